"""`python -m quire.loadtest.studies fleet WORKLOAD`: several engines on one queue, on a virtual clock.

It measures the effect of prefix locality on hit rate, requests per second and waits, and the fleet's load on Redis.

    sessions --> GatewaySide --> Redis, the real scripts --> EngineSide --> the real scheduler and prefix cache
                                      ^ virtual time                          StepTime: seconds per step

Redis, the scripts, both sides of the bus and the schedulers are real.  The model, the step times and Redis' clock are
simulated: `now_ms` of the scripts reads a key that this program sets.  An engine syncs after each step, and when a
script wakes it up; wake-ups during a sync (`--exchange-ms`) count as one.

Workloads, each after a warm-up that is not counted:
  prefixes   600 prefixes of 1,000 tokens, 100 tokens of its own and 64 of output for each request (--prefixes, --own,
             --output)
  chats      conversations of 6 turns: a system prompt of 256 tokens, then 200 tokens and an answer of 64 per turn
  unique     prompts of 1,000 tokens without shared prefixes
  mix        half prefixes, half unique
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import heapq
import itertools
import json
import math
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
import redis

from quire.engine.commands import merged
from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.core.blocks import BlockPool, HostPool
from quire.engine.core.limits import Outputs
from quire.engine.core.scheduler import Scheduler
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.observers.prefix_reports import HeldPrefixes, PromptBacklog
from quire.engine.tools.simulate import FAR, engine_limits, percentiles
from quire.engine.tools.step_time import StepTime
from quire.engine.tools.trace import EOS, VOCAB
from quire.engine.wire import scripts
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.messages import Delta, EngineLoad, Generate, Sampling, TokenBatch
from quire.engine.wire.prefixes import PrefixReport, prefix_digests
from quire.engine.wire.records import QueueBounds

# An 8B model in bfloat16 on an H200: 4.06 ms per step with one sequence, 9.65 ms with 256; 23 us per prompt token.
STEP = StepTime(fixed=0.00404, row=0.000022, prompt_token=0.000023)
BLOCK = 16
TARGET_MS = 1600  # maximum wait in the on-time lane (requests whose estimated wait meets the TTFT target)
WARM_RATE = 0.3  # fraction of the request rate during the warm-up: caches fill before the queue does
TIME = "local time = call('TIME')\n    NOW = time[1] * 1000 + math.floor(time[2] / 1000)"


class Turn(msgspec.Struct):
    """One request of a session.  The next one follows its answer."""

    tokens: list[int]
    then: Callable[[], tuple[float, Turn] | None] = lambda: None  # returns seconds to wait, and the next turn
    tenant: str = ""
    adapter: str = ""  # as in Generate.adapter


Sessions = Iterator[Turn]


class Shape(msgspec.Struct, frozen=True):
    """Sizes of a workload."""

    prefixes: int = 600  # prefixes that requests share
    own: int = 100  # tokens after the prefix
    output: int = 64  # tokens of each answer


DEFAULT = Shape()


def prefixes(rng: random.Random, shape: Shape = DEFAULT, *, length: int = 1000) -> Sessions:
    shared = [rng.choices(range(2, VOCAB), k=length) for _ in range(shape.prefixes)]
    while True:
        yield Turn(rng.choice(shared) + rng.choices(range(2, VOCAB), k=shape.own))


def unique(rng: random.Random, shape: Shape = DEFAULT, *, length: int = 1000, tenant: str = "") -> Sessions:
    while True:
        yield Turn(rng.choices(range(2, VOCAB), k=length), tenant=tenant)


def mix(rng: random.Random, shape: Shape) -> Sessions:
    both = prefixes(rng, shape), unique(rng)
    while True:
        yield next(rng.choice(both))


def chats(rng: random.Random, shape: Shape, *, turns: int = 6, message: int = 200) -> Sessions:
    system = rng.choices(range(2, VOCAB), k=256)

    def turn(history: list[int], left: int) -> Turn:
        tokens = history + rng.choices(range(2, VOCAB), k=message)
        said = [*tokens, *[1] * shape.output]
        return Turn(tokens, then=lambda: (rng.expovariate(1 / 3.0), turn(said, left - 1)) if left else None)

    while True:
        yield turn(system, turns - 1)


WORKLOADS: Mapping[str, Callable[[random.Random, Shape], Sessions]] = MappingProxyType(
    {"prefixes": prefixes, "chats": chats, "unique": unique, "mix": mix}
)


class _Count(msgspec.Struct):
    """Sums from the start to one moment of virtual time."""

    at: float
    scripts: int
    cpu_us: float  # CPU time of Redis
    syncs: int
    steps: int
    requests: int

    def load(self, before: _Count) -> dict[str, float]:
        """Return the fleet's load on Redis since `before`."""
        seconds, syncs = self.at - before.at, self.syncs - before.syncs
        requests, steps = self.requests - before.requests, self.steps - before.steps
        cpu_us = self.cpu_us - before.cpu_us
        return {
            "scripts_per_s": (self.scripts - before.scripts) / seconds,
            "exchanges_per_s": syncs / seconds,
            "exchanges_per_request": syncs / requests,
            "exchanges_per_step": syncs / max(1, steps),
            "steps_per_s": steps / seconds,  # steps per second of all engines together
            # Redis' CPU time, which depends on the machine.
            "cpu_us_per_request": cpu_us / requests,
            "cores": cpu_us / 1e6 / seconds,  # CPU cores that Redis needs; above 1, one Redis is not enough
        }


