"""Structured output over HTTP: the official client, complete and streamed, with a model of random weights.

Its chat template knows tools, so that calls can be demanded of it too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import BadRequestError
from pydantic import BaseModel, Field

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.service.fakes import with_tools
from tests.system.stack import Stack

pytestmark = pytest.mark.system
TOO_WIDE = "((a{1,100}){1,100}){1,100}"  # its lexer outgrows an engine's bounds within the answer
SAID: Any = [{"role": "user", "content": "Rate the engine."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3},
    },
    "required": ["stars", "words"],
    "additionalProperties": False,
}
DAYS = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "rate", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "forecast", "parameters": DAYS, "strict": True}},
]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "rating", "strict": True, "schema": SCHEMA}}


class Part(BaseModel):
    name: Literal["gateway", "engine"]
    stars: int = Field(ge=1, le=5, description="of five")


class Rating(BaseModel):
    """A rating of a few parts."""

    parts: list[Part] = Field(min_length=1, max_length=2)
    good: bool
    note: Literal["fine", "so so"] | None


@pytest.fixture(scope="module")
def stack(
    redis_server: EmbeddedRedis, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder = with_tools(Path(shutil.copytree(checkpoint("llama"), tmp_path_factory.mktemp("tools") / "llama")))
    with Stack(redis_server.url, "structured", folder) as made:
        yield made


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("seed", range(4))
def test_a_pydantic_model_comes_back(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=SAID, response_format=Rating, seed=seed, max_tokens=400
    )
    rating = answer.choices[0].message.parsed
    assert rating is not None
    assert 1 <= rating.parts[0].stars <= 5
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("scored", [{"logprobs": True, "top_logprobs": 2}, {}])
def test_streamed_equals_whole(client: openai.OpenAI, scored: dict[str, Any]) -> None:
    """With choices, penalties and logprobs.  Without logprobs forced tokens arrive several at a time."""
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": SAID,
        "response_format": FORMAT,
        "seed": 5,
        "n": 3,
        "max_tokens": 300,
        "frequency_penalty": 1.0,
        **scored,
    }
    whole = client.chat.completions.create(**asked)
    texts, ends = ["", "", ""], [""] * 3
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == ["stop"] * 3
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_any_object(client: openai.OpenAI) -> None:
    """It may take more tokens than it gets: then it is cut, and says so."""
    for seed in range(4):
        answer = client.chat.completions.create(
            model="tiny", messages=SAID, response_format={"type": "json_object"}, seed=seed, max_tokens=60
        )
        [choice] = answer.choices
        assert choice.message.content is not None
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.finish_reason == "length"


@pytest.mark.parametrize("choice", ["required", "named"])
def test_demanded_calls_are_made_and_fit_their_schemas(client: openai.OpenAI, choice: str) -> None:
    asked: Any = "required" if choice == "required" else {"type": "function", "function": {"name": "rate"}}
    for seed in range(4):
        fields: dict[str, Any] = {
            "model": "tiny",
            "messages": SAID,
            "tools": TOOLS,
            "tool_choice": asked,
            "parallel_tool_calls": False,
            "seed": seed,
            "max_tokens": 400,
            # Random weights would think until max_tokens.
            "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
        }
        [whole] = client.chat.completions.create(**fields).choices
        assert whole.finish_reason == "tool_calls"
        assert not whole.message.content
        [call] = whole.message.tool_calls or []
        assert call.type == "function"
        schemas = {"rate": SCHEMA, "forecast": DAYS} if choice == "required" else {"rate": SCHEMA}
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
        name, arguments = "", ""
        for chunk in client.chat.completions.create(**fields, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or []:
                assert piece.function is not None
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
        assert (name, arguments) == (call.function.name, call.function.arguments)


def test_strict_arguments_and_a_response_format_with_tools(client: openai.OpenAI) -> None:
    """The answer is JSON of the schema, or calls; nothing else."""
    for seed in range(4):
        answer = client.chat.completions.create(
            model="tiny",
            messages=SAID,
            tools=TOOLS,
            response_format=FORMAT,
            seed=seed,
            max_tokens=400,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        [choice] = answer.choices
        if choice.finish_reason == "tool_calls":
            for call in choice.message.tool_calls or []:
                assert call.type == "function"
                schema = {"rate": SCHEMA, "forecast": DAYS}[call.function.name]
                jsonschema.validate(json.loads(call.function.arguments), schema)
        elif choice.finish_reason == "stop":
            assert choice.message.content is not None
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        else:
            assert choice.finish_reason == "length"


def test_completions_with_the_names_of_vllm(client: openai.OpenAI) -> None:
    def texts(**extra: Any) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt=["a", "b"], max_tokens=300, n=2, seed=1, extra_body=extra
        )
        return [choice.text for choice in answer.choices]

    assert set(texts(guided_choice=["yes", "no"])) <= {"yes", "no"}
    assert all(len(text) == 7 for text in texts(structured_outputs={"regex": "[a-z]{3}-[0-9]{3}"}))
    assert set(texts(guided_grammar='start: "x" | "y"')) <= {"x", "y"}
    for text in texts(guided_json=SCHEMA):
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_stop_string_cuts_the_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="a", max_tokens=60, stop='"words', extra_body={"guided_json": SCHEMA}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text.strip().startswith("{")
    assert "words" not in answer.choices[0].text


def test_a_prefix_in_the_cache_changes_nothing(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "x = 1\n" * 40, "max_tokens": 80, "seed": 2}
    first = client.completions.create(**asked, extra_body={"guided_json": SCHEMA})
    again = client.completions.create(**asked, extra_body={"guided_json": SCHEMA})
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens
    assert again.choices[0].text == first.choices[0].text


def test_a_refusal_names_the_keyword(client: openai.OpenAI) -> None:
    schema: Any = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny",
            messages=SAID,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
    assert caught.value.param == "response_format.json_schema.schema.properties.tags.uniqueItems"
    assert caught.value.code == "unsupported"


def test_a_grammar_that_an_engine_cannot_follow_ends_its_request(client: openai.OpenAI) -> None:
    """A grammar that fails only in the engine fails this request, not the engine; other requests continue."""
    asked: Any = {"model": "tiny", "prompt": "a", "max_tokens": 300, "temperature": 0}
    for form, param in (
        ({"guided_regex": TOO_WIDE}, "guided_regex"),
        ({"structured_outputs": {"regex": TOO_WIDE}}, "structured_outputs.regex"),
    ):
        for n in (1, 2):
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(**asked, n=n, extra_body=form)
            assert "the grammar cannot be followed any further" in caught.value.message
            assert (caught.value.code, caught.value.param) == ("unsupported", param)
    # An error within the stream; or a 400, if it comes before the first token is sent.
    with (
        pytest.raises(openai.APIError) as broken_off,
        client.completions.create(**asked, stream=True, extra_body=form) as stream,
    ):
        list(stream)
    assert broken_off.value.code == "unsupported"
    answer = client.completions.create(model="tiny", prompt="a", max_tokens=5)
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("budget", [0, 1, 9])
def test_reasoning_ends_with_its_budget(client: openai.OpenAI, budget: int) -> None:
    """A random model would think on: all of its answer, as the first request shows."""
    opened: Any = [*SAID, {"role": "assistant", "content": "<think>"}]
    asked: dict[str, Any] = {"model": "tiny", "messages": opened, "max_tokens": 40, "seed": 5}
    more: dict[str, Any] = {"continue_final_message": True, "return_token_ids": True}
    endless = client.chat.completions.create(**asked, extra_body={**more, "ignore_eos": True})
    bounded = client.chat.completions.create(**asked, extra_body={**more, "thinking_token_budget": budget}, n=3)
    closing = max(json.loads(endless.model_dump_json())["prompt_token_ids"]) + 1
    assert closing not in endless.choices[0].model_dump()["token_ids"]
    for choice in bounded.choices:
        tokens: list[int] = choice.model_dump()["token_ids"]
        assert tokens.index(closing) <= budget
        assert tokens.count(closing - 1) == 0
    assert bounded.usage is not None
    assert bounded.usage.completion_tokens_details is not None
    assert bounded.usage.completion_tokens_details.reasoning_tokens is not None
    assert bounded.usage.completion_tokens_details.reasoning_tokens <= 3 * (budget + 1)
