"""`python -m engine.tools redis-load`: what requests, exchanges and tokens cost Redis.

Both sides of the bus and the scripts are the real ones, and so is Redis with its append-only file.  No model runs.  For
each number of engines and of sequences on each engine:

    ring       an exchange of an engine with room while nothing waits, as after a ring of the bell
    step       an exchange with one token for each sequence, and the gateway that reads them
    request    queued, claimed, ended and settled, with its prompt; its tokens count as steps
    fleet      what a gateway reads every second or more often

Times are microseconds of Redis' own CPU (INFO cpu), so they leave out waiting, clients and the network, and hardly
depend on what else the machine does; `script_us` is the part inside scripts.  Bytes are those of Redis' memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import time
from typing import Any, Self

import msgspec
import redis

from engine.common.embedded_redis import EmbeddedRedis
from engine.tools.fleet import redis_cpu_s, unique
from engine.wire.engine_side import EngineSide
from engine.wire.gateway_side import GatewaySide
from engine.wire.messages import Delta, EngineLoad, Finish, Generate, Sampling, TokenBatch
from engine.wire.prefixes import PrefixReport, prefix_digests

CONFIGURATIONS = ((4, 1), (4, 16), (4, 64), (4, 256), (1, 16), (16, 16), (64, 16))  # engines, sequences on each
RINGS, STEPS, FLEETS = 32, 32, 32  # of each engine, of each engine, calls
COSTS = PrefixReport(token_us=23.0, step_us=5000.0, backlog=1000)


class Spent(msgspec.Struct, frozen=True):
    """What Redis has spent since its start, or between two moments: microseconds and bytes, by name."""

    counts: dict[str, float]

    @classmethod
    def read(cls, client: redis.Redis) -> Self:
        info: Any = client.info("everything")
        counts = {
            "cpu_us": 1e6 * redis_cpu_s(info),
            "script_us": sum(info.get(f"cmdstat_{name}", {"usec": 0})["usec"] for name in ("evalsha", "eval")),
            "in_bytes": info["total_net_input_bytes"],
            "out_bytes": info["total_net_output_bytes"],
        }
        return cls(counts)

    def __sub__(self, before: Spent) -> Spent:
        return Spent({name: count - before.counts[name] for name, count in self.counts.items()})

    def each(self, number: int, less: dict[str, float] | None = None, times: int = 0) -> dict[str, float]:
        """Return the mean of `number`, after `times` times the costs `less` are taken off."""
        return {
            name: round((count - times * (less or {}).get(name, 0)) / number, 1) for name, count in self.counts.items()
        }


class _Engine:
    """One engine whose sequences get a token in each exchange."""

    def __init__(self, url: str, name: str) -> None:
        self.side = EngineSide(url, name, lease_ms=600_000)
        self.held: dict[str, int] = {}  # request id -> tokens so far
        self._name = name

    async def exchange(self, *, tokens: bool = False, ends: int = 0, room: int = 0) -> list[str]:
        """Send a token for each sequence, end the oldest `ends`, claim at most `room`; return the ids of the ended."""
        ended = list(self.held)[:ends]
        deltas = [
            Delta(name, count, [count], Finish("length") if name in ended else None)
            for name, count in self.held.items()
            if tokens
        ]
        load = EngineLoad(self._name, "m", "f", 4096, 32_000, 16, 100, 100, 0, 0, 0, 0, 0)
        batches = [("g", TokenBatch(self._name, deltas, load))] if deltas else []
        reply = await self.side.exchange(batches, ended, load, 10**9 if room else 0, room, COSTS)
        self.held = {name: count + tokens for name, count in self.held.items() if name not in ended}
        self.held.update((request.id, 0) for request in reply.generates)
        return ended


class _Deployment:
    """One gateway that reads, and engines."""

    def __init__(self, url: str, engines: int, prompt_tokens: int) -> None:
        self.client = redis.Redis.from_url(url)
        self.gateway = GatewaySide(url, "g")
        self.engines = [_Engine(url, f"e{at}") for at in range(engines)]
        self._prompts = unique(random.Random(0), length=prompt_tokens)
        self._numbers = itertools.count()
        self._read = 0  # tokens that the gateway has read
        self._more = asyncio.Event()

    async def open(self) -> None:
        await self.gateway.open()
        for engine in self.engines:
            await engine.side.open()
        self._reading = asyncio.create_task(self._follow())

    async def close(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        for engine in self.engines:
            await engine.side.close()
        await self.gateway.close()
        self.client.close()

    async def _follow(self) -> None:
        async for batch in self.gateway.batches():
            self._read += len(batch.deltas)
            self._more.set()

    async def submit(self) -> None:
        tokens = next(self._prompts).tokens
        deadline_ms = int(1000 * time.time()) + 3_600_000
        name = f"request-{next(self._numbers)}"
        digests = prefix_digests(tokens, "")
        await self.gateway.submit(Generate(name, "g", tokens, 64, Sampling(), deadline_ms, prefixes=digests))

    async def fill(self, sequences: int) -> None:
        """Queue and claim, until each engine runs so many."""
        while any(len(engine.held) < sequences for engine in self.engines):
            for engine in self.engines:
                await engine.exchange(room=sequences - len(engine.held))

    async def step(self, *, turnover: bool = False) -> None:
        """One step of every engine; with `turnover` each ends a request and claims another one."""
        for engine in self.engines:
            if turnover:
                await self.submit()
            expected = self._read + len(engine.held)
            ended = await engine.exchange(tokens=True, ends=int(turnover), room=int(turnover))
            while self._read < expected:
                await self._more.wait()
                self._more.clear()
            if ended:
                await self.gateway.settle([(name, "", [1]) for name in ended])


def _stored_bytes(client: redis.Redis) -> int:
    """Return the bytes of all keys and their values.  Redis' total has buffers of clients, which come and go."""
    pipeline = client.pipeline(transaction=False)
    for key in client.scan_iter(count=1000):
        pipeline.memory_usage(key, samples=0)
    return sum(size or 0 for size in pipeline.execute())


