"""A flight log played again: by the engine itself as it was recorded, and by the simulator under any other policy.

`again` drives the real Engine turn by turn with the recorded orders and times, over an executor that ends each output
where it ended; every decision must come out as recorded.  `jobs` and `step_time` turn a log into a trace and a clock
for `engine.tools.simulate.simulate`, `measured` into what that should have predicted.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from engine.core.limits import Limits, Outputs
from engine.core.plan import Sampler, StepResult
from engine.executor.base import ScriptedExecutor, StepError
from engine.loop import Engine, build_scheduler
from engine.orders import Order, Report, Resume
from engine.recorder import DIGEST, Arrival, Entry, Log, Turn, read
from engine.tools.simulate import (
    EOS,
    SLO_ITL_S,
    SLO_TTFT_S,
    VOCAB,
    Job,
    Mode,
    StepTime,
    content,
    line,
    percentiles,
    simulate,
)
from engine.tools.simulate import Report as SimReport
from engine.wire.messages import Abort, Generate, Sampling


class Output(msgspec.Struct):
    """What a log knows of one continuation."""

    arrival: Arrival
    at_s: float  # when it came in: as far as known, in the middle between the turns before and after
    first_s: float = -1.0  # when its first token was out; -1: not in the log
    end_s: float = -1.0
    tokens: int = 0  # of output
    reason: str = ""  # of its Finish; "": none in the log
    chain: list[int] = []  # numbers that stand for its full blocks: equal where their digests are


def outputs(log: Log) -> dict[tuple[int, int], Output]:
    """(number, index) -> continuation, for all that arrive within the log."""
    found: dict[tuple[int, int], Output] = {}
    known: dict[bytes, int] = {}  # digest -> what stands for it
    number, before = log.first, 0
    for turn in log.turns:
        for order in turn.orders:
            if isinstance(order, Arrival):
                for index in range(order.n):
                    found[number, index] = Output(order, (max(before, turn.at_us - turn.took_us) + turn.at_us) / 2e6)
                number += 1
        before = turn.at_us
        for event in turn.events:
            if (output := found.get((event.number, event.index))) is None:
                continue
            if event.kind == "first":
                output.first_s = turn.over_us / 1e6
            elif event.kind == "ended":
                output.end_s, output.tokens, output.reason = turn.over_us / 1e6, event.tokens, event.reason
                digests = (event.digests[at : at + DIGEST] for at in range(0, len(event.digests), DIGEST))
                output.chain = [known.setdefault(digest, len(known)) for digest in digests]
    return found


# ------------------------------------------------------------------------------------------------------ as it was


class _Same(ScriptedExecutor):
    """Ends each continuation where the log says; loses the steps that were lost, and takes as long as they took."""

    def __init__(self, log: Log, found: dict[tuple[int, int], Output]) -> None:
        header = log.header
        super().__init__(
            msgspec.structs.replace(header.info, vocab_size=VOCAB), header.blocks, host_blocks=header.host_blocks
        )
        self.max_seqs, self.step_tokens, self.depth = header.max_seqs, header.step_tokens, header.depth
        self.swap_bytes_per_s = header.swap_bytes_per_s
        self.turn: Turn | None = None  # that is lived through now
        self._found = found
        self._block_size = header.config.block_size

    def collect(self) -> StepResult:
        turn = self.turn
        if turn is None or turn.failed:
            self._plans.clear()
            self._decoding.clear()
            raise StepError("lost, as recorded")
        # A result names its rows in any order; whose first or last token is handed out when, the log knows.
        noted = [(entry.number, entry.index) for entry in turn.events if entry.kind in ("first", "ended")]
        places = {key: place for place, key in reversed(list(enumerate(noted)))}
        result = super().collect()
        sampled = sorted(
            zip(result.rows, result.tokens, strict=True),
            key=lambda sample: places.get(self._key(self._decoding[sample[0]][0]), len(noted)),
        )
        return msgspec.structs.replace(
            result,
            rows=[row for row, _ in sampled],
            tokens=[token for _, token in sampled],
            failed=dict.fromkeys(turn.bad_rows, "not usable, as recorded"),
            impossible=dict.fromkeys(turn.impossible_rows, "impossible, as recorded"),
            step_s=turn.step_s,
            swapped_bytes=turn.swapped_bytes,
            swap_s=turn.swap_s,
        )

    @staticmethod
    def _key(sampler: Sampler) -> tuple[int, int]:
        return sampler.sampling.seed, sampler.sibling

    def token(self, sampler: Sampler, position: int) -> int:
        output = self._found[self._key(sampler)]
        if position + 1 == output.tokens and output.reason == "stop":
            return EOS
        return content(output.chain, self._block_size, output.arrival.prompt_len + position)


class _Box:
    """Inbox, outbox and clock of an engine that lives through a log again."""

    relieved = False

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.now_ms = 0
        self.full = False
        self.events: list[Entry] = []

    def drain(self, wait_s: float) -> list[Order]:
        orders, self.orders = self.orders, []
        return orders

    def put(self, outputs: Outputs, report: Report) -> None:
        self.events += [
            Entry(e.kind, int(e.request.id), e.index, e.step, e.tokens, e.reason or "") for e in outputs.events
        ]


class Difference(NamedTuple):
    """The first turn that did not come out as recorded."""

    turn: int  # its place in the log, from 0
    recorded: list[Entry]
    replayed: list[Entry]


def again(log: Log) -> tuple[int, Difference | None]:
    """Play a whole log through the engine as it was configured.  Returns how many decisions came out as recorded, and
    the first turn that did not (None: all did), where it stops."""
    found, box, same = outputs(log), _Box(), 0
    executor = _Same(log, found)
    engine = Engine(log.header.config, executor, box, box, clock=lambda: box.now_ms)
    number = log.first
    for at, turn in enumerate(log.turns):
        for order in turn.orders:
            if isinstance(order, Arrival):
                # The prompt of all its continuations is that of the one which came farthest.
                chain = max((found[number, index].chain for index in range(order.n)), key=len)
                box.orders.append(_order(number, order, chain, log.header.config.block_size))
                number += 1
            else:
                box.orders.append(Abort(str(order.number), order.lost, order.index))
        box.now_ms, box.full, box.events, executor.turn = turn.now_ms, turn.stalled, [], turn
        engine.turn()
        recorded = [msgspec.structs.replace(event, digests=b"") for event in turn.events]
        if box.events != recorded:
            return same, Difference(at, recorded, box.events)
        same += len(recorded)
    return same, None


def _order(number: int, arrival: Arrival, chain: list[int], block_size: int) -> Generate | Resume:
    """The request, with made-up tokens that are equal where the recorded ones were."""
    rng = random.Random(number)
    covered = min(arrival.prompt_len, len(chain) * block_size)
    prompt = [content(chain, block_size, at) for at in range(covered)]
    prompt += [rng.randrange(2, VOCAB) for _ in range(arrival.prompt_len - covered)]
    stops = [EOS] if arrival.stops else []
    sampling = Sampling(
        seed=number, stop_token_ids=stops, ignore_eos=True, prompt_logprobs=0 if arrival.scores_prompt else -1
    )
    request = Generate(
        str(number),
        "",
        prompt,
        arrival.max_new,
        sampling,
        arrival.deadline_ms,
        arrival.salt,
        n=arrival.n,
        priority=arrival.priority,
        tenant=arrival.tenant,
        weight=arrival.weight,
    )
    if not arrival.said:
        return request
    places = range(arrival.prompt_len, arrival.prompt_len + max(length or 0 for length in arrival.said))
    said = [content(chain, block_size, at) for at in places]
    return Resume(request, [None if length is None else said[:length] for length in arrival.said])


# ------------------------------------------------------------------------------------------------ as it would have been


def jobs(log: Log) -> list[Job]:
    """What arrived, for the simulator: each continuation is a job of its own, ends where it ended, and finds the prompt
    of the one before it cached.  Who was gone before that (cancelled, past its deadline, or the log was over) is gone
    after as long again, wherever its answer has come to by then.  What came to nothing (an error) is left out."""
    if not log.turns:
        return []
    begin, over = log.turns[0].at_us / 1e6, log.turns[-1].over_us / 1e6
    found = []
    for (number, _), output in outputs(log).items():
        arrival, stays = output.arrival, output.reason in ("stop", "length", "error")
        if stays and not output.tokens:
            continue
        job = Job(
            prompt_len=arrival.prompt_len,
            output_len=output.tokens if stays else arrival.max_new,
            at_s=max(0.0, output.at_s - begin),
            max_tokens=arrival.max_new,
            prompt_seed=number,
            tenant=arrival.tenant,
            weight=arrival.weight,
            salt=arrival.salt,
            priority=arrival.priority,
            chain=output.chain,
            chain_block=log.header.config.block_size,
            ends_known=not arrival.stops,
            leaves_s=0.0 if stays else max(1e-6, (output.end_s if output.end_s >= 0 else over) - output.at_s),
        )
        found.append(job)
    return found


def limits(log: Log, mode: Mode, max_seqs: int = 0) -> Limits:
    """Of the recorded engine under another mode, and with another number of seats (0: its own)."""
    config = msgspec.structs.replace(
        log.header.config,
        allocation="static" if mode == "static" else "paged",
        admission="none" if mode == "static" else mode,
        max_seqs=max_seqs or log.header.config.max_seqs,
    )
    return msgspec.structs.replace(build_scheduler(config, _Same(log, {})).limits, eos_ids=frozenset([EOS]))


def mode_of(log: Log) -> Mode:
    """What was recorded."""
    config = log.header.config
    return "static" if config.allocation == "static" else config.admission


def report(path: Path, modes: Sequence[Mode], kv_blocks: int, max_seqs: int) -> Iterator[str]:
    """What `python -m engine.tools simulate --replay` prints, line by line: the log, whether it comes out again, and
    what each mode would have made of it (none given: the recorded one).  0 blocks or seats: as recorded.

    Raises FlightLogError."""
    log = read(path)
    header, clock, trace = log.header, step_time(log), jobs(log)
    yield line("recorded", 0, measured(log))
    if log.whole:
        same, difference = again(log)
        yield f"played again: {same} decisions came out as recorded" + (
            f"; turn {difference.turn} did not: {difference.recorded} became {difference.replayed}"
            if difference
            else ", all there are"
        )
    else:
        yield "not played again: the log does not begin with the engine, or has gaps"
    yield (
        f"a step: {1000 * clock.fixed:.2f} ms, {1000 * clock.row:.4f} a row, {1000 * clock.prompt_token:.4f} a prompt "
        f"token, fitted; {header.depth} in flight; {mode_of(log)} was recorded with {header.blocks} blocks"
    )
    for mode in modes or [mode_of(log)]:
        yield line(
            mode,
            0,
            simulate(
                trace,
                limits(log, mode, max_seqs),
                kv_blocks or header.blocks,
                block_size=header.config.block_size,
                caching=header.config.prefix_cache,
                step_time=clock,
                depth=header.depth,
                host_blocks=header.host_blocks,
                swap_bytes_per_s=header.swap_bytes_per_s,
            ),
        )


def step_time(log: Log) -> StepTime:
    """Seconds of a step by its rows and prompt tokens, fitted to the recorded ones by least squares, and how much more
    or less they took from second to second: other work on the machine, contexts that grow.  In the fit steps beyond
    four times the median count as that: something held them up."""
    steps = [turn for turn in log.turns if turn.took_us and turn.rows]
    if not steps:
        return StepTime()
    took = np.array([turn.took_us / 1e6 for turn in steps])
    capped = np.minimum(took, 4 * np.median(took))
    shape = np.array([[1.0, turn.rows, turn.prompt_tokens] for turn in steps])
    # A factor below zero would be noise taken for a law: leave that column out.
    kept = [0, 1, 2]
    while kept:
        fit = np.linalg.lstsq(shape[:, kept], capped, rcond=None)[0]
        if (worst := int(np.argmin(fit))) >= 0 and fit[worst] >= 0:
            break
        del kept[worst]
    factors = [0.0, 0.0, 0.0]
    for column, factor in zip(kept, fit if kept else (), strict=True):
        factors[column] = float(factor)
    begun = np.array([turn.over_us - turn.took_us for turn in steps]) - log.turns[0].at_us
    second = np.maximum(0, begun // 1_000_000).astype(int)
    expected = np.bincount(second, shape @ factors)
    pace = np.divide(np.bincount(second, took), expected, out=np.ones(len(expected)), where=expected > 0)
    # Rounded, so that the same log gives the same prediction whoever does the algebra.
    fixed, row, prompt_token = (round(factor, 9) for factor in factors)
    return StepTime(fixed, row, prompt_token, [round(float(value), 6) for value in pace])


def measured(log: Log) -> SimReport:
    """What the engine did, in the simulator's terms.  Where a log has no times for it (ITL, recomputed tokens, filled
    slots, eta) it says 0."""
    found = outputs(log)
    began = [output for output in found.values() if output.first_s >= 0]
    counts: defaultdict[str, int] = defaultdict(int)
    full = contended = 0.0
    before = log.turns[0].at_us if log.turns else 0
    for turn in log.turns:
        for event in turn.events:
            counts[event.kind] += 1
        took, before = (turn.over_us - before) / 1e6, turn.over_us
        if turn.waiting:
            full += turn.held / log.header.blocks * took
            contended += took
    good = sum(
        output.first_s - output.at_s <= SLO_TTFT_S
        and (output.end_s - output.first_s) / max(1, output.tokens - 1) <= SLO_ITL_S
        for output in began
        if output.reason in ("stop", "length")
    )
    return SimReport(
        jobs=len(found),
        seconds=(log.turns[-1].over_us - log.turns[0].at_us) / 1e6 if log.turns else 0.0,
        preemptions=counts["preempted"],
        pauses=counts["paused"],
        recomputed_tokens=0,
        utilisation=full / contended if contended else 0.0,
        filled=0.0,
        efficiency=0.0,
        contended_s=contended,
        ttft=percentiles([output.first_s - output.at_s for output in began]),
        itl=(0.0, 0.0, 0.0),
        itl_max=0.0,
        goodput=good / max(1, len(found)),
        calibration=[],
        peaks_passed=0.0,
    )
