"""`python -m engine.tools simulate`: the scheduler on a virtual clock, without a model.

It shows what a pool size and an admission mode do to a given load.

The core is the real one; only the executor is made up.  It knows when each output ends, the scheduler does not, unless
the job says so (`ends_known`).  A step takes as long as `StepTime` says for its tokens and rows.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections import deque
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Literal, get_args

import msgspec

from engine.core.blocks import BlockPool, HostPool
from engine.core.limits import Admission, Limits
from engine.core.plan import Sampler
from engine.core.policy.step_cost import StepCostModel
from engine.core.scheduler import Scheduler
from engine.executor.base import ModelInfo, ScriptedExecutor
from engine.recorder import FlightLogError
from engine.wire.messages import Generate, Sampling

EOS = 0
VOCAB = 1 << 30
FAR = 1 << 62
SLO_TTFT_S, SLO_ITL_S = 2.0, 0.2


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a trace."""

    prompt_len: int  # tokens
    output_len: int  # tokens it will come to
    at_s: float = 0.0  # when it arrives
    max_tokens: int = 0  # that it may come to; 0: whatever it is given on reading
    prompt_seed: int = 0  # the ids are drawn with it; 0: with the job's place in the trace
    prefix_len: int = 0  # of the prompt, equal in all jobs
    tenant: str = ""  # shares prefixes with itself alone
    weight: float = 1.0  # of the tenant
    salt: str = ""  # shares prefixes with its equals alone; "": the tenant's
    priority: int = 0
    chain: list[int] = []  # stands for the content of its first blocks, output included; equal numbers, equal tokens
    chain_block: int = 16  # tokens that each of them stands for
    ends_known: bool = False  # it ends at max_tokens and the scheduler may know (ignore_eos)
    leaves_s: float = 0.0  # so long after its arrival its client is gone, if it has not ended; 0: stays


def content(chain: Sequence[int], block_size: int, at: int) -> int:
    """The token at a position of a sequence whose blocks the numbers of `chain` stand for: two of them begin with equal
    tokens as far as their chains do.  Only the last token of a block tells it from others: where a prompt ends within a
    block, it does not yet say how the answer will go on.  1 beyond the chain."""
    block, offset = divmod(at, block_size)
    return 2 + chain[block] if offset == block_size - 1 and block < len(chain) else 1


class StepTime(msgspec.Struct, frozen=True):
    """How long a step takes, seconds."""

    fixed: float = 0.010
    row: float = 0.0002  # for each row that decodes
    prompt_token: float = 0.00005

    pace: list[float] = []  # what steps took of that in each second of the clock; later ones: as much as that

    def __call__(self, rows: int, prompt_tokens: int, at_s: float = 0.0) -> float:
        """`at_s`: on the clock, when it begins."""
        pace = self.pace[int(at_s)] if at_s < len(self.pace) else 1.0
        return pace * (self.fixed + self.row * rows + self.prompt_token * prompt_tokens)


class Report(msgspec.Struct, frozen=True):
    """What came of it.  Times in seconds; utilisation while anybody waits, weighted by time."""

    jobs: int
    seconds: float
    preemptions: int
    pauses: int
    recomputed_tokens: int
    utilisation: float  # blocks held / pool
    filled: float  # slots holding a token / slots held, weighted by time; the rest is waste
    efficiency: float  # eta: blocks held / those that static allocation would hold for the same, weighted by time
    contended_s: float  # how long somebody waited
    ttft: tuple[float, float, float]  # p50, p90, p99
    itl: tuple[float, float, float]
    itl_max: float
    goodput: float  # fraction of jobs with TTFT <= 2 s and mean ITL <= 0.2 s
    calibration: list[float]  # share of outputs no longer than foretold at their start, for each of calibration.LEVELS
    peaks_passed: float  # share of bounds on what all running sequences would hold that was passed


