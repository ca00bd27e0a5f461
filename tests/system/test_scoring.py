"""echo, logprobs, n, streams and resumption, in every combination, over a real engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import torch
from transformers import PreTrainedModel

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.checkpoints import tokenizer
from tests.system.stack import Stack

pytestmark = pytest.mark.system

PROMPTS = ["def add(a, b):", "import asyncio\n"]
NEW = 5
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
Choice = dict[str, Any]


@pytest.fixture(scope="module")
def stack(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options: dict[str, Any] = {"kv_blocks": 128, "chunk_tokens": 4, "gateway_options": {"retain_s": 30.0}}
    with EmbeddedRedis() as redis, Stack(redis.url, "scoring", checkpoint("llama"), **options) as running:
        yield running


async def whole(session: aiohttp.ClientSession, body: dict[str, Any]) -> list[Choice]:
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        choices: list[Choice] = (await response.json())["choices"]
        return choices


async def streamed(session: aiohttp.ClientSession, body: dict[str, Any], *, breaks: int = -1) -> list[Choice]:
    """The same from a stream.  `breaks`: events after which the connection is lost once; the stream is then resumed."""
    choices: dict[int, Choice] = {}
    headers, events = {"X-Resumable": "1"}, 0
    for _ in range(2):
        async with session.post("/v1/completions", json={**body, "stream": True}, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                word, _, value = line.decode().rstrip("\n").partition(": ")
                if word == "id":
                    headers["Last-Event-ID"] = value
                if word != "data":
                    continue
                if value == "[DONE]":
                    return [choices[at] for at in sorted(choices)]
                add(choices, json.loads(value))
                events += 1
                if events == breaks:
                    break
    raise AssertionError("the stream has no end")


def add(choices: dict[int, Choice], event: dict[str, Any]) -> None:
    assert "error" not in event, event
    (new,) = event["choices"]
    one = choices.setdefault(new["index"], {"index": new["index"], "text": "", "logprobs": None})
    one["text"] += new["text"]
    if new["logprobs"] is not None:
        one["logprobs"] = one["logprobs"] or {name: [] for name in COLUMNS}
        for name in COLUMNS:
            one["logprobs"][name] += new["logprobs"][name]


def same(found: list[Choice], expected: list[Choice]) -> None:
    assert [choice["index"] for choice in found] == [choice["index"] for choice in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["text"] == other["text"]
        if other["logprobs"] is None:
            assert one["logprobs"] is None
            continue
        for name in ("tokens", "text_offset"):
            assert one["logprobs"][name] == other["logprobs"][name]
        pairs = list(zip(one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"], strict=True))
        assert [a is None for a, _ in pairs] == [b is None for _, b in pairs]
        assert [a for a, _ in pairs if a is not None] == pytest.approx([b for _, b in pairs if b is not None], abs=1e-4)


@pytest.mark.parametrize(
    ("echo", "logprobs", "n", "count"), list(itertools.product([False, True], [None, 0, 2], [1, 2, 3], [1, 2]))
)
async def test_every_combination_is_answered_alike(
    stack: Stack, echo: bool, logprobs: int | None, n: int, count: int
) -> None:
    prompts = PROMPTS[:count]
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompts,
        "max_tokens": NEW,
        "seed": 3,
        "ignore_eos": True,
        "n": n,
    }
    body |= {"echo": echo, "logprobs": logprobs, "skip_special_tokens": False}
    async with aiohttp.ClientSession(stack.url) as session:
        found = await whole(session, body)
        check(found, prompts, echo=echo, logprobs=logprobs, n=n)
        same(await streamed(session, body), found)
        for breaks in (1, 2 + n):
            same(await streamed(session, body, breaks=breaks), found)
        alone = await asyncio.gather(*(whole(session, {**body, "prompt": one, "n": 1}) for one in prompts))
        same([found[at * n] for at in range(count)], [{**one, "index": at * n} for at, (one,) in enumerate(alone)])


def check(found: list[Choice], prompts: list[str], *, echo: bool, logprobs: int | None, n: int) -> None:
    """Each choice has its prompt's scores, then its own; offsets point at each token's text."""
    assert [choice["index"] for choice in found] == list(range(len(prompts) * n))
    for choice in found:
        prompt = prompts[choice["index"] // n]
        assert choice["text"].startswith(prompt) == echo
        columns = choice["logprobs"]
        if logprobs is None:
            assert columns is None
            continue
        told = len(tokenizer().encode(prompt)) if echo else 0
        assert {name: len(columns[name]) for name in COLUMNS} == dict.fromkeys(COLUMNS, told + NEW)
        assert [at for at, value in enumerate(columns["token_logprobs"]) if value is None] == ([0] if echo else [])
        tops = [top for top in columns["top_logprobs"] if top is not None]
        assert all(1 <= len(top) <= logprobs + 1 for top in tops)
        offsets = columns["text_offset"]
        assert offsets == sorted(offsets)
        if echo:
            assert offsets[told] == len(prompt)
        for before, token, offset in zip(["", *columns["tokens"]], columns["tokens"], offsets, strict=False):
            added = echo and before == "" and token == tokenizer().bos_token  # named, but no part of the echoed text
            if not added and "\ufffd" not in before + token:  # parts of a character have no place of their own
                assert choice["text"][offset:].startswith(token), (token, offset)


async def test_prompt_scores_are_transformers_own(stack: Stack, reference: Callable[[str], PreTrainedModel]) -> None:
    ids = tokenizer().encode(PROMPTS[0])
    with torch.inference_mode():
        logp = reference("llama")(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logp[range(len(ids) - 1), ids[1:]].tolist()
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 1, "echo": True, "logprobs": 1, "n": 3}
    async with aiohttp.ClientSession(stack.url) as session:
        for choice in await whole(session, body):
            assert choice["logprobs"]["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)


async def test_a_bad_word_is_never_drawn(stack: Stack) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    async with aiohttp.ClientSession(stack.url) as session:
        for more in ({"temperature": 0}, {"temperature": 1.5, "seed": 5, "n": 4}):
            plain = await whole(session, {**body, **more})
            drawn = sorted({token for choice in plain for token in choice["token_ids"]})
            texts = [(token, tokenizer().decode([token])) for token in drawn]
            words = [text for token, text in texts if tokenizer().encode(text, add_special_tokens=False) == [token]]
            banned = {tokenizer().encode(word, add_special_tokens=False)[0] for word in words}
            assert banned & set(drawn)
            for choice in await whole(session, {**body, **more, "bad_words": words}):
                assert len(choice["token_ids"]) == 24
                assert not banned & set(choice["token_ids"])


@pytest.mark.parametrize("more", [{"temperature": 0}, {"temperature": 1.2, "seed": 5, "n": 3}])
def test_longer_bad_words_are_never_completed(stack: Stack, more: dict[str, Any]) -> None:
    """Over the official client, complete and streamed; other words change nothing."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer().encode(text, add_special_tokens=False)
        return ids

    def ask(client: openai.OpenAI, words: list[str]) -> list[tuple[str, list[int]]]:
        body = {"ignore_eos": True, "return_token_ids": True, "bad_words": words}
        asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 40, **more, "extra_body": body}
        choices = client.completions.create(**asked).choices
        found = [(choice.text, choice.model_dump()["token_ids"]) for choice in choices]
        texts = [""] * len(found)
        for chunk in client.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [text for text, _ in found]
        return found

    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0) as client:
        plain = ask(client, [])
        pieces = [ids[at : at + length] for _, ids in plain for at in range(36) for length in (2, 3, 4)]
        words = [(tokenizer().decode(ids), ids) for ids in pieces]
        longer = [(word, ids) for word, ids in words if word.strip() == word and encode(word) == ids][::5]
        assert longer
        for _, ids in ask(client, [word for word, _ in longer]):
            assert len(ids) == 40
            for _, sequence in longer:
                assert not any(ids[at : at + len(sequence)] == sequence for at in range(40))
        unseen = "\u2603\u2603 never said \u2603"
        assert ask(client, [unseen]) == plain


