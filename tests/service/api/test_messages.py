"""Anthropic's format over HTTP: requests translated, answers streamed and complete, refusals in its shape.

No client of Anthropic's is installed.  `folded` reads a stream as the published grammar of its events says, and fails
on what the grammar does not allow.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.wire.messages import Finish
from quire.service.api.anthropic.messages import NAMES, MessageFormat, parse, parse_count
from quire.service.api.api import NO_DEFAULTS
from quire.service.api.format import Prompted
from quire.service.api.valid_request import ValidRequest
from quire.service.common.pacing import Pacer
from quire.service.common.refusal import Refusal, renamed
from quire.service.config import GatewayConfig
from quire.service.output.choice_delta import ChoiceDelta
from quire.service.text.tokenizer import Tokenizer
from tests.service.api.test_tools import ANSWER, BROKEN, model, says
from tests.service.fakes import FakeEngine, Served, failed_within, settled
from tests.service.output.cuts import pieces_of

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASK: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "Rain?"}],
    "tools": [WEATHER, {"name": "time", "input_schema": {"type": "object"}}],
}


async def post(
    session: ClientSession, body: dict[str, Any], path: str = "/v1/messages", **headers: str
) -> tuple[int, Any]:
    async with session.post(path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def streamed(session: ClientSession, body: dict[str, Any], **headers: str) -> bytes:
    async with session.post("/v1/messages", json={**body, "stream": True}, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return await response.read()


def events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream: each has its type twice, as the event's name and in its JSON."""
    found = []
    for frame in data.decode().split("\n\n"):
        if not frame:
            continue
        name, line = frame.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def folded(data: bytes) -> dict[str, Any]:
    """Return the message that a stream builds, by the grammar of Anthropic's events."""
    message: dict[str, Any] = {}
    opened: int | None = None
    arguments = ""
    state = "before"
    for event in events(data):
        kind = event["type"]
        assert state != "over", event
        if kind == "ping":
            continue
        if kind == "message_start":
            assert state == "before"
            message, state = event["message"], "content"
            assert (message["content"], message["stop_reason"], message["type"]) == ([], None, "message")
        elif kind == "content_block_start":
            assert state == "content"
            assert opened is None
            assert event["index"] == len(message["content"])
            opened, arguments = event["index"], ""
            message["content"].append(event["content_block"])
        elif kind in ("content_block_delta", "content_block_stop"):
            assert event["index"] == opened
            block = message["content"][-1]
            if kind == "content_block_stop":
                opened = None
                if block["type"] == "tool_use":
                    block["input"] = parsed(arguments)
            elif block["type"] == "tool_use":
                assert event["delta"]["type"] == "input_json_delta"
                arguments += event["delta"]["partial_json"]
            else:
                name, field = DELTAS[block["type"]]
                assert event["delta"]["type"] == name
                block[field] += event["delta"][field]
        elif kind == "message_delta":
            assert (state, opened) == ("content", None)
            message |= event["delta"]
            message["usage"] |= event["usage"]
            state = "ended"
        else:
            assert (kind, state) == ("message_stop", "ended")
            state = "over"
    assert state == "over"
    return message


