"""Harmful adapters over HTTP: one line of 4xx with limit and value, and the base model's answers stay as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from transformers import PreTrainedModel

from quire.engine.adapters.errors import MAX_CHARS
from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.executor.test_lora import base_of, reference
from tests.executor.test_lora_files import REFUSED, Change, config
from tests.executor.test_lora_hostile import REFUSED as HOSTILE
from tests.lora import write_adapter
from tests.pace import patience
from tests.system.stack import Stack

pytestmark = pytest.mark.system

PROMPT, NEW = [20, 30, 40, 50, 60], 8
HALF_ONLY = {"beyond float16"}  # files that this engine, in float32, serves
BAD: dict[str, Change] = {name: change for name, (change, _) in (REFUSED | HOSTILE).items() if name not in HALF_ONLY}
BAD["a pattern that never ends"] = config(target_modules=r"(([\w.])+)+!")
NUMBERS = {"rank over the limit": (128, 129), "rank of a pattern": (128, 4096), "rank of a tensor": (128, 200)}


@pytest.fixture(scope="module")
def base(checkpoint: Callable[[str], Path]) -> PreTrainedModel:
    return base_of(checkpoint("llama"))


@pytest.fixture(scope="module")
def root(base: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`--lora-dir`: every bad adapter in a folder of its own, named by its place in BAD, and a good one."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "good", base)
    for at, change in enumerate(BAD.values()):
        change(write_adapter(folder / f"bad-{at}", base))
    return folder


@pytest.fixture(scope="module")
def stack(redis_server: EmbeddedRedis, checkpoint: Callable[[str], Path], root: Path) -> Iterator[Stack]:
    with Stack(redis_server.url, "faults", checkpoint("llama"), gateway_options={"lora_dir": str(root)}) as made:
        yield made


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience(200))) as session:
        yield session


async def post(client: aiohttp.ClientSession, stack: Stack, path: str, **body: Any) -> tuple[int, Any]:
    async with client.post(f"{stack.url}/v1/{path}", json=body) as response:
        is_json = response.content_type == "application/json"
        return response.status, await (response.json() if is_json else response.text())


async def ask(client: aiohttp.ClientSession, stack: Stack, model: str, **more: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    return await post(client, stack, "completions", **body, return_token_ids=True, **more)


async def test_each_bad_adapter_is_one_line_and_disturbs_no_other_request(
    client: aiohttp.ClientSession, stack: Stack, root: Path, base: PreTrainedModel
) -> None:
    """Named by `model`, and loaded by an operator.  Meanwhile the base model answers without a pause."""
    ended, plain, answers = asyncio.Event(), reference(base, PROMPT, NEW), 0

    async def ask_on() -> None:
        nonlocal answers
        while not ended.is_set():
            status, answer = await ask(client, stack, "tiny")
            assert (status, answer["choices"][0]["token_ids"]) == (200, plain)
            answers += 1

    async with asyncio.TaskGroup() as group:
        group.create_task(ask_on())
        for at, name in enumerate(BAD):
            where = f"bad-{at}"
            asked = await ask(client, stack, where)
            loaded = await post(client, stack, "load_lora_adapter", lora_name=f"new-{at}", lora_path=where)
            for status, answer in (asked, loaded):
                error = answer["error"]
                assert status in (400, 404), (name, status, answer)
                assert error["message"].isprintable(), name
                assert len(error["message"]) <= 2 * MAX_CHARS + 20, name
            assert loaded[1]["error"]["code"] in ("invalid_adapter", "adapter_not_found"), (name, loaded)
            assert loaded[1]["error"]["param"] == "lora_path"
            if name in NUMBERS:
                details = loaded[1]["error"]
                assert (details.get("limit"), details.get("given")) == NUMBERS[name], details
        ended.set()
    assert answers > len(BAD)
    async with client.get(f"{stack.url}/v1/models") as response:
        listed = {one["id"] for one in (await response.json())["data"]}
    assert not any(name.startswith("new-") for name in listed), "a refused adapter is served"
    status, answer = await ask(client, stack, "good")
    assert status == 200
    assert answer["choices"][0]["token_ids"] != plain


async def test_an_adapter_that_changes_or_goes_while_it_is_used_ends_no_other_request(
    client: aiohttp.ClientSession, stack: Stack, root: Path, base: PreTrainedModel
) -> None:
    """Its files are replaced, and its name unloaded and loaded again, while an answer of it streams."""
    moving = write_adapter(root / "moving", base, seed=5)
    assert (await post(client, stack, "load_lora_adapter", lora_name="m", lora_path="moving"))[0] == 200
    first = (await ask(client, stack, "m"))[1]["choices"][0]["token_ids"]
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
    async with client.post(f"{stack.url}/v1/completions", json={**body, "return_token_ids": True}) as response:
        assert response.status == 200
        lines = response.content
        begun = await lines.readline()
        assert begun.startswith(b"data: {")
        write_adapter(moving, base, seed=6)
        assert (await post(client, stack, "unload_lora_adapter", lora_name="m"))[0] == 200
        assert (await ask(client, stack, "m"))[0] == 404
        assert (await post(client, stack, "unload_lora_adapter", lora_name="m"))[0] == 404
        assert (await post(client, stack, "load_lora_adapter", lora_name="m", lora_path="moving"))[0] == 200
        again = await post(client, stack, "load_lora_adapter", lora_name="m", lora_path="moving")
        assert (again[0], again[1]["error"]["code"]) == (400, "adapter_exists")
        second = (await ask(client, stack, "m"))[1]["choices"][0]["token_ids"]
        rest = await lines.read()
    assert b"error" not in rest
    assert rest.rstrip().endswith(b"data: [DONE]")
    assert second != first
