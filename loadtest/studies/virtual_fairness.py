"""A quiet tenant's time to first token with a loud tenant, compared with the quiet tenant alone, in virtual time.

    python -m quire.loadtest.studies virtual-fairness [--seeds 1,2,3] [--engines 1,2,4] [--rate 22] [--name NAME]

The load is that of the study `fairness`, and nothing depends on the machine's speed: Redis, its scripts, both sides of
the bus and the schedulers are real, the steps and Redis' clock are simulated (`fleet`).  An engine syncs while its next
step runs, so a request claimed at the end of a step starts one step later.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
from collections import Counter
from functools import partial
from typing import Any

import msgspec

from quire.engine.commands import merged
from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.core.blocks import BlockPool, HostPool
from quire.engine.core.scheduler import Scheduler
from quire.engine.observers.prefix_reports import HeldPrefixes
from quire.engine.tools.simulate import engine_limits
from quire.engine.tools.step_time import StepTime
from quire.engine.tools.trace import VOCAB, Job, burst
from quire.engine.wire.messages import Generate, Sampling, TokenBatch
from quire.engine.wire.prefixes import PrefixReport, prefix_digests
from quire.engine.wire.records import QueueBounds
from quire.loadtest import machine
from quire.loadtest.stats import spread
from quire.loadtest.studies.fairness import GOAL, TENANTS
from quire.loadtest.studies.fleet import BLOCK, TARGET_MS, Run, Turn, _Engine, use_virtual_clock

READ_S = 0.25  # seconds between two readings of the fleet by a gateway
MAX_SEQS = 256


class _Bounds(msgspec.Struct):
    """An engine's report at the end of a step, minus the requests it has claimed since."""

    over_share: list[str]
    preemptible_tokens: int
    preemptible_tokens_of: dict[str, int]
    free_tokens: int
    free_requests: int
    claim_tokens: int
    preempt_claim_tokens: int

    def take(self, tokens: int) -> None:
        self.free_requests = max(0, self.free_requests - 1)
        for name in ("preemptible_tokens", "free_tokens", "claim_tokens", "preempt_claim_tokens"):
            setattr(self, name, max(0, getattr(self, name) - tokens))
        self.preemptible_tokens_of = {
            tenant: max(0, left - tokens) for tenant, left in self.preemptible_tokens_of.items()
        }


class TenantEngine(_Engine):
    """An engine that reports which tenants hold their share, and claims by preemption, as engine/loop.py does."""

    def __init__(self, name: str, url: str, blocks: int, step: StepTime, *, locality: bool) -> None:
        super().__init__(name, url, blocks, step, locality=locality)
        self.core = Scheduler(BlockPool(blocks, BLOCK), engine_limits("forecast", max_seqs=MAX_SEQS), HostPool())
        self.held = HeldPrefixes(self.core.pool, self)
        self.note_bounds()

    def note_bounds(self) -> None:
        """Compute the report of the state after a step."""
        room = self.core.headroom
        over_share, preemptible, own = room.yielding()
        free = room.startable()
        claimable = room.claimable() if free[0] else 0
        by_preemption = room.claimable_by_preemption() if preemptible else 0
        self.bounds = _Bounds(list(over_share), preemptible, own, *free, claimable, by_preemption)

    async def sync(self) -> float:
        (gained, lost), self.changes = self.changes, ([], [])
        lost = [digest for digest in lost if digest not in set(gained)]
        costs, bounds = self.core.step_cost, self.bounds
        step_us = 1e6 * costs.decode_s(self.core.running)
        report = PrefixReport(gained, lost, 1e6 * costs.token_s, step_us, self.backlog.tokens, 0.0, 0)
        batches = [("g", TokenBatch(self.name, merged(self.deltas)))] if self.deltas else []
        finished, self.finished, self.deltas = self.finished, [], []
        self.syncs += 1
        load = msgspec.structs.replace(
            self.load,
            over_share=bounds.over_share,
            preemptible_tokens=bounds.preemptible_tokens,
            preemptible_tokens_of=bounds.preemptible_tokens_of,
        )
        reply = await self.side.sync(
            batches, finished, load, bounds.free_tokens, bounds.free_requests, report, bounds.claim_tokens,
            preempt_claim_tokens=bounds.preempt_claim_tokens,
        )  # fmt: skip
        self.core.claims.queued = math.ceil(self.side.queue_share)
        for request in reply.generates:
            held = reply.claim(request.id).held_tokens
            self.backlog.add(request.id, len(request.token_ids) - held)
            bounds.take(len(request.token_ids))
            self.begun += 1
            self.accept(request)
        return reply.retry_ms / 1000


