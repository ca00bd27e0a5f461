"""POST /debug/audit through a whole stack without a model: gateway, Redis, the engine's loop, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import ClientSession

from engine.common.embedded_redis import EmbeddedRedis
from tests.system.stack import Stack


async def ask(url: str, key: str = "") -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    async with ClientSession() as session, session.post(f"{url}/debug/audit", headers=headers) as response:
        return response.status, await response.json()


async def test_every_engine_answers(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path]
) -> None:
    options: dict[str, Any] = {"debug_endpoints": True, "api_keys": ["secret"]}
    scripted: dict[str, Any] = {"executor": "scripted", "bad_books": "log", "check_books": False}
    where = redis_server.url, namespace, checkpoint("llama")
    with Stack(*where, engines=2, gateway_options=options, **scripted) as stack:
        assert (await ask(stack.url))[0] == 401
        status, found = await ask(stack.url, "secret")
        assert (status, found) == (200, {"balanced": True, "engines": {"engine0": "", "engine1": ""}})
        pool = stack.core.pool
        lost = pool._free.pop(0)
        status, found = await ask(stack.url, "secret")
        assert (status, found["balanced"], found["engines"]["engine1"]) == (500, False, "")
        assert f"block {lost} is neither held nor idle" in found["engines"]["engine0"]
        pool._free.insert(0, lost)


async def test_there_is_no_such_endpoint_unless_asked_for(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path]
) -> None:
    with Stack(redis_server.url, namespace, checkpoint("llama"), executor="scripted") as stack:
        assert (await ask(stack.url))[0] == 404
