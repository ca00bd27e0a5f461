"""OpenAI's responses over HTTP: requests translated, typed events, stored responses, refusals."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from aiohttp import ClientSession
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.wire.messages import Finish
from quire.service.api.api import parse_chat
from quire.service.api.format import Prompted
from quire.service.api.openai_responses.response_format import ResponseFormat
from quire.service.api.openai_responses.response_items import messages_of
from quire.service.api.openai_responses.responses import NAMES, parse
from quire.service.api.sampling_fields import SamplingFields
from quire.service.api.skipped import Skipped
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
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASK: dict[str, Any] = {
    "model": "tiny",
    "max_output_tokens": 400,
    "input": "Rain?",
    "tools": [WEATHER, {"type": "function", "name": "time"}],
}
PATH = "/v1/responses"


async def post(session: ClientSession, body: dict[str, Any], path: str = PATH, **headers: str) -> tuple[int, Any]:
    async with session.post(path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def get(session: ClientSession, path: str, **headers: str) -> tuple[int, Any]:
    async with session.get(path, headers=headers) as response:
        return response.status, await response.json()


async def streamed(session: ClientSession, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    async with session.post(PATH, json={**body, "stream": True}, headers=headers) as response:
        assert response.status == 200, await response.text()
        return events(await response.read())


def events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream: each has its type twice, as the event's name and in its JSON."""
    found = []
    for frame in data.decode().split("\n\n"):
        if frame.strip():
            name, line = frame.strip().split("\n")
            found.append(json.loads(line.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def folded(found: list[dict[str, Any]], first: int = 0) -> dict[str, Any]:
    """Return the response built from a stream's deltas, compared with the values that its events repeat."""
    assert [event["sequence_number"] for event in found] == list(range(first, first + len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    closed = True
    for event in found[2:-1]:
        _, kind, step = event["type"].split(".")
        at = event["output_index"]
        if (kind, step) == ("output_item", "added"):
            assert closed
            assert at == len(items)
            items.append(event["item"])
            assert event["item"]["status"] == "in_progress"
            texts[at], closed = "", False
            continue
        assert at == len(items) - 1
        assert not closed
        if kind == "output_item":
            assert event["item"]["id"] == items[at]["id"]
            items[at], closed = event["item"], True
            assert text_of(event["item"]) == texts[at]
            continue
        assert event["item_id"] == items[at]["id"]
        if step == "delta":
            assert event["delta"]
            texts[at] += event["delta"]
        elif kind != "content_part":
            assert texts[at] == event.get("text", event.get("arguments"))
    assert closed
    last: dict[str, Any] = found[-1]["response"]
    assert found[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == items
    return last


def text_of(item: dict[str, Any]) -> str:
    return str(item["arguments"]) if item["type"] == "function_call" else str(item["content"][0]["text"])


def bare(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between two requests."""
    gone = ("id", "created_at", "call_id")
    output = [{key: value for key, value in item.items() if key not in gone} for item in response["output"]]
    return {**{key: value for key, value in response.items() if key not in gone}, "output": output}


async def test_a_stream_and_a_whole_answer_are_the_same_response(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        status, whole = await post(served.session, ASK)
        fake.burst = 5
        told = folded(await streamed(served.session, ASK))
    assert status == 200
    assert bare(told) == bare(whole)
    thought, text, weather, clock, broken = whole["output"]
    assert (thought["type"], text_of(thought)) == ("reasoning", "They ask about rain 🙂.")
    assert (text["type"], text["role"], text_of(text)) == ("message", "assistant", "I look.")
    assert (weather["name"], json.loads(weather["arguments"])) == ("weather", {"city": 'Par"is'})
    assert (clock["type"], clock["name"], clock["arguments"]) == ("function_call", "time", "{}")
    assert text_of(broken).strip() == BROKEN
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert (whole["status"], whole["error"], whole["incomplete_details"]) == ("completed", None, None)
    usage = whole["usage"]
    assert usage["input_tokens"] == len(fake.seen[0].token_ids)
    assert usage["output_tokens"] == len(tools_tokenizer._encode(ANSWER, special=False)) + 1
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert fake.seen[0].token_ids == fake.seen[1].token_ids


async def test_tokens_are_counted_alike_with_a_stored_response_and_with_its_items(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    """The prompt counts the earlier turns; cached tokens and reasoning are those of the last response alone."""
    served = await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        _, first = await post(served.session, ASK)
        calls = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": one, "output": "ok"} for one in calls]
        new = [*results, {"role": "user", "content": "Rain again?"}]
        asked = {**ASK, "input": new, "previous_response_id": first["id"]}
        _, stored = await post(served.session, asked)
        told = folded(await streamed(served.session, asked))
        _, counted = await post(
            served.session, {key: asked[key] for key in asked if key != "max_output_tokens"}, f"{PATH}/input_tokens"
        )
        items = [{"role": "user", "content": "Rain?"}, *first["output"], *new]
        _, sent = await post(served.session, {**ASK, "input": items})
        prompts = [generate.token_ids for generate in fake.seen]
    assert prompts[1] == prompts[2] == prompts[3]
    assert stored["usage"] == told["usage"] == sent["usage"]
    usage, before = stored["usage"], first["usage"]
    assert usage["input_tokens"] == counted["input_tokens"] == len(prompts[1]) > before["input_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == len(prompts[1]) // 16 * 16
    assert {key: usage[key] for key in ("output_tokens", "output_tokens_details")} == {
        key: before[key] for key in ("output_tokens", "output_tokens_details")
    }
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_the_official_client_creates_streams_and_continues(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    first, other = await serve(tools_tokenizer), await serve(tools_tokenizer)
    tools: Any = ASK["tools"]
    async with (
        model(engine, says(tools_tokenizer)) as fake,
        openai.AsyncOpenAI(base_url=f"{first.url}/v1", api_key="x", max_retries=0) as client,
        openai.AsyncOpenAI(base_url=f"{other.url}/v1", api_key="x", max_retries=0) as elsewhere,
    ):
        await settled(lambda: bool(first.streams.fleet.engines) and bool(other.streams.fleet.engines))
        made = await client.responses.create(model="tiny", input="Rain?", tools=tools, instructions="Be brief.")
        assert made.output_text == f"I look.{BROKEN}"
        calls = [item for item in made.output if item.type == "function_call"]
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"result {at}"}
            for at, call in enumerate(calls)
        ]
        async with elsewhere.responses.stream(
            model="tiny", input=results, tools=tools, previous_response_id=made.id
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert {"response.output_text.delta", "response.function_call_arguments.delta"} <= set(kinds)
        assert final.output_text == made.output_text
        assert final.previous_response_id == made.id
        loaded = await client.responses.retrieve(final.id)
        assert loaded.to_dict() == final.to_dict() | {"output": loaded.to_dict()["output"]}
        assert [item.to_dict()["id"] for item in loaded.output] == [item.to_dict()["id"] for item in final.output]
        listed = [item async for item in client.responses.input_items.list(made.id)]
        assert [item.type for item in listed] == ["message"]
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):  # its beginning is gone
            await client.responses.create(model="tiny", input="x", previous_response_id=final.id)
    prompt = tools_tokenizer.text_of(fake.seen[1].token_ids, skip_special=False)
    assert "<|im_start|>system\nBe brief." in tools_tokenizer.text_of(fake.seen[0].token_ids, skip_special=False)
    assert "Be brief." not in prompt  # instructions hold for one response
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par\\"is"}}\n</tool_call>'
    assert f"<think>\nThey ask about rain 🙂.\n</think>\n\nI look.{call}" in prompt
    assert prompt.endswith(
        "<|im_start|>tool\nresult 0<|im_end|>\n<|im_start|>tool\nresult 1<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_only_its_own_key_sees_a_response(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer, api_keys=["k", "l"])
    mine, other = {"Authorization": "Bearer k"}, {"x-api-key": "l"}
    async with model(engine, says(tools_tokenizer, "No.")):
        await settled(lambda: bool(served.streams.fleet.engines))
        _, made = await post(served.session, ASK, **mine)
        path = f"{PATH}/{made['id']}"
        assert (await get(served.session, path, **mine))[1] == made
        assert (await get(served.session, path, **other))[0] == 404
        assert (await get(served.session, f"{path}/input_items", **other))[0] == 404
        async with served.session.delete(path, headers=other) as response:
            assert response.status == 404
        status, error = await post(served.session, {**ASK, "previous_response_id": made["id"]}, **other)
        assert (status, error["error"]["param"]) == (404, "previous_response_id")
        assert (await get(served.session, path))[0] == 401


async def test_all_keys_of_a_tenant_see_its_responses(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def digest(key: str) -> str:
        return hashlib.sha256(key.encode()).hexdigest()

    file = tmp_path / "tenants.toml"
    file.write_text(
        f'[acme]\nweight = 1.0\nkey_sha256 = ["{digest("k")}", "{digest("l")}"]\n'
        f'[other]\nweight = 1.0\nkey_sha256 = ["{digest("m")}"]\n'
    )
    served = await serve(tools_tokenizer, tenants=str(file))
    async with model(engine, says(tools_tokenizer, "No.")):
        await settled(lambda: bool(served.streams.fleet.engines))
        _, made = await post(served.session, ASK, **{"x-api-key": "k"})
        found = [await get(served.session, f"{PATH}/{made['id']}", **{"x-api-key": key}) for key in "klm"]
    assert [status for status, _ in found] == [200, 200, 404]
    assert found[0][1] == found[1][1] == made


async def test_what_is_not_stored_says_so(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    on, off = await serve(tools_tokenizer, responses_mib=1), await serve(tools_tokenizer, responses_ttl_s=0)
    async with model(engine, says(tools_tokenizer, "No.")):
        await settled(lambda: bool(on.streams.fleet.engines) and bool(off.streams.fleet.engines))
        cases: list[tuple[Served, dict[str, Any]]] = [
            (on, {"store": False}),
            (off, {}),
            (on, {"metadata": {"a": "b"}}),
        ]
        for served, fields in cases:
            for made in (
                (await post(served.session, {**ASK, **fields}))[1],
                folded(await streamed(served.session, {**ASK, **fields})),
            ):
                stored = "metadata" in fields
                assert made["store"] is stored
                status, found = await get(served.session, f"{PATH}/{made['id']}")
                assert (status, found == made) == (200 if stored else 404, stored)
        for fields, param in (  # what needs a store
            ({"store": True}, "store"),
            ({"background": True}, "background"),
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ):
            status, error = await post(off.session, {**ASK, **fields})
            assert (status, error["error"]["param"], error["error"]["code"]) == (400, param, "unsupported")


def part_of(item: dict[str, Any]) -> str:
    """The text of a message whose content is one part."""
    [part] = item["content"]
    assert part["type"] == "input_text"
    return str(part["text"])


async def test_pages_of_the_input(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer)
    given_items = [{"role": "user", "content": text} for text in "abc"]
    async with model(engine, says(tools_tokenizer, "No.")):
        await settled(lambda: bool(served.streams.fleet.engines))
        _, made = await post(served.session, {**ASK, "input": given_items})
        path = f"{PATH}/{made['id']}/input_items"
        _, page = await get(served.session, f"{path}?limit=2&order=asc")
        assert ([part_of(item) for item in page["data"]], page["has_more"]) == (["a", "b"], True)
        _, rest = await get(served.session, f"{path}?order=asc&after={page['last_id']}")
        assert ([part_of(item) for item in rest["data"]], rest["has_more"]) == (["c"], False)
        _, newest = await get(served.session, path)
        assert [part_of(item) for item in newest["data"]] == ["c", "b", "a"]
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order")):
            status, error = await get(served.session, f"{path}?{query}")
            assert (status, error["error"]["param"]) == (400, param)


async def test_an_answer_that_is_cut_is_incomplete(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, lambda *_: (tools_tokenizer._encode("<think>\n" + "hm " * 99, special=False), None)):
        await settled(lambda: bool(served.streams.fleet.engines))
        body = {**ASK, "max_output_tokens": 12}
        _, whole = await post(served.session, body)
        told = folded(await streamed(served.session, body))
    assert bare(told) == bare(whole)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    [item] = whole["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")


async def test_a_failure_within_a_stream_is_its_last_event(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, lambda *_: ([5, 6, 7], None)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        found = events(await failed_within(served.session, PATH, ASK, fake))
        fake.failure = Finish("error", message="it broke")
        status, error = await post(served.session, ASK)
    assert (status, error["error"]["code"]) == (500, "engine_error")
    last = found[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "engine_error: it broke"}
    assert [event["sequence_number"] for event in found] == list(range(len(found)))


# ------------------------------------------------------------------------------------------------------------- any cut


@given(st.data())
def test_any_cut_gives_the_same_events_and_the_same_response(tools_tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([ANSWER, ANSWER.replace("</tool_call>\n", "</tool_call> then "), "Text. 🙂", ""]))
    finish = data.draw(st.sampled_from([Finish("stop"), Finish("length")]))
    stop = data.draw(st.sampled_from([None, "Par"]))
    body = json.dumps({**ASK, "stop": stop}).encode()
    valid = parse(body, GatewayConfig(), "tiny", 600.0)
    ids = tools_tokenizer._encode_chat(valid.messages, None, valid.options)
    valid = msgspec.structs.replace(valid, reading=tools_tokenizer.rules.reading(valid, ids))
    tokens = tools_tokenizer._encode(text, special=False) or [5]
    cuts = data.draw(st.lists(st.integers(1, max(1, len(tokens) - 1))))
    whole = written(valid, pieces_of(tools_tokenizer, valid, tokens, finish, [], each_token=True))
    cut = written(valid, pieces_of(tools_tokenizer, valid, tokens, finish, cuts, each_token=True))
    assert cut == whole
    assert folded(whole) == json.loads(asyncio.run(whole_of(valid, tools_tokenizer, tokens, finish, cuts)))
    after = data.draw(st.integers(0, len(whole)))
    rest = written(valid, pieces_of(tools_tokenizer, valid, tokens, finish, cuts, each_token=True), after)
    assert rest == whole[after + 1 :]


def form_of(valid: ValidRequest) -> ResponseFormat:
    return ResponseFormat(
        valid,
        request_id=f"resp_{0:032x}",
        model="tiny",
        created=1_700_000_000,
        prompt=Prompted([1] * 40),
        vocabulary=[],
    )


def written(valid: ValidRequest, pieces: list[ChoiceDelta], after: int = -1) -> list[dict[str, Any]]:
    form = form_of(valid)
    form.after = after
    return events(b"".join(map(form.chunk, pieces)) + form.usage_chunk() + form.done())


async def whole_of(
    valid: ValidRequest, tokenizer: Tokenizer, tokens: list[int], finish: Finish, cuts: list[int]
) -> bytes:
    [body] = await form_of(valid).whole(pieces_of(tokenizer, valid, tokens, finish, cuts, each_token=True), Pacer())
    return body


# ----------------------------------------------------------------------------------------------------- what is refused

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "invalid_type"),
    ({"input": []}, "input", "empty_prompt"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "invalid_type"),
    ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]", "invalid_type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "invalid_type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "unsupported"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "unsupported"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "invalid_type"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "invalid_type"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content", "invalid_type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [{**WEATHER, "parameters": {"type": "array"}}]}, "tools[0].parameters.type", "invalid_value"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "unsupported"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools", "invalid_type"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}}, "tool_choice.mode", "invalid_value"),
    ({"tools": [{"type": "mcp", "server_label": "x"}], "tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [{"type": "function", "name": "a" * 65}]}, "tools[0].name", "invalid_value"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "invalid_type"),
    (
        {"tools": [WEATHER, {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a b"}]}]},
        "tools[1].tools[0].name",
        "invalid_value",
    ),
    ({"input": [{"type": "unheard_of"}]}, "input[0].type", "unsupported"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary", "invalid_value"),
    ({"text": {"verbosity": 3}}, "text.verbosity", "invalid_type"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "unsupported"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "invalid_type"),
    ({"text": {"colour": "red"}}, "text.colour", "unsupported"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort", "invalid_type"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": -1}, "max_output_tokens", "invalid_value"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"truncation": "some"}, "truncation", "invalid_value"),
    ({"include": ["message.output_text.scores"]}, "include[0]", "unsupported"),
    ({"top_logprobs": -1}, "top_logprobs", "invalid_value"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "too_long"),
    ({"metadata": {"x" * 65: "a"}}, "metadata", "too_long"),
    ({"metadata": {f"x{at}": "a" for at in range(17)}}, "metadata", "too_many"),
    ({"background": True, "store": False}, "background", "invalid_value"),
    ({"prompt": {"id": "x"}}, "prompt", "unsupported"),
    ({"conversation": "x"}, "conversation", "unsupported"),
    ({"moderation": {"model": "x"}}, "moderation", "unsupported"),
    ({"context_management": [{}]}, "context_management[0].type", "unsupported"),
    (
        {"context_management": [{"type": "compaction", "compact_threshold": "x"}]},
        "context_management[0].compact_threshold",
        "invalid_type",
    ),
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


def prompt_of(tokenizer: Tokenizer, body: dict[str, Any]) -> str:
    valid = parse(json.dumps(body).encode(), GatewayConfig(), "tiny", 600.0)
    return tokenizer.text_of(tokenizer._encode_chat(valid.messages, None, valid.options), skip_special=False)


def test_items_become_messages() -> None:
    found, sources = messages_of(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": []},
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}", "id": "fc_1"},
            {"type": "function_call", "call_id": "call_2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "2"}]},
            {"type": "reasoning", "summary": []},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Yes", "annotations": []}]},
            {"role": "assistant", "content": "and no"},
        ],
        Skipped(GatewayConfig()),
    )
    assert [one.role for one in found] == ["developer", "user", "assistant", "tool", "assistant", "assistant"]
    assert found[2].reasoning_content == "hm"
    calls: Any = found[2].tool_calls
    assert [call["id"] for call in calls] == ["1", "2"]
    assert (found[3].content, found[3].name, found[3].tool_call_id) == ("2", "g", "2")
    assert [found[4].content, found[5].content] == ["Yes", "and no"]
    assert sources == [f"input[{at}]" for at in (0, 1, 2, 5, 6, 8)]


def test_calls_may_be_demanded() -> None:
    tools = [{**WEATHER, "strict": True}, ASK["tools"][1]]
    choices: list[tuple[Any, list[str]]] = [
        ("auto", []),
        ("required", ["weather", "time"]),
        ({"type": "function", "name": "weather"}, ["weather"]),
    ]
    for choice, demanded in choices:
        body = json.dumps({**ASK, "tools": tools, "tool_choice": choice}).encode()
        valid = parse(body, GatewayConfig(), "tiny", 600.0)
        assert valid.options.demanded == demanded
        assert valid.options.strict
        assert valid.shown["tool_choice"] == choice


async def test_answers_may_have_a_schema() -> None:
    form = {"type": "json_schema", "name": "a", "strict": True, "schema": {"type": "object"}}
    valid = parse(json.dumps({"input": "x", "text": {"format": form}}).encode(), GatewayConfig(), "tiny", 600.0)
    assert valid.constraint is not None
    assert (valid.constraint.kind, valid.constraint.value) == ("json", {"type": "object"})
    assert valid.shown["text"]["format"] == form


OF_A_CHAT: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 40,
    "min_p": 0.05,
    "stop": "END",
    "stop_token_ids": [9],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.2,
    "logit_bias": {"15": -100},
    "bad_words": ["no"],
    "seed": 7,
    "cache_salt": "a",
    "timeout": 20,
    "priority": "low",
}


def test_sampling_fields_mean_what_they_mean_in_a_chat() -> None:
    asked = json.dumps({"input": "x", **OF_A_CHAT}).encode()
    valid = parse(asked, GatewayConfig(strict_fields=True), "tiny", 600.0)
    chat = json.dumps({"messages": [{"role": "user", "content": "x"}], **OF_A_CHAT}).encode()
    expected = parse_chat(chat, GatewayConfig(strict_fields=True), "tiny", 600.0)
    assert valid.sampling == expected.sampling
    for name in ("stop", "include_stop", "bad_words", "seeded", "cache_salt", "timeout_s", "priority"):
        assert getattr(valid, name) == getattr(expected, name)
    choice = parse(
        json.dumps({"input": "x", "structured_outputs": {"choice": ["a"]}}).encode(), *(GatewayConfig(), "m", 9.0)
    )
    assert choice.constraint is not None
    assert choice.constraint.param == "structured_outputs.choice"
    assert {*OF_A_CHAT, "structured_outputs"} == set(SamplingFields.__struct_fields__)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_may_show_all_tokens(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, stream: bool
) -> None:
    served = await serve(tools_tokenizer)
    body = {"model": "tiny", "input": "Rain?", "max_output_tokens": 400}
    async with model(engine, says(tools_tokenizer, "<think>\nhm\n</think>\n\nNo.")) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        if stream:
            found = (await streamed(served.session, {**body, "enable_response_messages": True}))[-1]["response"]
        else:
            _, found = await post(served.session, {**body, "enable_response_messages": True})
        _, plain = await post(served.session, body)
        prompt = fake.seen[0].token_ids
    assert "input_messages" not in plain
    [asked], [answered] = found["input_messages"], found["output_messages"]
    assert (asked["type"], asked["tokens"]) == ("raw_message_tokens", prompt)
    assert asked["message"] == tools_tokenizer.text_of(prompt, skip_special=False)
    assert "Rain?" in asked["message"]
    assert answered["message"].startswith("<think>\nhm\n</think>\n\nNo.")
    assert len(answered["tokens"]) == found["usage"]["output_tokens"]


@pytest.mark.parametrize("item", [{"type": "item_reference"}, {"role": "user", "content": "a"}, {"type": "reasoning"}])
@pytest.mark.parametrize("item_id", [{"a": 1}, ["msg_1"], 5, True, 1.5, {}])
def test_the_id_of_an_item_is_a_string(item: dict[str, Any], item_id: object) -> None:
    body = json.dumps({"input": [{"role": "user", "content": "Hi"}, {**item, "id": item_id}]}).encode()
    with pytest.raises(Refusal) as refused:
        parse(body, GatewayConfig(), "tiny", 600.0)
    assert (refused.value.status, refused.value.param) == (400, "input[1].id")
    assert refused.value.message.startswith("input[1].id: must be a string")


def test_an_item_whose_id_is_null_gets_one() -> None:
    body = json.dumps({"input": [{"role": "user", "content": "Hi", "id": None}]}).encode()
    [item] = parse(body, GatewayConfig(), "tiny", 600.0).items
    assert item["id"].startswith("msg_")