def parsed(arguments: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(arguments)
    except ValueError:
        return {}
    return found


def without_id(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose ids, which differ between two requests, are left out."""
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


async def test_a_stream_and_a_whole_answer_are_the_same_message(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        status, whole = await post(served.session, ASK)
        fake.burst = 5
        told = folded(await streamed(served.session, ASK))
    assert status == 200
    assert without_id(told) == without_id(whole)
    thought, text, weather, clock, broken = whole["content"]
    assert thought == {"type": "thinking", "thinking": "They ask about rain 🙂.", "signature": ""}
    assert text == {"type": "text", "text": "I look."}
    assert (weather["name"], weather["input"]) == ("weather", {"city": 'Par"is'})
    assert (clock["name"], clock["input"]) == ("time", {})
    assert broken["text"].strip() == BROKEN  # what cannot be read as a call is text, in its place
    assert (whole["stop_reason"], whole["stop_sequence"], whole["role"]) == ("tool_use", None, "assistant")
    assert whole["id"].startswith("msg_")
    usage = whole["usage"]
    prompt = len(fake.seen[0].token_ids)
    assert usage["cache_read_input_tokens"] == prompt // 16 * 16
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    assert usage["output_tokens"] == len(tools_tokenizer._encode(ANSWER, special=False)) + 1


async def test_why_an_answer_stopped(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer)
    plain = {**ASK, "tools": []}
    script = says(tools_tokenizer, "One two three.")
    async with model(engine, lambda one, at: script(one, at) if one.max_new_tokens > 5 else ([60] * 9, None)):
        await settled(lambda: bool(served.streams.fleet.engines))
        for fields, reason, sequence, text in (
            ({}, "end_turn", None, "One two three."),
            ({"stop_sequences": ["thr", "x"]}, "stop_sequence", "thr", "One two "),
            ({"max_tokens": 5}, "max_tokens", None, None),
        ):
            for message in (
                (await post(served.session, {**plain, **fields}))[1],
                folded(await streamed(served.session, {**plain, **fields})),
            ):
                assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
                assert text is None or [block["text"] for block in message["content"]] == [text]


async def test_the_request_reaches_the_chat_template(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    """A coding agent's second turn: system blocks, thinking, a call, its result and more text."""
    served = await serve(tools_tokenizer)
    body = {
        **ASK,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_abcdefghi", "name": "weather", "input": {"city": "Ö"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_abcdefghi",
                        "content": [{"type": "text", "text": "21"}],
                        "is_error": False,
                    },
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "anna"},
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
    }
    async with model(engine, says(tools_tokenizer, "No.")) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
        async with served.session.post("/v1/messages", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            assert "x-unknown-fields" not in response.headers
            assert response.headers["request-id"] == response.headers["x-request-id"]
        counted = {name: value for name, value in body.items() if name in ("messages", "system", "tools", "thinking")}
        _, count = await post(served.session, counted, "/v1/messages/count_tokens")
    prompt = tools_tokenizer.text_of(fake.seen[0].token_ids, skip_special=False)
    assert count == {"input_tokens": len(fake.seen[0].token_ids)}
    chat = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n"
        '<think>\nhm\n</think>\n\nI look.<tool_call>\n{"name": "weather", "arguments": {"city": "Ö"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>tool\n21<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert prompt.endswith(chat)
    sampling = fake.seen[0].sampling
    assert (sampling.temperature, sampling.top_k, round(sampling.top_p, 3)) == (0.5, 7, 0.9)


async def test_a_last_turn_of_the_assistant_is_continued(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    messages = [*ASK["messages"], {"role": "assistant", "content": "It"}]
    async with model(engine, says(tools_tokenizer, " rains.")) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        _, whole = await post(served.session, {"max_tokens": 20, "messages": messages})
    assert whole["content"] == [{"type": "text", "text": " rains."}]
    assert tools_tokenizer.text_of(fake.seen[0].token_ids, skip_special=False).endswith("assistant\nIt")


async def test_errors_have_anthropics_shape(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer, api_keys=["k"])
    async with model(engine, lambda *_: ([5], Finish("error", message="it broke"))):
        await settled(lambda: bool(served.streams.fleet.engines))
        status, error = await post(served.session, ASK)
        assert (status, error["error"]["type"]) == (401, "authentication_error")
        key = {"x-api-key": "k"}
        status, error = await post(served.session, {**ASK, "model": "claude"}, **key)
        assert (status, error["type"], error["error"]["type"]) == (404, "error", "not_found_error")
        async with served.session.get("/v1/messages", headers={**key, "X-Request-Id": "r-1"}) as response:
            assert response.status == 405
            found = await response.json()
        assert found == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "GET /v1/messages: Method Not Allowed"},
            "request_id": "r-1",
        }
        status, error = await post(served.session, ASK, **key)
        assert (status, error["error"]["type"]) == (500, "api_error")
        bearer = {"Authorization": "Bearer k"}
        status, _ = await post(served.session, ASK["messages"][0], "/v1/messages/count_tokens", **bearer)
        assert status == 400