class _Script(ScriptedExecutor):
    """Ends each output where its job says; the seed of the sampling is the job's number."""

    def __init__(self, jobs: Sequence[Job], blocks: int) -> None:
        super().__init__(ModelInfo("sim", "sim", VOCAB, FAR, [EOS], 0), blocks)
        self._jobs = jobs

    def token(self, sampler: Sampler, position: int) -> int:
        job = self._jobs[sampler.sampling.seed]
        return EOS if position + 1 == job.output_len else content(job.chain, job.chain_block, job.prompt_len + position)


def burst(
    seed: int,
    *,
    base: float = 5.0,
    peak: float = 15.0,
    peak_s: float = 30.0,
    rest_s: float = 30.0,
    max_tokens: int = 1024,
    ends_known: bool = False,
) -> list[Job]:
    """Poisson arrivals: `base` a second for `rest_s`, `peak` for `peak_s`, `base` again for `rest_s`.  Lognormal
    lengths with means 77 in and 165 out, clipped to 4 .. 8 times the mean."""
    rng = random.Random(seed)

    def draw(mean: float, sigma: float) -> int:
        return int(min(8 * mean, max(4, rng.lognormvariate(log(mean) - sigma * sigma / 2, sigma))))

    jobs, now = [], 0.0
    for rate, end in ((base, rest_s), (peak, rest_s + peak_s), (base, 2 * rest_s + peak_s)):
        while (now := now + rng.expovariate(rate)) < end:
            prompt, output = draw(77, 1.05), min(draw(165, 0.89), max_tokens)
            jobs.append(Job(prompt, output, now, output if ends_known else max_tokens, ends_known=ends_known))
        now = end
    return jobs


Mode = Admission | Literal["static"]
MODES: tuple[Mode, ...] = (*get_args(Admission), "static")


def efficiency(held_blocks: int, reserved_blocks: int) -> float:
    """eta: what paging holds of what contiguous allocation at the greatest length would hold for the same sequences,
    at one moment.  1 where nothing runs."""
    return held_blocks / reserved_blocks if reserved_blocks else 1.0


def engine_limits(mode: Mode, *, max_seqs: int = 256, step_tokens: int = 1024, threshold: float = 0.9) -> Limits:
    """An engine without a model; `mode` "static" is allocation, all others are admission to a paged pool."""
    return Limits(
        max_seqs,
        step_tokens,
        step_tokens,
        FAR,
        VOCAB,
        threshold,
        frozenset([EOS]),
        "sim",
        "none" if mode == "static" else mode,
        "static" if mode == "static" else "paged",
    )


