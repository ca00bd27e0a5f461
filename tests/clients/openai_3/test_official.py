"""OpenAI's own client, version 3: what the other clients are made of."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]


class Stop(BaseModel):
    """A stop of a journey."""

    town: str = Field(max_length=20)
    nights: int = Field(ge=1, le=9)


class Journey(BaseModel):
    """A journey."""

    kind: Literal["boat", "train"]
    stops: list[Stop] = Field(max_length=2)


@pytest.fixture
def client(base_url: str) -> Any:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.sense
def test_schemas_of_pydantic(client: openai.OpenAI, model: str) -> None:
    """Sampled, so that the demo model writes different answers; each fits."""
    asked: Any = {"model": model, "messages": CAPITAL, "response_format": Journey, "temperature": 1, "max_tokens": 300}
    for seed in range(3):
        [choice] = client.chat.completions.parse(**asked, seed=seed).choices
        assert isinstance(choice.message.parsed, Journey)
    with client.chat.completions.stream(**asked, seed=0) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Journey)


@pytest.mark.sense
@pytest.mark.parametrize("named", [False, True])
def test_demanded_calls_fit_their_schema(
    client: openai.OpenAI, model: str, weather: dict[str, Any], named: bool
) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}} if named else "required"
    tools: Any = [weather]
    one: Any = {"parallel_tool_calls": False}
    for seed in range(3):
        answer = client.chat.completions.create(
            model=model,
            messages=CAPITAL,
            tools=tools,
            tool_choice=choice,
            temperature=1,
            seed=seed,
            max_tokens=300,
            **one,
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        for call in answer.choices[0].message.tool_calls or []:
            assert call.type == "function"
            jsonschema.validate(json.loads(call.function.arguments), weather["function"]["parameters"])


@pytest.mark.sense
def test_responses_with_a_schema_and_a_tool(client: openai.OpenAI, model: str, weather: dict[str, Any]) -> None:
    parsed = client.responses.parse(model=model, input="Plan a journey.", text_format=Journey, max_output_tokens=300)
    assert isinstance(parsed.output_parsed, Journey)
    tools: Any = [{"type": "function", "strict": True, **weather["function"]}]
    asked: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(model=model, input="Paris?", **asked) as stream:
        [call] = stream.get_final_response().output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), weather["function"]["parameters"])


def test_a_prompt_is_counted_as_it_is_charged(client: openai.OpenAI, model: str, url: str) -> None:
    counted: Any = client.post(f"{url}/tokenize", body={"messages": CAPITAL}, cast_to=object)
    answer = client.chat.completions.create(model=model, messages=CAPITAL, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == counted["count"]
