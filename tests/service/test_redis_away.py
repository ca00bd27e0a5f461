"""While Redis is away: new work is refused and told when to come again, /ready says why; streams go on after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from engine.wire.embedded import EmbeddedRedis
from service.text import Tokenizer
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_resume import events, merged, says

Serve = Callable[..., Awaitable[Served]]


async def test_a_restart_of_redis_costs_running_streams_nothing(
    serve: Serve, namespace: str, byte_level_tokenizer: Tokenizer
) -> None:
    with EmbeddedRedis() as server:
        served = await serve(redis_url=server.url)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 120, "stream": True}
        async with FakeEngine(server.url, namespace, says(byte_level_tokenizer), step_s=0.01) as fake:
            await settled(lambda: bool(served.streams.fleet.engines))
            expected = merged(await events(served.session, "/v1/completions", body))
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
            assert not running.done()
            await asyncio.to_thread(server.start)
            await settled(lambda: served.streams.trouble is None)
            async with served.session.get("/ready") as answer:
                assert answer.status == 200
            async with asyncio.timeout(20):
                got = merged(await running)
                assert (got["text 0"], got["end 0"]) == (expected["text 0"], expected["end 0"])
                again = merged(await events(served.session, "/v1/completions", body))
                assert again["text 0"] == expected["text 0"]
        assert len(fake.seen) == 3
        await served.streams.stop()