def simulate(
    jobs: Sequence[Job],
    limits: Limits,
    blocks: int,
    *,
    block_size: int = 16,
    caching: bool = True,
    step_time: StepTime | None = None,
    depth: int = 1,
    host_blocks: int = 0,
    swap_bytes_per_s: float = 0.0,
) -> Report:
    """Run jobs through a Scheduler with a pool of `blocks` and `depth` steps in flight, as the engine's loop does.
    What goes to `host_blocks` of the host's memory, and back, takes no time.

    Raises ValueError for a job that no scheduler could run."""
    jobs = sorted(jobs, key=lambda job: job.at_s)
    step_time = step_time or StepTime()
    pool = BlockPool(blocks, block_size, caching=caching and limits.allocation == "paged")
    core = Scheduler(pool, limits, HostPool(host_blocks), StepCostModel(swap_bytes_per_s))
    executor = _Script(jobs, blocks)
    coming = deque(enumerate(jobs))
    leaving: list[tuple[float, int]] = []  # heap: when a client is gone, and its job
    in_flight: deque[tuple[float, float]] = deque()  # of each step: when it will be done, seconds that it takes
    now = device = full = contended = filled = eta = busy = 0.0
    begun: dict[str, float] = {}  # id -> when its first token came
    last: dict[str, float] = {}  # id -> when its last token came
    ttft: list[float] = []
    itl: list[float] = []
    good = 0
    while coming or not core.idle:
        if core.idle:
            now = max(now, coming[0][1].at_s)
        while coming and coming[0][1].at_s <= now:
            number, job = coming.popleft()
            core.accept(_request(number, job))
            if job.leaves_s:
                heapq.heappush(leaving, (job.at_s + job.leaves_s, number))
        while leaving and leaving[0][0] <= now:
            core.abort(str(heapq.heappop(leaving)[1]))
        if (plan := core.plan(0)) is not None:
            executor.submit(plan)
            rows, prompt_tokens = core.running, sum(len(piece.token_ids) for piece in plan.slices)
            device = max(device, now)
            seconds = step_time(rows, prompt_tokens, device)
            device += seconds
            in_flight.append((device, seconds))
        if in_flight and (plan is None or len(in_flight) == depth):
            done, seconds = in_flight.popleft()
            took = done - now
            held = pool.total - pool.available
            used, slots = core.used_slots()
            if slots:
                filled += used / slots * took
                eta += efficiency(held, core.reserved_blocks) * took
                busy += took
            if core.waiting:
                full += held / pool.total * took
                contended += took
            now = done
            core.commit(msgspec.structs.replace(executor.collect(), step_s=seconds))
        for delta in core.outputs().deltas.get("", ()):
            if delta.finish is not None and delta.finish.reason == "cancelled":
                continue
            if not delta.token_ids:
                raise ValueError(f"job {delta.id}: {delta.finish.message if delta.finish else ''}")
            if delta.first == 0:
                begun[delta.id] = now
                ttft.append(now - jobs[int(delta.id)].at_s)
            else:
                itl.append(now - last[delta.id])
            last[delta.id] = now
            if delta.finish is not None:
                mean = (now - begun[delta.id]) / max(1, delta.first)
                good += begun[delta.id] - jobs[int(delta.id)].at_s <= SLO_TTFT_S and mean <= SLO_ITL_S
    calibration = core.outlook.calibration
    return Report(
        jobs=len(jobs),
        seconds=now,
        preemptions=core.totals.preemptions,
        pauses=core.totals.pauses,
        recomputed_tokens=core.totals.recomputed_tokens,
        utilisation=full / contended if contended else 0.0,
        filled=filled / busy if busy else 0.0,
        efficiency=eta / busy if busy else 1.0,
        contended_s=contended,
        ttft=percentiles(ttft),
        itl=percentiles(itl),
        itl_max=max(itl, default=0.0),
        goodput=good / max(1, len(jobs)),
        calibration=[within / max(1, judged) for _, judged, within in calibration.table()],
        peaks_passed=calibration.peaks_passed / max(1, calibration.peaks),
    )


def _request(number: int, job: Job) -> Generate:
    """A prompt of ids that no other job has, after the prefix that all have."""
    rng = random.Random(job.prompt_seed or number)
    prompt = [2 + i for i in range(job.prefix_len)]
    covered = min(job.prompt_len, len(job.chain) * job.chain_block)
    prompt += [content(job.chain, job.chain_block, at) for at in range(job.prefix_len, covered)]
    prompt += [rng.randrange(2, VOCAB) for _ in range(job.prompt_len - len(prompt))]
    sampling = Sampling(seed=number, ignore_eos=job.ends_known)
    return Generate(
        str(number),
        "",
        prompt,
        job.max_tokens,
        sampling,
        FAR,
        job.salt or job.tenant,
        priority=job.priority,
        tenant=job.tenant,
        weight=job.weight,
    )


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """p50, p90 and p99; zeros for nothing."""
    ordered = sorted(values) or [0.0]
    p50, p90, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.9, 0.99))
    return p50, p90, p99


class TraceError(Exception):
    """A line of a trace is wrong; says which line and field."""


def read_trace(path: Path, *, max_tokens: int = 0, rate: float = 0.0, seed: int = 0) -> list[Job]:
    """One JSON object a line, fields as in Job.  A line without max_tokens gets `max_tokens` (its output ends there at
    the latest); with a `rate` jobs arrive as a Poisson process of so many a second.  Raises TraceError."""
    jobs: list[Job] = []
    rng, now = random.Random(seed), 0.0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            job = msgspec.json.decode(line, type=Job)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
        if job.max_tokens == 0 and max_tokens:
            job = msgspec.structs.replace(job, max_tokens=max_tokens, output_len=min(job.output_len, max_tokens))
        if rate:
            job = msgspec.structs.replace(job, at_s=(now := now + rng.expovariate(rate)))
        for field, least in (("prompt_len", 1), ("output_len", 1), ("max_tokens", job.output_len), ("at_s", 0)):
            if (value := getattr(job, field)) < least:
                raise TraceError(f"{path}, line {number}: {field} is {value}; it must be at least {least}")
        if not 0 <= job.prefix_len <= job.prompt_len:
            raise TraceError(f"{path}, line {number}: prefix_len is {job.prefix_len}; prompt_len is {job.prompt_len}")
        jobs.append(job)
    return jobs