def test_named_logprobs_are_transformers_own(stack: Stack, reference: Callable[[str], PreTrainedModel]) -> None:
    """On both endpoints, complete and streamed, over the official client; the tokens are far from the most probable."""
    prompt, named = tokenizer().encode(PROMPTS[0]), [600, 5, 17]
    more = {"logprob_token_ids": named, "return_tokens_as_token_ids": True, "return_token_ids": True}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "seed": 3, "extra_body": {**more, "ignore_eos": True}}
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0) as client:
        [choice] = client.completions.create(**asked, prompt=PROMPTS[0], logprobs=2).choices
        ids: list[int] = choice.model_dump()["token_ids"]
        with torch.inference_mode():
            logits = reference("llama")(torch.tensor([prompt + ids])).logits[0]
        logp = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert choice.logprobs is not None
        tops = choice.logprobs.top_logprobs or []
        for at, token in enumerate(ids):
            wanted = {f"token_id:{one}": pytest.approx(float(logp[at, one]), abs=1e-4) for one in (token, *named)}
            assert tops[at] == wanted
            assert next(iter(tops[at])) == f"token_id:{token}"
        parts = client.completions.create(**asked, prompt=PROMPTS[0], logprobs=2, stream=True)
        streamed = [part.choices[0].logprobs for part in parts]
        found = [top for one in streamed if one is not None for top in one.top_logprobs or []]
        assert [list(top) for top in found] == [list(top) for top in tops]
        messages: Any = [{"role": "user", "content": "Hi"}]
        [answer] = client.chat.completions.create(**asked, messages=messages, logprobs=True).choices
        assert answer.logprobs is not None
        for entry in answer.logprobs.content or []:
            names = [entry.token, *(f"token_id:{one}" for one in named)]
            assert [one.token for one in entry.top_logprobs] == list(dict.fromkeys(names))


