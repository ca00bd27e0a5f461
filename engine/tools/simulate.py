"""`python -m quire.engine.tools simulate`: the scheduler on a virtual clock, without a model.

It shows TTFT, ITL, preemptions and KV utilisation of a load by pool size and admission mode.

Scheduler and block pool are the engine's own; only the executor is simulated.  The executor knows when each output
ends.  The scheduler does not, unless the job has `ends_known`.  `StepTime` gives the time of a step from its tokens and
sequences; for a request log, step_fit.py fits it to the log's times.  The first line of the table has the log's own
measurements, so that a reader sees the error of the simulation.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.engine.config import EngineConfig
from quire.engine.core.blocks import BlockPool, HostPool
from quire.engine.core.limits import Limits
from quire.engine.core.plan import Sampler, StepPlan
from quire.engine.core.policy.admission import ADMISSION
from quire.engine.core.policy.step_cost import StepCostModel
from quire.engine.core.scheduler import Scheduler
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.observers.request_log import RequestLine
from quire.engine.tools.step_fit import fit
from quire.engine.tools.step_time import StepTime
from quire.engine.tools.trace import EOS, VOCAB, Job, TraceError, burst, read_lines, read_trace
from quire.engine.wire.messages import Generate, Sampling

FAR = 1 << 62
SLO_TTFT_S, SLO_ITL_S = 2.0, 0.2


class Report(msgspec.Struct, frozen=True):
    """Result of a simulation.  Times are in seconds; utilisation is averaged over the time in which sequences wait."""

    jobs: int
    seconds: float
    preemptions: int
    pauses: int
    recomputed_tokens: int
    held: float  # blocks held / blocks of the pool, averaged over the simulation
    utilisation: float  # blocks held / blocks of the pool, while sequences wait
    filled: float  # KV positions with a token / KV positions held, weighted by time; the rest is waste
    efficiency: float  # eta: blocks held / blocks that static allocation would hold, weighted by time
    contended_s: float  # seconds in which sequences waited
    ttft: tuple[float, float, float]  # p50, p90, p99
    itl: tuple[float, float, float]
    itl_max: float
    goodput: float  # fraction of jobs with TTFT <= 2 s and mean ITL <= 0.2 s
    calibration: list[float]  # fraction of outputs within the predicted quantile, per entry of LEVELS
    peaks_passed: float  # fraction of predicted peak bounds that the actual usage exceeded


class Script(ScriptedExecutor):
    """An executor that ends each output at the job's output_len; the sampling seed is the job's number."""

    def __init__(self, jobs: Sequence[Job], blocks: int) -> None:
        super().__init__(ModelInfo("sim", "sim", VOCAB, FAR, [EOS], 0), blocks)
        self._jobs = jobs

    def token(self, sampler: Sampler, position: int) -> int:
        job = self._jobs[sampler.sampling.seed]
        return EOS if position + 1 == job.output_len else 1


def on_time(ttft_s: float, rest_s: float, tokens: int) -> bool:
    """Return whether an answer was within both limits.  `rest_s`: seconds from the first token to the last."""
    return ttft_s <= SLO_TTFT_S and rest_s / max(1, tokens - 1) <= SLO_ITL_S


def efficiency(held_blocks: int, reserved_blocks: int) -> float:
    """Return eta: blocks held with paging / blocks that static allocation at the maximum length would hold, now.

    1: no sequence runs."""
    return held_blocks / reserved_blocks if reserved_blocks else 1.0


def engine_limits(
    mode: str,
    *,
    max_seqs: int = 256,
    step_tokens: int = 1024,
    threshold: float = 0.9,
    itl_stretch: float = 0.0,
    step_target_s: float = 0.0,
) -> Limits:
    """Return the limits of an engine without a model, for an admission mode."""
    return Limits(
        max_seqs,
        step_tokens,
        step_tokens,
        FAR,
        VOCAB,
        threshold,
        frozenset([EOS]),
        "sim",
        mode,
        itl_stretch=itl_stretch,
        step_target_s=step_target_s,
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

    Copies to the `host_blocks` of host memory and back take no time.  Raises ValueError for a job that cannot run."""
    pool = BlockPool(blocks, block_size, caching=caching)
    core = Scheduler(pool, limits, HostPool(host_blocks), StepCostModel(swap_bytes_per_s))
    run = Simulation(sorted(jobs, key=lambda job: job.at_s + job.claimed_s), core, blocks)
    return run.to_the_end(step_time or StepTime(), depth)


