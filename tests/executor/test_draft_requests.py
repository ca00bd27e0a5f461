"""Random requests with drafts and without: every token, reason and log-probability is equal."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.engine.llm import LLM
from quire.engine.wire.messages import Sampling
from tests.executor.matchers import PERSON, PROMPT, choice, schema
from tests.executor.test_drafts import compare, open_llm

ROUNDS = 3  # rounds of random requests


def request(luck: random.Random) -> Sampling:
    """Settings that drafts go with and, seldom, settings that they do not go with."""
    fields: dict[str, Any] = {"temperature": luck.choice([0, 0.7, 1.3]), "seed": luck.randrange(1000)}
    options: list[tuple[float, dict[str, Any]]] = [
        (0.5, {"logit_bias": [(7, luck.choice([4.0, 60.0])), (8, 4.0), (9, float("-inf"))]}),
        (0.3, {"top_k": luck.choice([1, 3, 20])}),
        (0.3, {"top_p": luck.choice([0.5, 0.9])}),
        (0.5, {"stop_token_ids": [7, luck.randrange(10, 30)]}),
        (0.4, {"ignore_eos": True}),
        (0.5, {"logprobs": luck.choice([0, 1, 4])}),
        (0.15, {"min_tokens": luck.randrange(1, 9)}),
        (0.1, {"presence_penalty": 0.5}),
        (0.1, {"bad_words": [[7, 8]]}),
        (0.2, {"grammar": luck.choice([schema(PERSON), choice("one two three", "one two")]), "logit_bias": []}),
    ]
    for share, more in options:
        fields |= more if luck.random() < share else {}
    return Sampling(**fields)


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> Any:
    """An engine whose model has layers with a sliding window, in tables of their own."""
    made = open_llm(checkpoint("gemma2"))
    assert made.executor.info.windows
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_random_requests_have_equal_tokens_and_logprobs(llm: LLM, seed: int) -> None:
    """Among them limits and stop tokens in the middle of accepted drafts, and choices that fork while others draft."""
    luck = random.Random(seed)
    prompts = [PROMPT[: luck.randrange(1, len(PROMPT))] for _ in range(6)]
    new = luck.choice([2, 5, 13, 40])
    plain, drafted, _ = compare(llm, prompts, [request(luck) for _ in prompts], None, n=1 + seed % 3, new=new)
    for before, after in zip(plain, drafted, strict=True):
        for want, got in zip(before.outputs, after.outputs, strict=True):
            assert len(want.logprobs) == len(got.logprobs)
            for one, other in zip(want.logprobs, got.logprobs, strict=True):
                assert [token for token, _ in other.top] == [token for token, _ in one.top]
                assert other.logprob == pytest.approx(one.logprob, abs=1e-5)
    assert llm.engine.core.idle
