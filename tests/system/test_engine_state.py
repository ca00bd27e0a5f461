"""The live state of an engine over real Redis and HTTP: prefix hits and forks, published only for a watcher."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.service.fakes import settled
from tests.service.http.state_reader import StateReader
from tests.service.http.test_engine_state import LIMIT_S, watch
from tests.system.stack import Stack

pytestmark = pytest.mark.system

BLOCKS, SIZE = 2048, 16
PROMPT = [9] * (4 * SIZE + 5)  # four full blocks
ENGINE: dict[str, Any] = {"executor": "scripted", "scripted_step_ms": 10.0, "kv_blocks": BLOCKS, "max_model_len": 8192}


def published(url: str, namespace: str) -> set[str]:
    """The keys of the live state in Redis."""
    with redis.Redis.from_url(url) as store:
        keys = {key.decode().split("}:")[1] for key in store.scan_iter(f"{{{namespace}}}:*")}
    return {key for key in keys if key.startswith(("watch", "pool_state"))}


@contextlib.asynccontextmanager
async def answering(session: aiohttp.ClientSession, **body: Any) -> AsyncIterator[str]:
    """A context in which an engine computes an answer.  Yields the name of its sequences, without the last number."""
    body = {"prompt": PROMPT, "max_tokens": 6000, "ignore_eos": True, "stream": True, **body}
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200
        while not (line := await response.content.readline()).startswith(b"data: "):
            assert line
        answer: str = json.loads(line.removeprefix(b"data: "))["id"]
        yield f"{answer[-20:-12]}.0"


def counts(reader: StateReader) -> list[int]:
    """How many blocks are free, cached, owned by one and shared."""
    kinds = [kind for kind, _ in reader.cells["engine0"]]
    return [kinds.count(kind) for kind in range(4)]


async def test_sharing_is_seen_while_a_client_watches_and_nothing_is_written_without(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path]
) -> None:
    def names(reader: StateReader) -> set[str]:
        return set(reader.seqs.get("engine0", ()))

    def refs(reader: StateReader, name: str) -> list[int]:
        """References of the first blocks of a sequence."""
        return [reader.cells["engine0"][block][1] for block in reader.blocks("engine0", name)[:4]]

    with Stack(redis_server.url, namespace, checkpoint("llama"), **ENGINE) as stack:
        async with aiohttp.ClientSession(stack.url) as session, asyncio.timeout(4 * LIMIT_S):
            async with answering(session) as one:
                assert published(redis_server.url, namespace) == set()
                async with watch(session) as watching:
                    reader = await watching.until(lambda reader: f"{one}.0" in names(reader))
                    assert refs(reader, f"{one}.0") == [1] * 4
                    async with answering(session) as other:
                        reader = await watching.until(lambda reader: f"{other}.0" in names(reader))
                        assert names(reader) == {f"{one}.0", f"{other}.0"}
                        assert refs(reader, f"{one}.0") == [2] * 4
                        tables = [reader.blocks("engine0", f"{name}.0") for name in (one, other)]
                        assert tables[0][:4] == tables[1][:4]
                        assert not set(tables[0][4:]) & set(tables[1][4:])
                        async with answering(session, n=3) as forked:
                            reader = await watching.until(lambda reader: len(names(reader)) == 5)
                            assert names(reader) == {f"{one}.0", f"{other}.0", *(f"{forked}.{at}" for at in range(3))}
                            assert refs(reader, f"{forked}.2") == [5] * 4
                    reader = await watching.until(lambda reader: names(reader) == {f"{one}.0"})
                    assert refs(reader, f"{one}.0") == [1] * 4
                    assert counts(reader)[1] > 0  # what the others computed is cached
                    assert published(redis_server.url, namespace) == {"watch", "pool_state:engine0"}
            async with watch(session) as watching:
                reader = await watching.until(
                    lambda reader: (
                        "engine0" in reader.cells
                        and not names(reader)
                        and sum(counts(reader)[:2]) == reader.figures["engine0"]["free_blocks"] == BLOCKS
                    )
                )
                assert counts(reader)[1] == reader.figures["engine0"]["cached_blocks"] >= 4
                assert reader.figures["engine0"]["tokens"] > 0
            with redis.Redis.from_url(redis_server.url) as store:
                store.delete(f"{{{namespace}}}:watch")  # it would expire
                await settled(lambda: not stack.engines[0].bus.pool.wanted)
                store.delete(f"{{{namespace}}}:pool_state:engine0")
            async with answering(session):
                await settled(lambda: published(redis_server.url, namespace) == set())
