"""`python -m quire.loadtest.studies claim-cost`: Redis time of a sync that claims one request of a long queue.

1,000 requests wait.  One engine repeatedly ends a request and claims one, alternately in the queue's order and by
prefix.  The time is that of Redis itself (INFO commandstats), without the network and this process.

  order_us, locality_us    us per sync after a pause: Redis' code and data have left the CPU caches
  busy_..._us              the same for syncs that only claim, in bursts: Redis is fully busy
  ..._commands             Redis commands in the script, independent of other work on the machine
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any

import msgspec
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.messages import EngineLoad, Generate, Sampling
from quire.engine.wire.prefixes import PrefixReport, prefix_digests, split
from quire.engine.wire.scripts import SYNC
from quire.loadtest.studies.fleet import prefixes, unique

COSTS = PrefixReport(token_us=23.0, step_us=5000.0, backlog=1000)
ENGINES = 4
BURST = 50  # syncs of one burst


class _Queue:
    """A queue of constant length, and the engines that claim from it."""

    def __init__(self, url: str, namespace: str, workload: str, *, locality: bool) -> None:
        self._report = COSTS if locality else None
        self._client = redis.Redis.from_url(url)
        self._gateway = GatewaySide(url, "g", namespace=namespace)
        self._engines = [EngineSide(url, f"e{at}", namespace=namespace) for at in range(ENGINES)]
        self._turns = (prefixes if workload == "prefixes" else unique)(random.Random(0))
        self._number = 0
        self._done: list[str] = []

    async def open(self, queued: int) -> None:
        """Fill the queue, and publish a part of all prefixes for each engine, as after some time of operation."""
        await self._gateway.open()
        for _ in range(queued):
            await self._submit()
        for at, engine in enumerate(self._engines):
            await engine.open()
            held = [next(self._turns).tokens[:1000] for _ in range(150)]
            added = [digest for tokens in held for digest in split(prefix_digests(tokens, ""))]
            report = PrefixReport(added, [], COSTS.token_us, COSTS.step_us, COSTS.backlog) if self._report else None
            await engine.sync([], [], _load(f"e{at}"), 0, 0, report)

    async def _submit(self) -> None:
        tokens, self._number = next(self._turns).tokens, self._number + 1
        deadline_ms = int(1000 * time.time()) + 3_600_000
        request = Generate(
            f"r{self._number}", "g", tokens, 64, Sampling(), deadline_ms, prefixes=prefix_digests(tokens, "")
        )
        await self._gateway.submit(request)

    def _used(self) -> tuple[int, int]:
        """Return the microseconds of all scripts so far, and the commands that they have run."""
        stats: Any = self._client.info("commandstats")
        scripts = stats["cmdstat_evalsha"]
        commands = sum(one["calls"] for name, one in stats.items() if name != "cmdstat_info") - scripts["calls"]
        return int(scripts["usec"]), int(commands)

    async def claim(self) -> tuple[int, int]:
        """End a request and claim one; return Redis' microseconds and commands."""
        before = self._used()
        reply = await self._engines[0].sync([], self._done, _load("e0"), 2000, 1, self._report)
        after = self._used()
        self._done = [request.id for request in reply.generates]
        for _ in self._done:
            await self._submit()
        return after[0] - before[0], after[1] - before[1]

    async def burst(self) -> float:
        """Claim BURST requests, one per sync, all sent at once; return Redis' microseconds per claim."""
        engine, sent = self._engines[0], list[Any]()
        run = engine._link.run_script

        async def record(script: Any, *words: Any, **more: Any) -> Any:
            sent.extend(words)
            return await run(script, *words, **more)

        for _ in range(BURST):
            await self._submit()
        engine._link.run_script = record  # type: ignore[method-assign]
        reply = await engine.sync([], self._done, _load("e0"), 2000, 1, self._report)
        engine._link.run_script = run  # type: ignore[method-assign]
        pipeline = self._client.pipeline(transaction=False)
        arguments = msgspec.msgpack.decode(sent[0])
        for _ in range(BURST):
            engine._seq += 1
            arguments["seq"] = engine._seq
            packed = msgspec.msgpack.encode(arguments)
            pipeline.evalsha(SYNC.sha, 1, engine._link.prefix, packed, *sent[1:])
        before = self._used()
        replies = pipeline.execute()
        took = self._used()[0] - before[0]
        works: list[Any] = [work for claimed, *_ in replies for work in claimed]
        self._done = [msgspec.msgpack.decode(payload, type=Generate).id for payload, *_ in works]
        self._done += [request.id for request in reply.generates]
        await self._submit()
        await self.claim()  # ends all claimed requests
        return took / BURST

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()
        await self._gateway.close()


def _load(name: str) -> EngineLoad:
    return EngineLoad(name, "m", "f", 4096, 32000, 16, 100, 100, 0, 0, 0, 0, 0)


async def measure(url: str, workload: str, queued: int, claims: int) -> dict[str, Any]:
    """Return medians of a sync in both modes: microseconds, difference within a pair, commands."""
    queues = [_Queue(url, f"{workload}-{locality}", workload, locality=locality) for locality in (False, True)]
    for queue in queues:
        await queue.open(queued)
    pairs = [[await queue.claim() for queue in queues] for _ in range(claims)]
    bursts = [[await queue.burst() for queue in queues] for _ in range(claims // 10)]
    for queue in queues:
        await queue.close()
    order, locality = ([pair[at][0] for pair in pairs] for at in (0, 1))
    result = {
        "workload": workload,
        "queued": queued,
        "order_us": statistics.median(order),
        "locality_us": statistics.median(locality),
        "least_order_us": min(order),
        "least_locality_us": min(locality),
        "difference_us": statistics.median(b - a for a, b in zip(order, locality, strict=True)),
    }
    for at, mode in enumerate(("order", "locality")):
        result[f"{mode}_commands"] = statistics.median(pair[at][1] for pair in pairs)
        if bursts:
            result[f"busy_{mode}_us"] = statistics.median(burst[at] for burst in bursts)
    return result


def main(argv: list[str]) -> int:
    """Print a JSON object for each workload."""
    parser = argparse.ArgumentParser(prog="python -m quire.loadtest.studies claim-cost", description=__doc__)
    parser.add_argument("--queued", type=int, default=1000, help="requests that wait (default: 1000)")
    parser.add_argument("--claims", type=int, default=300, help="claims in each mode (default: 300)")
    args = parser.parse_args(argv)
    for workload in ("prefixes", "unique"):
        with EmbeddedRedis() as server:
            print(json.dumps(asyncio.run(measure(server.url, workload, args.queued, args.claims))))
    return 0