class Simulation:
    """One run of jobs, in the order in which the engine gets them, through a scheduler."""

    def __init__(self, jobs: Sequence[Job], core: Scheduler, blocks: int) -> None:
        self.jobs, self.core, self.executor = jobs, core, Script(jobs, blocks)
        self.coming = deque(enumerate(jobs))
        self.leaving: list[tuple[float, int]] = []  # heap of (time when the client cancels, number of its job)
        self.in_flight: deque[tuple[float, float]] = deque()  # per step: (time of its end, its seconds)
        self.planned: StepPlan | None = None
        self.now = self.device = 0.0  # virtual clocks of the host and the device, seconds
        self.held = 0.0  # integrals over time, for the report
        self.full = self.contended = self.filled = self.eta = self.busy = 0.0
        self.begun: dict[tuple[str, int], float] = {}  # (id, choice) -> time of its first token
        self.last: dict[tuple[str, int], float] = {}  # (id, choice) -> time of its last token so far
        self.ttft: list[float] = []
        self.itl: list[float] = []
        self.good = 0.0

    def to_the_end(self, step_time: StepTime, depth: int) -> Report:
        """Run steps until all jobs have ended, `depth` of them in flight."""
        while self.coming or not self.core.idle:
            self.accept()
            self.submit(step_time)
            if self.in_flight and (self.planned is None or len(self.in_flight) == depth):
                self.collect()
            self.deliver()
        return self.report()

    def request(self, number: int, job: Job) -> Generate:
        """Return the request of a job."""
        return _request(number, job)

    def accept(self) -> None:
        """Accept the jobs that have arrived, and cancel the jobs whose clients leave."""
        if self.core.idle:
            self.now = max(self.now, self.coming[0][1].at_s + self.coming[0][1].claimed_s)
        while self.coming and self.coming[0][1].at_s + self.coming[0][1].claimed_s <= self.now:
            number, job = self.coming.popleft()
            self.core.accept(self.request(number, job))
            if job.leaves_s:
                heapq.heappush(self.leaving, (job.at_s + job.leaves_s, number))
        while self.leaving and self.leaving[0][0] <= self.now:
            self.core.abort(str(heapq.heappop(self.leaving)[1]))

    def prompt_tokens(self, plan: StepPlan) -> int:
        """Return the tokens of a step that cost as much as prompt tokens."""
        return sum(len(piece.token_ids) for piece in plan.slices)

    def submit(self, step_time: StepTime) -> None:
        """Plan and start a step, if there is anything to compute."""
        self.planned = self.core.plan(0)
        if self.planned is not None:
            self.executor.submit(self.planned)
            self.device = max(self.device, self.now)
            seconds = step_time(self.core.running, self.prompt_tokens(self.planned))
            self.device += seconds
            self.in_flight.append((self.device, seconds))

    def collect(self) -> None:
        """End the oldest step in flight, and advance the clock to its end."""
        core, pool = self.core, self.core.pool
        done, seconds = self.in_flight.popleft()
        took = done - self.now
        held = pool.total - pool.available
        used, slots = core.occupancy.used_positions()
        self.held += held / pool.total * took
        if slots:
            self.filled += used / slots * took
            self.eta += efficiency(held, core.batch.reserved_blocks) * took
            self.busy += took
        if core.waiting:
            self.full += held / pool.total * took
            self.contended += took
        self.now = done
        core.commit(msgspec.structs.replace(self.executor.collect(), step_s=seconds))

    def deliver(self) -> None:
        """Record the times of the tokens that the scheduler has output."""
        now = self.now
        for delta in self.core.outputs().deltas.get("", ()):
            if delta.finish is not None and delta.finish.reason == "cancelled":
                continue
            if not delta.token_ids:
                raise ValueError(f"job {delta.id}: {delta.finish.message if delta.finish else ''}")
            job, choice = self.jobs[int(delta.id)], (delta.id, delta.index)
            if delta.first == 0:
                self.begun[choice] = now
                self.ttft.append(now - job.at_s)
            else:
                self.itl.append(now - self.last[choice])
            self.last[choice] = now
            if delta.finish is not None:
                self.good += on_time(self.begun[choice] - job.at_s, now - self.begun[choice], delta.first + 1) / job.n

    def report(self) -> Report:
        totals, calibration = self.core.report.totals, self.core.admission.forecast.calibration
        return Report(
            jobs=len(self.jobs),
            seconds=self.now,
            preemptions=totals.preemptions,
            pauses=totals.pauses,
            recomputed_tokens=totals.recomputed_tokens,
            held=self.held / self.now if self.now else 0.0,
            utilisation=self.full / self.contended if self.contended else 0.0,
            filled=self.filled / self.busy if self.busy else 0.0,
            efficiency=self.eta / self.busy if self.busy else 1.0,
            contended_s=self.contended,
            ttft=percentiles(self.ttft),
            itl=percentiles(self.itl),
            itl_max=max(self.itl, default=0.0),
            goodput=self.good / max(1, len(self.jobs)),
            calibration=[within / max(1, judged) for _, judged, within in calibration.table()],
            peaks_passed=calibration.peaks_passed / max(1, calibration.peaks),
        )


