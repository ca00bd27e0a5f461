"""Answers and events, validated strictly against the types of the newest official clients."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

import anthropic.types
import openai.types.chat
import openai.types.responses
import pydantic
import pytest

URL = os.environ["QUIRE_SCRIPTED_URL"]
HI = {"role": "user", "content": "Hi"}
OBJECT = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {"type": "function", "name": "run_shell", "parameters": OBJECT}
KINDS: list[tuple[str, dict[str, Any], Any, Any]] = [
    (
        "/v1/chat/completions",
        {"messages": [HI], "tools": [{"type": "function", "function": {"name": "run_shell", "parameters": OBJECT}}]},
        openai.types.chat.ChatCompletion,
        openai.types.chat.ChatCompletionChunk,
    ),
    (
        "/v1/responses",
        {"input": "Hi", "tools": [TOOL, {"type": "custom", "name": "x"}], "reasoning": {"summary": "auto"}},
        openai.types.responses.Response,
        openai.types.responses.ResponseStreamEvent,
    ),
    (
        "/v1/messages",
        {"messages": [HI], "max_tokens": 999, "tools": [{"name": "run_shell", "input_schema": OBJECT}]},
        anthropic.types.Message,
        anthropic.types.RawMessageStreamEvent,
    ),
]


def ask(path: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        text: str = response.read().decode()
    return text


@pytest.mark.parametrize(("path", "body", "whole", "event"), KINDS, ids=[path for path, *_ in KINDS])
def test_answers_validate_strictly(path: str, body: dict[str, Any], whole: Any, event: Any) -> None:
    pydantic.TypeAdapter(whole).validate_json(ask(path, body), strict=True)
    lines = [line.removeprefix("data: ") for line in ask(path, {**body, "stream": True}).splitlines()]
    events = [line for line in lines if line.startswith("{")]
    assert len(events) > 3
    for line in events:
        pydantic.TypeAdapter(event).validate_json(line, strict=True)
