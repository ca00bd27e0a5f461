"""LiteLLM, as a library: the proxy calls the same functions."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read when it is imported: else it asks GitHub for prices

import jsonschema
import litellm
from pydantic import BaseModel, ConfigDict, Field

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."


class Rating(BaseModel):
    """A rating."""

    model_config = ConfigDict(extra="forbid")
    word: Literal["good", "bad"]
    stars: int = Field(ge=1, le=5)


@pytest.fixture(params=["openai", "hosted_vllm"])
def asked(request: pytest.FixtureRequest, base_url: str, model: str) -> dict[str, Any]:
    """Both prefixes under which users of LiteLLM reach a server of their own."""
    name = f"{request.param}/{model}"
    common = {"model": name, "api_base": base_url, "api_key": "none", "num_retries": 0}
    return {**common, "messages": CAPITAL, "temperature": 0, "max_tokens": 96}


@pytest.mark.sense
def test_completion(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (PARIS, "stop")
    assert answer.usage.completion_tokens == 8


def test_streams_with_usage(asked: dict[str, Any]) -> None:
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks, messages=CAPITAL)
    assert whole.choices[0].message.content == litellm.completion(**asked).choices[0].message.content
    assert whole.usage.completion_tokens > 0


async def test_async_calls_and_streams(asked: dict[str, Any]) -> None:
    whole = await litellm.acompletion(**asked)
    deltas = [chunk.choices[0].delta.content or "" async for chunk in await litellm.acompletion(**asked, stream=True)]
    assert "".join(deltas) == whole.choices[0].message.content


def test_several_answers_stop_strings_and_bounds(asked: dict[str, Any]) -> None:
    whole = litellm.completion(**asked).choices[0].message.content
    stop = whole[4:8]
    assert litellm.completion(**asked, stop=[stop]).choices[0].message.content == whole.partition(stop)[0]
    several = litellm.completion(**asked | {"n": 3, "temperature": 1, "seed": 3, "max_tokens": 2})
    assert [choice.finish_reason for choice in several.choices] == ["length"] * 3


def test_log_probabilities(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, logprobs=True, top_logprobs=2)
    assert all(len(entry["top_logprobs"]) == 2 for entry in answer.choices[0].logprobs["content"])


@pytest.mark.sense
@pytest.mark.parametrize("named", [False, True])
def test_tools_and_their_results(asked: dict[str, Any], weather: dict[str, Any], named: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}} if named else "required"
    message = litellm.completion(**asked, tools=[weather], tool_choice=choice, parallel_tool_calls=False)
    message = message.choices[0].message
    [call] = message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), weather["function"]["parameters"])
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    answer = litellm.completion(**asked | {"messages": [*CAPITAL, message, result]}, tools=[weather])
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


@pytest.mark.sense
def test_streamed_tool_calls(asked: dict[str, Any], weather: dict[str, Any]) -> None:
    options: dict[str, Any] = {"tools": [weather], "tool_choice": "required", "parallel_tool_calls": False}
    whole = litellm.stream_chunk_builder(list(litellm.completion(**asked, **options, stream=True)))
    [call] = whole.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), weather["function"]["parameters"])


@pytest.mark.sense
def test_a_schema_of_pydantic(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, response_format=Rating)
    assert Rating.model_validate_json(answer.choices[0].message.content)


def test_completions(base_url: str, model: str) -> None:
    common: dict[str, Any] = {"api_base": base_url, "api_key": "none", "max_tokens": 4}
    answer = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="To be or", **common)
    assert answer.choices[0].text


def test_a_long_prompt_is_litellms_own_error(asked: dict[str, Any], long_text: str) -> None:
    asked["messages"] = [{"role": "user", "content": long_text}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked)


def test_other_errors_have_their_classes(asked: dict[str, Any]) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(litellm.BadRequestError, match=r"content\[0\]\.type: this server takes text only"):
        litellm.completion(**asked | {"messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked | {"model": f"{asked['model']}-other"})
    with pytest.raises(litellm.Timeout):
        litellm.completion(**asked, timeout=0.001)


def test_embeddings_are_a_clear_error(base_url: str, model: str) -> None:
    with pytest.raises(litellm.NotFoundError, match="/v1/embeddings"):
        litellm.embedding(f"openai/{model}", input=["a"], api_base=base_url, api_key="none")
