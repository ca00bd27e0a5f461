"""Beam search over HTTP, on one `quire serve`: answers of transformers, refusals, a client that leaves, a kill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis
import torch
from transformers import GenerationConfig, PreTrainedModel

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.records import Fleet
from tests.checkpoints import VOCAB
from tests.pace import patience
from tests.system.processes import at_rest, ending, fleet_until, wait_until_ready
from tests.system.test_survival import LIMIT_S, Served

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]
NAMESPACE = "beams"
SLOTS = 16
PROMPT = [20, 30, 40] * 7
LONG: dict[str, Any] = {
    "prompt": PROMPT,
    "use_beam_search": True,
    "beam_width": 8,
    "max_tokens": 400,
    "ignore_eos": True,
}
SHOWN: dict[str, Any] = {"return_token_ids": True, "logprobs": 0}


@pytest.fixture(scope="module")
def served(
    checkpoint: Callable[[str], Path], redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    made = Served(
        tmp_path_factory.mktemp("beams"),
        checkpoint("llama"),
        f"--redis-url={redis_server.url}",
        f"--namespace={NAMESPACE}",
        f"--max-seqs={SLOTS}",
        *("--dtype=float32", "--threads=1", "--kv-blocks=600", "--check-accounting", "--late-wait-s=1000"),
    )
    with ending([made.process]):
        wait_until_ready(made.url, LIMIT_S)
        yield made


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience(LIMIT_S))) as session:
        yield session


async def ask(client: aiohttp.ClientSession, served: Served, status: int = 200, **body: Any) -> dict[str, Any]:
    headers = {"Idempotency-Key": body.pop("key")} if "key" in body else {}
    path = "chat/completions" if "messages" in body else "completions"
    async with client.post(f"{served.url}/v1/{path}", json={"model": "tiny", **body}, headers=headers) as response:
        found: dict[str, Any] = await response.json()
        assert response.status == status, found
        return found


def generated(server: EmbeddedRedis) -> int:
    """Return the output tokens in the ledger of the tenant without a name."""
    with redis.Redis.from_url(server.url) as store:
        found: Any = store.hget(f"{{{NAMESPACE}}}:usage:", "generated")
        return int(found or 0)


async def rest(server: EmbeddedRedis) -> Fleet:
    return await fleet_until(server.url, NAMESPACE, at_rest, LIMIT_S)


@torch.no_grad()
def theirs(model: PreTrainedModel, ends: list[int], **how: Any) -> tuple[list[list[int]], list[float]]:
    config = GenerationConfig(
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
        max_new_tokens=40,
        return_dict_in_generate=True,
        output_scores=True,
        **how,
    )
    found = model.generate(torch.tensor([PROMPT]), generation_config=config)
    answers = []
    for tokens in found.sequences[:, len(PROMPT) :].tolist():
        ended = next((at + 1 for at, token in enumerate(tokens) if token in ends), len(tokens))
        answers.append(tokens[:ended])
    return answers, found.sequences_scores.tolist()


@pytest.mark.parametrize(("penalty", "early"), [(2.0, False), (-1.0, "never"), (1.0, True)])
async def test_answers_are_those_of_transformers(
    served: Served,
    client: aiohttp.ClientSession,
    reference: Callable[[str], PreTrainedModel],
    penalty: float,
    early: Any,
) -> None:
    model = reference("llama")
    far, _ = theirs(model, [VOCAB - 1], num_beams=4, num_return_sequences=4)
    ends = [far[0][-3], far[-1][4]]  # tokens that some beams meet and others do not
    how = {"length_penalty": penalty, "early_stopping": early}
    wanted, scores = theirs(model, ends, num_beams=4, num_return_sequences=3, **how)
    body: dict[str, Any] = {
        "prompt": PROMPT,
        "n": 3,
        "num_beams": 4,
        "max_tokens": 40,
        "stop_token_ids": ends,
        "ignore_eos": True,
    }
    found = await ask(client, served, use_beam_search=True, **body, **how, **SHOWN)
    choices = found["choices"]
    assert [choice["token_ids"] for choice in choices] == wanted
    assert [choice["score"] for choice in choices] == pytest.approx(scores, rel=1e-4)
    assert scores == sorted(scores, reverse=True)
    for choice, tokens, score in zip(choices, wanted, scores, strict=True):
        stopped = tokens[-1] in ends
        assert choice["finish_reason"] == ("stop" if stopped else "length")
        assert choice["stop_reason"] == (tokens[-1] if stopped else None)
        total = sum(choice["logprobs"]["token_logprobs"])
        assert total / len(tokens) ** penalty == pytest.approx(score, rel=1e-4)
    assert found["usage"]["completion_tokens"] == sum(map(len, wanted))


async def test_several_prompts_and_chats_are_searched_too(served: Served, client: aiohttp.ClientSession) -> None:
    how: dict[str, Any] = {"use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 20, "ignore_eos": True}
    both = await ask(client, served, prompt=[PROMPT, PROMPT[:9]], **how)
    alone = await ask(client, served, prompt=PROMPT[:9], **how)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in both["choices"][2:]] == [choice["text"] for choice in alone["choices"]]
    details = alone["usage"]["completion_tokens_details"]
    assert details.pop("shared_kv_fraction") > 0.2  # three tables of 5 or 6 blocks have at least a full block in common
    assert details == {"searched_tokens": 20}
    chat = await ask(client, served, messages=[{"role": "user", "content": "Say it."}], **how)
    assert [choice["message"]["role"] for choice in chat["choices"]] == ["assistant"] * 2
    scores = [choice["score"] for choice in chat["choices"]]
    assert scores == sorted(scores, reverse=True)


async def test_the_best_of_sampled_answers_are_those_with_the_highest_mean(
    served: Served, client: aiohttp.ClientSession
) -> None:
    how: dict[str, Any] = {"prompt": [PROMPT, PROMPT[:9]], "seed": 5, "max_tokens": 12}
    every = (await ask(client, served, n=5, **how, **SHOWN))["choices"]
    found = await ask(client, served, n=2, best_of=5, return_token_ids=True, **how)

    def mean(choice: dict[str, Any]) -> float:
        logprobs: list[float] = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    best = [choice for at in (0, 5) for choice in sorted(every[at : at + 5], key=mean, reverse=True)[:2]]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in found["choices"]] == [choice["token_ids"] for choice in best]
    assert [choice["text"] for choice in found["choices"]] == [choice["text"] for choice in best]
    assert all(choice["logprobs"] is None for choice in found["choices"])
    assert found["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in every)


@pytest.mark.parametrize(
    ("fields", "param", "limit", "given"),
    [
        ({"beam_width": SLOTS + 1}, "beam_width", SLOTS, SLOTS + 1),
        ({"beam_width": 129}, "beam_width", ">= 1 and <= 128", 129),
        ({"beam_width": 2, "n": 3}, "n", 2, 3),
        ({"stream": True}, "stream", "false", True),
        ({"beam_width": 16, "max_tokens": 990}, "beam_width", 600 * 16, 16 * 1024 - 15 * 16),
    ],
)
async def test_what_cannot_be_searched_is_a_400(
    served: Served, client: aiohttp.ClientSession, fields: dict[str, Any], param: str, limit: Any, given: Any
) -> None:
    found = await ask(client, served, 400, prompt=PROMPT, use_beam_search=True, **fields)
    error = found["error"]
    assert (error["param"], error["limit"], error["given"]) == (param, limit, given)


async def test_a_client_that_leaves_frees_every_beam(
    served: Served, client: aiohttp.ClientSession, redis_server: EmbeddedRedis
) -> None:
    await rest(redis_server)
    before = generated(redis_server)
    leaving = asyncio.create_task(ask(client, served, **LONG))
    await fleet_until(redis_server.url, NAMESPACE, lambda fleet: fleet.engines[0].running == 8, LIMIT_S)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await rest(redis_server)
    charged = generated(redis_server) - before
    assert charged > 0, "what its beams computed is charged all the same"
    assert charged % 8 == 0


async def test_a_killed_engine_loses_and_repeats_nothing(
    served: Served, client: aiohttp.ClientSession, redis_server: EmbeddedRedis
) -> None:
    """The search begins again at the next engine.  Its tokens are charged once, and a retry reads the same answer."""
    undisturbed = await ask(client, served, **LONG, **SHOWN, n=3)
    await rest(redis_server)
    before, starts = generated(redis_server), served.process.said().count("started: ")
    reading = asyncio.create_task(ask(client, served, **LONG, **SHOWN, n=3, key="one"))
    await fleet_until(redis_server.url, NAMESPACE, lambda fleet: fleet.engines[0].running == 8, LIMIT_S)
    engine = served.engine()
    assert engine is not None
    assert not reading.done()
    engine.kill()
    found = await reading
    assert served.process.said().count("started: ") == starts + 1
    assert found["choices"] == undisturbed["choices"]
    for usage in (found["usage"], undisturbed["usage"]):
        del usage["prompt_tokens_details"]  # the next engine's prefix cache is empty
    assert found["usage"] == undisturbed["usage"]
    assert found["usage"]["completion_tokens"] == 3 * 400
    assert found["usage"]["completion_tokens_details"]["searched_tokens"] == 5 * 400
    await rest(redis_server)
    assert generated(redis_server) - before == 8 * 400
    again = await ask(client, served, **LONG, **SHOWN, n=3, key="one")
    assert again["choices"] == found["choices"]
    assert generated(redis_server) - before == 8 * 400
