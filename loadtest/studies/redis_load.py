"""`python -m quire.loadtest.studies redis-load`: CPU time, commands and bytes of Redis per request, sync and token.

Both sides of the bus, the scripts, Redis with its append-only file and the request ids are real.  No model runs.  For
each number of gateways, engines, sequences per engine and waiting tenants:

    ring       a sync of an engine with free capacity while no request waits, as after a wake-up
    submit     a request that joins the queue
    step       a sync with one token per sequence, including the reads of all gateways
    request    queued, claimed, ended and settled, with its prompt; its tokens count as steps
    first      a gateway's first read of the fleet's state
    reading    its next reads: each engine has synced since the last one
    quiet      a read when no engine has synced since the last one

The streams of an engine are spread evenly over the gateways.  Times are microseconds of Redis' own CPU (INFO cpu), so
they exclude waiting, clients and the network, and hardly depend on other work on the machine; `script_us` is the part
inside scripts.  `commands` counts what Redis runs, those inside scripts included.  `in_bytes` and `out_bytes`
cross the network; `queued_bytes` is memory of Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import secrets
import shlex
import time
from typing import Any, Self

import msgspec
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire import scripts
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.layout import READING_ENGINES, TENANTS_SHOWN, TOKEN_CHANNELS
from quire.engine.wire.messages import LATER_FIELDS, Delta, EngineLoad, Finish, Generate, Sampling, TokenBatch
from quire.engine.wire.prefixes import PrefixReport, prefix_digests
from quire.loadtest import machine
from quire.loadtest.studies.fleet import redis_cpu_s, unique

STEPS, READINGS = 32, 8  # steps per engine, reads of the fleet in total
TOKEN = 20_000  # smallest token id: ids of 3 bytes, as most of a vocabulary has
# Load of a busy engine: large counts, all fields set.
LOAD = EngineLoad(
    "", "meta-llama/Llama-3.1-8B-Instruct", 64 * "f", 131_072, 128_256, 16, 40_000, 8_000, 4_000, 64, 3, 3_000,
    1_700_000_000_000, 3_141.5, 27.1, 12, 123_456_789, 98_765_432, 23_456_789, 12_345, False, 39_000, 0.0203, 2, 120,
    2**31, 2**30, 1, 17, [(0.5, 10_000, 5_012), (0.9, 10_000, 9_013), (0.99, 10_000, 9_907)], 500_000, 1_234, 2**34,
    2**33, 100_000, 0, 7, ["tenant-1"], 4_000, [128_001, 128_008, 128_009], True, 8, 80_000, 0.93, list(LATER_FIELDS),
)  # fmt: skip
COSTS = PrefixReport(token_us=23.0, step_us=5000.0, backlog=1000)


class Size(msgspec.Struct, frozen=True):
    """Size of the measured deployment."""

    gateways: int = 1
    engines: int = 1
    sequences: int = 16  # sequences per engine
    tenants: int = 1  # tenants with waiting requests
    prompt_tokens: int = 1000  # tokens of each prompt
    steps: int = STEPS  # steps per engine


SIZES = (
    *(Size(1, 4, sequences) for sequences in (1, 16, 64, 256)),
    *(Size(1, engines, 16) for engines in (1, 16, 64)),
    *(Size(gateways, 1, 64) for gateways in (1, 4, 16, 64)),
    *(Size(1, 1, 16, tenants=tenants) for tenants in (100, 1000)),
    *(Size(1, engines, 1, steps=1) for engines in (256, 1000)),
)


def expected(size: Size) -> dict[str, dict[str, float]]:
    """Return the formula of docs/scaling.md: commands, and bytes to and from Redis, of each part."""
    names = min(size.gateways, size.sequences)  # gateways that a step has tokens for
    channels = min(names, TOKEN_CHANNELS)
    readers = size.gateways * channels / min(size.gateways, TOKEN_CHANNELS)  # gateways that listen to those channels
    parts = 24 * size.sequences + 12 * names  # all messages of a step: tokens with their ids, names
    tenants = min(size.tenants, size.sequences)  # tenants with sequences on one engine
    shown = 426 + 38 * min(size.tenants, TENANTS_SHOWN)
    return {
        "ring": {"commands": 13, "in_bytes": 700, "out_bytes": 50},
        "submit": {"commands": 48, "in_bytes": 300 + 5.6 * size.prompt_tokens, "out_bytes": 170},
        "step": {
            "commands": 13 + 4 * tenants + 2 * channels + 0.15 * size.sequences,
            "in_bytes": 700 + 28 * size.sequences + 14 * names,
            "out_bytes": 60 + readers * (60 + parts / channels),
        },
        "request": {
            "commands": 108,
            "in_bytes": 750 + 5.6 * size.prompt_tokens,
            "out_bytes": 400 + 5.2 * size.prompt_tokens,
        },
        "reading": {
            "commands": 34,
            "in_bytes": 134,
            "out_bytes": shown + 390 * min(size.engines, READING_ENGINES),
        },
        "quiet": {"commands": 34, "in_bytes": 134, "out_bytes": shown},
    }


class Spent(msgspec.Struct, frozen=True):
    """Costs of Redis since its start, or between two moments: microseconds and bytes, by name."""

    counts: dict[str, float]

    @classmethod
    def read(cls, client: redis.Redis) -> Self:
        info: Any = client.info("everything")
        counts = {
            "cpu_us": 1e6 * redis_cpu_s(info),
            "script_us": sum(info.get(f"cmdstat_{name}", {"usec": 0})["usec"] for name in ("evalsha", "eval")),
            "in_bytes": info["total_net_input_bytes"],
            "out_bytes": info["total_net_output_bytes"],
            "commands": sum(
                one["calls"]
                for name, one in info.items()
                if name.startswith("cmdstat_") and name not in ("cmdstat_info", "cmdstat_evalsha", "cmdstat_eval")
            ),
        }
        return cls(counts)

    def __add__(self, other: Spent) -> Spent:
        return Spent({name: count + other.counts[name] for name, count in self.counts.items()})

    def __sub__(self, before: Spent) -> Spent:
        return Spent({name: count - before.counts[name] for name, count in self.counts.items()})

    @classmethod
    def of_reading(cls, client: redis.Redis) -> Spent:
        """Return the cost of one call of `read`."""
        before = cls.read(client)
        return cls.read(client) - before

    def each(self, number: int, less: dict[str, float] | None = None, times: int = 0) -> dict[str, float]:
        """Return the mean over `number` events, after subtracting `times` times the costs `less`."""
        return {
            name: round((count - times * (less or {}).get(name, 0)) / number, 1) for name, count in self.counts.items()
        }


class Engine:
    """One engine whose sequences get a token in each sync."""

    def __init__(self, url: str, name: str) -> None:
        self.side = EngineSide(url, name, lease_ms=600_000)
        self.held: dict[str, tuple[str, int]] = {}  # request id -> its gateway, tokens so far
        self._name = name

    async def sync(self, *, tokens: bool = False, ends: int = 0, room: int = 0) -> list[str]:
        """Send a token for each sequence, end the oldest `ends`, claim at most `room`; return the ended ids."""
        ended = list(self.held)[:ends]
        deltas: dict[str, list[Delta]] = {}
        for name, (gateway, count) in self.held.items() if tokens else ():
            finish = Finish("length") if name in ended else None
            deltas.setdefault(gateway, []).append(Delta(name, count, [TOKEN + count], finish))
        load = msgspec.structs.replace(LOAD, engine=self._name, preemptible_tokens=0)
        batches = [(gateway, TokenBatch(self._name, some)) for gateway, some in deltas.items()]
        reply = await self.side.sync(batches, ended, load, 10**9 if room else 0, room, COSTS)
        self.held = {
            name: (gateway, count + tokens) for name, (gateway, count) in self.held.items() if name not in ended
        }
        self.held.update((request.id, (request.gateway, 0)) for request in reply.generates)
        return ended


class Deployment:
    """Gateways that read tokens, and engines."""

    def __init__(self, url: str, size: Size) -> None:
        self.client = redis.Redis.from_url(url)
        self.gateways = {name: GatewaySide(url, name) for name in (f"gateway-{at}" for at in range(size.gateways))}
        self.engines = [Engine(url, f"engine-{at}") for at in range(size.engines)]
        self._prompts = unique(random.Random(0), length=size.prompt_tokens)
        self._tenants = itertools.cycle([f"tenant-{at}" for at in range(size.tenants)])
        self._turns = itertools.cycle(self.gateways)
        self._read = 0  # tokens that the gateways have read
        self._more = asyncio.Event()

    async def open(self) -> None:
        for gateway in self.gateways.values():
            await gateway.open()
        for engine in self.engines:
            await engine.side.open()
        self._reading = [asyncio.create_task(self._follow(gateway)) for gateway in self.gateways.values()]

    async def close(self) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        for engine in self.engines:
            await engine.side.close()
        for gateway in self.gateways.values():
            await gateway.close()
        self.client.close()

    async def _follow(self, gateway: GatewaySide) -> None:
        async for batch in gateway.batches():
            self._read += len(batch.deltas)
            self._more.set()

    @property
    def gateway(self) -> GatewaySide:
        """The first gateway."""
        return next(iter(self.gateways.values()))

    async def submit(self) -> None:
        tokens = next(self._prompts).tokens
        now_ms = int(1000 * time.time())
        gateway = next(self._turns)
        name = f"chatcmpl-{now_ms:012x}{secrets.token_hex(10)}.0"  # as service/delivery/resume.py makes them
        digests = prefix_digests(tokens, "")
        request = Generate(
            name,
            gateway,
            tokens,
            64,
            Sampling(),
            now_ms + 3_600_000,
            tenant=next(self._tenants),
            prefixes=digests,
        )
        await self.gateways[gateway].submit(request)

    async def fill(self, sequences: int) -> None:
        """Queue and claim, until each engine runs `sequences` sequences."""
        while any(len(engine.held) < sequences for engine in self.engines):
            for engine in self.engines:
                await engine.sync(room=sequences - len(engine.held))

    async def step(self, *, turnover: bool = False) -> None:
        """One step of every engine; with `turnover` each ends a request and claims another one."""
        for engine in self.engines:
            if turnover:
                await self.submit()
            expected = self._read + len(engine.held)
            ended = await engine.sync(tokens=True, ends=int(turnover), room=int(turnover))
            while self._read < expected:
                self._more.clear()
                await self._more.wait()
            if ended:
                await self.gateway.settle([(name, "", [1]) for name in ended])


def _stored_bytes(client: redis.Redis) -> int:
    """Return the bytes of all keys and their values.

    Redis' own total is not used: it includes the buffers of clients, which come and go."""
    pipeline = client.pipeline(transaction=False)
    for key in client.scan_iter(count=1000):
        pipeline.memory_usage(key, samples=0)
    return sum(size or 0 for size in pipeline.execute())