class Figures(msgspec.Struct):
    """Result of a run, without its warm-up.  Times in seconds."""

    requests: int
    offered_per_s: float
    served_per_s: float
    hit_rate: float  # prompt tokens found in a prefix cache / prompt tokens
    ttft: tuple[float, float, float]  # p50, p90, p99
    ttft_by_tenant: dict[str, tuple[float, float, float]]
    claims: dict[str, int]  # Claim.reason -> number of claims
    busiest: float  # requests started by the busiest engine / mean
    exchange_us: float  # Redis' mean time for one sync
    waiting: int  # requests in the queue when the last session arrived
    redis: dict[str, float]  # see _Count.load; up to the arrival of the last session


class _Texts(ScriptedExecutor):
    """All engines emit the same tokens; outputs end at their max_tokens."""

    def token(self, sampler: Any, position: int) -> int:
        return 1


class _Engine:
    """One engine: a scheduler, its clock, and its side of the bus."""

    def __init__(self, name: str, url: str, blocks: int, step: StepTime, *, locality: bool) -> None:
        self.name, self.step, self.locality = name, step, locality
        self.side = EngineSide(url, name, namespace="fleet", lease_ms=3_600_000)
        self.core = Scheduler(BlockPool(blocks, BLOCK), engine_limits("forecast", step_tokens=8192), HostPool())
        self.executor = _Texts(ModelInfo("sim", "sim", VOCAB, FAR, [EOS], 0), blocks)
        self.held = HeldPrefixes(self.core.pool, self)
        self.backlog = PromptBacklog()
        self.changes: tuple[list[bytes], list[bytes]] = [], []
        self.deltas: list[Delta] = []
        self.finished: list[str] = []
        self.running: float = 0.0  # seconds of the step in flight; 0: no step is in flight
        self.steps = self.begun = self.syncs = 0
        self.silent_until = 0.0  # wake-ups before this time count as one, recorded in `rung`
        self.rung = False
        self.claims: Counter[str] = Counter()
        self.load = EngineLoad(name, "sim", "sim", FAR, VOCAB, BLOCK, blocks, blocks, 0, 0, 0, 0, 0)

    def put_prefixes(self, gained: list[bytes], lost: list[bytes]) -> None:
        self.changes[0].extend(gained)
        self.changes[1].extend(lost)

    def submit(self) -> float:
        """Start a step; return its seconds, 0 if there is nothing to do."""
        plan = self.core.plan(0)
        self.running = 0.0
        if plan is not None:
            self.executor.submit(plan)
            prompt_tokens = sum(len(piece.token_ids) for piece in plan.slices)
            self.running = self.step(self.core.running, prompt_tokens)
        return self.running

    def collect(self) -> list[Delta]:
        """End the step in flight; return its tokens."""
        self.core.commit(msgspec.structs.replace(self.executor.collect(), step_s=self.running))
        self.running = 0.0
        return self.take(self.core.outputs())

    def take(self, outputs: Outputs) -> list[Delta]:
        found = [delta for group in outputs.deltas.values() for delta in group]
        self.deltas += found
        self.finished += outputs.finished
        self.backlog.remove(delta.id for delta in found)
        self.steps += 1
        self.held.follow(outputs)
        return found

    @property
    def due(self) -> bool:
        """Whether the engine must sync at the end of this step: it has something to report or to claim."""
        return bool(self.finished) or self.steps % 16 == 0 or self.core.headroom.startable()[1] > 0

    async def sync(self) -> float:
        """Sync with Redis; return the seconds until the next sync; 0: after the next step or wake-up."""
        (gained, lost), self.changes = self.changes, ([], [])
        lost = [digest for digest in lost if digest not in set(gained)]
        costs, report = self.core.step_cost, None
        if self.locality:
            step_us = 1e6 * costs.decode_s(self.core.running)
            load_s, loads = self.loads_waiting()
            figures = 1e6 * costs.token_s, step_us, self.backlog.tokens, 1e6 * load_s, loads
            report = PrefixReport(gained, lost, *figures)
        batches = [("g", TokenBatch(self.name, merged(self.deltas)))] if self.deltas else []
        finished, self.finished, self.deltas = self.finished, [], []
        self.syncs += 1
        room, claimable = self.core.headroom.startable(), self.core.headroom.claimable()
        reply = await self.side.sync(batches, finished, self.load, *room, report, claimable)
        self.core.claims.queued = math.ceil(self.side.queue_share)
        for request in reply.generates:
            claim = reply.claim(request.id)
            self.backlog.add(request.id, len(request.token_ids) - claim.held_tokens)
            self.claims[claim.reason] += 1
            self.begun += 1
            self.accept(request)
        return reply.retry_ms / 1000

    def loads_waiting(self) -> tuple[float, int]:
        """Return the seconds until one more LoRA adapter would be loaded (0: not known), and the waiting loads."""
        return 0.0, 0

    def accept(self, request: Generate) -> None:
        """Take a claimed request."""
        self.core.accept(request)


