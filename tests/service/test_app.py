"""The gateway over HTTP: a real server, a real Redis, real clients, and an engine that follows a script."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from aiohttp import ClientConnectionResetError, ClientError, ClientSession, web
from aiohttp.http_exceptions import BadStatusLine
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.wire.messages import Finish, Generate
from quire.service.api.tenants import Tenant
from quire.service.common.metrics import TABLE
from quire.service.http.middleware import drop_broken_http
from quire.service.text.tokenizer import Tokenizer
from tests.pace import paced, patience
from tests.service.fakes import FakeEngine, Served, failed_within, settled

Serve = Callable[..., Awaitable[Served]]

ANSWER = "One request down, one token up 🙂 café. END of story."
EngineMaker = Callable[..., FakeEngine]


def says(tokenizer: Tokenizer, text: str = ANSWER, *, eos: bool = False) -> Callable[..., Any]:
    """A script: `text` for ever, or once and then the end-of-sequence token."""

    def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        ids = tokenizer._encode(text, special=False)
        if eos:
            return [*ids, 1], Finish("stop", stop_token=1)
        return ids * (generate.max_new_tokens // len(ids) + 1), None

    return script


async def events(response: Any) -> AsyncIterator[tuple[str | None, Any]]:
    """(event id, decoded data) of an SSE response; comments as (None, the line); [DONE] as (None, "[DONE]")."""
    event_id = None
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
            yield (None, data) if data == "[DONE]" else (event_id, json.loads(data))
        elif line.startswith(":"):
            yield None, line


async def test_the_official_client_reads_a_completion(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    async with (
        engine(says(byte_level_tokenizer, eos=True)),
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client,
    ):
        await settled(lambda: bool(served.streams.fleet.engines))
        answer = await client.completions.create(model="tiny", prompt="Say it", max_tokens=400)
        assert answer.choices[0].text == ANSWER
        assert answer.choices[0].finish_reason == "stop"
        ids = byte_level_tokenizer._encode(ANSWER, special=False)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(ids) + 1
        assert answer.system_fingerprint == "fp_" + "f" * 16

        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Say it"}],
            stream=True,
            n=2,
            stream_options={"include_usage": True},
        )
        texts, roles, usage = ["", ""], [0, 0], None
        finishes: list[str | None] = [None, None]
        async for chunk in stream:
            for choice in chunk.choices:
                assert usage is None
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] += choice.delta.role == "assistant"
                finishes[choice.index] = choice.finish_reason
            usage = chunk.usage
        assert texts == [ANSWER, ANSWER]
        assert roles == [1, 1]
        assert finishes == ["stop", "stop"]
        assert usage is not None
        assert usage.completion_tokens == 2 * len(ids) + 2


async def raw(session: ClientSession, path: str, **body: Any) -> tuple[int, dict[str, Any], Any]:
    """(status, decoded body, headers) of a POST."""
    async with session.post(path, json={"model": "tiny", **body}) as response:
        return response.status, await response.json(), response.headers


async def test_streamed_and_whole_answers_agree_with_a_stop_string(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        asked = {"prompt": ["a", "b"], "n": 2, "max_tokens": 300, "stop": ["END of", "nowhere"]}
        status, whole, headers = await raw(served.session, "/v1/completions", **asked)
        assert status == 200
        expected = ANSWER.partition("END of")[0]
        assert [choice["text"] for choice in whole["choices"]] == [expected] * 4
        assert {(c["finish_reason"], c["stop_reason"]) for c in whole["choices"]} == {("stop", "END of")}
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert int(headers["openai-processing-ms"]) >= 0

        texts, position = [""] * 4, None
        async with served.session.post(
            "/v1/completions",
            json={"model": "tiny", "stream": True, "stream_options": {"include_ids": True}, **asked},
            headers={"X-Request-Id": "mine-1"},
        ) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            assert response.headers["Cache-Control"] == "no-cache"
            assert response.headers["X-Accel-Buffering"] == "no"
            assert response.headers["x-request-id"] == "mine-1"
            async for event_id, data in events(response):
                if data != "[DONE]":
                    position = event_id
                    texts[data["choices"][0]["index"]] += data["choices"][0]["text"]
        assert texts == [expected] * 4
        used = whole["usage"]["completion_tokens"]
        assert position is not None
        assert sum(map(int, position.split(":")[1].split(","))) == used
        # each choice as it ends, and the order with its last one
        await settled(
            lambda: sum(" " not in order for order in fake.aborted) == 4
        )  # both requests, both prompts: the engine went on after the match
        assert len(served.streams) == 0


async def test_a_trace_context_goes_along_if_it_is_one(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    void = [good.upper(), good + "-x", "ff" + good[2:], good.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32), "x"]
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        for header in (good, *void):
            body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
            async with served.session.post("/v1/completions", json=body, headers={"traceparent": header}) as response:
                assert response.status == 200
        assert [generate.traceparent for generate in fake.seen] == [good, *[""] * len(void)]
        fake.seen.clear()
        for parent, state in ((good, "rojo=00f067aa, congo=t61"), ("x", "rojo=1"), (good, "Rojo=1")):
            headers = {"traceparent": parent, "tracestate": state}
            async with served.session.post("/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
        assert [generate.tracestate for generate in fake.seen] == ["rojo=00f067aa,congo=t61", "", ""]


async def test_a_client_that_leaves_stops_the_engine(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    async with engine(says(byte_level_tokenizer), step_s=0.02) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        body = {"model": "tiny", "prompt": "a", "max_tokens": 400}
        async with served.session.post("/v1/completions", json={**body, "stream": True}) as response:
            await response.content.readline()
            response.close()
        await settled(lambda: len(fake.aborted) == 1)
        asking = asyncio.create_task(raw(served.session, "/v1/completions", **body))
        await settled(lambda: len(fake.seen) == 2)
        asking.cancel()
        await settled(lambda: len(fake.aborted) == 2)
        fake.holding = True  # now one that is still queued
        asking = asyncio.create_task(raw(served.session, "/v1/completions", **body))
        await settled(lambda: served.streams.fleet.queued == 1)
        asking.cancel()
        await settled(lambda: len(served.streams) == 0 and served.streams.fleet.queued == 0)
        assert len(fake.seen) == 2


async def test_leaving_in_the_middle_of_a_write_is_no_error(
    serve: Serve,
    engine: EngineMaker,
    byte_level_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Mostly a departure cancels the handler; when the write comes first, it finds the connection closing."""
    served = await serve()
    write, writes = web.StreamResponse.write, iter([True, True])

    async def write_twice(self: web.StreamResponse, data: bytes) -> None:
        if not next(writes, False):
            raise ClientConnectionResetError("Cannot write to closing transport")
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", write_twice)
    async with engine(says(byte_level_tokenizer), step_s=0.02) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        body = {"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": True}
        async with served.session.post("/v1/completions", json=body) as response:
            with pytest.raises(ClientError):
                await response.read()
        await settled(lambda: len(fake.aborted) == 1 and len(served.streams) == 0)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_two_hundred_random_disconnects_leave_nothing_behind(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    async with engine(says(byte_level_tokenizer), step_s=0.005) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))

        async def visit(number: int) -> None:
            body = {"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": number % 3 > 0}
            try:
                async with asyncio.timeout(0.05 + number % 17 * 0.02):
                    async with served.session.post("/v1/completions", json=body) as response:
                        await response.read()
            except TimeoutError:
                pass

        await asyncio.gather(*(visit(number) for number in range(200)))
        await settled(lambda: len(served.streams) == 0 and not fake.busy and served.streams.fleet.queued == 0)


