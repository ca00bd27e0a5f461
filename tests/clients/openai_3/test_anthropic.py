"""Anthropic's own client."""

from __future__ import annotations

from typing import Any

import anthropic
import jsonschema
import pytest

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."


@pytest.fixture
def client(url: str) -> Any:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def tool(weather: dict[str, Any]) -> dict[str, Any]:
    function = weather["function"]
    return {"name": function["name"], "description": "The weather.", "input_schema": function["parameters"]}


@pytest.fixture
def asked(model: str) -> dict[str, Any]:
    """Greedy: newer versions of the client have no argument for it."""
    return {"model": model, "messages": CAPITAL, "max_tokens": 48, "extra_body": {"temperature": 0}}


@pytest.mark.sense
def test_create(client: Any, asked: dict[str, Any]) -> None:
    message = client.messages.create(**asked)
    assert (message.content[0].text, message.stop_reason) == (PARIS, "end_turn")
    assert message.usage.output_tokens == 8


def test_a_system_prompt_stop_sequences_and_bounds(client: Any, asked: dict[str, Any]) -> None:
    whole = client.messages.create(system="Be brief.", **asked).content[0].text
    stop = whole[4:8]
    message = client.messages.create(system="Be brief.", stop_sequences=[stop], **asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in message.content) == whole.partition(stop)[0]
    assert client.messages.create(**asked | {"max_tokens": 1}).stop_reason == "max_tokens"


def test_streams(client: Any, asked: dict[str, Any]) -> None:
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == client.messages.create(**asked).content[0].text
    events = [event.type for event in client.messages.create(stream=True, **asked)]
    assert (events[0], events[-1]) == ("message_start", "message_stop")


async def test_async_calls_and_streams(url: str, asked: dict[str, Any]) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            assert await stream.get_final_text() == whole.content[0].text


@pytest.mark.sense
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tools_and_their_results(client: Any, asked: dict[str, Any], tool: Any, choice: dict[str, Any]) -> None:
    choice, asked = {**choice, "disable_parallel_tool_use": True}, {**asked, "max_tokens": 120}
    with client.messages.stream(tools=[tool], tool_choice=choice, **asked) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    [use] = message.content
    jsonschema.validate(use.input, tool["input_schema"])
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "21 degrees"}
    asked["messages"] = [*CAPITAL, {"role": "assistant", "content": message.content}]
    asked["messages"].append({"role": "user", "content": [result]})
    assert client.messages.create(tools=[tool], **asked).content


def test_tokens_are_counted(client: Any, asked: dict[str, Any], model: str) -> None:
    counted = client.messages.count_tokens(model=model, messages=CAPITAL).input_tokens
    usage = client.messages.create(**asked).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_images_and_long_prompts_are_bad_requests(client: Any, asked: dict[str, Any], long_text: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    asked["messages"] = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type"):
        client.messages.create(**asked)
    asked["messages"] = [{"role": "user", "content": long_text}]
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(**asked)


def test_other_errors_have_their_classes(client: Any, asked: dict[str, Any], url: str, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked | {"model": "other"})
    hasty = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=0.001)
    with pytest.raises(anthropic.APITimeoutError):
        hasty.messages.create(**asked)
    assert client.models.retrieve(model).id == model
