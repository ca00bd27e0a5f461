"""What comes out over HTTP is what transformers.generate says, for every family and however the work was cut up."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from sentencepiece import SentencePieceProcessor
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.tokenizers.convert import convert_directory
from quire.loadtest.studies import tiny_checkpoints
from tests.checkpoints import FAMILIES, VOCAB
from tests.pace import patience
from tests.service.text.test_vocabulary_files import AS_LLAMA, LLAMA, trained
from tests.system.processes import open_requests
from tests.system.stack import CLAIMS_BY_TOKENS, Stack, a_long_step

pytestmark = pytest.mark.system

# Block size, chunk size, prefix cache, blocks in the pool: each value of each appears with every family.
SHAPES: dict[str, dict[str, Any]] = {
    "block 8, chunk 1": {"block_size": 8, "chunk_tokens": 1, "prefix_cache": True, "kv_blocks": 512},
    "block 16, chunk 7, no cache": {"block_size": 16, "chunk_tokens": 7, "prefix_cache": False, "kv_blocks": 256},
    "block 32, chunk 512": {"block_size": 32, "chunk_tokens": 512, "prefix_cache": True, "kv_blocks": 128},
    "block 64, chunk 7": {"block_size": 64, "chunk_tokens": 7, "prefix_cache": True, "kv_blocks": 128},
    "preempted": {"block_size": 8, "chunk_tokens": 512, "prefix_cache": True, "kv_blocks": 22, "max_model_len": 170},
    "preempted, swapped": {
        "block_size": 8,
        "chunk_tokens": 7,
        "prefix_cache": False,
        "kv_blocks": 22,
        "max_model_len": 170,
        "preempt": "swap",
    },
    "preempted, no cache": {
        "block_size": 16,
        "chunk_tokens": 7,
        "prefix_cache": False,
        "kv_blocks": 11,
        "max_model_len": 170,
    },
}


def prompts() -> list[tuple[list[int], int]]:
    """32 prompts of mixed lengths, some with a common start, and how much to generate."""
    rng = random.Random(7)
    shared = [rng.randrange(10, VOCAB) for _ in range(40)]
    work = []
    for i in range(32):
        own = [rng.randrange(10, VOCAB) for _ in range(rng.choice([1, 2, 7, 8, 15, 16, 17, 33, 50]))]
        work.append(((shared if i % 4 == 0 else []) + own, rng.choice([4, 9, 17, 24])))
    return work


@pytest.fixture(scope="module")
def expected(reference: Callable[[str], PreTrainedModel]) -> Callable[[str], list[list[int]]]:
    """Greedy token ids from transformers.generate in float32, prompt by prompt; computed once a family."""
    known: dict[str, list[list[int]]] = {}

    def generate(family: str) -> list[list[int]]:
        if family not in known:
            model = reference(family)
            known[family] = [
                model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0, len(ids) :].tolist()
                for ids, new in prompts()
            ]
        return known[family]

    return generate


async def complete(url: str, work: list[tuple[list[int], int]]) -> list[dict[str, Any]]:
    """All at once, as token ids, and the tokens of each answer back."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience(110))) as client:

        async def one(ids: list[int], new: int) -> dict[str, Any]:
            body = {"model": "tiny", "prompt": ids, "max_tokens": new, "temperature": 0, "return_token_ids": True}
            async with client.post(f"{url}/v1/completions", json=body) as response:
                answer: dict[str, Any] = await response.json()
                assert response.status == 200, answer
                return answer

        return await asyncio.gather(*(one(ids, new) for ids, new in work))


async def complete_at_once(stack: Stack) -> list[dict[str, Any]]:
    """All prompts, the first in a step that lasts until the gateway has accepted the others: none joins late."""
    work = prompts()
    with a_long_step(stack.engines[0].executor) as inside:
        first = asyncio.create_task(complete(stack.url, work[:1]))
        await asyncio.to_thread(inside.wait)
        others = asyncio.create_task(complete(stack.url, work[1:]))
        await open_requests(stack.url, len(work))
    return await first + await others