async def test_a_reset_empties_the_prefix_cache_before_the_next_request(stack: Stack) -> None:
    body = {"prompt": "the same words again and again " * 8, "max_tokens": 2}
    async with aiohttp.ClientSession(stack.url) as session:

        async def cached() -> int:
            async with session.post("/v1/completions", json=body) as response:
                return int((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])

        await cached()
        assert await cached() > 0
        for _ in range(2):
            async with session.post("/reset_prefix_cache") as response:
                assert await response.json() == {"engines": 1}
            assert await cached() == 0
        assert await cached() > 0


async def test_scores_of_items_are_those_of_a_completion(stack: Stack) -> None:
    """A score is what the model's own log probabilities say, and the items of a request share nothing but the query."""
    labels, items = [40, 41, 7], ["    return a", "pass", "    return a"]
    query = tokenizer().encode(PROMPTS[0])
    async with aiohttp.ClientSession(stack.url) as session:
        for softmax in (True, False):
            body = {"query": PROMPTS[0], "items": items, "label_token_ids": labels, "apply_softmax": softmax}
            async with session.post("/generative_scoring", json=body) as response:
                found = (await response.json())["data"]
            for at, item in enumerate(items):
                prompt = query + tokenizer().encode(item, add_special_tokens=False)
                asked = {
                    "prompt": prompt,
                    "max_tokens": 1,
                    "temperature": 0,
                    "logprobs": 0,
                    "logprob_token_ids": labels,
                }
                (choice,) = await whole(session, {**asked, "return_tokens_as_token_ids": True})
                logprobs = choice["logprobs"]["top_logprobs"][0]
                odds = [math.exp(logprobs[f"token_id:{label}"]) for label in labels]
                expected = odds[0] / (sum(odds) if softmax else 1.0)
                assert found[at] == {"index": at, "object": "score", "score": pytest.approx(expected, rel=1e-4)}
