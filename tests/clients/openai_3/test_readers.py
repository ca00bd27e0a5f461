"""Readers of streams as load generators write them, over plain sockets: they know nothing but lines."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

Read = Callable[[bytes], list[Any]]


def decoded(data: bytes) -> Any:
    return "[DONE]" if data == b"[DONE]" else json.loads(data)


def every_line(stream: bytes) -> list[Any]:
    """As llmperf and SGLang's bench_serving: each non-empty line is an event after six characters."""
    return [decoded(line.strip()[6:]) for line in stream.split(b"\n") if line.strip()]


def every_message(stream: bytes) -> list[Any]:
    """As `vllm bench serve`: a message ends at a blank line, and one that begins with a colon is a comment."""
    messages = [message.strip() for message in stream.split(b"\n\n")]
    return [decoded(message.removeprefix(b"data: ")) for message in messages if message and message[:1] != b":"]


def data_lines(stream: bytes) -> list[Any]:
    """Every line that begins with `data: `, and no other."""
    return [decoded(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: ")]


READERS = [every_line, every_message, data_lines]
CHAT = {"messages": [{"role": "user", "content": "Count to nine."}], "stream_options": {"include_usage": True}}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
FORMAT = {"name": "n", "schema": SCHEMA}


def body_of(url: str, path: str, asked: dict[str, Any]) -> bytes:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    body = json.dumps({"stream": True, "max_tokens": 12, "temperature": 0, **asked})
    connection.request("POST", f"/v1{path}", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    stream = response.read()
    connection.close()
    assert response.status == 200, stream
    return stream


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/completions", {"prompt": "To be", "stream_options": {"include_usage": True}}),
        ("/completions", {"prompt": "To be", "logprobs": 1, "n": 2, "temperature": 1}),
        ("/chat/completions", CHAT),
        ("/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": FORMAT}}),
    ],
    ids=["completion", "logprobs", "chat", "schema"],
)
def test_a_reader_of_lines_reads_every_stream(url: str, path: str, asked: dict[str, Any], read: Read) -> None:
    found = read(body_of(url, path, asked))
    assert found[-1] == "[DONE]"
    events = found[:-1]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    assert {choice["finish_reason"] for choice in choices} - {None} <= {"stop", "length"}
    if "stream_options" in asked:
        assert events[-1]["usage"]["completion_tokens"] > 0
