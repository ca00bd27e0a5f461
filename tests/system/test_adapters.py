"""Answers with LoRA adapters, tool calls among them, survive their engine, killed in the middle: token for token."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from tests.executor.test_lora import base_of, reference
from tests.lora import merged, write_adapter
from tests.pace import patience
from tests.service.fakes import with_tools
from tests.system.chaos.kills import Ask, Stream
from tests.system.processes import ending, metric, wait_until_ready
from tests.system.test_survival import LIMIT_S, Answer, Served, begin, until
from tests.system.test_takeover import engines, spare_of

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]

PROMPT = [20, 30, 40, 50, 60, 70]
TOKENS = 300  # tokens per answer
TOOL = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"]}


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience(LIMIT_S))) as session:
        yield session


def bodies() -> list[dict[str, Any]]:
    """Greedy, sampled in two choices and under a schema: of each adapter and of the base model."""
    free = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
    items = {"type": "array", "items": TOOL, "minItems": 100}
    return [
        {**free, "model": model, **how}
        for model in ("sql", "chat", "tiny")
        for how in (
            {"temperature": 0},
            {"top_k": 4, "seed": 5, "n": 2},
            {"top_k": 8, "seed": 7, "ignore_eos": False, "guided_json": items},
        )
    ]


async def test_a_killed_engine_continues_every_stream_with_its_adapter(
    checkpoint: Callable[[str], Path], tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    """With drafts.  The engine is killed in the middle of all answers, and then the spare that took over."""
    model = checkpoint("llama")
    base = base_of(model)
    folders = {name: write_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate(("sql", "chat"))}
    lora = ",".join(f"{name}={folder}" for name, folder in folders.items())
    options = ("--dtype=float32", "--threads=1", "--kv-blocks=1200", "--check-accounting", "--drafts=on")
    served = Served(tmp_path, model, *options, f"--lora={lora}", "--late-wait-s=1000", "--takeover-wait-s=200")
    with ending([served.process]):
        await asyncio.to_thread(wait_until_ready, served.url, LIMIT_S)
        undisturbed = await asyncio.gather(*(Answer(body).read(client, served.url) for body in bodies()))
        for answer, name in ((undisturbed[0], "sql"), (undisturbed[3], "chat")):
            assert answer.tokens[0][:8] == reference(merged(model, folders[name]), PROMPT, 8)
        answers = [Answer(body) for body in bodies()]
        await spare_of(served)
        reading = begin(answers, client, served.url)
        for _ in range(2):
            reached = [len(answer.tokens[0]) for answer in answers]
            await until(
                lambda reached=reached: all(  # type: ignore[misc]
                    len(answer.tokens[0]) > before + 10 or answer.ends[0]
                    for answer, before in zip(answers, reached, strict=True)
                ),
                reading,
            )
            assert sum(None in answer.ends for answer in answers) > 4, "too little was left to lose"
            engines(served)[0].kill()
        await asyncio.gather(*reading)
        assert served.process.said().count("takeover: this spare serves") >= 1
        assert served.process.said().count("loaded adapter sql") == 3
    for answer, wanted in zip(answers, undisturbed, strict=True):
        answer.same_as(wanted)


CITY = {"type": "string", "minLength": 2, "maxLength": 9}
ROUTE = {
    "type": "object",
    "properties": {
        "cities_in_their_order": {"type": "array", "items": CITY, "minItems": 20, "maxItems": 20},
        "kilometres_in_total": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["cities_in_their_order", "kilometres_in_total"],
    "additionalProperties": False,
}
MODELS = ("sql", "chat", "tiny")


def calls_of(models: tuple[str, ...]) -> list[Ask]:
    """Chats that must call a tool: per model a greedy answer, and two sampled choices of the named tool."""
    said = [{"role": "user", "content": "Which way is the shortest?"}]
    tool = {"type": "function", "function": {"name": "plan_route", "parameters": ROUTE, "strict": True}}
    named = {"type": "function", "function": {"name": "plan_route"}}
    common = {"messages": said, "tools": [tool], "parallel_tool_calls": False, "max_tokens": 600}
    common["chat_template_kwargs"] = {"enable_thinking": False}
    return [
        Ask("tools", "/v1/chat/completions", {**common, "model": model, **how})
        for model in models
        for how in (
            {"tool_choice": "required", "temperature": 0},
            {"tool_choice": named, "n": 2, "top_k": 8, "seed": 11},
        )
    ]


async def whole(client: aiohttp.ClientSession, url: str, ask: Ask) -> dict[str, Any]:
    """Return a non-streaming answer in the form of `Stream.answer`."""
    async with client.post(url + ask.path, json=ask.body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    choices = [
        {
            "text": choice["message"]["content"] or "",
            "calls": [
                [call["function"]["name"], call["function"]["arguments"]] for call in choice["message"]["tool_calls"]
            ],
            "finish": choice["finish_reason"],
        }
        for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    ]
    return {
        "choices": choices,
        "usage": {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")},
    }


async def read_all(client: aiohttp.ClientSession, url: str, asks: list[Ask]) -> list[dict[str, Any]]:
    streams = [Stream(ask) for ask in asks]
    await asyncio.gather(*(stream.read(client, url) for stream in streams))
    return [stream.answer for stream in streams]


async def test_tool_calls_of_adapters_survive_preemption_and_a_killed_engine(
    checkpoint: Callable[[str], Path], tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    """Grammars, `n`, drafts and little memory at once, streamed and complete: the calls of a server with more memory.

    The calls of a base model with the adapter merged into its weights are the same."""
    model = with_tools(Path(shutil.copytree(checkpoint("llama"), tmp_path / "model")))
    base = base_of(model)
    folders = {name: write_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate(("sql", "chat"))}
    lora = ",".join(f"{name}={folder}" for name, folder in folders.items())
    one = Path(shutil.copytree(model, tmp_path / "merged"))
    merged(model, folders["sql"]).save_pretrained(one)
    options = ("--dtype=float32", "--threads=1", "--check-accounting", "--drafts=on")
    adapted = (f"--lora={lora}", "--late-wait-s=1000", "--takeover-wait-s=200")
    asks = calls_of(MODELS)
    for folder in ("large", "small", "other"):
        (tmp_path / folder).mkdir()
    large = Served(tmp_path / "large", model, *options, "--kv-blocks=1200", f"--lora={lora}")
    with ending([large.process]):
        await asyncio.to_thread(wait_until_ready, large.url, LIMIT_S)
        expected = await read_all(client, large.url, asks)
    for ask, answer in zip(asks, expected, strict=True):
        assert len(answer["choices"]) == ask.body.get("n", 1)
        for choice in answer["choices"]:
            [[name, arguments]] = choice["calls"]
            assert (name, choice["finish"]) == ("plan_route", "tool_calls")
            jsonschema.validate(json.loads(arguments), ROUTE)
    texts = {json.dumps(answer["choices"]) for answer in expected}
    assert len(texts) == len(asks), "an adapter does not change the calls"
    other = Served(tmp_path / "other", one, *options, "--kv-blocks=1200")
    with ending([other.process]):
        await asyncio.to_thread(wait_until_ready, other.url, LIMIT_S)
        assert await read_all(client, other.url, calls_of(("tiny",))) == expected[:2]
    served = Served(
        tmp_path / "small",
        model,
        *options,
        "--kv-blocks=64",
        "--max-model-len=1000",
        "--admission=threshold",
        "--admit-threshold=1",
        *adapted,
    )
    with ending([served.process]):
        await asyncio.to_thread(wait_until_ready, served.url, LIMIT_S)
        assert await asyncio.gather(*(whole(client, served.url, ask) for ask in asks)) == expected
        assert await metric(client, served.url, "quire_engine_preemptions") > 0, "the memory was not small enough"
        streams = [Stream(ask) for ask in asks]
        await spare_of(served)
        reading = [asyncio.create_task(stream.read(client, served.url)) for stream in streams]
        await until(lambda: sum(stream.events > 8 for stream in streams) > 2, reading)  # type: ignore[arg-type]
        assert sum(not task.done() for task in reading) > 2, "too little was left to lose"
        engines(served)[0].kill()
        await asyncio.gather(*reading)
        assert served.process.said().count("takeover: this spare serves") == 1
    assert [stream.answer for stream in streams] == expected
