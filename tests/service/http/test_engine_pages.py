"""Engines' metrics under vLLM's names on the gateway's page: all of them, once each, whatever the engines answer."""

from __future__ import annotations

import logging

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.observers.measurements import NO_LOAD
from quire.engine.observers.metrics import Telemetry
from quire.engine.wire.messages import EngineLoad
from quire.service.http import engine_pages
from quire.service.http.engine_pages import EnginePages, EnginePagesError, merge
from tests.service.conftest import Serve


def page(name: str, running: int) -> str:
    """The page of an engine that runs some sequences."""
    telemetry = Telemetry(name, vllm=True)
    telemetry.load = EngineLoad(name, "tiny", "", 64, 10, 16, 100, 90, 0, running, 0, 0, 0)
    assert telemetry.load is not NO_LOAD
    return generate_latest(telemetry.registry).decode()


def test_pages_of_several_engines_become_one_that_parsers_read() -> None:
    one, two = page("a", 3), page("b", 4)
    assert one.count("quire_") > 10
    families = {
        family.name: family.samples for family in text_string_to_metric_families(merge([one, "", two]).decode())
    }
    alone = {family.name: family.samples for family in text_string_to_metric_families(one)}
    assert families.keys() == {name for name in alone if name.startswith("vllm:")}
    assert len(families) > 15
    assert all(len(samples) == 2 * len(alone[name]) for name, samples in families.items())
    running = {sample.labels["engine"]: sample.value for sample in families["vllm:num_requests_running"]}
    assert running == {"a": 3.0, "b": 4.0}


async def test_the_clients_port_shows_what_can_be_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A page that cannot be read is left out and logged once; it is shown again as soon as it can be read."""
    monkeypatch.setattr(engine_pages, "FRESH_S", 0.0)
    broken = False

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=500) if broken else web.Response(text=page("a", 3))

    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with TestServer(app) as engine:
        served = await serve(
            vllm_metrics=True, engine_metrics=f"{engine.make_url('/metrics')}, http://127.0.0.1:1/metrics"
        )

        async def shown() -> set[str]:
            async with served.session.get("/metrics") as response:
                assert response.status == 200
                return {family.name for family in text_string_to_metric_families(await response.text())}

        with caplog.at_level(logging.WARNING, logger="quire.gateway"):
            first = await shown()
            assert {"vllm:num_requests_running", "vllm:time_to_first_token_seconds", "quire_requests"} <= first
            broken = True
            assert "vllm:num_requests_running" not in await shown()
            assert "vllm:time_to_first_token_seconds" in await shown()
            broken = False
            assert await shown() >= first
        warned = [record.getMessage() for record in caplog.records if "engine's metrics" in record.getMessage()]
        assert len(warned) == 2  # one for each page


async def test_a_page_is_read_once_a_second_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal reads
        reads += 1
        return web.Response(text=page("a", reads))

    monkeypatch.setattr(engine_pages, "FRESH_S", 3600.0)
    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with TestServer(app) as engine:
        pages = EnginePages(str(engine.make_url("/metrics")))
        assert len({await pages.families() for _ in range(20)}) == 1
    assert reads == 1


async def test_a_page_that_never_ends_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"# HELP vllm:x x\n" * 4096)

    monkeypatch.setattr(engine_pages, "TIMEOUT_S", 60.0)
    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with TestServer(app) as engine:
        assert await EnginePages(str(engine.make_url("/metrics"))).families() == b""


@pytest.mark.parametrize("urls", ["10.0.0.7:9100", "ftp://a/metrics", "http://", "http://a/metrics,b"])
def test_what_is_no_address_is_refused_by_name(urls: str) -> None:
    with pytest.raises(EnginePagesError, match="--engine-metrics"):
        EnginePages(urls)


async def test_a_gateway_without_engine_pages_asks_nobody(serve: Serve) -> None:
    served = await serve()
    async with served.session.get("/metrics") as response:
        assert "vllm:" not in await response.text()
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
