"""A request that arrives while no engine takes requests waits for one: a spare, or the first one after none."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from quire.service.delivery.fleet_view import FleetView
from quire.service.text.tokenizer import Tokenizer
from tests.pace import paced, patience
from tests.service.delivery.test_admission import busy
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import EngineMaker, Serve, raw, says

ASKED: dict[str, Any] = {"prompt": "a", "max_tokens": 3}


async def without_engine(served: Served, fake: FakeEngine) -> None:
    """Start the engine, end it, and wait until the gateway knows that it has ended."""
    async with fake:
        await settled(lambda: served.streams.fleet.engines != [])
    await settled(lambda: served.streams.fleet.engines == [])


def test_an_engine_that_shuts_down_takes_no_requests() -> None:
    view = FleetView()
    assert not view.serving
    view.record_load(busy(engine="one", draining=True))
    assert not view.serving
    view.record_load(busy(engine="two"))
    assert view.serving


async def test_a_request_waits_for_the_engine_that_takes_over(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(takeover_wait_s=100.0)
    await without_engine(served, engine(says(byte_level_tokenizer)))
    asking = [asyncio.create_task(raw(served.session, "/v1/completions", **ASKED)) for _ in range(3)]
    _, (first, *_) = await asyncio.wait(asking, timeout=paced(0.5), return_when=asyncio.FIRST_COMPLETED)
    assert not first.done()
    assert (await served.session.get("/ready")).status == 503, "a load balancer prefers other gateways meanwhile"
    async with engine(says(byte_level_tokenizer)):
        for status, body, _ in await asyncio.gather(*asking):
            assert (status, body["usage"]["completion_tokens"]) == (200, 3)


@pytest.mark.parametrize(
    ("wait_s", "headers"),
    [(0.0, {}), (0.2, {}), (100.0, {"X-Max-Queue-Wait": "0"}), (100.0, {"X-Request-Timeout": "0.1"})],
)
async def test_it_is_refused_when_no_engine_comes(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, wait_s: float, headers: dict[str, str]
) -> None:
    served = await serve(takeover_wait_s=wait_s)
    await without_engine(served, engine(says(byte_level_tokenizer)))
    async with served.session.post("/v1/completions", json={"model": "tiny", **ASKED}, headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "no_engine")
    assert response.headers["Retry-After"] == "5"


WAITING = re.compile(r'quire_queue_(requests|oldest_seconds){.*lane="no_engine"} (\S+)')


async def waiting(served: Served) -> dict[str, float]:
    """What the page of metrics says of requests that wait for an engine."""
    page = await (await served.session.get("/metrics")).text()
    return {name: float(value) for name, value in WAITING.findall(page)}


async def asking(served: Served, count: int, **headers: str) -> list[asyncio.Task[Any]]:
    """Send requests, and return when they wait for an engine."""

    async def ask() -> tuple[int, Any]:
        async with served.session.post("/v1/completions", json={"model": "tiny", **ASKED}, headers=headers) as response:
            return response.status, await response.json()

    tasks = [asyncio.create_task(ask()) for _ in range(count)]
    await settled(lambda: len(served.streams.fleet_watch.engine_wait) == count)
    return tasks


async def test_requests_wait_for_the_first_engine_and_the_metric_that_starts_it_counts_them(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(takeover_wait_s=1000.0, ready_without_engine=True)
    assert (await waiting(served)) == {"requests": 0, "oldest_seconds": 0}
    assert (await served.session.get("/ready")).status == 200, "or no request would reach this gateway"
    tasks = await asking(served, 3)

    async with asyncio.timeout(patience(100)):
        while (await waiting(served))["requests"] != 3:  # noqa: ASYNC110  (the page is written a moment later)
            await asyncio.sleep(0.01)
    assert (await waiting(served))["oldest_seconds"] > 0
    async with engine(says(byte_level_tokenizer)):
        for status, body in await asyncio.gather(*tasks):
            assert (status, body["usage"]["completion_tokens"]) == (200, 3)
        async with asyncio.timeout(patience(100)):
            while await waiting(served) != {"requests": 0, "oldest_seconds": 0}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_clients_that_leave_before_an_engine_comes_cost_nothing(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(takeover_wait_s=1000.0)
    stays, *leave = await asking(served, 4)
    for task in leave:
        task.cancel()
    await settled(lambda: len(served.streams.fleet_watch.engine_wait) == 1)
    async with engine(says(byte_level_tokenizer)) as fake:
        assert (await stays)[0] == 200
        assert len(fake.seen) == 1


async def test_so_many_requests_wait_at_most(serve: Serve) -> None:
    served = await serve(takeover_wait_s=1000.0, max_queued=2)
    tasks = await asking(served, 2)
    async with served.session.post("/v1/completions", json={"model": "tiny", **ASKED}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "queue_full")
    assert response.headers["Retry-After"] == "5"
    for task in tasks:
        task.cancel()
    await settled(lambda: len(served.streams.fleet_watch.engine_wait) == 0)


async def test_the_wait_counts_in_the_deadline(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(takeover_wait_s=1000.0)
    tasks = await asking(served, 1, **{"X-Request-Timeout": "500"})
    latest_ms = served.streams.redis_ms() + 500_000  # the request came before
    await asyncio.sleep(0.2)
    async with engine(says(byte_level_tokenizer)) as fake:
        assert (await tasks[0])[0] == 200
        assert fake.seen[0].deadline_ms <= latest_ms + 100  # of 200
