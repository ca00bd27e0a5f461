"""Resuming an answer: from any event of any stream, at any gateway, for its owner only."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from aiohttp import ClientError, ClientSession
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.wire.messages import Finish, Generate
from quire.service.api.position import Position
from quire.service.common.refusal import Refusal
from quire.service.delivery import resume
from quire.service.text.tokenizer import Tokenizer
from tests.pace import paced
from tests.service.fakes import FakeEngine, Served, settled

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
Event = tuple[str, Any]  # (event id, decoded data; "[DONE]" as it stands)

IDS = {"include_ids": True}
TEXT = "One request down, one token up 🙂 café. END of story. "


def says(tokenizer: Tokenizer) -> Callable[[Generate, int], tuple[list[int], Finish | None]]:
    """Each choice from another place of the text on; a stop token after 50 tokens where it is asked for."""

    def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        ids = tokenizer._encode(TEXT, special=False)
        tokens = (ids[index:] + ids[:index]) * (generate.max_new_tokens // len(ids) + 1)
        if generate.sampling.stop_token_ids:
            stop = generate.sampling.stop_token_ids[0]
            return [*tokens[:50], stop], Finish("stop", stop)
        return tokens, None

    return script


async def events(
    session: ClientSession,
    path: str,
    body: dict[str, Any] | None,
    *,
    most: int = -1,
    found: list[Event] | None = None,
    **headers: str,
) -> list[Event]:
    """The events of a stream: all of them, or the first `most`, after which the connection is closed.  They stand in
    `found` even when it breaks off."""
    found = [] if found is None else found
    ask = session.get(path, headers=headers) if body is None else session.post(path, json=body, headers=headers)
    async with ask as response:
        assert response.status == 200, await response.text()
        event_id = ""
        async for raw in response.content:
            line = raw.decode().rstrip("\n")
            if line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: "):
                found.append((event_id, line[6:] if line == "data: [DONE]" else json.loads(line[6:])))
                if len(found) == most:
                    response.close()
                    break
    return found


async def refusal(session: ClientSession, path: str, **headers: str) -> tuple[int, str]:
    async with session.get(path, headers=headers) as response:
        return response.status, (await response.json())["error"]["code"]


def merged(found: list[Event]) -> dict[str, Any]:
    """All a client can make of a stream, whatever its cuts; with what must be the same in each chunk."""
    whole: dict[str, Any] = defaultdict(list)
    for _, data in found:
        if data == "[DONE]":
            whole["done"].append(True)
            continue
        assert "error" not in data, data
        whole["frame"].append((data["id"], data["created"], data["model"], data["system_fingerprint"], data["object"]))
        if not data["choices"]:
            whole["usage"].append(data["usage"])
        for choice in data["choices"]:
            at = choice["index"]
            delta = choice.get("delta", choice)
            whole[f"text {at}"].append(delta.get("text") or delta.get("content") or "")
            whole[f"role {at}"] += [delta["role"]] if "role" in delta else []
            whole[f"end {at}"] += [(choice["finish_reason"], choice["stop_reason"])] if choice["finish_reason"] else []
            whole[f"ids {at}"] += choice.get("token_ids") or []
            for field, entries in (choice["logprobs"] or {}).items():
                whole[f"{field} {at}"] += entries
    whole["frame"] = sorted(set(whole["frame"]))
    return {key: "".join(parts) if key.startswith("text ") else parts for key, parts in whole.items() if parts}


HONOURS: dict[str, object] = {"honours": ["logprob_token_ids"]}
NAMED: dict[str, Any] = {"logprob_token_ids": [7, 260, 9], "return_tokens_as_token_ids": True}
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 40}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 25, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "Say it", "echo": True, "logprobs": 2, "max_tokens": 30}),
    ("/v1/completions", {"prompt": "a", "stop": ["END of", "zzz"], "max_tokens": 300, "return_token_ids": True}),
    (
        "/v1/completions",
        {"prompt": "a", "stop": "END", "include_stop_str_in_output": True, "max_tokens": 300, "n": 3, "logprobs": 0},
    ),
    ("/v1/completions", {"prompt": "a" * 50, "stop_token_ids": [300], "max_tokens": 300, "stop": ["café. X"]}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "n": 2,
            "max_tokens": 30,
            "logprobs": True,
            "top_logprobs": 2,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "stop": ["of story"], "max_tokens": 300, "n": 2},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a" * 60}],
            "stop_token_ids": [300],
            "max_tokens": 300,
            "stream_options": {"include_usage": True},
        },
    ),
    ("/v1/completions", {"prompt": "a", "n": 2, "logprobs": 1, "max_tokens": 40, **NAMED}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 30,
            "logprobs": True,
            **NAMED,
            "logprob_token_ids": list(range(128)),
        },
    ),
]


@pytest.mark.parametrize(("path", "asked"), FORMS, ids=[f"{at}" for at in range(len(FORMS))])
async def test_every_event_is_a_place_to_go_on_from(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, path: str, asked: dict[str, Any]
) -> None:
    """Text, logprobs, roles, ends and usage come once each, and in all are what an undisturbed client got."""
    first, other = await serve(), await serve()
    options = {"include_ids": True, **asked.get("stream_options", {})}
    body = {"model": "tiny", "stream": True, **asked, "stream_options": options}
    made = engine(says(byte_level_tokenizer))
    made.load_changes = HONOURS
    async with made as fake:
        await settled(lambda: bool(first.streams.fleet.engines) and bool(other.streams.fleet.engines))
        fake.burst = 2
        fake.step_s = 0.005
        whole = await events(first.session, path, body)
        expected = merged(whole)
        ids = [event_id for event_id, _ in whole]
        assert len(set(ids)) == len(ids)
        assert len(ids) >= 3  # as few, if all tokens arrive together
        for at, event_id in enumerate(ids[:-1]):
            rest = await events(other.session, path, body, **{"Last-Event-ID": event_id})
            assert merged(whole[: at + 1] + rest) == expected, event_id
            assert rest[-1] == whole[-1]
        request_id = ids[0].partition(":")[0]
        assert merged(await events(other.session, f"/v1/streams/{request_id}", None)) == expected
        middle = len(ids) // 2
        for headers in ({}, {"Last-Event-ID": ids[middle]}):  # the header is newer than the address
            asked_at = middle if headers else 0
            rest = await events(other.session, f"/v1/streams/{ids[0]}", None, **headers)
            assert merged(whole[: asked_at + 1] + rest) == expected
        async with other.session.get(f"/v1/streams/{request_id}", headers={"Last-Event-ID": ids[-1]}) as response:
            assert response.status == 204
        assert len(fake.seen) == len({generate.id for generate in fake.seen})  # nothing was computed twice


@pytest.mark.parametrize(
    ("path", "asked"), [FORMS[1], FORMS[4], FORMS[6], FORMS[9]], ids=["usage", "stop", "chat", "named"]
)
async def test_a_running_answer_goes_on_elsewhere_as_often_as_it_is_cut(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, path: str, asked: dict[str, Any]
) -> None:
    gateways = [await serve(), await serve(), await serve()]
    body = {"model": "tiny", "stream": True, **asked}
    made = engine(says(byte_level_tokenizer), step_s=0.05)
    made.load_changes = HONOURS
    async with made as fake:
        await settled(lambda: all(served.streams.fleet.engines for served in gateways))
        expected = merged(await events(gateways[0].session, path, body))
        found: list[Event] = []
        headers = {"X-Resumable": "true"}
        for cut in range(6):
            most = 1 if cut == 1 else 5
            found += await events(gateways[cut % 3].session, path, body, most=most, **headers)
            assert fake.busy
            headers = {"Last-Event-ID": found[-1][0]}
        found += await events(gateways[0].session, path, body, **headers)
        got = merged(found)
        assert got.pop("frame") != expected.pop("frame")  # another request
        assert got == expected
        await settled(lambda: not fake.busy)
        for served in gateways:
            await settled(lambda served=served: len(served.streams) == 0)  # type: ignore[misc]


async def test_who_may_come_back_and_to_what(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(api_keys=["mine", "other"])
    session, mine = served.session, {"Authorization": "Bearer mine"}
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        body = {"model": "tiny", "prompt": "a", "max_tokens": 9, "stream": True, "stream_options": IDS}
        found = await events(session, "/v1/completions", body, **mine)
        last = found[0][0]
        request_id = last.partition(":")[0]
        address = f"/v1/streams/{request_id}"
        assert merged(await events(session, address, None, **mine)) == merged(found)
        other = {"Authorization": "Bearer other"}
        assert await refusal(session, address, **other) == (404, "stream_not_found")
        assert await refusal(session, address) == (401, "invalid_api_key")
        young = resume.new_id("cmpl-", int(request_id[5:17], 16))
        assert await refusal(session, f"/v1/streams/{young}", **mine) == (404, "stream_not_found")
        old = resume.new_id("cmpl-", int(request_id[5:17], 16) - 3_600_000)
        assert await refusal(session, f"/v1/streams/{old}", **mine) == (410, "stream_gone")
        for bad in (
            "x",
            f"{request_id}:",
            f"{request_id}:1:",
            f"{request_id}:1:7",
            f"{request_id}:1,2",
            f"{request_id}:100",
            f"{request_id}:-1",
            f"{request_id}:1:usage,done",
            f"{request_id}x:1",
            f"{request_id}:1:0x",
            f"{request_id}:١",
        ):
            if bad == f"{request_id}:":
                continue  # nothing at all of its one choice: from the start
            status, code = await refusal(session, address, **{**mine, "Last-Event-ID": bad.encode().decode("latin-1")})
            assert (status, code) == (400, "invalid_event_id"), bad
        assert await refusal(session, f"/v1/streams/{old}", **{**mine, "Last-Event-ID": last}) == (
            400,
            "invalid_event_id",
        )
        async with session.post("/v1/chat/completions", json=body, headers={**mine, "Last-Event-ID": last}) as response:
            assert response.status == 404
        assert len(fake.seen) == 1


async def test_a_lost_client_is_waited_for_only_if_it_said_that_it_comes_back(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(resume_s=paced(0.3))
    body = {"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": True, "stream_options": IDS}
    async with engine(says(byte_level_tokenizer), step_s=paced(0.02)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        [(left, _)] = await events(served.session, "/v1/completions", body, most=1)
        await settled(lambda: len(fake.aborted) == 1)
        assert await refusal(served.session, f"/v1/streams/{left}") == (410, "stream_gone")
        for headers in ({"Idempotency-Key": "k"}, {"X-Resumable": "1"}):
            count = len(fake.aborted)
            [(left, _)] = await events(served.session, "/v1/completions", body, most=1, **headers)
            await settled(lambda: len(served.streams) == 0)
            assert fake.busy
            await settled(lambda count=count: len(fake.aborted) == count + 1 and not fake.busy)  # type: ignore[misc]
            assert await refusal(served.session, f"/v1/streams/{left}") == (410, "stream_gone")


async def test_an_answer_is_cancelled_at_any_gateway_by_its_owner_alone(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    first, other = await serve(api_keys=["a", "b"]), await serve(api_keys=["a", "b"])
    body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 400, "stream": True}
    mine = {"Authorization": "Bearer a", "X-Resumable": "1"}
    async with engine(says(byte_level_tokenizer), step_s=0.02) as fake:
        await settled(lambda: bool(first.streams.fleet.engines) and bool(other.streams.fleet.engines))
        for leave_first in (True, False):
            count, fake.burst = len(fake.aborted), 1
            async with first.session.post("/v1/completions", json=body, headers=mine) as response:
                answer = response.headers["x-answer-id"]
                fake.burst = 0  # the answer has begun, and never ends by itself
                await settled(lambda: fake.busy)
                if leave_first:
                    response.close()
                    await settled(lambda: len(first.streams) == 0)
                for key, status in (("b", 404), ("a", 204), ("a", 204)):
                    headers = {"Authorization": f"Bearer {key}"}
                    async with other.session.delete(f"/v1/streams/{answer}", headers=headers) as deleted:
                        assert deleted.status == status
                await settled(lambda count=count: len(fake.aborted) == count + 2 and not fake.busy)  # type: ignore[misc]
                if not leave_first:
                    ending = (await response.text()).strip().splitlines()
                    assert '"code":"cancelled"' in "".join(ending)
                    assert ending[-1] == "data: [DONE]"
            assert await refusal(first.session, f"/v1/streams/{answer}", **mine) == (410, "stream_gone")
            await settled(
                lambda: not first.streams.submissions._submissions and not other.streams.submissions._submissions
            )


async def test_a_retry_attaches_to_the_running_and_to_the_finished_answer(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    first, other = await serve(api_keys=["a", "b"]), await serve(api_keys=["a", "b"])
    key = {"Authorization": "Bearer a", "Idempotency-Key": "order-66"}
    body = {"model": "tiny", "prompt": "a", "max_tokens": 60, "stream": True}
    async with engine(says(byte_level_tokenizer), step_s=0.01) as fake:
        await settled(lambda: bool(first.streams.fleet.engines) and bool(other.streams.fleet.engines))
        running = asyncio.create_task(events(first.session, "/v1/completions", body, **key))
        await settled(lambda: fake.busy)
        retries = await asyncio.gather(
            *(events(served.session, "/v1/completions", body, **key) for served in (first, other, other))
        )
        whole = merged(await running)
        assert [merged(found) for found in retries] == [whole] * 3
        assert merged(await events(other.session, "/v1/completions", body, **key)) == whole
        assert len(fake.seen) == 1

        async with other.session.post("/v1/completions", json={**body, "max_tokens": 61}, headers=key) as response:
            assert response.status == 409
            assert (await response.json())["error"]["code"] == "idempotency_key_reused"
        async with other.session.post("/v1/completions", json=body, headers={**key, "Idempotency-Key": ""}) as response:
            assert response.status == 400
        mine = {**key, "Authorization": "Bearer b"}  # the same key of another client is a different key
        assert merged(await events(other.session, "/v1/completions", body, **mine))["text 0"] == whole["text 0"]
        assert len(fake.seen) == 2

        whole_body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
        answers = []
        for served in (first, other):
            ask = served.session.post("/v1/chat/completions", json=whole_body, headers={**key, "Idempotency-Key": "w"})
            answers.append(asyncio.create_task(_json(ask)))
        assert await answers[0] == await answers[1]
        assert len(fake.seen) == 3


async def _json(ask: Any) -> Any:
    async with ask as response:
        assert response.status == 200
        return await response.json()


async def test_a_key_whose_answer_came_to_nothing_is_free(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(resume_s=0.05)
    key = {"Idempotency-Key": "k"}
    body = {"model": "tiny", "prompt": "a", "max_tokens": 30, "stream": True}
    async with engine(says(byte_level_tokenizer), step_s=0.02) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        await events(served.session, "/v1/completions", body, most=1, **key)
        await settled(lambda: len(fake.aborted) == 1)  # no client resumed in time
        assert merged(await events(served.session, "/v1/completions", body, **key))["end 0"] == [("length", None)]
        assert len(fake.seen) == 2

        async with served.session.post("/v1/completions", json={**body, "timeout": 0.1}, headers=key) as response:
            assert response.status == 409
        key = {"Idempotency-Key": "l"}
        soon = {"X-Request-Timeout": "0.2"}  # a header: the body must be that of the retry, which may take its time
        fake.holding = True
        async with served.session.post("/v1/completions", json=body, headers=key | soon) as response:
            assert response.status == 504
        fake.holding = False
        fake.step_s = 0.0
        assert merged(await events(served.session, "/v1/completions", body, **key))["end 0"] == [("length", None)]
        fake.load_changes = {"draining": True}
        await settled(lambda: any(load.draining for load in served.streams.fleet.engines))
        key = {"Idempotency-Key": "m"}
        async with served.session.post("/v1/completions", json=body, headers=key | soon) as response:
            assert response.status in (429, 503)
        fake.load_changes = {}
        await settled(lambda: not any(load.draining for load in served.streams.fleet.engines))
        assert merged(await events(served.session, "/v1/completions", body, **key))["end 0"] == [("length", None)]


async def test_a_client_that_is_back_before_its_withdrawal_reads_on_and_may_leave_again(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    """Redis does not answer when the withdrawal is sent.  The client is back before it is sent again."""
    served = await serve(resume_s=0.0)
    withdrawals = served.streams._bus._withdrawals
    send, key = withdrawals._send, {"Idempotency-Key": "k"}
    body = {"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": True}

    async def lose(_: object) -> bool:
        return False

    async with engine(says(byte_level_tokenizer), step_s=paced(0.02)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        withdrawals._send = lose
        await events(served.session, "/v1/completions", body, most=1, **key)
        await settled(lambda: len(withdrawals) == 1)
        async with served.session.post("/v1/completions", json=body, headers=key) as response:
            await response.content.readuntil(b"data: ")
            assert len(withdrawals) == 0
            withdrawals._send = send
            await served.streams.fleet_watch.refresh()
            assert not fake.aborted
        await settled(lambda: len(fake.aborted) == 1 and not fake.busy)
        assert len(fake.seen) == 1


@pytest.mark.usefixtures("patient")
async def test_requests_retried_twice_each_are_computed_once(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    """Three attempts each, at either gateway, at once or after each other, some given up before they are answered."""
    gateways = [await serve(late_wait_s=1000.0), await serve(late_wait_s=1000.0)]
    count = 1000
    slots = asyncio.Semaphore(30)

    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: all(served.streams.fleet.engines for served in gateways))

        async def attempt(number: int, turn: int) -> str | None:
            body = {"model": "tiny", "prompt": f"number {number}", "max_tokens": 4}
            session = gateways[(number + turn) % 2].session
            hurry = 0.01 if turn == 0 and number % 3 == 0 else None
            try:
                async with asyncio.timeout(hurry):
                    key = {"Idempotency-Key": f"n{number}"}
                    async with session.post("/v1/completions", json=body, headers=key) as response:
                        assert response.status == 200, await response.text()
                        return str((await response.json())["id"])
            except TimeoutError:
                assert hurry is not None
                return None

        async def client(number: int) -> None:
            async with slots:
                if number % 2:
                    found = set(await asyncio.gather(*(attempt(number, turn) for turn in range(3))))
                else:
                    found = {await attempt(number, turn) for turn in range(3)}
                assert len(found - {None}) == 1

        await asyncio.gather(*(client(number) for number in range(count)))
        assert len(fake.seen) == count
        assert fake.generated == 4 * count


async def test_at_the_end_of_a_drain_streams_move_on_and_plain_ones_are_told(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    leaving, staying = await serve(drain_s=0.1), await serve()
    found: list[Event] = []
    begun: list[Event] = []  # events of the plain stream; before its first one it is answered with a status
    body = {"model": "tiny", "prompt": "a", "max_tokens": 100, "stream": True}
    async with engine(says(byte_level_tokenizer), step_s=paced(0.02)) as fake:
        await settled(lambda: bool(leaving.streams.fleet.engines) and bool(staying.streams.fleet.engines))
        expected = merged(await events(staying.session, "/v1/completions", body))

        async def resuming() -> list[Event]:
            with pytest.raises(ClientError):  # broken off: no client takes it for a complete answer
                await events(leaving.session, "/v1/completions", body, found=found, **{"X-Resumable": "1"})
            last = {"Last-Event-ID": found[-1][0]}
            return found + await events(staying.session, "/v1/completions", body, **last)

        async def plain() -> list[Event]:
            return await events(leaving.session, "/v1/completions", body, found=begun)

        async def whole() -> int:
            ask = {**body, "stream": False}
            key = {"Idempotency-Key": "k"}
            async with leaving.session.post("/v1/completions", json=ask, headers=key) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
            async with staying.session.post("/v1/completions", json=ask, headers=key) as response:
                return int((await response.json())["usage"]["completion_tokens"])

        tasks = asyncio.gather(resuming(), plain(), whole())
        await settled(lambda: len(fake.seen) == 4 and bool(found) and bool(begun))
        fake.burst = 0  # no answer comes to its end before the drain does
        leaving.gateway.refuse_new()
        assert (await leaving.session.get("/ready")).status == 503
        await leaving.gateway.drain()
        fake.burst = 1
        moved, told, tokens = await tasks
        assert moved[-1][1] == "[DONE]"
        assert merged(moved)["text 0"] == expected["text 0"]
        assert told[-2][1]["error"]["code"] == "cancelled"
        assert tokens == 100
        assert len(fake.seen) == 4


@pytest.mark.parametrize("headers", [{}, {"X-Resumable": "1"}], ids=["blank lines", "comments"])
async def test_openais_client_reads_on_after_a_keep_alive(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, headers: dict[str, str]
) -> None:
    """After an id it takes a blank line for an event, even one after nothing but a comment."""
    served = await serve(heartbeat_s=0.05)
    async with (
        engine(says(byte_level_tokenizer), step_s=0.2) as fake,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client,
    ):
        await settled(lambda: bool(served.streams.fleet.engines))
        stream = await client.completions.create(
            model="tiny", prompt="a", max_tokens=4, stream=True, extra_headers=headers
        )
        assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "length"
        assert fake.generated == 4


@given(
    st.lists(st.none() | st.integers(0, 10**9 - 1), min_size=1, max_size=5),
    st.sets(st.integers(0, 4)),
    st.sampled_from(["", "usage", "done"]),
)
def test_positions_read_back_what_they_say(tokens: list[int | None], ended: set[int], stage: str) -> None:
    ends = {choice for choice in ended if choice < len(tokens) and tokens[choice] is not None}
    counts = ",".join("" if count is None else str(count) for count in tokens)
    last = stage or ",".join(map(str, ends))
    found = Position.parse(f"cmpl-{'0' * 32}:{counts}" + (f":{last}" if last else ""))
    assert found.tokens == tuple(tokens)
    assert found.ended == (frozenset(range(len(tokens))) if stage else ends)
    assert (found.usage, found.done) == (bool(stage), stage == "done")


@given(st.text(max_size=60))
def test_nothing_but_an_event_id_is_one(text: str) -> None:
    with pytest.raises(Refusal) as caught:
        Position.parse(text)
    assert caught.value.status == 400


def falls_silent(tokenizer: Tokenizer) -> Callable[[Generate, int], tuple[list[int], Finish | None]]:
    """A text that stops without an end, so that only a withdrawal ends the request."""
    return lambda generate, index: (tokenizer._encode(TEXT, special=False), None)


async def test_a_client_ends_a_request_that_it_could_resume(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    """At the gateway that it left, and at another one."""
    gateways = [await serve(api_keys=["k", "other"]), await serve(api_keys=["k", "other"])]
    key = {"Authorization": "Bearer k"}
    body = {"prompt": "a", "max_tokens": 400, "stream": True}
    async with engine(falls_silent(byte_level_tokenizer)) as fake:
        await settled(lambda: all(one.streams.fleet.engines for one in gateways))
        for at in gateways:
            found = await events(gateways[0].session, "/v1/completions", body, most=3, **key, **{"X-Resumable": "1"})
            last = found[-1][0]
            request_id = last.split(":")[0]
            async with at.session.delete(f"/v1/streams/{request_id}", headers={"Authorization": "Bearer other"}) as no:
                assert (no.status, (await no.json())["error"]["code"]) == (404, "stream_not_found")
            assert fake.busy
            async with at.session.delete(f"/v1/streams/{last}", headers=key) as response:
                assert response.status == 204
            await settled(lambda: not fake.busy)
            assert any(order.startswith(request_id) for order in fake.aborted)
        async with gateways[0].session.delete("/v1/streams/cmpl-1", headers=key) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "invalid_event_id")


async def test_other_readers_of_a_request_that_was_ended_get_an_error(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    body = {"prompt": "a", "max_tokens": 400, "stream": True}
    async with engine(falls_silent(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        found: list[Event] = []
        headers = {"X-Resumable": "1"}
        reading = asyncio.create_task(events(served.session, "/v1/completions", body, found=found, **headers))
        await settled(lambda: len(found) > 3)
        async with served.session.delete(f"/v1/streams/{found[0][0]}") as response:
            assert response.status == 204
        await reading
        assert found[-1][1] == "[DONE]"
        assert found[-2][1]["error"]["code"] == "cancelled"
        await settled(lambda: not fake.busy)
