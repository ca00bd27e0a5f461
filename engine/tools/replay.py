"""Exact replay of a flight log: the real engine loop makes every recorded decision again.

`replay` drives an Engine turn by turn with the recorded orders and times, over an executor that ends each output where
it ended.
For what another pool or admission mode would have done, simulate a request log: `engine.tools simulate --trace FILE`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.core.limits import Outputs
from engine.core.plan import Sampler, StepResult
from engine.executor.base import ScriptedExecutor, StepError
from engine.loop import Engine
from engine.orders import Order, Report, Resume
from engine.recorder import DIGEST, Arrival, Entry, Log, LoggedTurn, read
from engine.tools.trace import EOS, VOCAB
from engine.wire.messages import Abort, Generate, Sampling


class Output(msgspec.Struct):
    """What a log knows of one continuation."""

    arrival: Arrival
    tokens: int = 0  # of output
    reason: str = ""  # of its Finish; "": none in the log
    chain: list[int] = []  # numbers that stand for its full blocks: equal where their digests are


def outputs(log: Log) -> dict[tuple[int, int], Output]:
    """Return every continuation that arrives within the log, by (number, index)."""
    found: dict[tuple[int, int], Output] = {}
    known: dict[bytes, int] = {}  # digest -> the number that stands for it
    number = log.first
    for turn in log.turns:
        for order in turn.orders:
            if isinstance(order, Arrival):
                for index in range(order.n):
                    found[number, index] = Output(order)
                number += 1
        for event in turn.events:
            if event.kind == "ended" and (output := found.get((event.number, event.index))) is not None:
                output.tokens, output.reason = event.tokens, event.reason
                digests = (event.digests[at : at + DIGEST] for at in range(0, len(event.digests), DIGEST))
                output.chain = [known.setdefault(digest, len(known)) for digest in digests]
    return found


def content(chain: Sequence[int], block_size: int, at: int) -> int:
    """Return the token at a position of a sequence whose blocks the numbers of `chain` stand for; 1 beyond the chain.

    Two sequences begin with equal tokens as far as their chains are equal.  Only the last token of a block differs from
    other blocks': a prompt that ends within a block does not yet say how the answer continues."""
    block, offset = divmod(at, block_size)
    return 2 + chain[block] if offset == block_size - 1 and block < len(chain) else 1


class RecordedExecutor(ScriptedExecutor):
    """Ends each continuation where the log does, loses the steps that were lost, reports the recorded times."""

    def __init__(self, log: Log, found: dict[tuple[int, int], Output]) -> None:
        header = log.header
        super().__init__(
            msgspec.structs.replace(header.info, vocab_size=VOCAB), header.blocks, host_blocks=header.host_blocks
        )
        self.max_seqs, self.step_tokens, self.depth = header.max_seqs, header.step_tokens, header.depth
        self.swap_bytes_per_s = header.swap_bytes_per_s
        self.turn: LoggedTurn | None = None  # the turn that is replayed now
        self._found = found
        self._block_size = header.config.block_size

    def collect(self) -> StepResult:
        turn = self.turn
        if turn is None or turn.failed:
            self._plans.clear()
            self._decoding.clear()
            raise StepError("lost, as recorded")
        # A result names its rows in any order; the log knows the order of first and last tokens.
        ordered = [(entry.number, entry.index) for entry in turn.events if entry.kind in ("first", "ended")]
        places = {key: place for place, key in reversed(list(enumerate(ordered)))}
        result = super().collect()
        sampled = sorted(
            zip(result.rows, result.tokens, strict=True),
            key=lambda sample: places.get(self._key(self._decoding[sample[0]][0]), len(ordered)),
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


class RecordedBox:
    """Inbox, outbox and clock of an engine that replays a log."""

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
    """The first turn that differs from its recording."""

    turn: int  # its place in the log, from 0
    recorded: list[Entry]
    replayed: list[Entry]


def replay(log: Log) -> tuple[int, Difference | None]:
    """Replay a whole log under its own configuration, up to the first difference.

    Returns how many decisions are equal, and the first turn that differs (None: all are equal)."""
    found, box, same = outputs(log), RecordedBox(), 0
    executor = RecordedExecutor(log, found)
    engine = Engine(log.header.config, executor, box, box, clock=lambda: box.now_ms)
    number = log.first
    for at, turn in enumerate(log.turns):
        for order in turn.orders:
            if isinstance(order, Arrival):
                # All continuations have the same prompt; the longest one knows most of its blocks.
                chain = max((found[number, index].chain for index in range(order.n)), key=len)
                box.orders.append(_order(number, order, chain, log.header.config.block_size))
                number += 1
            else:
                box.orders.append(Abort(str(order.number), order.reassigned, order.index))
        box.now_ms, box.full, box.events, executor.turn = turn.now_ms, turn.stalled, [], turn
        engine.turn()
        recorded = [msgspec.structs.replace(event, digests=b"") for event in turn.events]
        if box.events != recorded:
            return same, Difference(at, recorded, box.events)
        same += len(recorded)
    return same, None


def _order(number: int, arrival: Arrival, chain: list[int], block_size: int) -> Generate | Resume:
    """Return the request, with made-up tokens that are equal where the recorded ones were."""
    rng = random.Random(number)
    covered = min(arrival.prompt_len, len(chain) * block_size)
    prompt = [content(chain, block_size, at) for at in range(covered)]
    prompt += [rng.randrange(2, VOCAB) for _ in range(arrival.prompt_len - covered)]
    sampling = Sampling(
        seed=number,
        stop_token_ids=[EOS] if arrival.stops else [],
        ignore_eos=True,
        prompt_logprobs=0 if arrival.scores_prompt else -1,
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
    if not arrival.begun:
        return request
    places = range(arrival.prompt_len, arrival.prompt_len + max(length or 0 for length in arrival.begun))
    output = [content(chain, block_size, at) for at in places]
    return Resume(request, [None if length is None else output[:length] for length in arrival.begun])


def report(path: Path) -> Iterator[str]:
    """Yield the lines of `python -m engine.tools simulate --replay`.  Raises FlightLogError."""
    log = read(path)
    if not log.whole:
        yield "not replayed: the log does not begin with the engine, or has gaps"
        return
    same, difference = replay(log)
    rest = ", all there are"
    if difference:
        rest = f"; turn {difference.turn} differs: {difference.recorded} became {difference.replayed}"
    yield f"replayed {len(log.turns)} turns: {same} decisions are as recorded{rest}"
