"""How true the stated Retry-After is after a burst, with clients that obey it, in virtual time.

    python -m quire.loadtest.studies virtual-retries [--seeds 1,2,3] [--late-wait-s 0,10,20] [--name NAME]

The base rate holds 80 % of the pool; the burst has --times as many requests for --burst-s seconds.  The gateway's
admission and its promises, Redis, its scripts, both sides of the bus and the scheduler are real; the steps and Redis'
clock are simulated (`fleet`).  A refused client sends its request again after `retry-after-ms`.  The figures are those
of `loadtest report`: the share of refused clients that get in at the first retry, and |stated - needed| / needed, where
a client needed to wait until as many had joined the late lane as were refused before it (`loadtest/stats.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from functools import partial
from typing import Any

import msgspec

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.core.blocks import BlockPool, HostPool
from quire.engine.core.plan import Sampler
from quire.engine.core.scheduler import Scheduler
from quire.engine.executor.base import ModelInfo
from quire.engine.observers.load_report import LoadReport
from quire.engine.observers.prefix_reports import HeldPrefixes
from quire.engine.tools.simulate import engine_limits
from quire.engine.tools.step_time import StepTime
from quire.engine.tools.trace import EOS, VOCAB, Job, burst
from quire.engine.wire.messages import Generate, Sampling
from quire.engine.wire.records import Fleet
from quire.loadtest import machine, stats
from quire.loadtest.studies.burst_in_virtual_time import BASE_S, BLOCKS, MAX_TOKENS
from quire.loadtest.studies.fleet import BLOCK, Turn, _Texts, use_virtual_clock
from quire.loadtest.studies.virtual_fairness import READ_S, TenantEngine, TenantRun
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery.admission import Cost
from quire.service.delivery.fleet_view import FleetView
from quire.service.delivery.retry_book import RetryBook

ANSWER_S = 6000.0  # deadline of each request, so long that none is missed
ATTEMPTS = 3  # submits per attempt of a client, as the gateway's
FIRST_RETRIES, ERROR = 0.9, 0.2  # aims: share admitted at the first retry, median error of the stated pause


class _Outputs(_Texts):
    """An executor that ends each output at the length of its job; the sampling seed is the job's number."""

    def __init__(self, info: ModelInfo, blocks: int) -> None:
        super().__init__(info, blocks)
        self.lengths: dict[int, int] = {}  # job -> output tokens

    def token(self, sampler: Sampler, position: int) -> int:
        return EOS if position + 1 == self.lengths[sampler.sampling.seed] else 1


class RetryEngine(TenantEngine):
    """An engine that reports its rates, and ends each output at the length of its job."""

    def __init__(self, name: str, url: str, blocks: int, step: StepTime, *, locality: bool) -> None:
        super().__init__(name, url, blocks, step, locality=locality)
        limits = msgspec.structs.replace(engine_limits("forecast"), itl_stretch=2.0, step_target_s=2.0)
        self.core = Scheduler(BlockPool(blocks, BLOCK, caching=False), limits, HostPool())
        self.held = HeldPrefixes(self.core.pool, self)
        self.report = LoadReport(name, self.executor.info)
        self.executor = _Outputs(self.executor.info, blocks)
        self.note_bounds()

    def describe(self, now_s: float, now_ms: int, *, stepped: bool) -> None:
        """Measure the rates at the end of a step, or while idle."""
        if stepped:
            self.report.pace.step(now_s)
        else:
            self.report.pace.pause()
        load = self.report.describe(self.core, now_s, draining=False, queued=self.core.claims.queued > 0)
        self.load = msgspec.structs.replace(load, time_ms=now_ms)