async def _reading(deployment: Deployment) -> dict[str, float]:
    """Return the costs of a read of the fleet after each engine has synced."""
    readings, own = [], Spent.of_reading(deployment.client)
    for _ in range(READINGS):
        for engine in deployment.engines:
            await engine.sync()
        before = Spent.read(deployment.client)
        await deployment.gateway.fleet()
        readings.append(Spent.read(deployment.client) - before - own)
    return sum(readings[1:], readings[0]).each(READINGS)


async def measure(url: str, size: Size) -> dict[str, Any]:
    """Return the costs of one size."""
    deployment = Deployment(url, size)
    client, engines = deployment.client, size.engines
    for script in vars(scripts).values():  # sent once per server, so not part of a request's cost
        if isinstance(script, scripts.Script):
            client.script_load(script.source)
    await deployment.open()
    for engine in deployment.engines:
        await engine.sync(room=1)
    own, marks = Spent.of_reading(client), [Spent.read(client)]

    def mark() -> Spent:
        marks.append(Spent.read(client))
        return marks[-1] - marks[-2] - own

    for _ in range(size.steps):
        for engine in deployment.engines:
            await engine.sync(room=1)
    ring = mark().each(size.steps * engines)
    memory = _stored_bytes(client)
    waiting = max(engines * size.sequences, size.tenants)
    mark()
    for _ in range(waiting):
        await deployment.submit()
    submit = mark().each(waiting)
    queued_bytes = (_stored_bytes(client) - memory) / waiting
    mark()
    await deployment.gateway.fleet()
    first = mark().each(1)
    reading = await _reading(deployment)
    mark()
    for _ in range(READINGS):
        await deployment.gateway.fleet()
    quiet = mark().each(READINGS)
    await deployment.fill(size.sequences)
    mark()
    for _ in range(size.steps):
        await deployment.step()
    step = mark().each(size.steps * engines)
    for _ in range(size.steps):
        await deployment.step(turnover=True)
    turnover = mark()
    await deployment.close()
    return {
        **msgspec.structs.asdict(size),
        "ring": ring,
        "submit": submit,
        "queued_bytes": round(queued_bytes),
        "step": step,
        "expected": expected(size),
        "step_cpu_us_per_token": round(step["cpu_us"] / size.sequences, 2),
        "step_bytes_per_token": round((step["in_bytes"] + step["out_bytes"]) / size.sequences),
        "request": turnover.each(size.steps * engines, step, size.steps * engines),
        "first": first,
        "reading": reading,
        "quiet": quiet,
    }