class Run:
    """One simulation of a fleet."""

    def engine(self, name: str, blocks: int, step: StepTime, *, locality: bool) -> _Engine:
        return _Engine(name, self.url, blocks, step, locality=locality)

    def __init__(
        self,
        server: EmbeddedRedis,
        engines: int,
        blocks: int,
        step: StepTime,
        *,
        locality: bool,
        seed: int,
        output: int,
        exchange_s: float,
    ) -> None:
        """`output`: tokens of each answer.  `exchange_s`: duration of a sync, in which wake-ups count as one."""
        self.output, self.exchange_s = output, exchange_s
        self.url = server.url
        self.client = redis.Redis.from_url(server.url)
        self.client.flushall()
        self.engines = [self.engine(f"e{at}", blocks, step, locality=locality) for at in range(engines)]
        self.named = {engine.name: engine for engine in self.engines}
        self.bells: Any = self.client.pubsub()  # type: ignore[no-untyped-call]
        self.bells.psubscribe("{fleet}:bell:*")
        self.gateway = GatewaySide(self.url, "g", namespace="fleet")
        self.rng = random.Random(seed)
        self.events: list[tuple[float, int, Callable[[], Any]]] = []
        self.numbers = itertools.count()
        self.now, self.base_ms, self.ticked_ms = 0.0, int(time.time() * 1000), 0
        self.open: dict[str, tuple[float, Turn, bool]] = {}  # id -> arrival, turn, whether it counts
        self.ttft: dict[str, list[float]] = {}
        self.ended: deque[float] = deque()  # times at which counted requests ended
        self.arrived = 0

    def at(self, seconds: float, what: Callable[[], Any]) -> None:
        heapq.heappush(self.events, (seconds, next(self.numbers), what))

    def tick(self) -> None:
        if (now_ms := self.base_ms + int(1000 * self.now)) != self.ticked_ms:
            self.ticked_ms = now_ms
            self.client.set("{fleet}:virtual_ms", now_ms)

    async def arrive(self, turn: Turn, *, counts: bool) -> None:
        name = f"r{next(self.numbers)}"
        self.arrived += 1
        self.open[name] = self.now, turn, counts
        request = Generate(
            name, "g", turn.tokens, self.output, Sampling(ignore_eos=True), self.base_ms + 86_400_000, turn.tenant,
            tenant=turn.tenant, adapter=turn.adapter,
            prefixes=prefix_digests(turn.tokens, f"{turn.adapter} {turn.tenant}" if turn.adapter else turn.tenant),
        )  # fmt: skip
        self.tick()
        await self.gateway.submit(request, bounds=QueueBounds(target_ms=TARGET_MS))
        self.wake()

    async def start_session(self, sessions: Sessions, *, counts: bool) -> None:
        await self.arrive(next(sessions), counts=counts)

    def wake(self) -> None:
        """Sync the engines that the last script has woken."""
        self.bells.ping("end")
        while (message := self.bells.get_message(timeout=None))["type"] != "pong":
            if message["type"] == "pmessage":
                name = message["channel"].decode().rpartition(":")[2]
                self.at(self.now, partial(self.ring, self.named[name]))

    async def ring(self, engine: _Engine) -> None:
        if engine.rung:
            return
        if engine.silent_until > self.now:
            engine.rung = True
            self.at(engine.silent_until, lambda: self.talk(engine))
        else:
            await self.talk(engine)

    async def talk(self, engine: _Engine) -> None:
        engine.rung, engine.silent_until = False, self.now + self.exchange_s
        self.tick()
        await self.sync(engine)
        if not engine.running:
            self.start(engine)

    async def sync(self, engine: _Engine) -> None:
        """Sync with Redis; sync again when the reply says so, unless another sync comes first."""
        retry = await engine.sync()
        self.wake()
        if retry:
            number = engine.syncs
            self.at(self.now + retry, lambda: self.talk(engine) if engine.syncs == number else None)

    def start(self, engine: _Engine) -> None:
        if seconds := engine.submit():
            self.at(self.now + seconds, lambda: self.finish(engine))

    async def finish(self, engine: _Engine) -> None:
        for delta in engine.collect():
            arrived, turn, counts = self.open[delta.id]
            if delta.first == 0 and counts:
                self.ttft.setdefault(turn.tenant, []).append(self.now - arrived)
            if delta.finish is not None:
                del self.open[delta.id]
                if counts:
                    self.ended.append(self.now)
                if (following := turn.then()) is not None:
                    pause, after = following
                    self.at(self.now + pause, partial(self.arrive, after, counts=counts))
        if engine.due:
            self.tick()
            await self.sync(engine)
        self.start(engine)

    async def serve(self, streams: list[tuple[Sessions, float]], warm: int, count: int) -> Figures:
        """Start sessions at these rates per second (Poisson): `warm` sessions that are not counted, then `count`."""
        await self.gateway.open()
        self.tick()
        for engine in self.engines:
            await engine.side.open()
            await engine.sync()
        total = sum(rate for _, rate in streams)
        at = 0.0
        for number in range(warm + count):
            at += self.rng.expovariate(total if number >= warm else WARM_RATE * total)
            sessions = self.rng.choices([s for s, _ in streams], [rate for _, rate in streams])[0]
            if number == warm:
                self.at(at, self.begin)
            self.at(at, partial(self.start_session, sessions, counts=number >= warm))
        self.at(at, self.stop_counting)
        await self.run_to_the_end()
        return self.figures(total)

    async def run_to_the_end(self) -> None:
        """Handle events until there are none, then close all connections."""
        while self.events:
            self.now, _, what = heapq.heappop(self.events)
            if (work := what()) is not None:
                await work
        for engine in self.engines:
            await engine.side.close()
        await self.gateway.close()
        self.bells.close()

    def begin(self) -> None:
        self.began = self.now
        self.before = [msgspec.structs.replace(engine.core.report.totals) for engine in self.engines]
        self.begun = [engine.begun for engine in self.engines]
        for engine in self.engines:
            engine.claims.clear()
        self.client.config_resetstat()
        self.count_before = self.count()

    def stop_counting(self) -> None:
        self.count_after, self.waiting = self.count(), int(self.client.hlen("{fleet}:waiting"))

    def count(self) -> _Count:
        info: Any = self.client.info("everything")
        scripts, cpu_us = info.get("cmdstat_evalsha", {"calls": 0})["calls"], 1e6 * redis_cpu_s(info)
        syncs, steps = (sum(getattr(one, name) for one in self.engines) for name in ("syncs", "steps"))
        return _Count(self.now, scripts, cpu_us, syncs, steps, self.arrived)

    def figures(self, offered: float) -> Figures:
        totals = [(engine.core.report.totals, before) for engine, before in zip(self.engines, self.before, strict=True)]
        asked = sum(after.prompt_tokens - before.prompt_tokens for after, before in totals)
        cached = sum(after.cached_prompt_tokens - before.cached_prompt_tokens for after, before in totals)
        begun = [engine.begun - before for engine, before in zip(self.engines, self.begun, strict=True)]
        claims: Counter[str] = Counter()
        for engine in self.engines:
            claims += engine.claims
        stats: Any = self.client.info("commandstats")
        calls = stats["cmdstat_evalsha"]
        half = self.ended[int(0.9 * len(self.ended))]
        return Figures(
            requests=len(self.ended),
            offered_per_s=offered,
            served_per_s=0.9 * len(self.ended) / (half - self.began),
            hit_rate=cached / asked,
            ttft=percentiles([one for each in self.ttft.values() for one in each]),
            ttft_by_tenant={tenant: percentiles(each) for tenant, each in self.ttft.items()},
            claims=dict(claims),
            busiest=max(begun) / (sum(begun) / len(begun)),
            exchange_us=calls["usec_per_call"],
            waiting=self.waiting,
            redis=self.count_after.load(self.count_before),
        )


