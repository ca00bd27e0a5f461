"""Every answer and event of the API, validated strictly against the types of the official clients.

The clients build their objects without validating, so a field that is missing shows up only where it is read."""

from __future__ import annotations

import functools
import json
import pkgutil
from collections.abc import Awaitable, Callable
from typing import Any

import pydantic
import pytest
from openai import types as openai_types
from openai.types import chat as chat_types
from openai.types import responses as response_types
from openai.types.responses.compacted_response import CompactedResponse
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.responses.response_item import ResponseItem

from quire.service.text.tokenizer import Tokenizer
from tests.service.api.test_tools import model, says
from tests.service.fakes import FakeEngine, Served, failed_within, settled

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]

# Anthropic's by name: each worker imports this file, and one of them runs it.  The import takes a second.
PATHS: dict[str, tuple[Any, Any]] = {
    "/v1/completions": (openai_types.Completion, openai_types.Completion),
    "/v1/chat/completions": (chat_types.ChatCompletion, chat_types.ChatCompletionChunk),
    "/v1/chat/completions/batch": (chat_types.ChatCompletion, None),
    "/v1/responses": (response_types.Response, response_types.ResponseStreamEvent),
    "/v1/messages": ("anthropic.types:Message", "anthropic.types:RawMessageStreamEvent"),
}
OBJECT = {"type": "object", "properties": {"cmd": {"type": "string"}}}
HI = {"role": "user", "content": "Hi"}
FUNCTION = {"type": "function", "name": "sh", "parameters": OBJECT}
CUSTOM = {"type": "custom", "name": "patch"}
NAMESPACE = {"type": "namespace", "name": "n", "description": "d", "tools": [{**FUNCTION, "name": "f"}]}
TEXT = (
    "<think>\nhm\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "sh", "arguments": {"cmd": "ls"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "patch", "arguments": {"input": "x"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "n__f", "arguments": {}}\n</tool_call>'
)
CHAT_TOOLS = [{"type": "function", "function": {"name": "sh", "parameters": OBJECT}}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hi", "logprobs": 2}),
    ("/v1/completions", {"prompt": ["Hi", "Ho"], "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": [HI], "tools": CHAT_TOOLS, "n": 2}),
    ("/v1/chat/completions", {"messages": [HI], "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": [HI], "max_tokens": 3, "stream_options": {"include_usage": True}}),
    (
        "/v1/chat/completions",
        {"messages": [HI], "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    ("/v1/chat/completions", {"messages": [HI], "return_token_ids": True, "include_reasoning": False}),
    ("/v1/chat/completions/batch", {"messages": [[HI], [HI]], "max_tokens": 3}),
    ("/v1/responses", {"input": "Hi", "tools": [FUNCTION, CUSTOM, NAMESPACE]}),
    ("/v1/responses", {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ("/v1/responses", {"input": "Hi", "include": ["reasoning.encrypted_content"], "enable_response_messages": True}),
    ("/v1/responses", {"input": "Hi", "tools": [FUNCTION], "tool_choice": "none"}),
    ("/v1/responses", {"input": "Hi", "background": True}),
    ("/v1/responses", {"input": "Hi", "reasoning": {"summary": "auto"}, "metadata": {"a": "b"}}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "store": False, "instructions": "Be brief."}),
    ("/v1/messages", {"messages": [HI], "max_tokens": 400, "tools": [{"name": "sh", "input_schema": OBJECT}]}),
    ("/v1/messages", {"messages": [HI], "max_tokens": 3, "stop_sequences": ["x"]}),
]


@functools.cache
def adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    """Build the validator of a type, or of what a name refers to.  A union of all events takes half a second."""
    return pydantic.TypeAdapter(pkgutil.resolve_name(kind) if isinstance(kind, str) else kind)


def check(kind: Any, data: dict[str, Any]) -> None:
    """Fails where a field is missing or of another type than the client's."""
    adapter(kind).validate_json(json.dumps(data), strict=True)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(("path", "fields"), REQUESTS, ids=[f"{path}{at}" for at, (path, _) in enumerate(REQUESTS)])
async def test_answers_and_events_validate_strictly(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, path: str, fields: dict[str, Any]
) -> None:
    served = await serve(tools_tokenizer)
    whole, event = PATHS[path]
    async with model(engine, says(tools_tokenizer, TEXT)):
        await settled(lambda: bool(served.streams.fleet.engines))
        body = {name: value for name, value in fields.items() if name != "stream_options"}
        async with served.session.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            check(whole, await response.json())
        if event is None:  # it is never streamed
            return
        async with served.session.post(path, json={**fields, "stream": True}) as response:
            assert response.status == 200, await response.text()
            found = events(await response.text())
        assert found  # tokens that arrive together share an event
        for one in found:
            for choice in one.get("choices", ()) if path == "/v1/completions" else ():
                choice["finish_reason"] = choice["finish_reason"] or "stop"  # OpenAI, too, sends null before the end
            check(event, one)


async def test_other_endpoints_validate_strictly(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer, TEXT)):
        await settled(lambda: bool(served.streams.fleet.engines))
        for path, kind, body in (
            ("/v1/responses/input_tokens", InputTokenCountResponse, {"input": "Hi"}),
            ("/v1/messages/count_tokens", "anthropic.types:MessageTokensCount", {"messages": [HI]}),
            ("/v1/responses/compact", None, {"input": "Hi"}),
        ):
            async with served.session.post(path, json=body) as response:
                found = await response.json()
            if kind is not None:
                check(kind, found)
                continue
            # The client's type has no message of a user among output items, though its text promises them.
            check(CompactedResponse, {**found, "output": found["output"][1:]})
        async with served.session.get("/v1/models") as response:
            for card in (await response.json())["data"]:
                check(openai_types.Model, card)
        async with served.session.post("/v1/responses", json={"input": "Hi", "background": True}) as response:
            queued = await response.json()
        check(response_types.Response, queued)


async def test_every_state_of_a_stored_response_validates_strictly(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    """Queued, running, ended, cancelled and failed responses; read again as JSON and as events; input items."""
    served = await serve(tools_tokenizer)
    kind, events_kind = PATHS["/v1/responses"]

    async def read(path: str, method: str = "GET", **body: Any) -> dict[str, Any]:
        async with served.session.request(method, f"/v1/responses{path}", json=body or None) as response:
            assert response.status == 200, await response.text()
            found: dict[str, Any] = await response.json()
            return found

    async with model(engine, says(tools_tokenizer, TEXT)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        turns: list[dict[str, Any]] = [
            HI,
            {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
            {"role": "assistant", "content": "b"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "d"}]},
            {"type": "function_call", "call_id": "e", "name": "sh", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "e", "output": "f"},
            {"type": "custom_tool_call", "call_id": "g", "name": "patch", "input": "h"},
            {"type": "custom_tool_call_output", "call_id": "g", "output": "i"},
        ]
        ended = await read("", "POST", input=turns, instructions="Be brief.")
        check(kind, await read(f"/{ended['id']}"))
        given = (await read(f"/{ended['id']}/input_items?order=asc"))["data"]
        assert [item["type"] for item in given] == [turn.get("type", "message") for turn in turns]
        for item in given:
            check(ResponseItem, item)
        fake.holding = True
        waiting = await read("", "POST", input="Hi", background=True)
        check(kind, await read(f"/{waiting['id']}"))
        cancelled = await read(f"/{waiting['id']}/cancel", "POST")
        assert cancelled["status"] == "cancelled"
        check(kind, cancelled)
        fake.holding, fake.script = False, lambda *_: ([5, 6], None)
        found = events((await failed_within(served.session, "/v1/responses", {"input": "Hi"}, fake)).decode())
    assert found[-1]["type"] == "response.failed"
    for one in found:
        check(events_kind, one)
