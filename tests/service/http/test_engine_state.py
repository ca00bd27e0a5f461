"""GET /engine/state over HTTP and a real Redis: who may watch, how many, and what a watcher sees of engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import redis
from aiohttp import ClientResponse, ClientSession

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.messages import PoolState, SequenceBlocks
from quire.service.http import engine_state
from quire.service.text.tokenizer import Tokenizer
from tests.pace import patience
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.http.state_reader import StateReader
from tests.service.test_app import says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
PATH = "/engine/state"
LIMIT_S = 200.0  # a hang
SEQUENCE = SequenceBlocks("cmpl-0123456789abc0ffee00ffffffffffff.2", 1, b"\x02\x00\x00\x00\x02\x00\x00\x00")


class Watching:
    """One open stream and what its reader knows."""

    def __init__(self, response: ClientResponse) -> None:
        self.response, self.reader = response, StateReader()

    async def until(self, condition: Callable[[StateReader], bool]) -> StateReader:
        """Read on until the condition holds.  Fails when the stream ends before."""
        async with asyncio.timeout(patience(LIMIT_S)):
            while not condition(self.reader):
                block = await self.response.content.readuntil(b"\n\n")
                self.reader.feed(block.decode().removesuffix("\n\n"))
        return self.reader

    async def rest(self) -> None:
        """Read until the gateway ends the stream."""
        async with asyncio.timeout(patience(LIMIT_S)):
            await self.response.read()


@contextlib.asynccontextmanager
async def watch(session: ClientSession, path: str = PATH) -> AsyncIterator[Watching]:
    async with session.get(path) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        yield Watching(response)


async def refusal(session: ClientSession, path: str = PATH, key: str = "") -> tuple[int, str]:
    async with session.get(path, headers={"Authorization": f"Bearer {key}"} if key else {}) as response:
        return response.status, (await response.json())["error"]["code"]


def keys(served: Served, url: str, namespace: str) -> set[str]:
    """Which of the two keys of the live state exist."""
    with redis.Redis.from_url(url) as store:
        found = {key.decode().split(":")[1] for key in store.scan_iter(f"{{{namespace}}}:*")}
    return found & {"watch", "pool_state"}


async def test_where_keys_exist_the_admin_scope_is_needed(serve: Serve) -> None:
    guarded = await serve(api_keys=["plain"], admin_keys=["root"], root_path="/llm")
    assert await refusal(guarded.session) == (401, "invalid_api_key")
    assert await refusal(guarded.session, key="guess") == (401, "invalid_api_key")
    assert await refusal(guarded.session, key="plain") == (403, "admin_only")
    assert await refusal(guarded.session, "/llm" + PATH) == (401, "invalid_api_key")
    guarded.session.headers["Authorization"] = "Bearer root"
    for path in (PATH, "/llm" + PATH):
        async with watch(guarded.session, path) as watching:
            assert (await watching.until(lambda reader: reader.events > 0)).figures == {}
    async with guarded.session.get("/v1/models") as response:
        assert response.status == 200  # an admin key is a key
    admin_only = await serve(admin_keys=["root"])
    assert await refusal(admin_only.session, "/v1/models") == (401, "invalid_api_key")
    free = await serve()
    async with watch(free.session) as watching:
        await watching.until(lambda reader: reader.events > 0)


async def test_an_engine_is_seen_with_a_map_once_it_publishes_one_and_until_it_ends(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, redis_server: EmbeddedRedis, namespace: str
) -> None:
    served = await serve()
    assert keys(served, redis_server.url, namespace) == set()
    async with watch(served.session) as watching:
        async with engine(says(byte_level_tokenizer), engine="e7") as fake:
            fake.load_changes = {"preemptions": 4, "generated_tokens": 99, "swapped": 1}
            reader = await watching.until(lambda reader: reader.figures.get("e7", {}).get("tokens") == 99)
            assert {"blocks": 1000, "block_size": 16, "swapped": 1, "preemptions": 4}.items() <= reader.figures[
                "e7"
            ].items()
            assert "e7" not in reader.cells  # an older engine publishes no map
            assert fake._side.watched
            assert keys(served, redis_server.url, namespace) == {"watch"}
            state = PoolState("e7", 1000, 1, bytes([3, 2]) + bytes(998), [SEQUENCE], 5, 8, 3)
            await fake._side.pool_states.write(state)
            reader = await watching.until(lambda reader: "e7" in reader.cells)
            assert reader.cells["e7"][:3] == [(3, 2), (2, 1), (0, 0)]
            assert reader.blocks("e7", "c0ffee00.2.1") == [2, 3]
            assert {"left_out": 5, "host_blocks": 8, "host_used": 3}.items() <= reader.figures["e7"].items()
        reader = await watching.until(lambda reader: not reader.figures)
        assert reader.cells == {}


async def test_watchers_are_bounded_and_the_last_one_ends_the_reading(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_state, "WATCHERS", 2)
    served = await serve()
    feed = served.gateway.engine_state
    async with watch(served.session) as one:
        await one.until(lambda reader: reader.events > 0)
        async with watch(served.session), served.session.get(PATH) as response:
            assert response.status == 429
            assert (await response.json())["error"]["code"] == "too_many_watchers"
            assert int(response.headers["Retry-After"]) >= 1
        await settled(lambda: feed._watchers == 1)
        async with watch(served.session) as other:
            await other.until(lambda reader: reader.events > 0)
    await settled(lambda: feed._watchers == 0)
    assert feed._reader is None


async def test_a_gateway_that_drains_ends_its_streams(serve: Serve) -> None:
    served = await serve()
    async with watch(served.session) as watching:
        await watching.until(lambda reader: reader.events > 0)
        served.gateway.refuse_new()
        await watching.rest()
    assert await refusal(served.session) == (503, "shutting_down")


async def test_a_stream_outlives_redis(
    serve: Serve, namespace: str, byte_level_tokenizer: Tokenizer, redis_binary: Path
) -> None:
    with EmbeddedRedis(binary=redis_binary) as server:
        served = await serve(redis_url=server.url)
        async with FakeEngine(server.url, namespace, says(byte_level_tokenizer)) as fake:
            async with watch(served.session) as watching:
                await watching.until(lambda reader: "e0" in reader.figures)
                await asyncio.to_thread(server.stop)
                comments = watching.reader.comments
                await watching.until(lambda reader: reader.comments > comments + 1)
                await asyncio.to_thread(server.start)
                fake.load_changes = {"preemptions": 17}
                reader = await watching.until(lambda reader: reader.figures.get("e0", {}).get("preemptions") == 17)
                assert reader.figures["e0"]["blocks"] == 1000
            await settled(lambda: served.streams.trouble is None)
        await served.streams.stop()
