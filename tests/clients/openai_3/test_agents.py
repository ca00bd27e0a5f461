"""OpenAI's agents SDK, over the Responses API and over chat completions."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
)
from agents.exceptions import MaxTurnsExceeded
from pydantic import BaseModel, Field

CAPITAL, PARIS = "What is the capital of France?", "The capital of France is Paris."
SILENT = RunConfig(tracing_disabled=True)  # else it sends traces to OpenAI
KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class Rating(BaseModel):
    """A rating."""

    word: Literal["good", "bad"]
    stars: int = Field(ge=1, le=5)


class Weather:
    """A tool that remembers with what it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

        @function_tool
        def get_weather(city: str, unit: Literal["celsius", "kelvin"]) -> str:
            """Return the weather in a city."""
            self.calls.append((city, unit))
            return "It is sunny."

        self.tool = get_weather


@pytest.fixture(params=KINDS)
async def served(request: pytest.FixtureRequest, base_url: str, model: str) -> Any:
    """The model, over both APIs."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield KINDS[request.param](model=model, openai_client=client)


def agent(served: Any, choice: str | None = None, **options: Any) -> Agent[None]:
    settings = ModelSettings(
        temperature=0,
        max_tokens=48,
        tool_choice=choice,
        parallel_tool_calls=None if choice is None else False,
        include_usage=True,
    )
    return Agent(
        name="A", instructions="You answer in one short sentence.", model=served, model_settings=settings, **options
    )


async def test_a_run(served: Any) -> None:
    result = await Runner.run(agent(served), CAPITAL, run_config=SILENT)
    assert result.final_output
    assert result.context_wrapper.usage.output_tokens > 0


async def test_a_streamed_run(served: Any) -> None:
    whole = await Runner.run(agent(served), CAPITAL, run_config=SILENT)
    result = Runner.run_streamed(agent(served), CAPITAL, run_config=SILENT)
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == result.final_output == whole.final_output


async def test_several_turns_of_a_session(served: Any) -> None:
    session = SQLiteSession("s")
    await Runner.run(agent(served), CAPITAL, session=session, run_config=SILENT)
    await Runner.run(agent(served), "And of Italy?", session=session, run_config=SILENT)
    assert len(await session.get_items()) == 4


@pytest.mark.sense
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_is_called_and_its_result_answered(served: Any, streamed: bool) -> None:
    """`required` holds for the first turn: the SDK then leaves the choice to the model."""
    weather = Weather()
    asked = agent(served, "required", tools=[weather.tool])
    if streamed:
        run = Runner.run_streamed(asked, "How is the weather in Paris?", max_turns=4, run_config=SILENT)
        items = [event.name async for event in run.stream_events() if event.type == "run_item_stream_event"]
        assert items[:2] == ["tool_called", "tool_output"]
        assert run.final_output
    else:
        result = await Runner.run(asked, "How is the weather in Paris?", max_turns=4, run_config=SILENT)
        assert result.final_output
    assert weather.calls
    assert all(unit in ("celsius", "kelvin") for _, unit in weather.calls)


@pytest.mark.sense
async def test_a_named_tool_ends_the_run(served: Any) -> None:
    weather = Weather()
    asked = agent(served, "get_weather", tools=[weather.tool], tool_use_behavior="stop_on_first_tool")
    assert (await Runner.run(asked, "Paris?", run_config=SILENT)).final_output == "It is sunny."


@pytest.mark.sense
async def test_the_output_type_is_a_schema(served: Any) -> None:
    result = await Runner.run(agent(served, output_type=Rating), "Rate the sea.", run_config=SILENT)
    assert isinstance(result.final_output, Rating)


@pytest.mark.sense
async def test_a_handoff(served: Any) -> None:
    other = agent(served).clone(name="Other")
    result = await Runner.run(agent(served, "required", handoffs=[other]), "Hi", run_config=SILENT)
    assert result.last_agent.name == "Other"
    assert result.final_output


@pytest.mark.sense
async def test_turns_are_bounded(served: Any) -> None:
    weather = Weather()
    asked = agent(served, "required", tools=[weather.tool], reset_tool_choice=False)
    with pytest.raises(MaxTurnsExceeded):
        await Runner.run(asked, "Paris?", max_turns=2, run_config=SILENT)
    assert len(weather.calls) >= 2


async def test_errors_are_the_official_clients(served: Any, long_text: str) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        await Runner.run(agent(served), long_text, run_config=SILENT)
    assert caught.value.code == "context_length_exceeded"
