"""Background responses: computed without a client, resumed by event number, cancelled, taken over by a live gateway."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from aiohttp import ClientSession

from quire.engine.wire.messages import Finish
from quire.service.http import background
from quire.service.http.stored_responses import StoredResponses
from quire.service.text.tokenizer import Tokenizer
from tests.pace import patience
from tests.service.api.test_responses import ASK, PATH, bare, events, folded, get, post
from tests.service.api.test_tools import model, says
from tests.service.fakes import FakeEngine, Served, settled

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
Launch = Callable[..., subprocess.Popen[str]]

LATER = {**ASK, "background": True}
LIMIT_S = 60  # a hang


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RENEW_S", 0.05)


async def state(session: ClientSession, response_id: str, *wanted: str) -> dict[str, Any]:
    """A background response, once it has one of the wanted states."""
    async with asyncio.timeout(patience(LIMIT_S)):
        while True:
            status, found = await get(session, f"{PATH}/{response_id}")
            assert status == 200
            if found["status"] in wanted:
                return dict(found)
            await asyncio.sleep(0.02)


async def ended(session: ClientSession, response_id: str) -> dict[str, Any]:
    """A background response, once it has ended."""
    return await state(session, response_id, "completed", "incomplete", "failed", "cancelled")


async def begin(served: Served, fields: dict[str, Any] | None = None) -> dict[str, Any]:
    status, made = await post(served.session, {**LATER, **(fields or {})})
    assert (status, made["status"], made["output"], made["background"]) == (200, "queued", [], True)
    return dict(made)


async def events_after(served: Served, response_id: str, after: int | None = None) -> list[dict[str, Any]]:
    query = "?stream=true" + ("" if after is None else f"&starting_after={after}")
    async with served.session.get(f"{PATH}/{response_id}{query}") as response:
        assert response.status == 200, await response.text()
        return events(await response.read())


async def test_it_is_computed_without_a_client(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        fake.holding = True
        made = await begin(served)
        assert (await get(served.session, f"{PATH}/{made['id']}"))[1] == made
        status, error = await post(served.session, {**ASK, "previous_response_id": made["id"]})
        assert (status, error["error"]["param"]) == (400, "previous_response_id")  # it has not ended
        fake.holding = False
        found = await ended(served.session, made["id"])
        _, whole = await post(served.session, ASK)
    assert found["status"] == "completed"
    assert bare({**found, "background": False}) == bare(whole)


async def test_the_official_client_polls_and_cancels(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    """The cancel arrives at another gateway; the one that answers for the response stops its engine."""
    first, other = await serve(tools_tokenizer), await serve(tools_tokenizer)
    async with (
        model(engine, lambda *_: (tools_tokenizer._encode("a " * 200, special=False), None), step_s=0.02) as fake,
        openai.AsyncOpenAI(base_url=f"{first.url}/v1", api_key="x", max_retries=0) as client,
        openai.AsyncOpenAI(base_url=f"{other.url}/v1", api_key="x", max_retries=0) as elsewhere,
    ):
        await settled(lambda: bool(first.streams.fleet.engines) and bool(other.streams.fleet.engines))
        made = await client.responses.create(model="tiny", input="Rain?", background=True)
        await state(other.session, made.id, "in_progress")
        fake.burst = 0  # the answer never ends by itself
        cancelled = await elsewhere.responses.cancel(made.id)
        assert cancelled.status == "cancelled"
        await settled(lambda: bool(fake.aborted))
        await settled(lambda: not first.gateway.capacity.answering)
        assert (await client.responses.retrieve(made.id)).status == "cancelled"
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        fake.burst = 1
        done = await client.responses.create(model="tiny", input="Rain?", max_output_tokens=2)
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(done.id)


async def test_a_deleted_one_stops(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, lambda *_: ([60] * 300, None), step_s=0.02) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        fake.burst = 0  # the answer never ends by itself
        made = await begin(served)
        async with served.session.delete(f"{PATH}/{made['id']}") as response:
            assert (await response.json())["deleted"] is True
        await settled(lambda: not served.gateway.capacity.answering)
        await settled(lambda: not fake.busy)
        assert (await get(served.session, f"{PATH}/{made['id']}"))[0] == 404


@pytest.mark.parametrize("burst", [1, 7])
async def test_its_events_continue_after_any_number_at_any_gateway(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, burst: int
) -> None:
    first, other = await serve(tools_tokenizer), await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer)) as fake:
        await settled(lambda: bool(first.streams.fleet.engines) and bool(other.streams.fleet.engines))
        fake.burst = burst
        fake.holding = True
        read = b""
        async with first.session.post(PATH, json={**LATER, "stream": True}) as response:
            assert response.status == 200
            fake.holding = False
            while read.count(b"\n\n") < 5:  # then the client leaves
                read += await response.content.readany()
        had = events(read[: read.rindex(b"\n\n")])
        assert had[0]["response"]["status"] == "queued"
        response_id = had[0]["response"]["id"]
        whole = await events_after(other, response_id)
        assert whole[: len(had)] == had
        assert folded(whole)["status"] == "completed"
        for after in range(burst, len(whole), len(whole) // 5):
            assert await events_after(other, response_id, after) == whole[after + 1 :]
        found = await ended(first.session, response_id)
        assert found == whole[-1]["response"]
        for query, status in (("starting_after=x", 400), ("starting_after=1", 404)):
            unknown = response_id if status == 400 else "resp_1"
            assert (await get(first.session, f"{PATH}/{unknown}?stream=true&{query}"))[0] == status


async def test_a_renewal_while_it_begins_does_not_stop_it(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis does not know it as running before it is stored."""
    monkeypatch.setattr(background, "RENEW_S", 3600)
    served = await serve(tools_tokenizer)
    jobs = served.gateway.handlers.background
    begin_storing = StoredResponses.begin

    async def begin_late(*given: Any) -> None:
        await jobs.renew()
        await begin_storing(*given)

    monkeypatch.setattr(StoredResponses, "begin", begin_late)
    async with model(engine, says(tools_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        found = await ended(served.session, (await begin(served))["id"])
    assert found["status"] == "completed"


async def test_it_may_fail(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, lambda *_: ([5, 6], Finish("error", message="it broke"))):
        await settled(lambda: bool(served.streams.fleet.engines))
        found = await ended(served.session, (await begin(served))["id"])
    assert (found["status"], found["error"]["message"]) == ("failed", "engine_error: it broke")


async def test_one_that_is_refused_is_no_response(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer, responses_mib=1)
    async with model(engine, says(tools_tokenizer, "No.")) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        status, error = await post(served.session, {**LATER, "max_output_tokens": 5000})
        assert (status, error["error"]["param"]) == (400, "input")
        items = [{"role": "user", "content": "a", "note": "x" * 2**20}]  # more than may be stored
        body = io.BytesIO(json.dumps({**LATER, "input": items}).encode())
        headers = {"Content-Type": "application/json"}
        async with served.session.post(PATH, data=body, headers=headers) as response:
            error = await response.json()
        assert (response.status, error["error"]["code"]) == (400, "too_long")
        await settled(lambda: not served.gateway.capacity.answering and not fake.busy)
        async with served.session.get("/metrics") as page:
            counted = await page.text()
    assert 'quire_requests_total{endpoint="/v1/responses",gateway="g0",status="400"} 2.0' in counted
    assert "in the background" not in counted  # each refused request is counted once


async def test_a_retry_under_an_idempotency_key_is_the_same_response(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    key = {"Idempotency-Key": "one"}
    async with model(engine, says(tools_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        fake.holding = True
        _, made = await post(served.session, LATER, **key)
        assert await post(served.session, LATER, **key) == (200, made)
        fake.holding = False
        found = await ended(served.session, made["id"])
        assert await post(served.session, LATER, **key) == (200, found)
        assert len(fake.seen) == 1


async def test_a_gateway_that_drains_hands_it_over(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    first, other = await serve(tools_tokenizer, drain_s=0.05), await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer), step_s=0.01) as fake:
        await settled(lambda: bool(first.streams.fleet.engines) and bool(other.streams.fleet.engines))
        fake.holding = True
        made = await begin(first)
        first.gateway.refuse_new()
        await first.gateway.drain()
        assert not first.gateway.capacity.answering
        fake.holding = False
        found = await ended(other.session, made["id"])
    assert found["status"] == "completed"
    assert len(found["output"]) == 5


async def test_one_whose_tokens_are_gone_is_reported_as_failed(serve: Serve, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer)
    made: dict[str, Any] = {"id": f"resp_{1:032x}", "status": "in_progress", "output": []}
    await served.streams.responses.put(
        "key ", made["id"], json.dumps(made).encode(), ended=False, ttl_ms=60_000, max_bytes=2**20, given=b"[]",
        lease_ms=1,
    )  # fmt: skip
    found = await ended(served.session, made["id"])
    assert found["status"] == "failed"
    assert "tokens are not kept" in found["error"]["message"]


async def test_the_response_of_a_killed_gateway_is_taken_over(
    serve: Serve,
    engine: EngineMaker,
    launch: Launch,
    byte_level_tokenizer: Tokenizer,
    port: int,
) -> None:
    tokens = byte_level_tokenizer._encode("One request down, one token up. " * 8, special=False)
    process = launch()
    async with engine(lambda *_: (tokens, Finish("stop"))) as fake, ClientSession(f"http://127.0.0.1:{port}") as client:
        fake.step_s = 0.02
        await up(client)
        _, made = await post(client, {"input": "Go", "background": True, "max_output_tokens": 400})
        await state(client, made["id"], "in_progress")
        process.send_signal(signal.SIGKILL)
        served = await serve()
        await served.streams.responses.renew(0, [made["id"]], 0)  # its lease, of 6 s, has lapsed
        found = await ended(served.session, made["id"])
    assert found["status"] == "completed"
    assert found["output"][0]["content"][0]["text"] == byte_level_tokenizer.text_of(tokens)
    assert found["usage"]["output_tokens"] == len(tokens)


async def up(client: ClientSession) -> None:
    async with asyncio.timeout(patience(LIMIT_S)):
        while True:
            try:
                async with client.get("/ready") as response:
                    if response.status == 200:
                        return
            except OSError:
                pass
            await asyncio.sleep(0.1)


async def test_a_fault_of_one_renewal_ends_no_lease(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    renewals = 0

    async def renew(self: background.Background) -> None:
        nonlocal renewals
        renewals += 1
        if renewals == 1:
            raise ValueError("a bug")

    monkeypatch.setattr(background.Background, "renew", renew)
    await serve()
    await settled(lambda: renewals > 2)