async def measure(url: str, engines: int, sequences: int, prompt_tokens: int) -> dict[str, Any]:
    """Return the costs of one configuration."""
    deployment = _Deployment(url, engines, prompt_tokens)
    client = deployment.client
    await deployment.open()
    for engine in deployment.engines:
        await engine.exchange(room=1)
    marks = [Spent.read(client)]

    def mark() -> Spent:
        marks.append(Spent.read(client))
        return marks[-1] - marks[-2]

    for _ in range(RINGS):
        for engine in deployment.engines:
            await engine.exchange(room=1)
    ring = mark().each(RINGS * engines)
    memory = _stored_bytes(client)
    for _ in range(engines * sequences):
        await deployment.submit()
    queued_bytes = (_stored_bytes(client) - memory) / (engines * sequences)
    submit = mark().each(engines * sequences)
    await deployment.fill(sequences)
    mark()
    for _ in range(STEPS):
        await deployment.step()
    step = mark().each(STEPS * engines)
    for _ in range(STEPS):
        await deployment.step(turnover=True)
    turnover = mark()
    for _ in range(FLEETS):
        await deployment.gateway.fleet()
    fleet = mark().each(FLEETS)
    await deployment.close()
    return {
        "engines": engines,
        "sequences": sequences,
        "ring": ring,
        "submit": submit,
        "queued_bytes": round(queued_bytes),
        "step": step,
        "step_cpu_us_per_token": round(step["cpu_us"] / sequences, 2),
        "request": turnover.each(STEPS * engines, step, STEPS * engines),
        "fleet": fleet,
    }


def main(argv: list[str]) -> int:
    """Print one JSON object."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m engine.tools redis-load", description=__doc__, formatter_class=raw)
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="of each request (default: 1000)")
    parser.add_argument("--engines", type=int, default=0, help="measure this number only (default: 1, 4, 16 and 64)")
    parser.add_argument("--sequences", type=int, default=16, help="on each engine, with --engines (default: 16)")
    args = parser.parse_args(argv)
    runs = []
    for engines, sequences in [(args.engines, args.sequences)] if args.engines else CONFIGURATIONS:
        with EmbeddedRedis() as server:
            runs.append(asyncio.run(measure(server.url, engines, sequences, args.prompt_tokens)))
    print(json.dumps({"prompt_tokens": args.prompt_tokens, "configurations": runs}))
    return 0