class RetryRun(TenantRun):
    """Replays jobs whose clients obey Retry-After."""

    def engine(self, name: str, blocks: int, step: StepTime, *, locality: bool) -> RetryEngine:
        return RetryEngine(name, self.url, blocks, step, locality=locality)

    def prepare(self, config: GatewayConfig, seed: int) -> None:
        self.config, self.dice = config, random.Random(seed)
        self.book, self.view = RetryBook(), FleetView(self.now_ms)
        self.records: dict[str, stats.Record] = {}
        self.samples: list[stats.Sample] = []

    def now_ms(self) -> int:
        return self.base_ms + int(1000 * self.now)

    async def arrive_job(self, number: int, job: Job) -> None:
        """Send a request for the first time, or once more."""
        name, rng = f"r{number}", random.Random(number)
        tokens = [rng.randrange(2, VOCAB) for _ in range(job.prompt_len)]
        self.open[name] = self.now, Turn(tokens), True
        record = self.records.setdefault(name, stats.Record(job.at_s, "", job.prompt_len, job.output_len))
        for engine in self.engines:
            assert isinstance(engine.executor, _Outputs)
            engine.executor.lengths[number] = job.output_len
        request = Generate(
            name, "g", tokens, job.max_tokens, Sampling(seed=number, ignore_eos=job.ends_known),
            self.base_ms + 86_400_000,
        )  # fmt: skip
        cost = Cost(job.prompt_len, ANSWER_S, job.max_tokens if job.ends_known else 1)
        self.tick()
        pause_s = 1.0
        for _ in range(ATTEMPTS):
            fleet, jitter = self.view.fleet(), self.dice.random()
            try:
                decision = self.book.decide([request], cost, fleet, self.now_ms(), self.config, jitter)
            except Refusal as refusal:
                pause_s = float(refusal.headers()["retry-after-ms"]) / 1000
                break
            queue = await self.gateway.submit(request, bounds=decision.bounds)
            self.view.record_queue(queue)
            if queue.lane is not None:
                self.book.joined([request])
                record.lane, record.outcome = queue.lane, "ok"
                record.attempts.append(stats.Attempt(self.now, 200))
                self.wake()
                return
        del self.open[name]
        record.attempts.append(stats.Attempt(self.now, 429, pause_s))
        self.at(self.now + pause_s, partial(self.arrive_job, number, job))

    async def read(self) -> None:
        self.tick()
        fleet: Fleet = await self.gateway.fleet()
        self.view.record_reading(fleet)
        self.samples.append(stats.Sample(self.now, waiting=fleet.queued))
        self.wake()
        if self.events:
            self.at(self.now + READ_S, self.read)

    async def finish(self, engine: Any) -> None:
        for delta in engine.collect():
            if delta.first == 0:
                self.records[delta.id].times.append(self.now)
            if delta.finish is not None:
                del self.open[delta.id]
        engine.note_bounds()
        engine.describe(self.now, self.now_ms(), stepped=True)
        self.start(engine)
        self.tick()
        await self.sync(engine)
        if not engine.running:
            engine.describe(self.now, self.now_ms(), stepped=False)
            self.start(engine)

    async def accuracy(self, jobs: list[Job]) -> dict[str, Any]:
        """Replay the jobs; return the accuracy of the stated pauses."""
        await self.replay(jobs)
        records = [self.records[f"r{number}"] for number in range(len(jobs))]
        found = stats.refusals(records, self.samples)
        waits = [record.times[0] - record.attempts[-1].sent_s for record in records if len(record.attempts) > 1]
        return {
            "requests": len(jobs),
            "refused": found["requests_refused"],
            "first_retry": found["first_retry_success"],
            "error_p50": found["retry_after_error"] and found["retry_after_error"]["p50"],
            "stated_s": found["retry_after_s"],
            "wait_after_retry_s": stats.spread(waits),
        }


def jobs_of(args: argparse.Namespace, seed: int, *, known: bool) -> list[Job]:
    sizes = {"base": args.rate, "peak": args.times * args.rate, "peak_s": args.burst_s, "rest_s": BASE_S}
    return burst(seed, **sizes, max_tokens=MAX_TOKENS, ends_known=known)


def run(args: argparse.Namespace, late_wait_s: float, seed: int, *, known: bool) -> dict[str, Any]:
    """Replay a burst on a new Redis and a new engine."""
    with EmbeddedRedis() as server:
        sizes: dict[str, Any] = {"locality": True, "output": 0, "exchange_s": 0.0, "seed": seed}
        fleet = RetryRun(server, 1, BLOCKS, StepTime(), **sizes)
        fleet.prepare(GatewayConfig(late_wait_s=late_wait_s), seed)
        return asyncio.run(fleet.accuracy(jobs_of(args, seed, known=known)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", default="1,2,3", help="one run of everything for each; default 1,2,3")
    parser.add_argument(
        "--late-wait-s", default="0,10,20", help="values of the gateway's option, one run for each; default 0,10,20"
    )
    parser.add_argument("--rate", type=float, default=9.9, help="base requests per second; default 9.9")
    parser.add_argument("--times", type=float, default=3.0, help="the burst's rate / the base rate; default 3")
    parser.add_argument("--burst-s", type=float, default=30.0, help="seconds of the burst; default 30")
    parser.add_argument("--name", type=machine.result_name, default="virtual_retries", help="name of the result file")


def main(args: argparse.Namespace, command: str) -> int:
    use_virtual_clock()
    table: dict[str, Any] = {}
    for lengths in ("known", "learned"):
        for late_wait_s in args.late_wait_s.split(","):
            runs: dict[str, Any] = {}
            for seed in args.seeds.split(","):
                runs[f"seed {seed}"] = found = run(args, float(late_wait_s), int(seed), known=lengths == "known")
                print(f"{lengths}, late wait {late_wait_s} s, seed {seed}: {found}", flush=True)
            medians = {}
            for name, aim in (("first_retry", FIRST_RETRIES), ("error_p50", ERROR)):
                medians[name] = statistics.median([each[name] for each in runs.values()])
                print(f"{name}: median {medians[name]} (aim {aim})", flush=True)
            table[f"{lengths}, late wait {late_wait_s} s"] = runs | {"medians": medians}
    path = machine.write(args.name, command, table)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