async def test_a_failure_within_a_stream_is_its_last_event(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, lambda *_: ([5, 6, 7], None)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        found = events(await failed_within(served.session, "/v1/messages", {**ASK, "tools": []}, fake))
    assert [found[0]["type"], found[-1]["type"]] == ["message_start", "error"]
    assert found[-1]["error"] == {"type": "api_error", "message": "it broke"}


async def test_a_silent_stream_begins_and_pings(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer, heartbeat_s=0.05)
    async with model(engine, says(tools_tokenizer, "No."), step_s=0.0) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        fake.holding = True
        async with served.session.post("/v1/messages", json={**ASK, "stream": True}) as response:
            seen = b""
            while b"event: ping" not in seen:
                seen += await response.content.readany()
            fake.holding = False
            seen += await response.read()
    assert [event["type"] for event in events(seen)][:2] == ["message_start", "ping"]
    assert folded(seen)["content"] == [{"type": "text", "text": "No."}]


async def test_a_retry_under_an_idempotency_key_gets_the_same_message(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    first, other = await serve(tools_tokenizer), await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer)) as fake:
        await settled(lambda: bool(first.streams.fleet.engines) and bool(other.streams.fleet.engines))
        key = {"Idempotency-Key": "one"}
        told = folded(await streamed(first.session, ASK, **key))
        assert folded(await streamed(other.session, ASK, **key)) == told
        assert len(fake.seen) == 1


# ---------------------------------------------------------------------------------------------------- any cut

TEXTS = st.sampled_from(
    [
        ANSWER,
        ANSWER.replace("</tool_call>\n", "</tool_call> and then "),
        "Just text. 🙂",
        "<think>\nonly a thought",
        '<tool_call>\n{"name": "time", "arguments": {"a": [1, ',
        "",
    ]
)


