"""A gateway ends within `drain_s` of SIGTERM, whatever its clients do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.wire.messages import Finish, Generate
from quire.service import app
from quire.service.app import CLOSE_S, LAST_EVENTS_S, drain_parts
from tests.pace import paced, patience
from tests.service.fakes import FakeEngine, settled

DRAIN_S = 30.0  # seconds, the default; nothing waits for them


@pytest.mark.parametrize("drain_s", [2.0, 3.0, 6.0, 10.0, 30.0, 36.0, 600.0])
def test_the_parts_of_a_drain_add_up_to_it(drain_s: float) -> None:
    answers_s, last_events_s = drain_parts(drain_s)
    assert answers_s + last_events_s + CLOSE_S == pytest.approx(drain_s)
    assert 1.0 <= last_events_s <= LAST_EVENTS_S
    assert answers_s >= 0


@pytest.mark.parametrize("drain_s", [0.0, 0.1, 1.0])
def test_a_short_drain_leaves_a_second_for_last_events(drain_s: float) -> None:
    assert drain_parts(drain_s) == (0.0, 1.0)


async def test_a_drain_under_an_endless_plain_stream_waits_no_longer_than_it_says(
    serve: Callable[..., Awaitable[Any]],
    engine: Callable[..., FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The waits of the drain are counted, not timed: each ends at once as if its seconds were over."""
    waits: list[float] = []

    async def wait_for(awaited: Awaitable[Any], seconds: float) -> Any:
        waits.append(seconds)
        return await asyncio.wait_for(awaited, patience(5.0) if len(waits) > 1 else 0)

    def endless(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        return [65] * generate.max_new_tokens, None

    served = await serve(drain_s=DRAIN_S)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": True}
    async with engine(endless, step_s=paced(0.2)):
        await settled(lambda: bool(served.streams.fleet.engines))
        async with served.session.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            await response.content.readline()
            monkeypatch.setattr(app, "asyncio", SimpleNamespace(**vars(asyncio) | {"wait_for": wait_for}))
            served.gateway.refuse_new()
            with caplog.at_level(logging.INFO, "quire.gateway"):
                await served.gateway.drain()
            monkeypatch.undo()
            text = (await response.content.read()).decode()
    assert '"code":"cancelled"' in text.replace(" ", "")
    assert sum(waits) + CLOSE_S <= DRAIN_S
    assert "1 requests may take 24 s more; this process ends within 30 s" in caplog.text
