"""Quotas of tenants over HTTP: two gateways, a real Redis, the official client."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import redis.asyncio
from aiohttp import ClientSession

from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import Finish, Generate
from quire.engine.wire.quotas import Quota, QuotaStore, Taken
from quire.service.api.tenants import Tenant, Tenants, TenantsError
from quire.service.common.refusal import Refusal
from quire.service.delivery import admission
from quire.service.delivery.quotas import duration
from tests.pace import Patience
from tests.service.fakes import FakeEngine, Served, settled

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
KEY = {"Authorization": "Bearer a"}
FREE = {"Authorization": "Bearer b"}
ANSWERED = {  # an engine answers these: they take all quotas
    *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/invocations", "/generative_scoring"),
    *("/v1/messages", "/v1/responses", "/v1/responses/compact"),
}
NOT_COUNTED = {  # for administrators, or without work
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/ping"),
    "/v1/responses/{id}/cancel",
}


def tenants_file(folder: Path, **quotas: int) -> str:
    quota_lines = "\n".join(f"{name} = {value}" for name, value in quotas.items())
    table = "weight = 1\nkey_sha256 = ['{}']\n"
    acme, free = (table.format(hashlib.sha256(key.encode()).hexdigest()) for key in ("a", "b"))
    path = folder / "tenants.toml"
    path.write_text(f"[acme]\n{acme}{quota_lines}\n[free]\n{free}")
    return str(path)


def six_tokens(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
    return [40, 41, 42, 43, 44, 1], Finish("stop", stop_token=1)


def endless(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
    return [40] * generate.max_new_tokens, None


async def ask(session: ClientSession, headers: dict[str, str] = KEY, **fields: Any) -> tuple[int, Any, dict[str, str]]:
    body = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 100, **fields}
    async with session.post("/v1/completions", json=body, headers=headers) as response:
        got = await response.text() if fields.get("stream") else await response.json()
        return response.status, got, dict(response.headers)


async def use_up(served: Served, tokens: int, *, requests: int = 1, minutes: float = 10) -> None:
    """Take quotas of acme as other requests would that run for long."""
    quota = served.gateway._tenants.of("Bearer a").quota
    assert quota is not None
    for i in range(requests):
        prompts = [(tokens if i == 0 else 0, 0)]
        deadline_ms = served.streams.redis_ms() + int(60_000 * minutes)
        taken = await served.streams.quotas.take("acme", quota, f"other-{i}", deadline_ms, prompts)
        assert taken.used_up is None


async def left(served: Served) -> tuple[int, int]:
    quota = served.gateway._tenants.of("Bearer a").quota
    assert quota is not None
    found = await served.streams.quotas.look("acme", quota)
    return found.requests, found.tokens


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    bound = Patience(100)
    while not await condition():
        assert bound.lasts()
        await asyncio.sleep(0.01)


async def test_every_answer_carries_what_is_left_and_gateways_share_it(
    serve: Serve, engine: EngineMaker, tmp_path: Path
) -> None:
    path = tenants_file(tmp_path, requests_per_minute=5, tokens_per_minute=1000)
    served, other = await serve(tenants=path), await serve(tenants=path)
    async with engine(six_tokens):
        await settled(lambda: bool(served.streams.fleet.engines and other.streams.fleet.engines))
        status, _, headers = await ask(served.session)
        assert status == 200
        assert headers["x-ratelimit-limit-requests"] == "5"
        assert headers["x-ratelimit-remaining-requests"] == "4"
        assert headers["x-ratelimit-reset-requests"] == "12s"
        assert headers["x-ratelimit-limit-tokens"] == "1000"
        assert headers["x-ratelimit-remaining-tokens"] == "896"  # the prompt and max_tokens
        assert headers["x-ratelimit-reset-tokens"] == "6.24s"
        status, _, headers = await ask(other.session, stream=True, n=2)
        assert status == 200
        assert headers["x-ratelimit-remaining-requests"] == "3"
        for method, path_, expected in (("GET", "/v1/models", 200), ("POST", "/v1/completions", 400)):
            async with other.session.request(method, path_, headers=KEY, json={"model": 1}) as response:
                assert response.status == expected
                assert response.headers["x-ratelimit-remaining-requests"] == "3"  # these take nothing
        for headers in ({}, FREE):
            async with other.session.get("/v1/models", headers=headers) as response:
                assert not [name for name in response.headers if name.startswith("x-ratelimit")]


async def test_a_settled_request_has_used_prompt_and_output(serve: Serve, engine: EngineMaker, tmp_path: Path) -> None:
    served = await serve(tenants=tenants_file(tmp_path, tokens_per_minute=1200))  # 20 a second
    async with engine(six_tokens):
        await settled(lambda: bool(served.streams.fleet.engines))
        await use_up(served, 100)
        began = time.monotonic()
        status, _, headers = await ask(served.session, prompt=[[5, 6, 7], [8]], n=2, max_tokens=200)
        assert status == 200
        assert int(headers["x-ratelimit-remaining-tokens"]) <= 1200 - 100 - 804 + 20 * (time.monotonic() - began + 1)

        async def settled_up() -> bool:
            return (await left(served))[1] >= 1200 - 100 - 4 - 24

        await until(settled_up)
        most = 1200 - 100 - 4 - 24 + 20 * (time.monotonic() - began + 1)
        assert (await left(served))[1] <= most


async def test_beyond_a_quota_the_refusal_says_when_and_the_official_client_waits(
    serve: Serve, engine: EngineMaker, tmp_path: Path
) -> None:
    served = await serve(tenants=tenants_file(tmp_path, tokens_per_minute=600))  # 10 a second
    async with engine(six_tokens):
        await settled(lambda: bool(served.streams.fleet.engines))
        await use_up(served, 590)
        start = time.monotonic()
        status, body, headers = await ask(served.session, max_tokens=26)
        assert (status, body["error"]["code"], body["error"]["type"]) == (
            429,
            "rate_limit_exceeded",
            "rate_limit_error",
        )
        assert (body["error"]["limit"], body["error"]["given"]) == (600, 30)
        assert 0 < int(headers["retry-after-ms"]) <= 2000
        assert headers["Retry-After"] in ("1", "2")
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="a", max_retries=2) as client:
            began = time.monotonic()
            answer = await client.completions.create(model="tiny", prompt=[5, 6, 7, 8], max_tokens=26)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 6
        assert time.monotonic() - start > 1.9  # after the pause of retry-after-ms, and without a third attempt
        metrics = served.gateway._middleware._telemetry.expose().decode()
        refused = 'quire_quota_refusals_total{gateway="g0",quota="tokens_per_minute",tenant="acme"}'
        assert f"{refused} 2.0" in metrics or began - start > 1.9  # a machine too busy for the client to be refused
        assert 'decision="refused"' not in metrics


async def test_requests_a_minute_are_refused_with_the_time_of_the_next(
    serve: Serve, engine: EngineMaker, tmp_path: Path
) -> None:
    served = await serve(tenants=tenants_file(tmp_path, requests_per_minute=2))
    async with engine(six_tokens):
        await settled(lambda: bool(served.streams.fleet.engines))
        began = time.monotonic()
        assert [(await ask(served.session))[0] for _ in range(2)] == [200, 200]
        status, body, headers = await ask(served.session)
        assert (status, body["error"]["limit"], body["error"]["given"]) == (429, 2, 1)
        passed_ms = 1000 * (time.monotonic() - began)
        assert 29_999 - passed_ms <= int(headers["retry-after-ms"]) <= 30_000
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert (await ask(served.session, FREE))[0] == 200


async def test_requests_at_once_are_counted_until_they_end(serve: Serve, engine: EngineMaker, tmp_path: Path) -> None:
    path = tenants_file(tmp_path, max_requests=1)
    served, other = await serve(tenants=path, resume_s=0.0), await serve(tenants=path)
    async with engine(endless, step_s=0.01) as fake:
        await settled(lambda: bool(served.streams.fleet.engines and other.streams.fleet.engines))
        body = {"model": "tiny", "prompt": [5], "max_tokens": 400, "stream": True}
        async with served.session.post("/v1/completions", json=body, headers=KEY) as response:
            await response.content.readline()
            status, answer, headers = await ask(other.session, max_tokens=1)
            assert (status, answer["error"]["limit"]) == (429, 1)
            assert (headers["Retry-After"], headers["retry-after-ms"]) == ("1", "1000")
            response.close()  # the client leaves
        await settled(lambda: not fake.busy)
        for _ in range(3):  # one after the other: the place of each is free when its answer is complete
            assert (await ask(other.session, max_tokens=2))[0] == 200


async def test_a_repeat_takes_a_request_and_the_tokens_that_are_sent_again(
    serve: Serve, engine: EngineMaker, tmp_path: Path
) -> None:
    """Also a client that resumes; what it has already, and what is still to be computed, costs nothing."""
    path = tenants_file(tmp_path, requests_per_minute=5, tokens_per_minute=60_000, max_requests=1)
    served = await serve(tenants=path, retain_s=60.0)
    taken: list[int] = []
    store = served.streams.quotas
    take = store.take_repeat

    async def watched(tenant: str, quota: Quota, repeat_id: str, tokens: int) -> Taken:
        taken.append(tokens)
        return await take(tenant, quota, repeat_id, tokens)

    store.take_repeat = watched  # type: ignore[method-assign]
    async with engine(six_tokens) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        key = {**KEY, "Idempotency-Key": "k"}
        status, body, _ = await ask(served.session, key)
        assert (status, (await left(served))[0]) == (200, 4)
        await settled(lambda: not fake.busy)
        for again in range(2):
            assert (await ask(served.session, key))[:2] == (200, body)
            assert (await left(served))[0] == 3 - again
        async with served.session.get(f"/v1/streams/{body['id']}:4", headers=KEY) as response:
            assert response.status == 200
            await response.read()
        assert taken == [6, 6, 2]
        assert (await ask(served.session))[0] == 200, "a repeat holds no place of max_requests"
        status, body, headers = await ask(served.session, key)
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["Retry-After"]) >= 1


async def test_a_request_that_is_not_admitted_takes_nothing(
    serve: Serve, engine: EngineMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise Refusal(503, "no_engine", "no engine is running")

    served = await serve(tenants=tenants_file(tmp_path, requests_per_minute=10, max_requests=1))
    async with engine(six_tokens):
        await settled(lambda: bool(served.streams.fleet.engines))
        monkeypatch.setattr(admission, "decide", refuse)
        for _ in range(3):
            status, body, headers = await ask(served.session)
            assert (status, body["error"]["code"]) == (503, "no_engine")
            assert headers["x-ratelimit-remaining-requests"] == "10"


async def test_a_request_that_no_bucket_holds_is_refused_for_good(
    serve: Serve, engine: EngineMaker, tmp_path: Path
) -> None:
    served = await serve(tenants=tenants_file(tmp_path, tokens_per_minute=200))
    async with engine(six_tokens):
        await settled(lambda: bool(served.streams.fleet.engines))
        status, body, _ = await ask(served.session, n=2)
        assert (status, body["error"]["code"]) == (400, "quota_exceeded_by_request")
        assert (body["error"]["limit"], body["error"]["given"], body["error"]["param"]) == (200, 204, "max_tokens")
        assert (await left(served))[1] == 200
        # Without max_tokens the rest of the context would be more: the complete quota is taken until the end.
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        async with served.session.post("/v1/chat/completions", json=chat, headers=KEY) as response:
            assert (response.status, response.headers["x-ratelimit-remaining-tokens"]) == (200, "0")
            used = (await response.json())["usage"]["total_tokens"]

        async def given_back() -> bool:
            return (await left(served))[1] >= 200 - used

        await until(given_back)


async def test_without_redis_it_is_a_503(
    serve: Serve, engine: EngineMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(*_: object) -> None:
        raise BusDown("gone")

    served = await serve(tenants=tenants_file(tmp_path, requests_per_minute=10))
    async with engine(six_tokens):
        await settled(lambda: bool(served.streams.fleet.engines))
        monkeypatch.setattr(served.streams.quotas, "_run", down)
        status, body, headers = await ask(served.session)
        assert (status, body["error"]["code"]) == (503, "queue_unavailable")
        assert not [name for name in headers if name.startswith("x-ratelimit")]
        assert (await ask(served.session, FREE))[0] == 200  # a tenant without quotas runs none of these scripts


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "true", "'ten'", "nan", "1000000001", "[1]"])
@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute", "max_requests"])
def test_a_bad_quota_is_refused_at_start(tmp_path: Path, name: str, value: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f"[acme]\nweight = 1\nkey_sha256 = ['{'0' * 64}']\n{name} = {value}\n")
    with pytest.raises(TenantsError, match=rf"tenants\.toml: tenant 'acme': {name} is .*; it must be a whole number"):
        Tenants((), str(path))


def test_quotas_of_the_file_reach_the_tenant(tmp_path: Path) -> None:
    tenants = Tenants((), tenants_file(tmp_path, requests_per_minute=3, max_requests=2))
    found = tenants.of("Bearer a").quota
    assert found is not None
    assert (found.requests_per_minute, found.tokens_per_minute, found.max_requests) == (3, None, 2)
    assert tenants.of("Bearer b") == Tenant("free", 1.0, None)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0.0, "0s"), (-5, "0s"), (0.2, "1ms"), (17, "17ms"), (1000, "1s"), (1200, "1.2s"), (59_999.5, "1m0s"),
        (360_000, "6m0s"), (61_250, "1m1.25s"), (3_723_000, "1h2m3s"),
    ],
)  # fmt: skip
def test_durations_are_openais(ms: float, text: str) -> None:
    assert duration(ms) == text


async def test_counting_tokens_takes_requests_per_minute_and_no_place(serve: Serve, tmp_path: Path) -> None:
    served = await serve(tenants=tenants_file(tmp_path, requests_per_minute=1, max_requests=1, tokens_per_minute=50))
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"model": "tiny", "prompt": "a" * 100}),
        ("/detokenize", {"model": "tiny", "tokens": [40, 41]}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses/input_tokens", {"model": "tiny", "input": "a"}),
    ]
    async with served.session.get("/openapi.json", headers=FREE) as response:
        paths = (await response.json())["paths"]
    assert {path for path in paths if "post" in paths[path]} - ANSWERED - NOT_COUNTED == {path for path, _ in bodies}
    async with served.session.post(bodies[0][0], json=bodies[0][1], headers=KEY) as response:
        assert response.status == 200
    assert (await left(served))[1] == 50
    for path, body in bodies:
        async with served.session.post(path, json=body, headers=KEY) as response:
            error = (await response.json())["error"]
            assert response.status == 429, path
            assert "requests_per_minute: 1 requests every 60 s" in error["message"]
            assert float(response.headers["retry-after"]) > 0
        async with served.session.post(path, json=body, headers=FREE) as response:
            assert response.status == 200


@pytest.mark.parametrize("reached", [False, True], ids=["on its way", "done"])
async def test_a_client_that_leaves_while_its_quota_is_taken_gets_it_back(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    served = await serve(tenants=tenants_file(tmp_path, requests_per_minute=5, tokens_per_minute=1000, max_requests=1))
    take, began, go_on = QuotaStore.take, asyncio.Event(), asyncio.Event()

    async def slow_take(self: QuotaStore, *args: Any) -> Taken:
        taken = await take(self, *args) if reached else None
        began.set()
        await go_on.wait()
        return taken or await take(self, *args)

    monkeypatch.setattr(QuotaStore, "take", slow_take)
    config = served.gateway._config
    async with FakeEngine(config.redis_url, config.namespace, six_tokens):
        await settled(lambda: bool(served.streams.fleet.engines))
        asking = asyncio.create_task(ask(served.session))
        await began.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0.05)
        go_on.set()
        await settled(lambda: served.gateway.capacity.answering == 0)
        async with redis.asyncio.from_url(config.redis_url) as client:
            assert not await client.keys(f"{{{config.namespace}}}:quota_*")
        monkeypatch.setattr(QuotaStore, "take", take)
        assert (await ask(served.session))[0] == 200  # its place is free, too