def redis_cpu_s(info: Mapping[str, Any]) -> float:
    """Return the CPU seconds that Redis has used since its start, from its INFO."""
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


def use_virtual_clock() -> None:
    """Make the scripts of this process read the time from a key.  Raises RuntimeError if base.lua differs."""
    for script in vars(scripts).values():
        if isinstance(script, scripts.Script) and "now_ms" in script.source:
            if TIME not in script.source:
                raise RuntimeError("base.lua defines now_ms in another way than this program expects")
            script.source = script.source.replace(TIME, "NOW = tonumber(call('GET', P .. 'virtual_ms'))")
            script.sha = hashlib.sha1(script.source.encode(), usedforsecurity=False).hexdigest()


def options() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m quire.loadtest.studies fleet", description=__doc__, formatter_class=raw
    )
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--engines", type=int, default=4, help="engines (default: 4)")
    parser.add_argument("--blocks", type=int, default=12_288, help="KV blocks of 16 tokens per engine (default: 12288)")
    parser.add_argument("--rate", type=float, default=100.0, help="sessions per second, Poisson (default: 100)")
    parser.add_argument("--quiet", type=float, default=0.0, help="requests per second of a second tenant (default: 0)")
    parser.add_argument(
        "--warm", type=int, default=1500, help="warm-up sessions, which are not counted (default: 1500)"
    )
    parser.add_argument("--requests", type=int, default=2000, help="sessions after the warm-up (default: 2000)")
    parser.add_argument(
        "--prefixes", type=int, default=DEFAULT.prefixes, help="prefixes that requests share (default: 600)"
    )
    parser.add_argument("--own", type=int, default=DEFAULT.own, help="tokens after the prefix (default: 100)")
    parser.add_argument("--output", type=int, default=DEFAULT.output, help="tokens of each answer (default: 64)")
    parser.add_argument(
        "--exchange-ms",
        type=float,
        default=0.0,
        help="duration of an engine's sync, in which "
        "further wake-ups count as one (default: 0, each wake-up is a sync)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=["locality", "order", "one"], default="locality",
                        help="order: engines claim in queue order; one: one engine with all blocks, and the speed of "
                        "all together")  # fmt: skip
    return parser


def main(argv: list[str]) -> int:
    """Print one JSON object."""
    args = options().parse_args(argv)
    use_virtual_clock()
    rng = random.Random(args.seed)
    shape = Shape(args.prefixes, args.own, args.output)
    streams = [(WORKLOADS[args.workload](rng, shape), args.rate)]
    if args.quiet:
        streams.append((unique(random.Random(args.seed + 1), length=200, tenant="quiet"), args.quiet))
    engines, blocks, step = args.engines, args.blocks, STEP
    if args.mode == "one":
        engines, blocks = 1, args.blocks * args.engines
        step = StepTime(*(seconds / args.engines for seconds in msgspec.structs.astuple(STEP)))
    with EmbeddedRedis() as server:
        modes = {"locality": args.mode == "locality", "output": args.output, "exchange_s": args.exchange_ms / 1000}
        run = Run(server, engines, blocks, step, seed=args.seed, **modes)
        figures = asyncio.run(run.serve(streams, args.warm, args.requests))
    print(json.dumps(vars(args) | msgspec.to_builtins(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
