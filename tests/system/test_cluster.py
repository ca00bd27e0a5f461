"""Gateway and engine over a Redis Cluster of three, while the master that serves their namespace dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire.engine.common.embedded_redis import server_binaries
from tests.pace import patience
from tests.system.processes import sse_events, wait_until_ready
from tests.system.stack import Stack
from tests.wire.redis_cluster import RedisCluster

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not server_binaries(), reason="needs redis-server or valkey-server on PATH"),
]
LIMIT_S = 200.0
TOKENS = 120


async def test_a_stream_survives_the_death_of_its_master(
    redis_binary: Path, namespace: str, checkpoint: Callable[[str], Path]
) -> None:
    """The processes are given the address of another node, and follow the slot to its master, then to the replica."""
    prefix = f"{{{namespace}}}:"
    with RedisCluster(redis_binary, replicated=prefix) as cluster:
        url = cluster.others(prefix)[0].url
        options: dict[str, Any] = {"executor": "scripted", "scripted_step_ms": 20.0}
        with Stack(url, namespace, checkpoint("llama"), **options) as stack:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience(LIMIT_S))) as client:
                expected = await read(client, stack.url, lambda: None)
                kill = cluster.serving(prefix).kill
                assert await read(client, stack.url, kill) == expected
                await asyncio.to_thread(wait_until_ready, stack.url, LIMIT_S)
                assert await read(client, stack.url, lambda: None) == expected
        assert cluster.replica.client.info("replication")["role"] == "master"


async def read(client: aiohttp.ClientSession, url: str, meanwhile: Callable[[], None]) -> list[int]:
    """Return the tokens of one answer; call `meanwhile` once after a quarter of them."""
    body = {"model": "tiny", "prompt": [1, 2], "max_tokens": TOKENS, "seed": 1, "stream": True, "ignore_eos": True}
    tokens: list[int] = []
    async with client.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}) as response:
        assert response.status == 200, await response.text()
        async for event in sse_events(response):
            before = len(tokens)
            tokens += [token for choice in event["choices"] for token in choice["token_ids"] or []]
            if before < TOKENS // 4 <= len(tokens):
                meanwhile()
    assert len(tokens) == TOKENS
    return tokens
