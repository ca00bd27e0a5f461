"""The server that `python -m tests.clients` has started, and what every client is asked to do with it."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the demo model, calls that need a template with tools, or an answer with sense, are skipped."""
    if os.environ["QUIRE_SENSE"] == "0":
        for item in items:
            if item.get_closest_marker("sense"):
                item.add_marker(pytest.mark.skip(reason="needs the demo model"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sense: needs the demo model's tools, or its sense")


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["QUIRE_URL"]


@pytest.fixture(scope="session")
def base_url(url: str) -> str:
    """What OpenAI's clients take."""
    return f"{url}/v1"


@pytest.fixture(scope="session")
def model(base_url: str) -> str:
    with urllib.request.urlopen(f"{base_url}/models") as response:
        name: str = json.load(response)["data"][0]["id"]
    return name


@pytest.fixture(scope="session")
def long_text() -> str:
    """More than fits into the context."""
    return "one two three " * 3000


@pytest.fixture(scope="session")
def weather() -> dict[str, Any]:
    """A function, in OpenAI's format."""
    return {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "kelvin"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
