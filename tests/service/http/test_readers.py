"""Readers of events as load generators write them: each must read a stream of a client that asks for nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.service.delivery import queue_updates
from quire.service.text.tokenizer import Tokenizer
from tests.service.delivery.test_late import LATE, TARGET_S, full
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import ANSWER, says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
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


def unstripped_messages(stream: bytes) -> list[Any]:
    """The same in a hurry: no white space is removed, only empty messages are skipped."""
    return [decoded(message[6:]) for message in stream.split(b"\n\n") if message]


def data_lines(stream: bytes) -> list[Any]:
    """Skips each line that does not begin with `data: `."""
    return [decoded(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: ")]


READERS = [every_line, every_message, unstripped_messages, data_lines]


async def body_of(served: Served, path: str, asked: dict[str, Any], **headers: str) -> bytes:
    async with served.session.post(path, json={"model": "tiny", "stream": True, **asked}, headers=headers) as response:
        assert response.status == 200
        return await response.read()


def text_of(events: list[Any]) -> str:
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": "a", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_every_reader_reads_a_plain_stream(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, path: str, asked: dict[str, Any]
) -> None:
    served = await serve(heartbeat_s=0.02)
    async with engine(says(byte_level_tokenizer, eos=True), step_s=0.01) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        fake.holding = True
        asking = asyncio.create_task(body_of(served, path, {"max_tokens": 400, **asked}))
        await asyncio.sleep(0.2)  # several keep-alives
        fake.holding = False
        stream = await asking
    assert stream.startswith(b"\n\n")
    for read in READERS:
        assert text_of(read(stream)) == ANSWER, read.__name__


async def test_every_reader_reads_a_late_stream(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_updates, "UPDATE_S", 0.02)
    served = await serve(ttft_target_s=TARGET_S, late_wait_s=60.0)
    async with full(served, engine(says(byte_level_tokenizer))) as fake:
        asking = asyncio.create_task(body_of(served, "/v1/completions", LATE))
        await settled(lambda: served.streams.fleet.late.requests == 1)
        await asyncio.sleep(0.2)
        fake.free_tokens = 1000
        stream = await asking
    assert stream.startswith(b"\n\n")
    texts = [text_of(read(stream)) for read in READERS]
    assert texts == texts[:1] * len(READERS)
    assert texts[0]


@pytest.mark.parametrize(
    ("headers", "options"),
    [({"X-Resumable": "1"}, {}), ({"Idempotency-Key": "k"}, {}), ({}, {"include_ids": True})],
)
async def test_a_client_that_asks_for_ids_gets_comments_too(
    serve: Serve,
    engine: EngineMaker,
    byte_level_tokenizer: Tokenizer,
    headers: dict[str, str],
    options: dict[str, bool],
) -> None:
    """A reader of every line fails on them, so they are sent on request only."""
    served = await serve(ttft_target_s=TARGET_S, late_wait_s=60.0)
    async with full(served, engine(says(byte_level_tokenizer))) as fake:
        asking = asyncio.create_task(body_of(served, "/v1/completions", {**LATE, "stream_options": options}, **headers))
        await settled(lambda: served.streams.fleet.late.requests == 1)
        await asyncio.sleep(0.1)
        fake.free_tokens = 1000
        stream = await asking
    assert stream.startswith(b": queued place=")
    assert stream.count(b"\nid: cmpl-") == len(data_lines(stream))
    assert text_of(data_lines(stream))
    with pytest.raises(json.JSONDecodeError):
        every_line(stream)
