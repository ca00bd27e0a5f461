"""Requests in the late lane (estimated wait over the TTFT target) over HTTP: kept open, with queue position."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
import pytest
from aiohttp import ClientSession

from quire.service.delivery import admission, queue_updates
from quire.service.text.tokenizer import Tokenizer
from tests.pace import Patience, paced
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import events, raw, says
from tests.service.test_process import answers

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
Launch = Callable[..., subprocess.Popen[str]]

# A full engine that starts 90 prompt tokens per second: 45 may wait in the on-time lane, 60 need 0.7 s.
TARGET_S = 0.5 / admission.ON_TIME_WAIT
FULL = {"running": 9, "tokens_per_s": 90.0, "blocks_per_s": 0.1, "prompt_tokens": 1000, "generated_tokens": 1000}
LATE = {"prompt": [7] * 60, "max_tokens": 5}
COMMENT = re.compile(r": queued place=(\d+) wait_s=([\d.]+)")


@contextlib.asynccontextmanager
async def full(served: Served, engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    """The engine has no free capacity until `free_tokens` changes, and the gateway knows its throughput."""
    async with engine as fake:
        fake.free_tokens, fake.load_changes = 0, dict(FULL)

        def is_full() -> bool:
            view = served.streams.fleet
            return view.free_tokens == 0 and any(load.running == 9 for load in view.engines)

        await settled(is_full)
        yield fake


async def test_a_late_stream_begins_at_once_and_says_where_it_stands(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_updates, "UPDATE_S", 0.05)
    served = await serve(ttft_target_s=TARGET_S, late_wait_s=60.0)
    async with full(served, engine(says(byte_level_tokenizer))) as fake:
        first = asyncio.create_task(raw(served.session, "/v1/completions", **LATE))
        await settled(lambda: served.streams.fleet.late.requests == 1)
        waits_since = asyncio.get_running_loop().time()
        body = {"model": "tiny", "stream": True, "stream_options": {"include_ids": True}, **LATE}
        async with served.session.post("/v1/completions", json=body) as response:
            assert response.status == 200
            assert not fake.seen
            assert (response.headers["x-queue-lane"], response.headers["x-queue-place"]) == ("late", "1")
            assert float(response.headers["x-queue-wait"]) == pytest.approx(120 / 90, abs=0.01)
            got = events(response)
            for _ in range(3):  # at once, and with every reading
                comment = COMMENT.fullmatch((await anext(got))[1])
                assert comment is not None
                assert comment[1] == "1"
            least_s = asyncio.get_running_loop().time() - waits_since
            fake.free_tokens = 1000
            rest = [data async for _, data in got]
        assert rest[-1] == "[DONE]"
        status, answer, headers = await first
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
        assert headers["x-queue-lane"] == "late"
        assert float(headers["x-queue-wait"]) >= least_s - 0.005  # what it waited, to the millisecond
        assert "x-queue-place" not in headers


@pytest.mark.parametrize("headers", [{}, {"X-Resumable": "1"}], ids=["blank lines", "comments"])
async def test_the_official_client_reads_over_the_comments(
    serve: Serve,
    engine: EngineMaker,
    byte_level_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
) -> None:
    monkeypatch.setattr(queue_updates, "UPDATE_S", 0.02)
    served = await serve(ttft_target_s=TARGET_S, late_wait_s=60.0)
    async with (
        full(served, engine(says(byte_level_tokenizer))) as fake,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x") as client,
    ):
        stream = await client.completions.create(
            model="tiny", stream=True, prompt=[7] * 60, max_tokens=5, extra_headers=headers
        )
        await asyncio.sleep(0.2)
        fake.free_tokens = 1000
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "length"


async def test_on_time_answers_say_so(serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer) -> None:
    served = await serve(ttft_target_s=TARGET_S)
    async with engine(says(byte_level_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        _, _, headers = await raw(served.session, "/v1/completions", prompt="a", max_tokens=2)
        assert headers["x-queue-lane"] == "on_time"
        assert 0 <= float(headers["x-queue-wait"]) < 20


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_late_leaves_nothing(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, stream: bool
) -> None:
    served = await serve(ttft_target_s=TARGET_S, late_wait_s=60.0)
    async with full(served, engine(says(byte_level_tokenizer))) as fake:
        async with ClientSession(base_url=served.url) as leaver:
            asking = asyncio.create_task(raw(leaver, "/v1/completions", **LATE, stream=stream))
            await settled(lambda: served.streams.fleet.late.requests == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await settled(lambda: served.streams.fleet.queued == 0)
        fake.free_tokens = 1000
        status, _, _ = await raw(served.session, "/v1/completions", prompt="a", max_tokens=1)
        assert status == 200
        assert len(fake.seen) == 1


async def test_a_deadline_that_passes_while_late_names_the_wait(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(ttft_target_s=TARGET_S, late_wait_s=60.0)
    async with full(served, engine(says(byte_level_tokenizer))) as fake:
        now, limit_s = asyncio.get_running_loop().time, paced(2.0)
        sent = now()
        asking = asyncio.create_task(raw(served.session, "/v1/completions", **LATE, timeout=limit_s))
        await settled(lambda: served.streams.fleet.late.requests == 1)
        queued = now()
        status, body, headers = await asking
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        told = re.search(r"it waited ([\d.]+) s in the queue, 0 requests ahead of it", body["error"]["message"])
        assert told is not None
        # The timeout began no earlier than the request was sent, the wait no later than it was seen in the queue.
        assert sent + limit_s - queued - 0.06 <= float(told[1]) <= now() - sent + 0.06
        assert headers["x-should-retry"] == "false"
        await settled(lambda: served.streams.fleet.queued == 0)
        async with served.session.post(
            "/v1/completions", json={"model": "tiny", "stream": True, "timeout": 1.0, **LATE}
        ) as response:
            assert response.status == 200
            got = [data async for _, data in events(response)]
        assert got[-1] == "[DONE]"
        assert got[-2]["error"]["code"] == "deadline_exceeded"
        assert "in the queue" in got[-2]["error"]["message"]
        assert not fake.seen
        await settled(lambda: served.streams.fleet.queued == 0)


async def test_a_client_says_how_long_it_may_wait(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(ttft_target_s=TARGET_S, late_wait_s=60.0)
    async with full(served, engine(says(byte_level_tokenizer))) as fake:

        async def ask(wait: str, prompt: int) -> tuple[int, Any]:
            body = {"model": "tiny", "prompt": [7] * prompt, "max_tokens": 1}
            headers = {"X-Max-Queue-Wait": wait}
            async with served.session.post("/v1/completions", json=body, headers=headers) as response:
                return response.status, await response.json()

        for wait, prompt in (("0", 60), ("0.6", 60), ("1", 100)):
            status, body = await ask(wait, prompt)
            assert (status, body["error"]["code"], body["error"]["param"]) == (
                429,
                "rate_limit_exceeded",
                "x-max-queue-wait",
            )
        for wait in ("-1", "nan", "inf", "", "soon", "1e999"):
            status, body = await ask(wait, 60)
            assert (status, body["error"]["param"]) == (400, "x-max-queue-wait"), wait
        waiting = [asyncio.create_task(ask(wait, prompt)) for wait, prompt in (("0", 40), ("5", 60))]
        await settled(lambda: served.streams.fleet.queued == 2)
        fake.free_tokens = 1000
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]


async def test_a_full_queue_is_503(serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer) -> None:
    served = await serve(ttft_target_s=TARGET_S, late_wait_s=60.0, max_queued=2)
    async with full(served, engine(says(byte_level_tokenizer))) as fake:
        waiting = [asyncio.create_task(raw(served.session, "/v1/completions", **LATE)) for _ in range(2)]
        await settled(lambda: served.streams.fleet.queued == 2)
        status, body, headers = await raw(served.session, "/v1/completions", **LATE)
        assert (status, body["error"]["code"], body["error"]["limit"]) == (503, "queue_full", 2)
        assert 1 <= int(headers["Retry-After"]) <= 60
        fake.free_tokens = 1000
        assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200, 200]


async def shows(client: ClientSession, line: str) -> None:
    """Wait until the metrics of a gateway have a line."""
    bound = Patience(60)
    while bound.lasts():
        async with client.get("/metrics") as response:
            if re.search(f"^{line}$", await response.text(), re.MULTILINE):
                return
        await asyncio.sleep(0.05)
    pytest.fail(f"/metrics never showed {line}")


async def test_a_killed_gateways_late_requests_are_never_computed(
    launch: Launch, serve: Serve, port: int, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    """SIGKILL while they wait: another gateway withdraws them after the grace."""
    served = await serve(ttft_target_s=TARGET_S, late_wait_s=60.0, resume_s=0.5)
    process = launch("--resume-s", "0.5", "--late-wait-s", "60")
    url = f"http://127.0.0.1:{port}"
    await answers(f"{url}/ping")
    async with full(served, engine(says(byte_level_tokenizer))) as fake, ClientSession(base_url=url) as client:
        await answers(f"{url}/ready")
        for line in ("quire_queue_room_tokens{.*} 0.0", "quire_engine_requests_running{.*} 9.0"):
            await shows(client, line)  # the process knows that the engine is full
        asking = [asyncio.create_task(raw(client, "/v1/completions", **LATE)) for _ in range(3)]
        await settled(lambda: served.streams.fleet.late.requests == 3)
        process.kill()
        await asyncio.gather(*asking, return_exceptions=True)
        await settled(lambda: served.streams.fleet.queued == 0)  # after GATEWAY_MS and the grace of this gateway
        fake.free_tokens = 1000
        status, _, _ = await raw(served.session, "/v1/completions", prompt="a", max_tokens=1)
        assert status == 200
        assert len(fake.seen) == 1
