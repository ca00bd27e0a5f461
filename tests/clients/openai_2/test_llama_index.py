"""LlamaIndex's OpenAILike."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from llama_index.core.llms import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

CAPITAL, PARIS = "What is the capital of France?", "The capital of France is Paris."


class Rating(BaseModel):
    """A rating."""

    word: Literal["good", "bad"]
    stars: int = Field(ge=1, le=5)


class Place(BaseModel):
    """The arguments of `get_weather`."""

    city: str
    unit: Literal["celsius", "kelvin"]


def get_weather(city: str, unit: str) -> str:
    """Return the weather in a city."""
    return f"21 {unit} in {city}"


def tool() -> FunctionTool:
    return FunctionTool.from_defaults(get_weather, fn_schema=Place)


@pytest.fixture
def options(base_url: str, model: str) -> dict[str, Any]:
    common = {"model": model, "api_base": base_url, "api_key": "none", "temperature": 0, "max_tokens": 48}
    return {**common, "max_retries": 0, "is_chat_model": True, "is_function_calling_model": True}


@pytest.fixture
def llm(options: dict[str, Any]) -> Any:
    return OpenAILike(**options)


@pytest.fixture
def question() -> list[Any]:
    return [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=CAPITAL)]


@pytest.mark.sense
def test_complete(llm: Any) -> None:
    assert llm.complete(CAPITAL).text == PARIS


def test_chat_of_several_turns(llm: Any, question: list[Any]) -> None:
    answer = llm.chat(question)
    assert answer.message.role == MessageRole.ASSISTANT
    assert llm.chat([*question, answer.message, ChatMessage(role="user", content="And of Italy?")]).message.content


def test_streams(llm: Any, question: list[Any]) -> None:
    *_, last = llm.stream_chat(question)
    assert last.message.content == llm.chat(question).message.content
    *_, last = llm.stream_complete(CAPITAL)
    assert last.text == llm.complete(CAPITAL).text


async def test_async_calls_and_streams(llm: Any, question: list[Any]) -> None:
    whole = await llm.achat(question)
    deltas = [event.delta or "" async for event in await llm.astream_chat(question)]
    assert "".join(deltas) == whole.message.content


def test_the_endpoint_of_completions(options: dict[str, Any]) -> None:
    llm = OpenAILike(**options | {"is_chat_model": False, "is_function_calling_model": False})
    *_, last = llm.stream_complete("To be or not")
    assert last.text == llm.complete("To be or not").text


def test_log_probabilities_and_stop_strings(options: dict[str, Any], question: list[Any]) -> None:
    assert OpenAILike(**options, logprobs=True, top_logprobs=2).chat(question).logprobs
    llm = OpenAILike(**options)
    whole = llm.chat(question).message.content
    assert llm.chat(question, stop=[whole[4:8]]).message.content == whole.partition(whole[4:8])[0]


@pytest.mark.sense
@pytest.mark.parametrize("streamed", [False, True])
def test_tools_and_their_results(llm: Any, question: list[Any], streamed: bool) -> None:
    asked: dict[str, Any] = {"tools": [tool()], "chat_history": question, "tool_required": True}
    if streamed:
        *_, answer = llm.stream_chat_with_tools(**asked)
    else:
        answer = llm.chat_with_tools(**asked)
    [call] = llm.get_tool_calls_from_response(answer)
    result = tool()(**call.tool_kwargs)
    assert result.content.startswith("21 ")
    returned = ChatMessage(role="tool", content=result.content, additional_kwargs={"tool_call_id": call.tool_id})
    assert llm.chat_with_tools([tool()], chat_history=[*question, answer.message, returned]).message


@pytest.mark.sense
def test_predict_and_call(llm: Any) -> None:
    answer = llm.predict_and_call([tool()], CAPITAL, tool_required=True)
    assert str(answer).startswith("21 ")


@pytest.mark.sense
@pytest.mark.parametrize("structured", [False, True])
def test_structured_output(options: dict[str, Any], question: list[Any], structured: bool) -> None:
    """By a tool, and by `response_format`."""
    llm = OpenAILike(**options, should_use_structured_outputs=structured)
    assert isinstance(llm.as_structured_llm(Rating).chat(question).raw, Rating)


def test_errors_are_the_official_clients(llm: Any, long_text: str, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        llm.complete(long_text)
    image = ChatMessage(role="user", blocks=[TextBlock(text="What?"), ImageBlock(url="data:image/png;base64,AAAA")])
    with pytest.raises(openai.BadRequestError, match=r"content\[1\]\.type: this server takes text only"):
        llm.chat([image])
    with pytest.raises(openai.NotFoundError):
        OpenAILike(**options | {"model": "other"}).complete("Hi")
