"""While Redis is away: new requests get 503 with Retry-After, /ready has the reason; streams continue afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.service.text.tokenizer import Tokenizer
from tests.pace import patience
from tests.service.delivery.test_resume import events, merged, says
from tests.service.fakes import FakeEngine, Served, settled

Serve = Callable[..., Awaitable[Served]]
pytestmark = pytest.mark.every_redis


async def test_a_restart_of_redis_costs_running_streams_nothing(
    serve: Serve, namespace: str, byte_level_tokenizer: Tokenizer, redis_binary: Path
) -> None:
    with EmbeddedRedis(binary=redis_binary) as server:
        served = await serve(redis_url=server.url)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 120, "stream": True}
        async with FakeEngine(server.url, namespace, says(byte_level_tokenizer), step_s=0.01) as fake:
            await settled(lambda: bool(served.streams.fleet.engines))
            expected = merged(await events(served.session, "/v1/completions", body))
            fake.step_s = 0.2  # it cannot end meanwhile, however long Redis takes to stop
            running = asyncio.create_task(events(served.session, "/v1/completions", body))
            await settled(lambda: fake.busy)
            await asyncio.to_thread(server.stop)
            await settled(lambda: served.streams.trouble is not None)
            async with served.session.get("/ready") as answer:
                assert answer.status == 503
                assert "Redis" in (await answer.json())["reason"]
            async with served.session.post("/v1/completions", json=body) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "queue_unavailable"
                assert float(response.headers["Retry-After"]) >= 1
            async with served.session.post("/reset_prefix_cache") as response:  # no engine can be notified
                assert (response.status, (await response.json())["error"]["code"]) == (503, "queue_unavailable")
            assert not running.done()
            await asyncio.to_thread(server.start)
            fake.step_s = 0.0
            await settled(lambda: served.streams.trouble is None)
            async with served.session.get("/ready") as answer:
                assert answer.status == 200
            async with asyncio.timeout(patience(100)):
                got = merged(await running)
                assert (got["text 0"], got["end 0"]) == (expected["text 0"], expected["end 0"])
                again = merged(await events(served.session, "/v1/completions", body))
                assert again["text 0"] == expected["text 0"]
        assert len(fake.seen) == 3
        await served.streams.stop()


async def test_a_full_redis_refuses_new_work_and_lets_what_runs_end(
    serve: Serve, namespace: str, byte_level_tokenizer: Tokenizer, redis_binary: Path
) -> None:
    with EmbeddedRedis(binary=redis_binary) as server, redis.Redis.from_url(server.url) as admin:
        served = await serve(redis_url=server.url)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 120, "stream": True}
        async with FakeEngine(server.url, namespace, says(byte_level_tokenizer), step_s=0.2) as fake:
            await settled(lambda: bool(served.streams.fleet.engines))
            running = asyncio.create_task(events(served.session, "/v1/completions", body))
            await settled(lambda: fake.busy)
            admin.config_set("maxmemory", 1)
            async with served.session.post("/v1/completions", json=body) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "queue_unavailable"
                assert float(response.headers["Retry-After"]) >= 1
            assert not running.done()
            fake.step_s = 0.0
            whole = merged(await running)
            assert whole["end 0"] == [("length", None)]
            admin.config_set("maxmemory", 0)
            await settled(lambda: served.streams.trouble is None)
            assert merged(await events(served.session, "/v1/completions", body))["text 0"] == whole["text 0"]
            assert len(fake.seen) == 2
        await served.streams.stop()