def main(argv: list[str]) -> int:
    """Print one JSON object, or write it as a result file."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m quire.loadtest.studies redis-load", description=__doc__, formatter_class=raw
    )
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="tokens of each prompt (default: 1000)")
    parser.add_argument(
        "--engines", type=int, default=0, help="measure only this number of engines (default: 1 to 1,000)"
    )
    parser.add_argument("--gateways", type=int, default=1, help="gateways that read, with --engines (default: 1)")
    parser.add_argument("--sequences", type=int, default=16, help="sequences per engine, with --engines (default: 16)")
    parser.add_argument("--tenants", type=int, default=1, help="waiting tenants, with --engines (default: 1)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps per engine, with --engines (default: {STEPS})")
    parser.add_argument("--name", type=machine.result_name, help="write loadtest/results/NAME.json")
    args = parser.parse_args(argv)
    sizes = SIZES
    if args.engines:
        sizes = (Size(args.gateways, args.engines, args.sequences, args.tenants, steps=args.steps),)
    runs = []
    for size in sizes:
        with EmbeddedRedis() as server:
            size = msgspec.structs.replace(size, prompt_tokens=args.prompt_tokens)
            runs.append(asyncio.run(measure(server.url, size)))
    found = {"prompt_tokens": args.prompt_tokens, "configurations": runs}
    print(json.dumps(found))
    if args.name:
        machine.write(args.name, f"python -m quire.loadtest.studies redis-load {shlex.join(argv)}", found)
    return 0