# Every shape of one family, and one of each other, so that each shape has two families or more; the rest nightly.
CASES = [
    pytest.param(family, shape, marks=[] if family == "llama" or place == number % 7 else pytest.mark.nightly)
    for number, family in enumerate(FAMILIES)
    for place, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_greedy_text_equals_transformers(
    family: str,
    shape: str,
    redis_server: EmbeddedRedis,
    namespace: str,
    checkpoint: Callable[[str], Path],
    expected: Callable[[str], list[list[int]]],
) -> None:
    want = expected(family)
    patient = {"late_wait_s": 1000.0}  # a pool this small would otherwise, rightly, answer 429
    eager: dict[str, Any] = {"admission": "threshold", "admit_threshold": 1.0, **CLAIMS_BY_TOKENS}
    with Stack(
        redis_server.url, namespace, checkpoint(family), gateway_options=patient, **eager, **SHAPES[shape]
    ) as stack:
        asyncio.run(complete(stack.url, prompts()[:1]))  # from now on the gateway knows a pace to estimate waits by
        answers = asyncio.run(complete_at_once(stack))
        got = [answer["choices"][0]["token_ids"] for answer in answers]
        assert got == want
        if shape.startswith("preempted"):
            assert stack.core.report.totals.preemptions > 0, "the pool was not small enough to test anything"
        if "swap" in shape:
            assert stack.core.report.totals.swapped_in_blocks > 0
            assert stack.core.report.totals.recomputed_tokens == 0
        if SHAPES[shape]["prefix_cache"]:
            again = asyncio.run(complete(stack.url, prompts()[:4]))  # now with whatever the cache still holds
            assert [answer["choices"][0]["token_ids"] for answer in again] == want[:4]


def test_a_shared_system_prompt_is_computed_once(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path]
) -> None:
    """The same 512 tokens before two questions: 512 of the second are cached, so 95 % of its prefill is saved."""
    system = [10 + i % 600 for i in range(512)]
    with Stack(redis_server.url, namespace, checkpoint("llama")) as stack:
        (first,) = asyncio.run(complete(stack.url, [([*system, 20, 21, 22], 4)]))
        (second,) = asyncio.run(complete(stack.url, [([*system, 30, 31, 32, 33], 4)]))
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 512
        totals = stack.core.report.totals
        assert totals.prompt_tokens - totals.cached_prompt_tokens <= 515 + 0.05 * 516


def test_a_checkpoint_with_a_converted_sentencepiece_file(
    redis_server: EmbeddedRedis, namespace: str, tmp_path: Path
) -> None:
    """Its text goes in and comes out, streamed and complete, as sentencepiece and transformers.generate have it."""
    directory = trained(tmp_path / "model", AS_LLAMA, **LLAMA)
    convert_directory(directory)
    model = tiny_checkpoints.make_checkpoint(directory, "llama", vocab_size=700, eos_token_id=2)
    library = SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    prompt = "The quick brown fox  jumps"
    ids = torch.tensor([[1, *library.encode(prompt)]])
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    mask = torch.ones_like(ids)
    whole_ids = reference.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    want = whole_ids[0, ids.shape[1] :].tolist()

    async def ask(url: str) -> tuple[dict[str, Any], str]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0}
        async with aiohttp.ClientSession() as client:
            async with client.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}) as response:
                whole: dict[str, Any] = await response.json()
            async with client.post(f"{url}/v1/completions", json=body | {"stream": True}) as response:
                lines = [line[6:] async for line in response.content if line.startswith(b"data: {")]
        return whole, "".join(json.loads(line)["choices"][0]["text"] for line in lines)

    with Stack(redis_server.url, namespace, directory, kv_blocks=64) as stack:
        whole, streamed = asyncio.run(ask(stack.url))
    [choice] = whole["choices"]
    assert choice["token_ids"] == want
    assert choice["text"] == streamed
    assert streamed in (library.decode(want), " " + library.decode(want))
