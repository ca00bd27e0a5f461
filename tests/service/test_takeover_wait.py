"""A request that arrives while no engine takes requests: it waits where one did a moment ago."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service.fleet_view import FleetView
from service.tokenizer import Tokenizer
from tests.pace import paced, patience
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_admission import busy
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


async def test_a_gateway_that_never_knew_an_engine_refuses_at_once(serve: Serve) -> None:
    served = await serve(takeover_wait_s=100.0)
    status, body, _ = await asyncio.wait_for(raw(served.session, "/v1/completions", **ASKED), patience(50))
    assert (status, body["error"]["code"]) == (503, "no_engine")
