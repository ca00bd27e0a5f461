"""A gateway that cannot read tokens fails its probes, and then ends so that it is restarted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import ClientSession
from redis.exceptions import ResponseError

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.subscription import Subscription
from quire.service.app import Unserviceable, serve
from quire.service.common import supervision
from quire.service.common.supervision import Supervisor, Task
from quire.service.config import GatewayConfig
from quire.service.http.status import NO_REDIS
from tests.pace import patience
from tests.service.fakes import settled


async def test_a_gateway_without_its_reader_is_dead_to_its_probes_and_ends(
    redis_server: EmbeddedRedis, namespace: str, byte_level_dir: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "BACKOFF_S", (0.01, 0.05))
    monkeypatch.setattr(supervision, "DEAD_S", 0.3)
    monkeypatch.setattr(supervision, "GIVE_UP_S", 60.0)

    async def refused(subscription: Subscription) -> bytes | None:
        raise ResponseError("NOPERM this user has no permissions to access this channel")

    monkeypatch.setattr(Subscription, "next", refused)
    config = GatewayConfig(
        model=str(byte_level_dir), redis_url=redis_server.url, namespace=namespace, gateway_id="g", port=port
    )
    listening = asyncio.Event()
    serving = asyncio.create_task(serve(config, asyncio.Event(), listening.set))
    await listening.wait()
    statuses: list[int] = []
    async with ClientSession(base_url=f"http://127.0.0.1:{port}") as session, asyncio.timeout(patience(100)):
        while 503 not in statuses:
            async with session.get("/ping") as answer:
                statuses.append(answer.status)
            await asyncio.sleep(0.02)
        async with session.get("/ready") as answer:
            assert answer.status == 503
            assert (await answer.json())["reason"] == NO_REDIS
    assert not serving.done()
    monkeypatch.setattr(supervision, "GIVE_UP_S", 0.0)
    with pytest.raises(Unserviceable, match="the token reader failed: NOPERM") as caught:
        async with asyncio.timeout(patience(100)):
            await serving
    assert "\n" not in str(caught.value)


class Work:
    """A task that fails or waits a given number of times."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.errors, self.done = list(errors), 0

    async def run(self) -> None:
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        if self.errors:
            return
        self.done += 1
        await asyncio.Event().wait()


async def test_whatever_ends_a_task_starts_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, a cancellation from within, and an end without either."""
    monkeypatch.setattr(supervision, "BACKOFF_S", (0.01, 0.01))
    work = Work(KeyError("x"), asyncio.CancelledError(), None, RuntimeError("y"))
    supervisor = Supervisor(Task("the work", work.run, lambda: work.done))
    supervisor.start()
    await settled(lambda: work.done == 1)
    assert supervisor.trouble is None
    assert not supervisor.dead
    assert not supervisor.gave_up.is_set()
    async with asyncio.timeout(patience(100)):
        await supervisor.stop()
