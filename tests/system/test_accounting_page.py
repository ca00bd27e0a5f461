"""POST /debug/accounting of an engine's own port: the page, the engine's loop between two turns, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.observers import accounting_checks
from quire.engine.observers.accounting_checks import AccountingChecks
from quire.engine.observers.metrics import Telemetry
from quire.engine.observers.metrics_page import Page
from tests.ports import free_port
from tests.system.stack import Stack


@contextmanager
def page_of(checks: AccountingChecks) -> Iterator[str]:
    """The address of the check on an engine's page."""
    port = free_port()
    page = Page(Telemetry("e0"), "127.0.0.1", port, checks.request_check)
    try:
        yield f"http://127.0.0.1:{port}/debug/accounting"
    finally:
        page.close()


async def check(url: str, method: str = "POST") -> tuple[int, Any]:
    async with ClientSession() as session, session.request(method, url) as response:
        return response.status, await response.json() if response.content_type == "application/json" else None


async def test_the_page_names_what_is_wrong_in_a_running_engine(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path]
) -> None:
    options: dict[str, Any] = {"executor": "scripted", "on_accounting_error": "log", "check_accounting": False}
    with (
        Stack(redis_server.url, namespace, checkpoint("llama"), **options) as stack,
        page_of(stack.engines[0].engine.checks) as url,
    ):
        assert await check(url) == (200, {"balanced": True, "finding": ""})
        assert (await check(url, "GET"))[0] == 404
        pool, totals = stack.core.pool, stack.core.report.totals
        before, lost = totals.audits, pool._free.pop(0)
        status, answer = await check(url)
        assert (status, answer["balanced"], totals.leaks, totals.audits) == (500, False, 1, before + 1)
        assert f"block {lost} is neither held nor idle" in answer["finding"]
        pool._free.insert(0, lost)
        assert await check(url) == (200, {"balanced": True, "finding": ""})


async def test_an_engine_whose_loop_does_not_turn_gives_no_verdict(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting_checks, "PATIENCE_S", 0.1)
    with Stack(redis_server.url, namespace, checkpoint("llama"), executor="scripted") as stack:
        checks = stack.engines[0].engine.checks
        monkeypatch.setattr(checks, "observe", lambda record: None)
        with page_of(checks) as url:
            assert await check(url) == (503, {"error": "the step loop does not turn"})