def _request(number: int, job: Job) -> Generate:
    """Return the request of a job: the common prefix, then random token ids of its own seed."""
    rng = random.Random(job.prompt_seed or number)
    prompt = [2 + i for i in range(job.prefix_len)]
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
        n=job.n,
    )


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """Return p50, p90 and p99; zeros for an empty list."""
    ordered = sorted(values) or [0.0]
    p50, p90, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.9, 0.99))
    return p50, p90, p99


HEADER = (
    "mode        seed  jobs preempt pauses recomputed   util filled    eta  queue s  TTFT p50/p99 s  "
    "ITL p50/p99/max ms  goodput  within q50/90/99"
)


def line(mode: str, seed: int, report: Report) -> str:
    """Format one line of the table below HEADER."""
    ttft, itl = report.ttft, [1000 * value for value in report.itl]
    return (
        f"{mode:<10} {seed:>5} {report.jobs:>5} {report.preemptions:>7} {report.pauses:>6} "
        f"{report.recomputed_tokens:>10} "
        f"{report.utilisation:>6.3f} {report.filled:>6.3f} {report.efficiency:>6.3f} "
        f"{report.contended_s:>8.1f} {ttft[0]:>7.2f} /{ttft[2]:>6.2f} "
        f"{itl[0]:>8.1f} /{itl[2]:>5.1f} /{1000 * report.itl_max:>5.0f} {report.goodput:>8.3f}  "
        f"{' /'.join(f'{share:>5.2f}' for share in report.calibration)}"
    )


def counted(lines: Sequence[RequestLine]) -> list[RequestLine]:
    """Return the lines that a simulation counts: requests that have output, or that their client cancelled."""
    return [line for line in lines if line.output_len or line.outcome in ("cancelled", "deadline")]


def share_on_time(lines: Sequence[RequestLine]) -> float:
    """Return the fraction of a log's counted requests that were on time; cancelled requests count as late."""
    ran = counted(lines)
    whole = [line for line in ran if line.outcome in ("stop", "length") and line.ttft_s is not None]
    good = sum(on_time(line.ttft_s or 0.0, line.e2e_s - (line.ttft_s or 0.0), line.output_len) for line in whole)
    return good / max(1, len(ran))


