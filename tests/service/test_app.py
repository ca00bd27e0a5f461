"""The gateway over HTTP: a real server, a real Redis, real clients, and an engine that follows a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
import pytest
from aiohttp import ClientSession

from engine.wire.messages import Finish, Generate
from service.text import Tokenizer
from tests.service.fakes import FakeEngine, Served

Serve = Callable[..., Awaitable[Served]]

ANSWER = "One request down, one token up 🙂 café. END of story."
EngineMaker = Callable[..., FakeEngine]


def says(tokenizer: Tokenizer, text: str = ANSWER, *, eos: bool = False) -> Callable[..., Any]:
    """A script: `text` for ever, or once and then the end-of-sequence token."""

    def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        ids = tokenizer._encode(text, special=False)
        if eos:
            return [*ids, 1], Finish("stop", stop_token=1)
        return ids * (generate.max_new_tokens // len(ids) + 1), None

    return script


async def events(response: Any) -> AsyncIterator[tuple[str | None, Any]]:
    """(event id, decoded data) of an SSE response; comments as (None, the line); [DONE] as (None, "[DONE]")."""
    event_id = None
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
            yield (None, data) if data == "[DONE]" else (event_id, json.loads(data))
        elif line.startswith(":"):
            yield None, line


async def settled(condition: Callable[[], bool]) -> None:
    """Return as soon as `condition()` holds; fails the test after 5 s."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_official_client_reads_a_completion(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    async with (
        engine(says(byte_level_tokenizer, eos=True)),
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client,
    ):
        await settled(lambda: bool(served.streams.fleet.engines))
        answer = await client.completions.create(model="tiny", prompt="Say it", max_tokens=400)
        assert answer.choices[0].text == ANSWER
        assert answer.choices[0].finish_reason == "stop"
        ids = byte_level_tokenizer._encode(ANSWER, special=False)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(ids) + 1
        assert answer.system_fingerprint == "fp_" + "f" * 16

        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Say it"}],
            stream=True,
            n=2,
            stream_options={"include_usage": True},
        )
        texts, roles, finishes, usage = ["", ""], [0, 0], [None, None], None
        async for chunk in stream:
            for choice in chunk.choices:
                assert usage is None
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] += choice.delta.role == "assistant"
                finishes[choice.index] = choice.finish_reason
            usage = chunk.usage
        assert texts == [ANSWER, ANSWER]
        assert roles == [1, 1]
        assert finishes == ["stop", "stop"]
        assert usage is not None
        assert usage.completion_tokens == 2 * len(ids) + 2
