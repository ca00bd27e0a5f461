"""LangChain's ChatOpenAI and OpenAI."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, Literal

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

CAPITAL, PARIS = "What is the capital of France?", "The capital of France is Paris."


class Rating(BaseModel):
    """A rating."""

    word: Literal["good", "bad"]
    stars: int = Field(ge=1, le=5)


@tool
def get_weather(city: str, unit: Literal["celsius", "kelvin"]) -> str:
    """Return the weather in a city."""
    return f"21 {unit} in {city}"


@pytest.fixture
def chat(base_url: str, model: str) -> Any:
    return ChatOpenAI(base_url=base_url, api_key="none", model=model, temperature=0, max_tokens=128, max_retries=0)


@pytest.mark.sense
def test_invoke(chat: Any) -> None:
    answer = chat.invoke(CAPITAL)
    assert answer.content == PARIS
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] == 8


def test_a_system_prompt_and_several_turns(chat: Any) -> None:
    turns = [SystemMessage("Be brief."), HumanMessage("Hi"), AIMessage("Hello."), HumanMessage("Count to three.")]
    short, long = chat.invoke(turns[:2]), chat.invoke(turns)
    assert long.usage_metadata["input_tokens"] > short.usage_metadata["input_tokens"]
    assert long.content


def test_stream_with_usage(chat: Any) -> None:
    chunks = list(chat.stream(CAPITAL, stream_usage=True))
    whole = sum(chunks[1:], chunks[0])
    assert whole.content == chat.invoke(CAPITAL).content
    assert whole.usage_metadata["output_tokens"] > 0


async def test_async_calls_and_streams(chat: Any) -> None:
    whole, *batch = await asyncio.gather(chat.ainvoke(CAPITAL), chat.ainvoke("Hi"), chat.ainvoke("Count."))
    assert "".join([chunk.content async for chunk in chat.astream(CAPITAL)]) == whole.content
    assert all(one.content for one in batch)


def test_batch(chat: Any) -> None:
    assert len(chat.batch([CAPITAL, "Hi", "Count."])) == 3


def test_stop_strings_and_bounds(chat: Any) -> None:
    whole = chat.invoke(CAPITAL).content
    stop = whole[4:8]
    assert chat.invoke(CAPITAL, stop=[stop]).content == whole.partition(stop)[0]
    cut = chat.invoke(CAPITAL, max_tokens=2)
    assert (cut.response_metadata["finish_reason"], cut.usage_metadata["output_tokens"]) == ("length", 2)


def test_log_probabilities(chat: Any) -> None:
    entries = chat.bind(logprobs=True, top_logprobs=2).invoke(CAPITAL).response_metadata["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_several_answers(base_url: str, model: str) -> None:
    chat = ChatOpenAI(base_url=base_url, api_key="none", model=model, n=3, temperature=1, max_tokens=8, seed=5)
    assert len(chat.generate([[HumanMessage("Hi")]]).generations[0]) == 3


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.sense
def test_structured_output(chat: Any, method: str) -> None:
    rating = chat.with_structured_output(Rating, method=method).invoke("Rate the sea.")
    assert isinstance(rating, Rating)


def test_json_mode(chat: Any) -> None:
    """The object may be longer than the answer: LangChain then raises what the official client raises."""
    with contextlib.suppress(openai.LengthFinishReasonError):
        answer = chat.bind(response_format={"type": "json_object"}).invoke("Rate the sea.")
        assert isinstance(json.loads(answer.content), dict)


@pytest.mark.parametrize("choice", ["any", "required", "get_weather", "auto"])
@pytest.mark.sense
def test_tools_and_their_results(chat: Any, choice: str) -> None:
    question = HumanMessage("How is the weather in Paris?")
    answer = chat.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False).invoke([question])
    if choice == "auto":  # the model decides
        assert answer.content or answer.tool_calls
        return
    [call] = answer.tool_calls
    assert call["name"] == "get_weather"
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    last = chat.bind_tools([get_weather]).invoke([question, answer, result])
    assert last.content or last.tool_calls


@pytest.mark.sense
def test_streamed_tool_calls(chat: Any) -> None:
    bound = chat.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    chunks = list(bound.stream("How is the weather in Paris?"))
    whole = sum(chunks[1:], chunks[0])
    assert get_weather.invoke(whole.tool_calls[0]).content.startswith("21 ")
    assert whole.response_metadata["finish_reason"] == "tool_calls"


def test_a_long_prompt_is_langchains_context_overflow(chat: Any, long_text: str) -> None:
    with pytest.raises(ContextOverflowError):
        chat.invoke(long_text)
    with pytest.raises(ContextOverflowError):
        list(chat.stream(long_text))


def test_images_are_refused_by_name(chat: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[1\]\.type: this server takes text only"):
        chat.invoke([HumanMessage([{"type": "text", "text": "What is this?"}, image])])


def test_embeddings_are_a_clear_error(base_url: str, model: str) -> None:
    embeddings = OpenAIEmbeddings(base_url=base_url, api_key="none", model=model, check_embedding_ctx_length=False)
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        embeddings.embed_query("a")


def test_other_errors_are_the_official_clients(base_url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="not the one asked for"):
        ChatOpenAI(base_url=base_url, api_key="none", model="gpt-4").invoke("Hi")


def test_a_timeout_is_one(base_url: str, model: str) -> None:
    hasty = ChatOpenAI(base_url=base_url, api_key="none", model=model, max_retries=0, timeout=0.001)
    with pytest.raises(openai.APITimeoutError):
        hasty.invoke("Count to one thousand.")


def test_completions(base_url: str, model: str) -> None:
    llm = OpenAI(base_url=base_url, api_key="none", model=model, temperature=0, max_tokens=12)
    assert "".join(llm.stream("To be or not")) == llm.invoke("To be or not")


@pytest.mark.sense
def test_the_responses_api(base_url: str, model: str) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 48, "use_responses_api": True}
    chat = ChatOpenAI(base_url=base_url, api_key="none", model=model, **options)
    assert chat.invoke(CAPITAL).text == PARIS
    assert "".join(chunk.text for chunk in chat.stream(CAPITAL)) == PARIS
    bound = chat.bind_tools([get_weather], tool_choice="required", strict=True, parallel_tool_calls=False)
    assert bound.invoke("The weather in Paris?").tool_calls
    assert isinstance(chat.with_structured_output(Rating).invoke("Rate the sea."), Rating)