@given(st.data())
def test_any_cut_gives_the_same_message_streamed_and_whole(tools_tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(TEXTS)
    stop = data.draw(st.sampled_from([[], ["Par"], ["</tool_call>"]]))
    finish = data.draw(st.sampled_from([Finish("stop"), Finish("length")]))
    body = json.dumps({**ASK, "stop_sequences": stop}).encode()
    valid = parse(body, GatewayConfig(), "tiny", 600.0, NO_DEFAULTS)
    ids = tools_tokenizer._encode_chat(valid.messages, None, valid.options)
    valid = with_reading(valid, tools_tokenizer, ids)
    tokens = tools_tokenizer._encode(text, special=False) or [tools_tokenizer._encode("<s>", special=False)[0]]
    cuts = data.draw(st.lists(st.integers(1, max(1, len(tokens) - 1))))
    expected = written(tools_tokenizer, valid, pieces_of(tools_tokenizer, valid, tokens, finish, []), stream=False)
    for stream in (True, False):
        pieces = pieces_of(tools_tokenizer, valid, tokens, finish, cuts)
        assert written(tools_tokenizer, valid, pieces, stream=stream) == expected


def with_reading(valid: ValidRequest, tokenizer: Tokenizer, ids: list[int]) -> ValidRequest:
    return msgspec.structs.replace(valid, reading=tokenizer.rules.reading(valid, ids))


def written(tokenizer: Tokenizer, valid: ValidRequest, pieces: list[ChoiceDelta], *, stream: bool) -> dict[str, Any]:
    form = MessageFormat(valid, request_id=f"msg_{0:032x}", model="tiny", prompt=Prompted([1] * 40))
    if stream:
        return folded(b"".join(map(form.chunk, pieces)) + form.usage_chunk() + form.done())
    [whole] = asyncio.run(form.whole(pieces, Pacer()))
    message: dict[str, Any] = json.loads(whole)
    return message


# ------------------------------------------------------------------------------------------------- what is refused

USER = {"role": "user", "content": "x"}


def user(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "invalid_type"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"messages": []}, "messages", "empty_prompt"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_value"),
    (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}]},
        "messages",
        "invalid_value",
    ),
    (user({"type": "image", "source": {}}), "messages[0].content[0].type", "unsupported"),
    (user({"type": "document", "source": {"type": "url"}}), "messages[0].content[0].type", "unsupported"),
    (user({"type": "text"}), "messages[0].content[0].text", "invalid_type"),
    (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id", "invalid_type"),
    (user({"type": "tool_use"}, role="assistant"), "messages[0].content[0]", "invalid_type"),
    ({"system": [{"type": "image"}]}, "system[0].type", "unsupported"),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type", "invalid_value"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name", "invalid_type"),
    ({"tools": [{"name": "a b"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "invalid_value"),
    ({"tools": [{"name": "a" * 129}]}, "tools[0].name", "invalid_value"),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "invalid_value"),
    (
        {
            "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        "tool_choice.name",
        "unsupported",
    ),
    (
        {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}},
        "tool_choice",
        "invalid_value",
    ),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type", "invalid_value"),
    ({"thinking": {"type": "deeply"}}, "thinking.type", "invalid_value"),
    ({"output_config": {"mood": {}}}, "output_config.mood", "unsupported"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].type", "invalid_value"),
    ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type", "unsupported"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "invalid_type"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences", "too_many"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "unsupported"),
    ({"container": "x"}, "container", "unsupported"),
    (
        {"context_management": {"edits": [{"type": "compact_20300101"}]}},
        "context_management.edits[0].type",
        "unsupported",
    ),
    (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 0}]}},
        "context_management.edits[0].keep",
        "invalid_value",
    ),
    ({"context_management": {"auto": True}}, "context_management.auto", "unsupported"),
    ({"speed": "slow"}, "speed", "unsupported"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=[param for _, param, _ in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(
    tools_tokenizer: Tokenizer, fields: dict[str, Any], param: str, code: str
) -> None:
    body = {name: value for name, value in {**ASK, **fields}.items() if value is not None}
    with pytest.raises(Refusal) as caught:
        prompt_of(tools_tokenizer, body)
    refusal = renamed(caught.value, NAMES)
    assert (refusal.status, refusal.param, refusal.code) == (400, param, code), refusal.message
    assert refusal.message.startswith(param) or refusal.code == "invalid_type"


def prompt_of(tokenizer: Tokenizer, body: dict[str, Any]) -> str:
    """The prompt of a request, as the model sees it."""
    valid = parse(json.dumps(body).encode(), GatewayConfig(), "tiny", 600.0, NO_DEFAULTS)
    return tokenizer.text_of(tokenizer._encode_chat(valid.messages, None, valid.options), skip_special=False)


def test_thinking_is_asked_of_models_that_think(tools_tokenizer: Tokenizer, byte_level_tokenizer: Tokenizer) -> None:
    def prompt(tokenizer: Tokenizer, kind: str) -> str:
        thinking = {"type": kind, "budget_tokens": 9}
        return prompt_of(tokenizer, {"max_tokens": 1, "messages": [USER], "thinking": thinking})

    assert prompt(tools_tokenizer, "disabled").endswith("</think>\n\n")
    assert prompt(tools_tokenizer, "enabled").endswith("assistant\n")
    assert prompt(byte_level_tokenizer, "disabled") == prompt(byte_level_tokenizer, "adaptive")
    assert prompt(byte_level_tokenizer, "enabled") == prompt(byte_level_tokenizer, "adaptive")


def test_calls_may_be_demanded() -> None:
    for choice, demanded in (
        ({"type": "auto"}, []),
        ({"type": "none"}, []),
        ({"type": "any"}, ["weather", "time"]),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, ["weather"]),
    ):
        body = {**ASK, "tool_choice": choice, "tools": [{**WEATHER, "strict": True}, ASK["tools"][1]]}
        options = parse(json.dumps(body).encode(), GatewayConfig(), "tiny", 600.0, NO_DEFAULTS).options
        assert options.demanded == demanded
        assert options.parallel == ("disable_parallel_tool_use" not in choice)
        assert bool(options.strict) == (choice["type"] != "none")


def test_a_count_needs_no_max_tokens() -> None:
    valid = parse_count(json.dumps({"messages": [USER]}).encode(), GatewayConfig(), "tiny", 600.0, NO_DEFAULTS)
    assert valid.messages == [USER]


async def test_a_message_is_cancelled_by_its_id(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, lambda *_: ([60] * 300, None), step_s=0.02) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        async with served.session.post("/v1/messages", json={**ASK, "stream": True}) as response:
            path = f"/v1/streams/{response.headers['x-answer-id']}"
            async with served.session.delete(path) as cancelled:
                assert cancelled.status == 204
            told = events(await response.read())
        await settled(lambda: not fake.busy)
    assert (told[0]["type"], told[-1]["type"]) == ("message_start", "error")
    assert told[-1]["error"]["type"] == "overloaded_error"