async def test_heartbeats_while_nothing_flows(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(heartbeat_s=0.05)
    async with engine(says(byte_level_tokenizer, eos=True)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        fake.holding = True
        seen = []
        async with served.session.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 99},
            headers={"X-Resumable": "1"},
        ) as response:
            async for _, data in events(response):
                if str(data).startswith(":"):  # it waits, or is claimed and silent
                    seen.append(data)
                    fake.holding = len(seen) < 3
                elif data != "[DONE]":
                    seen.append(data["choices"][0]["text"])
        assert set(seen[:3]) <= {": keep-alive", ": queued place=0"}
        assert "".join(text for text in seen if not text.startswith(": ")) == ANSWER


async def test_a_deadline_is_504_or_an_event(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    async with engine(says(byte_level_tokenizer), step_s=0.05) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        asked = {"prompt": "a", "max_tokens": 400, "timeout": 0.3}
        status, body, headers = await raw(served.session, "/v1/completions", **asked)
        assert (status, body["error"]["code"], headers["x-should-retry"]) == (504, "deadline_exceeded", "false")
        async with served.session.post("/v1/completions", json={"model": "tiny", "stream": True, **asked}) as response:
            assert response.status == 200
            data = [data async for _, data in events(response)]
        assert len(data) > 2
        assert data[-2]["error"]["code"] == "deadline_exceeded"
        assert data[-1] == "[DONE]"
        await settled(lambda: len(fake.aborted) == 2)


async def test_an_engine_error_fails_its_request_alone(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()

    def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        if generate.token_ids == [9]:
            return [], Finish("error", message="NaN logits")
        if generate.token_ids == [8]:
            return [300, 301], None
        return [300], Finish("stop", stop_token=300)

    async with engine(script) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        status, body, _ = await raw(served.session, "/v1/completions", prompt=[9], stream=True)
        assert (status, body["error"]["message"], body["error"]["type"]) == (500, "NaN logits", "server_error")
        found = await failed_within(served.session, "/v1/completions", {"model": "tiny", "prompt": [8]}, fake)
        error, done = found.decode().split("\n\n")[-3:-1]
        assert json.loads(error.removeprefix("data: "))["error"]["message"] == "it broke"
        assert done == "data: [DONE]"
        metrics = await (await served.session.get("/metrics")).text()
        assert 'quire_refusals_total{code="engine_error",gateway="g0"} 2.0' in metrics
        status, body, _ = await raw(served.session, "/v1/completions", prompt=[7], stop_token_ids=[300])
        assert status == 200
        assert body["choices"][0]["text"] == ""  # a stop token is no text, but it was generated
        assert body["choices"][0]["stop_reason"] == 300
        assert body["usage"]["completion_tokens"] == 1


async def test_echo_with_logprobs(serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer) -> None:
    served = await serve()
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        asked: dict[str, Any] = {"prompt": "café 🙂", "echo": True, "logprobs": 2, "max_tokens": 30}
        _, whole, _ = await raw(served.session, "/v1/completions", **asked)
        choice = whole["choices"][0]
        logprobs = choice["logprobs"]
        ids = byte_level_tokenizer._encode("café 🙂", special=False)
        assert choice["text"].startswith("café 🙂One request")
        assert {len(column) for column in logprobs.values()} == {len(ids) + 30}
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        assert choice["text"][logprobs["text_offset"][len(ids)] :].startswith("One")
        assert fake.seen[0].sampling.prompt_logprobs == 2
        streamed: dict[str, list[Any]] = {name: [] for name in logprobs}
        async with served.session.post("/v1/completions", json={"model": "tiny", "stream": True, **asked}) as response:
            async for _, data in events(response):
                if data != "[DONE]":
                    for name, column in data["choices"][0]["logprobs"].items():
                        streamed[name] += column
        assert streamed == logprobs


async def test_admission_refuses_with_retry_after(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(takeover_wait_s=0.0)
    status, body, _ = await raw(served.session, "/v1/completions", prompt="a")
    assert (status, body["error"]["code"]) == (503, "no_engine")
    async with engine(says(byte_level_tokenizer)) as fake:
        fake.free_tokens = 0
        fake.load_changes = {
            "free_blocks": 0,
            "running": 9,
            "waiting": 90,
            "waiting_tokens": 9000,
            "blocks_per_s": 5.0,
            "prompt_tokens": 1000,
            "generated_tokens": 1000,
        }
        await settled(lambda: any(load.waiting for load in served.streams.fleet.engines))
        status, body, headers = await raw(served.session, "/v1/completions", prompt="a")
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(headers["Retry-After"]) <= 60
        assert 1000 <= int(headers["retry-after-ms"]) <= 60_000
        metrics = await (await served.session.get("/metrics")).text()
        assert 'quire_refusals_total{code="rate_limit_exceeded",gateway="g0"} 1.0' in metrics
        assert 'quire_engine_requests_waiting{engine="e0",gateway="g0",model_name="tiny"} 90.0' in metrics


async def test_a_burst_between_two_readings_cannot_overfill_the_queue(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(fleet_s=0.5, late_wait_s=0.0)
    async with engine(says(byte_level_tokenizer)) as fake:
        fake.holding = True
        fake.load_changes = {"free_blocks": 0, "total_blocks": 100, "running": 5}
        await settled(lambda: any(load.running == 5 for load in served.streams.fleet.engines))
        # With no known pace the queue holds one pool of prompts: 10 requests.
        asked = {"prompt": [7] * 160, "max_tokens": 5}
        requests = [asyncio.create_task(raw(served.session, "/v1/completions", **asked)) for _ in range(50)]
        await settled(lambda: sum(task.done() for task in requests) == 40)
        fake.holding = False
        answers = await asyncio.gather(*requests)
    assert sorted(status for status, _, _ in answers) == [200] * 10 + [429] * 40


async def test_a_deadline_out_of_reach_is_refused_before_it_costs_anything(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(late_wait_s=1000.0)
    async with engine(says(byte_level_tokenizer)) as fake:
        fake.free_tokens = 0
        fake.load_changes = {
            "running": 9,
            "tokens_per_s": 90.0,
            "blocks_per_s": 0.1,
            "prompt_tokens": 1000,
            "generated_tokens": 1000,
        }
        await settled(lambda: any(load.running == 9 for load in served.streams.fleet.engines))
        await settled(lambda: served.streams.fleet.free_tokens == 0)
        # Prompt tokens start as fast as output tokens are generated, 90 per second: 300 of them take longer than 3 s.
        asked = {"prompt": [7] * 300, "max_tokens": 5}
        status, body, headers = await raw(served.session, "/v1/completions", **asked, timeout=3)
        assert (status, body["error"]["code"], body["error"]["limit"]) == (429, "deadline_unreachable", 3)
        assert body["error"]["given"] > 3
        assert 1 <= int(headers["Retry-After"]) <= 60
        async with served.session.post(
            "/v1/completions", json={"model": "tiny", **asked}, headers={"X-Request-Timeout": "3"}
        ) as response:
            assert (await response.json())["error"]["code"] == "deadline_unreachable"
        assert not fake.seen
        for timeout in ("0", "-1", "nan", "inf", "1e9", "soon"):
            async with served.session.post(
                "/v1/completions", json={"model": "tiny", **asked}, headers={"X-Request-Timeout": timeout}
            ) as response:
                error = (await response.json())["error"]
                assert (response.status, error["param"]) == (400, "x-request-timeout")
                assert error["limit"] == "> 0 and <= 3600"
        fake.free_tokens = 1000
        await settled(lambda: served.streams.fleet.free_tokens == 1000)
        status, _, _ = await raw(served.session, "/v1/completions", **asked, timeout=paced(3))
        assert status == 200


async def test_a_key_brings_its_tenant_along(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "tenants.toml"
    digest = hashlib.sha256(b"secret").hexdigest()
    path.write_text(f"[acme]\nweight = 2\nhighest_priority = -1\nkey_sha256 = ['{digest}']\n")
    served = await serve(tenants=str(path))
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        assert (await raw(served.session, "/v1/completions", prompt="a"))[0] == 401
        served.session.headers["Authorization"] = "Bearer secret"
        status, _, headers = await raw(served.session, "/v1/completions", prompt="a", priority=-100, cache_salt="x")
        [order] = fake.seen
        assert (status, order.tenant, order.weight, order.priority) == (200, "acme", 2.0, -1)
        assert headers["x-unknown-fields"] == "priority"  # the key has no right to more
        _, _, headers = await raw(served.session, "/v1/completions", prompt="a", priority="low")
        assert fake.seen[-1].priority == 1
        assert "x-unknown-fields" not in headers
        assert order.cache_salt == Tenant("acme").salt("x")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_huge_body_is_refused_without_keeping_it(serve: Serve, chunked: bool) -> None:
    served = await serve()
    block, sent = b"x" * 2**20, 0

    async def upload() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += len(block)
            yield block

    headers = {"Content-Type": "application/json"}
    if not chunked:
        headers["Content-Length"] = str(100 * 2**20)
    before = psutil.Process().memory_info().rss
    async with served.session.post("/v1/completions", data=upload(), headers=headers) as response:
        assert response.status == 413
        error = (await response.json())["error"]
    assert (error["param"], error["limit"]) == ("body", 4 * 2**20)
    assert psutil.Process().memory_info().rss - before < 50 * 2**20


async def test_errors_have_openais_shape_everywhere(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(api_keys=["k1", "k2"])
    async with engine(says(byte_level_tokenizer, eos=True)):
        await settled(lambda: bool(served.streams.fleet.engines))
        url, session = served.url, served.session
        for key, raises in (("nope", openai.AuthenticationError), ("k1", openai.NotFoundError)):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                with pytest.raises(raises):
                    await client.completions.create(model="other", prompt="a")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k2", max_retries=0) as client:
            assert [card.id async for card in client.models.list()] == ["tiny"]
            assert (await client.models.retrieve("tiny")).id == "tiny"
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("other/one")
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="tiny", prompt=[1] * 600)
            assert caught.value.code == "context_length_exceeded"
            assert "512" in caught.value.message
            assert "616" in caught.value.message
        for method, path, status in (
            ("GET", "/nowhere", 404),
            ("GET", "/v1/completions", 401),
            ("DELETE", "/ping", 405),
        ):
            async with session.request(method, path) as response:
                assert response.status == status
                assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


async def test_the_small_endpoints(serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer) -> None:
    served = await serve()
    session = served.session
    assert (await session.get("/health")).status == 503
    ready = await session.get("/ready")
    assert (ready.status, (await ready.json())["reason"]) == (503, "no engine is running")
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        for path in ("/health", "/ready", "/ping", "/version", "/metrics"):
            assert (await session.get(path)).status == 200
        _, body, _ = await raw(session, "/tokenize", prompt="café")
        assert (body.pop("count"), body.pop("token_strs")) == (len(body["tokens"]), None)
        assert body == {"max_model_len": 512, "tokens": body["tokens"]}
        _, body, _ = await raw(session, "/detokenize", tokens=body["tokens"])
        assert body == {"prompt": "café"}
        _, body, _ = await raw(session, "/tokenize", messages=[{"role": "user", "content": "hi"}])
        _, body, _ = await raw(session, "/detokenize", tokens=body["tokens"])
        assert body == {"prompt": "<|user|>hi</s><|assistant|>"}
        assert (await raw(session, "/tokenize"))[0] == 400
        assert (await raw(session, "/detokenize", tokens=[10_000]))[0] == 400
        fake.load_changes = {"draining": True}
        await settled(lambda: all(load.draining for load in served.streams.fleet.engines))
        assert (await (await session.get("/ready")).json())["reason"] == "every engine is shutting down"
    await settled(lambda: not served.streams.fleet.engines)
    assert (await session.get("/health")).status == 503


async def test_a_slow_reader_delays_nobody_and_loses_nothing(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    tokens = 6000  # about two kilobytes each with their logprobs: several times what socket buffers hold
    async with engine(says(byte_level_tokenizer)) as fake:
        fake.load_changes = {"max_model_len": 10_000}
        fake.burst = 50
        await settled(lambda: any(load.max_model_len == 10_000 for load in served.streams.fleet.engines))
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))
        reader, writer = await asyncio.open_connection(sock=client, limit=4096)
        body = json.dumps(
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": tokens,
                "stream": True,
                "logprobs": True,
                "top_logprobs": 20,
                "stream_options": {"include_ids": True},
            }
        ).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await settled(lambda: len(fake.seen) == 1)  # and read nothing
        for _ in range(20):
            async with asyncio.timeout(patience(2)):
                assert (await raw(served.session, "/v1/completions", prompt="b"))[0] == 200
        await settled(lambda: not fake.busy)
        assert len(served.streams) == 1  # the engine is long done, the rest waits here
        received = (await reader.read()).decode()
        assert f":{tokens}:done\n" in received  # the last chunk of text has the finish reason
        assert received.count('"top_logprobs"') == tokens
        assert "data: [DONE]" in received
        writer.close()
        await writer.wait_closed()


async def send_raw(url: str, request: bytes) -> bytes:
    """Return the complete response to these bytes."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(patience(100)):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_body_that_is_not_what_its_encoding_says_is_a_400(serve: Serve) -> None:
    served = await serve()
    for encoding in ("gzip", "deflate"):
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Encoding: {encoding}\r\n"
        )
        head += "Content-Type: application/json\r\n"
        answer = await send_raw(served.url, f"{head}Content-Length: 5\r\n\r\nhello".encode())
        assert b" 400 " in answer.splitlines()[0]
        assert b'"code":"invalid_body"' in answer


async def test_bytes_that_are_not_utf8_in_a_header_or_path_are_refused_like_any_others(serve: Serve) -> None:
    served = await serve()
    lines = (
        b"POST /v1/completions HTTP/1.1\r\nLast-Event-ID: cmpl-\xe9:1",
        b"GET /v1/streams/cmpl-%e9 HTTP/1.1",
        b"GET /nowhere/%ff HTTP/1.1",
    )
    for line in lines:
        answer = await send_raw(
            served.url, line + b"\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        )
        assert answer.splitlines()[0].split()[1] in (b"400", b"404"), answer
        assert b'"error"' in answer


def test_malformed_http_leaves_no_traceback_in_the_log() -> None:
    for error, kept in ((BadStatusLine("x"), False), (ConnectionResetError("gone"), False), (KeyError("a bug"), True)):
        record = logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "x", (), (type(error), error, None))
        assert drop_broken_http(record) == kept
    assert drop_broken_http(logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "x", (), None))


async def test_tokenize_and_detokenize_take_so_many_tokens(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    """`max_prompt_tokens`, or the model's context where that is longer (512 here)."""
    served = await serve(max_prompt_tokens=1000)
    async with engine(says(byte_level_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        status, answer, _ = await raw(served.session, "/detokenize", tokens=[5] * 1000)
        assert (status, answer["prompt"]) == (200, byte_level_tokenizer.text_of([5] * 1000))
        status, answer, _ = await raw(served.session, "/tokenize", prompt=answer["prompt"])
        assert (status, answer["count"]) == (200, 1000)
        for path, asked in (("/detokenize", {"tokens": [5] * 1001}), ("/tokenize", {"prompt": "$" * 1001})):
            status, answer, _ = await raw(served.session, path, **asked)
            error = answer["error"]
            assert (status, error["code"], error["limit"], error["given"]) == (400, "too_many_tokens", 1000, 1001)
        status, answer, _ = await raw(served.session, "/v1/completions", prompt=[[5] * 400] * 3, max_tokens=1)
        assert (status, answer["error"]["code"], answer["error"]["given"]) == (400, "too_many_tokens", 1200)


async def test_structured_output_needs_engines_that_can(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    """An engine that cannot enforce a grammar never gets one; the refusal names the field."""
    served = await serve()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "guided_choice": ["yes"]}
    async with engine(says(byte_level_tokenizer)) as fake, ClientSession() as client:
        await settled(lambda: bool(served.streams.fleet.engines))
        async with client.post(f"{served.url}/v1/completions", json=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["param"]) == (400, "unsupported", "guided_choice")
        assert not fake.seen
        fake.load_changes = {"grammars": True}
        await settled(lambda: served.streams.fleet.engines[0].grammars)
        async with client.post(f"{served.url}/v1/completions", json=body) as response:
            assert response.status == 200
        assert "yes" in fake.seen[0].sampling.grammar


async def test_every_name_of_vllm_has_the_value_of_what_clients_sent(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(vllm_metrics=True)
    began = time.monotonic()
    async with engine(says(byte_level_tokenizer), step_s=0.01) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        for n, tokens, stream in ((1, 6, True), (3, 4, False)):
            body = {"model": "tiny", "prompt": "a", "max_tokens": tokens, "n": n, "stream": stream}
            async with served.session.post("/v1/completions", json=body) as response:
                assert response.status == 200
                await response.read()
        async with served.session.post("/v1/completions", json={"prompt": "a", "top_p": 9}) as response:
            assert response.status == 400  # a refused request is in none of them
        assert len(fake.seen) == 2
    seconds = time.monotonic() - began
    async with served.session.get("/metrics") as response:
        families = {
            family.name: family.samples
            for family in text_string_to_metric_families(await response.text())
            if family.name.startswith("vllm:")
        }
    names = [name for row in TABLE if row.vllm is not None for name in row.vllm.names]
    assert sorted(names) == sorted(families)
    assert families.pop("vllm:admission_rejections") == []
    found: dict[str, tuple[float, float]] = {}
    for name, samples in families.items():
        assert {(one.labels["model_name"], one.labels["engine"]) for one in samples} == {("tiny", "g0")}
        values = {one.name.removeprefix(name): one.value for one in samples if not one.name.endswith("_bucket")}
        found[name] = values["_count"], values["_sum"]
    gaps = 5 + 3 * 3  # between two tokens of a choice
    assert found.pop("vllm:request_params_n") == (2, 1 + 3)
    assert found.pop("vllm:request_params_max_tokens") == (2, 6 + 4)
    counts = {
        "vllm:time_to_first_token_seconds": 2,
        "vllm:inter_token_latency_seconds": gaps,
        "vllm:time_per_output_token_seconds": gaps,
        "vllm:request_time_per_output_token_seconds": 2,
        "vllm:e2e_request_latency_seconds": 2,
    }
    assert {name: count for name, (count, _) in found.items()} == counts
    for total in (total for _, total in found.values()):
        assert 0 < total < seconds * 3
    assert found["vllm:time_to_first_token_seconds"][1] < found["vllm:e2e_request_latency_seconds"][1]
    assert found["vllm:inter_token_latency_seconds"] == found["vllm:time_per_output_token_seconds"]
