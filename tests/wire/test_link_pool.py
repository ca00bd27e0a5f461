"""The connections of a link: commands that wait for one get it in the order in which they asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisGone

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire import link
from tests.pace import patience


async def test_a_command_that_waits_is_not_overtaken(
    redis_server: EmbeddedRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst of submits must not keep one of them waiting for longer than PATIENCE_S."""
    monkeypatch.setattr(link, "CONNECTIONS", 1)
    one = link.Link(redis_server.url, namespace, reply_s=60.0)
    pool: Any = one.redis.connection_pool
    order = list[str]()

    async def use(name: str) -> None:
        connection = await pool.get_connection()
        order.append(name)
        await pool.release(connection)

    held = await pool.get_connection()
    waiting = asyncio.create_task(use("waiting"))
    for _ in range(10):  # until it waits
        await asyncio.sleep(0)
    await pool.release(held)
    await use("later")
    await waiting
    await one.close()
    assert order == ["waiting", "later"]


async def test_places_of_failed_and_cancelled_waits_are_free_again(
    redis_server: EmbeddedRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "CONNECTIONS", 2)
    gone = link.Link("redis://127.0.0.1:1/0", namespace, reply_s=60.0)
    pool: Any = gone.redis.connection_pool
    for _ in range(5):
        with pytest.raises(RedisGone):
            await pool.get_connection()
    await gone.close()
    one = link.Link(redis_server.url, namespace, reply_s=60.0)
    pool = one.redis.connection_pool
    held = [await pool.get_connection() for _ in range(2)]
    waits = [asyncio.create_task(pool.get_connection()) for _ in range(3)]
    await asyncio.sleep(0)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    for connection in held:
        await pool.release(connection)
    async with asyncio.timeout(patience(60)):
        held = [await pool.get_connection() for _ in range(2)]
    for connection in held:
        await pool.release(connection)
    await one.close()
