"""instructor: answers as objects of pydantic, in each of its ways."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import instructor
import openai
import pytest
from instructor.core import InstructorError
from pydantic import BaseModel, ConfigDict, Field

ASKED: Any = [{"role": "user", "content": "Rate the sea."}]
MODES = ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA"]


class Rating(BaseModel):
    """A rating.  Further properties are forbidden: a small model would add them without end."""

    model_config = ConfigDict(extra="forbid")
    word: Literal["good", "bad"]
    stars: int = Field(ge=1, le=5)


@pytest.fixture
def asked(model: str) -> dict[str, Any]:
    return {"model": model, "messages": ASKED, "temperature": 0, "max_tokens": 96, "max_retries": 0}


@pytest.mark.sense
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "JSON"])
def test_an_object(base_url: str, asked: dict[str, Any], mode: str) -> None:
    official = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(official, mode=getattr(instructor.Mode, mode))
    found, raw = client.chat.completions.create_with_completion(response_model=Rating, **asked)
    assert isinstance(found, Rating)
    assert raw.usage.completion_tokens > 0


@pytest.mark.sense
def test_json_mode_gives_json(base_url: str, asked: dict[str, Any]) -> None:
    """The server promises an object, not this one: with `JSON`, the schema is only a part of the prompt."""
    official = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(official, mode=instructor.Mode.JSON)
    sent: list[str] = []
    client.on("completion:response", lambda response: sent.append(response.choices[0].message.content))
    with contextlib.suppress(InstructorError):
        assert isinstance(client.chat.completions.create(response_model=Rating, **asked), Rating)
    assert sent[0].startswith("{")


@pytest.mark.sense
async def test_an_object_of_the_async_client(base_url: str, asked: dict[str, Any]) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as official:
        client = instructor.from_openai(official, mode=instructor.Mode.TOOLS)
        assert isinstance(await client.chat.completions.create(response_model=Rating, **asked), Rating)


@pytest.mark.sense
@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_an_object_while_it_arrives(base_url: str, asked: dict[str, Any], mode: str) -> None:
    official = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(official, mode=getattr(instructor.Mode, mode))
    *_, last = client.chat.completions.create_partial(response_model=Rating, **asked)
    assert last.word in ("good", "bad")
    assert 1 <= last.stars <= 5


@pytest.mark.sense
def test_the_address_of_a_provider(base_url: str, asked: dict[str, Any]) -> None:
    client = instructor.from_provider(f"openai/{asked['model']}", base_url=base_url, api_key="none")
    assert isinstance(client.create(response_model=Rating, **asked), Rating)


def test_text_without_a_model_of_pydantic(base_url: str, asked: dict[str, Any]) -> None:
    official = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    answer = instructor.from_openai(official).chat.completions.create(response_model=None, **asked)
    assert answer.choices[0].message.content
