"""Many different grammars at once, over HTTP: all are answered, and what clients leave behind holds nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.pace import patience, until
from tests.system.stack import Stack

pytestmark = pytest.mark.system
COUNT = 300  # more than any cache of a fixed number of them has held


def body(choices: list[str]) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": "a",
        "max_tokens": 6,
        "structured_outputs": {"choice": choices},
    }


async def ask(session: aiohttp.ClientSession, url: str, choices: list[str]) -> int:
    async with session.post(f"{url}/v1/completions", json=body(choices)) as response:
        await response.read()
        await response.read()
        return response.status


@pytest.fixture(scope="module")
def served(redis_server: EmbeddedRedis, checkpoint: Callable[[str], Path]) -> Any:
    options: dict[str, Any] = {"executor": "scripted", "max_seqs": 512, "step_tokens": 2048, "kv_blocks": 4096}
    with Stack(redis_server.url, "grammars", checkpoint("llama"), **options, grammar_memory_mib=16) as made:
        yield made


async def held_by_none(served: Stack) -> None:
    gate = served.engines[0].engine._inbox
    await until(lambda: gate.counts().held == gate.waiting == 0, 60)


async def test_many_are_answered_while_half_of_the_clients_leave(served: Stack) -> None:
    timeout = aiohttp.ClientTimeout(total=patience(200))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        work = [asyncio.ensure_future(ask(session, served.url, [f"w{at}x{at}", f"v{at}"])) for at in range(2 * COUNT)]
        await asyncio.sleep(0)
        for leaving in work[COUNT:]:
            leaving.cancel()
        assert set(await asyncio.gather(*work[:COUNT])) == {200}
        await held_by_none(served)
    counts = served.engines[0].engine._inbox.counts()
    assert COUNT <= counts.compiled <= 2 * COUNT
    assert counts.kept_bytes <= 16 << 20


async def test_one_large_grammar_of_many_requests_is_compiled_once(served: Stack) -> None:
    """About 60 KiB of choices, the most that a request may bring."""
    before = served.engines[0].engine._inbox.counts().compiled
    large = [f"choice number {at:04} of very many" for at in range(1800)]
    timeout = aiohttp.ClientTimeout(total=patience(200))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        found = await asyncio.gather(*(ask(session, served.url, large) for _ in range(60)))
        assert set(found) == {200}
        await held_by_none(served)
    assert served.engines[0].engine._inbox.counts().compiled == before + 1


async def test_choices_that_no_engine_can_follow_are_the_request_s_fault(served: Stack) -> None:
    """llguidance follows at most 2,000 alternatives at once: the gateway refuses more."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience(200))) as session:
        async with session.post(
            f"{served.url}/v1/completions", json=body([f"choice {at}" for at in range(2700)])
        ) as got:
            error = (await got.json())["error"]
        assert (got.status, error["code"]) == (400, "grammar_too_large")
        assert error["param"] == "structured_outputs.choice"
        assert "at most 1,900 choices, got 2,700" in error["message"]
        assert await ask(session, served.url, ["yes", "no"]) == 200
        await held_by_none(served)
