"""Requests and information open to any client: content types, metrics, readiness."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.service.text.tokenizer import Tokenizer
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
BODIES = {
    "/v1/completions": b'{"model": "tiny", "prompt": "a"}',
    "/v1/chat/completions": b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}',
    "/tokenize": b'{"prompt": "a"}',
    "/detokenize": b'{"tokens": [8]}',
}
# All that a web page may send to another site without asking that site first.
FROM_A_PAGE = [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
NOT_JSON = [*FROM_A_PAGE, "text/plain; a=application/json", "application/jsonp", "", "json"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_must_say_that_it_is_json(
    path: str, serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        asked: dict[str, Any] = {"data": BODIES[path], "skip_auto_headers": ["Content-Type"]}
        for kind in NOT_JSON:
            headers = {} if kind is None else {"Content-Type": kind}
            async with served.session.post(path, headers=headers, **asked) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (415, "unsupported_media_type"), kind
                assert (error["param"], error["limit"]) == ("content-type", "application/json")
        assert not fake.seen
        for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON ; charset=UTF-8"):
            async with served.session.post(path, headers={"Content-Type": kind}, **asked) as response:
                assert response.status == 200, kind


async def test_what_no_engine_could_serve_reaches_none(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    """Large salts stayed in engines for good; sampling without any token emptied their prefix caches."""
    served = await serve()
    async with engine(says(byte_level_tokenizer)) as fake:
        fake.load_changes = {"eos_ids": [1]}
        await settled(lambda: any(load.eos_ids for load in served.streams.fleet.engines))
        no_token = {"allowed_token_ids": [1], "min_tokens": 1}
        for fields in [{"cache_salt": f"{at}" * 2**18} for at in range(20)] + [no_token]:
            async with served.session.post(
                "/v1/completions", json={"model": "tiny", "prompt": "a", **fields}
            ) as response:
                error = (await response.json())["error"]
                assert (response.status, error["param"]) == (400, next(iter(fields)))
                assert len(str(error)) < 400
        assert not fake.seen
        async with served.session.post(
            "/v1/completions", json={"model": "tiny", "prompt": "a", "cache_salt": "s" * 256}
        ) as response:
            assert response.status == 200
        assert len(fake.seen[0].cache_salt) < 64
        body = b'{"tokens": [%d]}' % 2**70
        headers = {"Content-Type": "application/json"}
        async with served.session.post("/detokenize", data=body, headers=headers) as response:
            assert response.status == 400
            assert "digits" in (await response.json())["error"]["given"]


async def test_a_resumed_stream_needs_no_body(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    headers = {"Last-Event-ID": f"cmpl-{'0' * 32}:1"}
    async with served.session.post("/v1/completions", headers=headers) as response:
        assert response.status == 410


@pytest.mark.parametrize("guarded", [False, True])
async def test_tenants_are_shown_to_nobody_where_keys_are_needed(guarded: bool, serve: Serve) -> None:
    served = await serve(api_keys=["secret"] if guarded else [])
    for headers in ({}, {"Authorization": "Bearer secret"}):
        async with served.session.get("/metrics", headers=headers) as response:
            text = await response.text()
            assert response.status == (404 if guarded else 200)
            assert ("quire_" in text) != guarded
            assert ("--metrics-port" in text) == guarded


async def test_readiness_does_not_tell_where_redis_is(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = await serve()
    await served.streams.supervisor.stop()  # nothing else looks meanwhile
    served.streams.fleet_watch._troubles["fleet"] = (
        "Redis at 10.1.2.3:6379 did not serve us for 5.0 s: Connection refused"
    )
    with caplog.at_level(logging.WARNING, "quire.gateway"):
        for _ in range(3):
            async with served.session.get("/ready") as response:
                said = await response.text()
                assert response.status == 503
                assert "Redis" in said
                assert "10.1.2.3" not in said
    assert [record.getMessage().count("10.1.2.3:6379") for record in caplog.records] == [1]
