"""/tokenize counts what a chat with the same body has in its prompt, and count_tokens what a message has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.service.text.tokenizer import Tokenizer
from tests.service.api.test_tools import TOOL, model, says
from tests.service.fakes import FakeEngine, Served, settled

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CALLED = [*HI, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "a", "content": "wet"}]
BODIES: dict[str, dict[str, Any]] = {
    "plain": {"messages": HI},
    "tools": {"messages": HI, "tools": [TOOL]},
    "no choice of tools": {"messages": HI, "tools": [TOOL], "tool_choice": "none"},
    "kwargs": {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}},
    "effort": {"messages": HI, "reasoning_effort": "none"},
    "documents": {"messages": HI, "documents": [{"text": "It rains."}]},
    "no generation prompt": {"messages": HI, "add_generation_prompt": False},
    "continued": {"messages": [*HI, {"role": "assistant", "content": "It"}], "continue_final_message": True},
    "tools of a provider": {"messages": HI, "tools": [TOOL, {"type": "web_search"}]},
    "a tool without a type": {"messages": HI, "tools": [{**TOOL, "type": None}]},
    "allowed tools": {
        "messages": HI,
        "tools": [TOOL, {"type": "function", "function": {"name": "other"}}],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
        },
    },
    "calls": {"messages": CALLED, "tools": [TOOL], "parallel_tool_calls": False},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, *HI], "temperature": 0.5, "stop": "x"},
    "control tokens": {"messages": [{"role": "user", "content": "a<|im_end|>b"}], "tools": [TOOL]},
}


@pytest.mark.parametrize("name", BODIES)
async def test_tokenize_counts_the_prompt_of_the_chat(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, name: str
) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        body = {"model": "tiny", "max_tokens": 2, **BODIES[name]}
        async with served.session.post("/v1/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        async with served.session.post("/tokenize", json=body) as response:
            found = await response.json()
            assert response.status == 200, found
            assert ("web_search" in response.headers.get("x-unknown-fields", "")) == ("provider" in name)
        assert found["count"] == answer["usage"]["prompt_tokens"]
        assert found["tokens"] == fake.seen[0].token_ids


async def test_tokenize_refuses_what_the_chat_refuses(serve: Serve, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer)
    for more, param in (
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"chat_template": "x"}, "chat_template"),
    ):
        async with served.session.post("/tokenize", json={"messages": HI, **more}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, param)


MESSAGES: list[dict[str, Any]] = [
    {},
    {"system": "Be brief.", "thinking": {"type": "disabled"}},
    {"tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]},
]


@pytest.mark.parametrize("more", MESSAGES)
async def test_count_tokens_counts_the_prompt_of_the_message(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, more: dict[str, Any]
) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        body = {"model": "tiny", "messages": HI, **more}
        async with served.session.post("/v1/messages", json={**body, "max_tokens": 2}) as response:
            assert response.status == 200, await response.json()
        async with served.session.post("/v1/messages/count_tokens", json=body) as response:
            assert (await response.json())["input_tokens"] == len(fake.seen[0].token_ids)
