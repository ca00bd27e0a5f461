"""Pages of other origins: what a browser asks before a request, and what lets it read the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from quire.service.text.tokenizer import Tokenizer
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
PAGE = "https://app.example"
ASKED = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
}


async def test_a_page_of_an_allowed_origin_may_ask_and_read(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(cors_origins=[PAGE], api_keys=["k"])
    async with engine(says(byte_level_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        async with served.session.options("/v1/chat/completions", headers=ASKED) as response:  # without a key
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert response.headers["Access-Control-Allow-Headers"] == ASKED["Access-Control-Request-Headers"]
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
        for stream in (False, True):
            body = {"prompt": "a", "max_tokens": 1, "stream": stream}
            headers = {"Origin": PAGE, "Authorization": "Bearer k"}
            async with served.session.post("/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Origin"] == PAGE
                assert response.headers["Vary"] == "Origin"
                assert "retry-after-ms" in response.headers["Access-Control-Expose-Headers"]
                assert "Access-Control-Allow-Credentials" not in response.headers
        async with served.session.post("/v1/completions", json={}, headers={"Origin": PAGE}) as response:
            assert response.status == 401
            assert response.headers["Access-Control-Allow-Origin"] == PAGE  # or the page could not read the error


@pytest.mark.parametrize("origin", ["https://evil.example", PAGE + ".evil.example", "null", "http://app.example"])
async def test_a_page_of_another_origin_learns_nothing(serve: Serve, origin: str) -> None:
    served = await serve(cors_origins=[PAGE])
    async with served.session.options("/v1/completions", headers={**ASKED, "Origin": origin}) as response:
        assert not [name for name in response.headers if name.startswith("Access-Control")]
    async with served.session.get("/v1/models", headers={"Origin": origin}) as response:
        assert not [name for name in response.headers if name.startswith("Access-Control")]
        assert response.headers["Vary"] == "Origin"


async def test_any_origin_and_none(serve: Serve) -> None:
    open_to_all, closed = await serve(cors_origins=["*"]), await serve()
    async with open_to_all.session.options("/v1/completions", headers=ASKED) as response:
        assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (204, "*")
    odd = {**ASKED, "Access-Control-Request-Headers": "x(y)"}
    async with open_to_all.session.options("/v1/completions", headers=odd) as response:
        assert "Access-Control-Allow-Headers" not in response.headers
    async with open_to_all.session.options("/v1/completions") as response:  # no browser's question
        assert response.status == 405
    async with closed.session.options("/v1/completions", headers=ASKED) as response:
        assert response.status == 405
        assert not [name for name in response.headers if name.startswith("Access-Control")]


async def test_the_load_counts_open_requests(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        fake.step_s = 0.05
        body = {"prompt": "a", "max_tokens": 400, "stream": True}
        async with served.session.post("/v1/completions", json=body) as response:
            await response.content.readline()
            async with served.session.get("/load") as page:
                assert await page.json() == {"server_load": 1}
            response.close()
        await settled(lambda: served.gateway.capacity.answering == 0)
        async with served.session.get("/load") as page:
            assert await page.json() == {"server_load": 0}
