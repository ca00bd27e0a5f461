"""Answers with LoRA adapters survive their engine, killed in the middle: its spare resumes them, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.executor.test_lora import base_of, reference
from tests.lora import merged, write_adapter
from tests.pace import patience
from tests.system.processes import ending, wait_until_ready
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
    options = ("--dtype=float32", "--threads=1", "--kv-blocks=1200", "--check-books", "--drafts=on")
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