HEADER = (
    "mode        seed  jobs preempt pauses recomputed   util filled    eta  queue s  TTFT p50/p99 s  "
    "ITL p50/p99/max ms  goodput  within q50/90/99"
)


def line(mode: str, seed: int, report: Report) -> str:
    """One row below HEADER."""
    ttft, itl = report.ttft, [1000 * value for value in report.itl]
    return (
        f"{mode:<10} {seed:>5} {report.jobs:>5} {report.preemptions:>7} {report.pauses:>6} "
        f"{report.recomputed_tokens:>10} "
        f"{report.utilisation:>6.3f} {report.filled:>6.3f} {report.efficiency:>6.3f} "
        f"{report.contended_s:>8.1f} {ttft[0]:>7.2f} /{ttft[2]:>6.2f} "
        f"{itl[0]:>8.1f} /{itl[2]:>5.1f} /{1000 * report.itl_max:>5.0f} {report.goodput:>8.3f}  "
        f"{' /'.join(f'{share:>5.2f}' for share in report.calibration)}"
    )


def main(argv: list[str]) -> int:
    """Print a table; 2 and one line on stderr when the trace or the log is wrong."""
    parser = argparse.ArgumentParser(prog="python -m engine.tools simulate", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="JSON lines: at_s, prompt_len, output_len, max_tokens, ...")
    source.add_argument("--replay", type=Path, metavar="LOG", help="a flight log (quire engine --flight-log LOG)")
    source.add_argument("--burst", action="store_true", help="5 requests a second, 15 for 30 s, 5 again")
    parser.add_argument("--seeds", type=int, default=3, help="of --burst: 0, 1, ...")
    parser.add_argument("--peak", type=float, default=15.0, help="of --burst: requests a second in it")
    parser.add_argument("--max-tokens", type=int, default=1024, help="what requests ask for (--trace: that don't say)")
    parser.add_argument("--rate", type=float, default=0.0, help="of --trace: Poisson arrivals a second, not at_s")
    parser.add_argument("--known", action="store_true", help="of --burst: outputs end at max_tokens (ignore_eos)")
    parser.add_argument("--mode", choices=[*MODES, "all"], help="default: all; of --replay: the recorded one")
    parser.add_argument("--kv-blocks", type=int, default=0, help="in the pool; default: 512, of --replay: as recorded")
    parser.add_argument("--max-seqs", type=int, default=0, help="default: 256, of --replay: as recorded")
    args = parser.parse_args(argv)
    modes = [args.mode] if args.mode in MODES else [] if args.replay and args.mode is None else list(MODES)
    try:
        if args.replay:
            from engine.tools import replay  # which stands on this module

            print(HEADER)
            for row in replay.report(args.replay, modes, args.kv_blocks, args.max_seqs):
                print(row, flush=True)
            return 0
        runs = (
            [(0, read_trace(args.trace, max_tokens=args.max_tokens, rate=args.rate))]
            if args.trace
            else [
                (seed, burst(seed, peak=args.peak, max_tokens=args.max_tokens, ends_known=args.known))
                for seed in range(args.seeds)
            ]
        )
        print(HEADER)
        for mode in modes:
            for seed, jobs in runs:
                report = simulate(jobs, engine_limits(mode, max_seqs=args.max_seqs or 256), args.kv_blocks or 512)
                print(line(mode, seed, report), flush=True)
    except (TraceError, FlightLogError, OSError, ValueError) as error:
        print(f"engine.tools.simulate: {error}", file=sys.stderr)
        return 2
    return 0