class TenantRun(Run):
    """Replays the jobs of two tenants on several engines."""

    def engine(self, name: str, blocks: int, step: StepTime, *, locality: bool) -> TenantEngine:
        return TenantEngine(name, self.url, blocks, step, locality=locality)

    async def arrive_job(self, number: int, job: Job) -> None:
        name, rng = f"r{number}", random.Random(number)
        tokens = [rng.randrange(2, VOCAB) for _ in range(job.prompt_len)]
        self.open[name] = self.now, Turn(tokens, tenant=job.tenant), True
        request = Generate(
            name, "g", tokens, job.max_tokens, Sampling(ignore_eos=True), self.base_ms + 86_400_000, job.tenant,
            tenant=job.tenant, prefixes=prefix_digests(tokens, job.tenant),
        )  # fmt: skip
        self.tick()
        await self.gateway.submit(request, bounds=QueueBounds(target_ms=TARGET_MS))
        self.wake()

    async def read(self) -> None:
        self.tick()
        await self.gateway.fleet()
        self.wake()
        if self.open:
            self.at(self.now + READ_S, self.read)

    async def finish(self, engine: Any) -> None:
        for delta in engine.collect():
            arrived, turn, _ = self.open[delta.id]
            if delta.first == 0:
                self.ttft.setdefault(turn.tenant, []).append(self.now - arrived)
            if delta.finish is not None:
                del self.open[delta.id]
        engine.note_bounds()
        self.start(engine)
        self.tick()
        await self.sync(engine)
        if not engine.running:
            self.start(engine)

    async def replay(self, jobs: list[Job]) -> dict[str, Any]:
        """Replay the jobs until all have ended; return the TTFT of each tenant in seconds, and the preemptions."""
        await self.gateway.open()
        self.tick()
        for engine in self.engines:
            await engine.side.open()
            await engine.sync()
        for number, job in enumerate(jobs):
            self.at(job.at_s, partial(self.arrive_job, number, job))
        self.at(jobs[0].at_s, self.read)
        await self.run_to_the_end()
        totals = [engine.core.report.totals for engine in self.engines]
        return {
            "ttft_s": {tenant: spread(each) for tenant, each in self.ttft.items()},
            "requests": dict(Counter(job.tenant for job in jobs)),
            "preemptions": sum(each.preemptions for each in totals),
            "preemptions_for_fairness": sum(each.yields for each in totals),
            "seconds": round(self.now, 2),
        }


def jobs_of(seed: int, rate: float, seconds: float, shares: tuple[float, ...]) -> list[Job]:
    """Return the requests of both tenants of a seed, of known output lengths.  `shares`: weights of the tenants."""
    rng = random.Random(seed)
    jobs = burst(seed, base=rate, peak=rate, peak_s=0.0, rest_s=seconds / 2, ends_known=True)
    return [msgspec.structs.replace(job, tenant=rng.choices(TENANTS, shares)[0]) for job in jobs]


def run(args: argparse.Namespace, engines: int, seed: int, jobs: list[Job]) -> dict[str, Any]:
    """Replay the jobs on a new Redis and new engines."""
    with EmbeddedRedis() as server:
        sizes: dict[str, Any] = {"locality": True, "output": 0, "exchange_s": 0.0, "seed": seed}
        fleet = TenantRun(server, engines, args.kv_blocks, StepTime(args.step_ms / 1000, 0.0, 0.0), **sizes)
        return asyncio.run(fleet.replay(jobs))


def compare(args: argparse.Namespace, engines: int) -> dict[str, Any]:
    """Return the results of each seed, and the median ratio of the quiet tenant's p99 to its p99 alone."""
    shares = tuple(map(float, args.shares.split(",")))
    quiet = TENANTS[1]
    found: dict[str, Any] = {}
    for seed in map(int, args.seeds.split(",")):
        jobs = jobs_of(seed, args.rate * engines, args.seconds, shares)
        both = run(args, engines, seed, jobs)
        alone = run(args, engines, seed, [job for job in jobs if job.tenant == quiet])
        times = [each["ttft_s"][quiet] for each in (both, alone)]
        ratio = round(times[0]["p99"] / times[1]["p99"], 3)
        found[f"seed {seed}"] = {"with loud": both, "alone": alone, "ttft_p99_ratio": ratio}
        for name, each in zip(("with loud", "alone"), times, strict=True):
            cells = "  ".join(f"{p} {1000 * each[p]:.0f}" for p in ("p50", "p90", "p99", "max"))
            print(f"{engines} engines, seed {seed}, quiet tenant {name}: TTFT ms  {cells}", flush=True)
    found["median_ratio"] = statistics.median(each["ttft_p99_ratio"] for each in found.values())
    print(f"{engines} engines: median {found['median_ratio']} times that alone (target {GOAL})", flush=True)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", default="1,2,3", help="one pair of runs per seed; default 1,2,3")
    parser.add_argument("--shares", default="10,1", help="weights of the tenants' requests; default 10,1")
    parser.add_argument(
        "--rate", type=float, default=22.0, help="requests per second of both tenants, for each engine; default 22"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="time in which requests arrive; default 20")
    parser.add_argument("--step-ms", type=float, default=30.0, help="milliseconds of an engine step; default 30")
    parser.add_argument("--kv-blocks", type=int, default=512, help="blocks of 16 tokens of each engine; default 512")
    parser.add_argument("--engines", default="1,2,4", help="numbers of engines to run with; default 1,2,4")
    parser.add_argument("--name", type=machine.result_name, default="virtual_fairness", help="name of the result file")


def main(args: argparse.Namespace, command: str) -> int:
    use_virtual_clock()
    figures = {engines: compare(args, int(engines)) for engines in args.engines.split(",")}
    path = machine.write(args.name, command, figures)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
