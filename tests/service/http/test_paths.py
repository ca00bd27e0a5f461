"""Addresses and paths of a gateway: a slash at the end, a proxy's prefix, a Unix socket."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import openai
import pytest

from quire.engine.common import settings
from quire.service.config import GatewayConfig
from quire.service.text.tokenizer import Tokenizer
from tests.pace import patience
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
Launch = Callable[..., subprocess.Popen[str]]


async def test_a_slash_too_many_is_redirected(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(api_keys=["k"])
    key = {"Authorization": "Bearer k"}
    body = {"prompt": "a", "max_tokens": 1}
    async with engine(says(byte_level_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        async with served.session.post(
            "/v1/completions/?a=b%20c", json=body, headers=key, allow_redirects=False
        ) as response:
            assert (response.status, response.headers["Location"]) == (307, "/v1/completions?a=b%20c")
        async with served.session.post("/v1/completions/", json=body, headers=key) as response:
            assert (response.status, str(response.url)) == (200, f"{served.url}/v1/completions")
        async with served.session.post("/v1/completions/", json=body) as response:
            assert response.status == 401  # before the log line about paths
        for path, status in (
            ("/v1/models/", 200),
            ("/health/", 200),
            ("/nothing/", 404),
            ("/nothing//", 404),
            ("/", 200),
        ):
            async with served.session.get(path, headers=key) as response:
                assert response.status == status, path
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0) as client:
            found = await client.post("/completions/", body=body, cast_to=openai.types.Completion)
            assert found.choices[0].finish_reason == "length"


async def test_paths_may_begin_with_the_proxys_prefix(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(api_keys=["k"], root_path="/llm/a")
    key = {"Authorization": "Bearer k"}
    async with engine(says(byte_level_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        for path in ("/llm/a/v1/models", "/v1/models"):
            async with served.session.get(path) as response:
                assert response.status == 401, path
            async with served.session.get(path, headers=key) as response:
                assert response.status == 200, path
        for path in ("/llm/v1/models", "/llm/ab/v1/models", "/llm/a/llm/a/v1/models"):
            async with served.session.get(path, headers=key) as response:
                assert response.status == 404, path
        async with served.session.get("/v1/models/", headers=key, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (307, "/llm/a/v1/models")
        again = {**key, "Idempotency-Key": "once"}
        ids = set()
        for path in ("/llm/a/v1/completions", "/v1/completions"):
            async with served.session.post(path, json={"prompt": "a", "max_tokens": 1}, headers=again) as response:
                assert response.status == 200
                ids.add((await response.json())["id"])
        assert len(ids) == 1
        async with served.session.get("/metrics") as response:
            assert response.status == 404
        page = served.gateway.page()
        assert page is not None


@pytest.mark.parametrize("path", ["llm", "/a b", "/a//b", "/a?b"])
def test_a_prefix_that_is_no_path_is_refused(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.load(GatewayConfig, ["m", "--root-path", path], {}, prog="quire gateway", positional="model")
    assert "root-path" in capsys.readouterr().err


@pytest.mark.usefixtures("cold")  # a fork has the umask of its template
async def test_a_gateway_listens_at_a_unix_socket(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    before = os.umask(0)
    try:
        gateway = launch("--uds", str(path))
    finally:
        os.umask(before)
    connector = aiohttp.UnixConnector(str(path))
    async with aiohttp.ClientSession("http://localhost", connector=connector) as session:
        async with asyncio.timeout(patience(100)):
            while True:
                try:
                    async with session.get("/ping") as response:
                        assert await response.text() == "pong"
                        break
                except aiohttp.ClientConnectorError:
                    assert gateway.poll() is None, gateway.communicate()
                    await asyncio.sleep(0.05)
        async with session.get("/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["tiny"]
        assert path.stat().st_mode & 0o777 == 0o770  # other users cannot connect, whatever the umask
    gateway.terminate()
    assert gateway.wait(patience(30)) == 0
    assert not path.exists()
