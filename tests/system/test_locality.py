"""Prefix locality with engine processes: what they publish, and what is left of it when one is killed."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.messages import Generate, Sampling
from quire.engine.wire.prefixes import prefix_digests, split
from tests.pace import paced, paced_ms, patience
from tests.system.processes import Process, at_rest, ending, fleet_until

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]
LIMIT_S = 100.0  # generous: the machine may be busy


@pytest.mark.parametrize("locality", [True, False])
async def test_an_engine_publishes_what_it_has_cached_until_it_dies(
    redis_server: EmbeddedRedis, namespace: str, tmp_path: Path, locality: bool
) -> None:
    options = ["--executor=scripted", f"--lease-ms={paced_ms(1000)}", f"--{'' if locality else 'no-'}prefix-locality"]
    shared = [f"--redis-url={redis_server.url}", f"--namespace={namespace}", "--engine-id=e"]
    tokens = random.Random(0).choices(range(2, 900), k=500)
    gateway = GatewaySide(redis_server.url, "g", namespace=namespace)
    with ending([]) as processes, redis.Redis.from_url(redis_server.url) as client:
        key = f"{{{namespace}}}:prefixes:e"
        await gateway.open()
        engine = Process(tmp_path / "engine.log", "engine", *shared, *options)
        processes.append(engine)
        await fleet_until(redis_server.url, namespace, lambda fleet: len(fleet.engines) == 1, LIMIT_S)
        deadline_ms = int(time.time() * 1000) + 600_000
        digests = prefix_digests(tokens, "s")
        await gateway.submit(Generate("a", "g", tokens, 4, Sampling(), deadline_ms, "s", prefixes=digests))
        await gateway.submit(Generate("b", "g", tokens[:40], 4, Sampling(), deadline_ms, "s"))
        await fleet_until(redis_server.url, namespace, lambda fleet: fleet.queued == 0 and at_rest(fleet), LIMIT_S)
        expected = set(split(digests)) if locality else set()
        assert client.smembers(key) == expected
        await asyncio.sleep(paced(1.5))  # an idle engine syncs every second: it has asked its cache by now
        assert client.smembers(key) == expected
        await gateway.operations.reset_prefix_caches()
        async with asyncio.timeout(patience(LIMIT_S)):
            while client.exists(key):  # noqa: ASYNC110  (another process)
                await asyncio.sleep(0.02)
        await gateway.submit(Generate("c", "g", tokens, 4, Sampling(), deadline_ms, "s", prefixes=digests))
        await fleet_until(redis_server.url, namespace, lambda fleet: fleet.queued == 0 and at_rest(fleet), LIMIT_S)
        assert client.smembers(key) == expected
        engine.kill()
        await fleet_until(redis_server.url, namespace, lambda fleet: not fleet.engines, LIMIT_S)
        assert not client.exists(key, f"{{{namespace}}}:spare")
        await gateway.close()