def measured(lines: Sequence[RequestLine]) -> str:
    """Format a request log's own measurements as a line of the table below HEADER; ITL is not in the log."""
    ran = counted(lines)
    ttft = percentiles([line.ttft_s for line in ran if line.ttft_s is not None])
    return (
        f"{'measured':<10} {'':>5} {len(ran):>5} {sum(line.preemptions for line in ran):>7} "
        f"{sum(line.pauses for line in ran):>6} {'':>10} {'':>6} {'':>6} {'':>6} {'':>8} "
        f"{ttft[0]:>7.2f} /{ttft[2]:>6.2f} {'':>8}  {'':>5}  {'':>5} {share_on_time(lines):>8.3f}"
    )


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m quire.engine.tools simulate", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", type=Path, help="JSON lines: at_s, prompt_len, output_len, max_tokens, ...; or a request log"
    )
    source.add_argument("--burst", action="store_true", help="generate 5 requests/s, 15 for 30 s, then 5 again")
    parser.add_argument("--seeds", type=int, default=3, help="with --burst: number of runs, with seeds 0, 1, ...")
    parser.add_argument("--peak", type=float, default=15.0, help="with --burst: requests/s during the burst")
    parser.add_argument("--max-tokens", type=int, default=1024, help="maximum output tokens of jobs without their own")
    parser.add_argument("--rate", type=float, default=0.0, help="with --trace: Poisson arrivals/s instead of at_s")
    parser.add_argument("--known", action="store_true", help="with --burst: outputs end at max_tokens (ignore_eos)")
    parser.add_argument("--mode", choices=[*ADMISSION, "all"], default="all", help="admission mode (default: all)")
    parser.add_argument("--kv-blocks", type=int, default=512, help="blocks in the pool (default: 512)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block (default: 16)")
    parser.add_argument("--max-seqs", type=int, default=256, help="sequences that may run at once (default: 256)")
    parser.add_argument("--step-tokens", type=int, default=1024, help="maximum tokens of a step (default: 1024)")
    for name, of_log in (("itl_stretch", EngineConfig().itl_stretch), ("step_target_s", EngineConfig().step_target_s)):
        flag, text = (
            f"--{name.replace('_', '-')}",
            f"as the engine's option (default: {of_log:g} for a request log, else 0)",
        )
        parser.add_argument(flag, type=float, help=text)
    parser.add_argument("--depth", type=int, default=1, help="steps in flight: 1 on a CPU, 2 on a GPU (default: 1)")
    parser.add_argument(
        "--step-ms",
        type=float,
        nargs=3,
        metavar=("FIXED", "ROW", "TOKEN"),
        help="ms of a step: fixed, per running sequence, per prompt token (default: fitted to the times of a request "
        "log; without one 10, 0.2, 0.05)",
    )
    parser.add_argument(
        "--at",
        choices=("claimed", "queued"),
        default="claimed",
        help="with a request log: when the engine gets a request: when it claimed it, in the lanes' order; or when it "
        "was queued, to simulate another pool size (default: claimed)",
    )
    return parser


def settings(args: argparse.Namespace, lines: Sequence[RequestLine]) -> tuple[dict[str, float], StepTime]:
    """Return the bounds of a step with prompts, and the step times.  Raises ValueError if no log has the times."""
    defaults = EngineConfig() if lines else None
    bounds = {
        name: getattr(defaults, name, 0.0) if getattr(args, name) is None else getattr(args, name)
        for name in ("itl_stretch", "step_target_s")
    }
    if args.step_ms:
        return bounds, StepTime(*(ms / 1000 for ms in args.step_ms))
    if not lines:
        return bounds, StepTime()
    if (times := fit(lines)) is None:
        raise ValueError(f"{args.trace} has too few complete answers to fit the time of a step: give --step-ms")
    return bounds, times


def runs_of(args: argparse.Namespace) -> tuple[list[tuple[int, list[Job]]], list[RequestLine]]:
    """Return the jobs to simulate by seed, and the lines of a request log; no lines for any other source."""
    if not args.trace:
        made = [
            (seed, burst(seed, peak=args.peak, max_tokens=args.max_tokens, ends_known=args.known))
            for seed in range(args.seeds)
        ]
        return made, []
    jobs = read_trace(args.trace, max_tokens=args.max_tokens, rate=args.rate)
    if args.at == "queued":
        jobs = [msgspec.structs.replace(job, claimed_s=0.0) for job in jobs]
    return [(0, jobs)], [line for line in read_lines(args.trace) if isinstance(line, RequestLine)]


def main(argv: list[str]) -> int:
    """Run simulations and print a table.  Returns 2, with one line on stderr, if the trace is invalid."""
    args = options().parse_args(argv)
    try:
        runs, lines = runs_of(args)
        bounds, times = settings(args, lines)
        if lines:
            fixed, row, token = (1000 * seconds for seconds in msgspec.structs.astuple(times))
            print(f"a step takes {fixed:.3f} ms, {row:.4f} ms per running sequence and {token:.4f} ms per prompt token")
        print(HEADER)
        if lines:
            print(measured(lines))
        for mode in ADMISSION if args.mode == "all" else (args.mode,):
            limits = engine_limits(mode, max_seqs=args.max_seqs, step_tokens=args.step_tokens, **bounds)
            for seed, jobs in runs:
                report = simulate(
                    *(jobs, limits, args.kv_blocks), block_size=args.block_size, step_time=times, depth=args.depth
                )
                print(line(mode, seed, report), flush=True)
    except (TraceError, OSError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0
