"""bad_words: a word of one token gets a bias of -inf; longer ones reach engines as sequences of tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.wire.messages import Sampling
from quire.engine.wire.records import Fleet
from quire.service.api import api, fitting
from quire.service.api.fitting import EngineLimits
from quire.service.api.valid_request import ValidRequest
from quire.service.common import limits as table
from quire.service.common.limits import WORD_TOKENS
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery import admission
from quire.service.text.tokenizer import Tokenizer
from tests.matrix import examples
from tests.service.fakes import FakeEngine, Served, a_load, settled
from tests.service.test_app import says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
LIMITS = EngineLimits(512, 500, 16, 1000, frozenset([1]))


def parsed(**fields: Any) -> ValidRequest:
    return api.parse_completion(json.dumps({"prompt": "x", **fields}).encode(), GatewayConfig(), "tiny", 60.0)


def forbidden(tokenizer: Tokenizer, *words: str) -> set[int]:
    valid = tokenizer.forbid(parsed(bad_words=list(words)))
    return {token for token, bias in valid.sampling.logit_bias if bias == -math.inf}


def test_a_word_of_one_token_is_forbidden_with_and_without_a_blank(byte_level_tokenizer: Tokenizer) -> None:
    encode = byte_level_tokenizer._backend.encode
    assert len(encode("e").ids) == len(encode(" one").ids) == 1
    assert forbidden(byte_level_tokenizer, "o", "t") == {encode(text).ids[0] for text in ("o", " o", "t", " t")}


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_no_spelling_of_a_word_is_left(byte_level_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """For each token sequence of a word, one token has a bias, or the complete sequence is banned."""
    tokens = data.draw(st.lists(st.lists(st.integers(2, 499), min_size=1, max_size=4), min_size=1, max_size=3))
    encode = byte_level_tokenizer._backend.encode
    words = [byte_level_tokenizer.text_of(ids) for ids in tokens]
    words = [word for word in words if word and "\ufffd" not in word]
    if not words:
        return

    def spellings(word: str) -> list[list[int]]:
        return [encode(text).ids for text in ((word.lstrip(), " " + word.lstrip()) if word.strip() else (word,))]

    sampling = byte_level_tokenizer.forbid(parsed(bad_words=words)).sampling
    never = forbidden(byte_level_tokenizer, *words)
    wanted = [ids for word in words for ids in spellings(word)]
    assert all(ids in sampling.bad_words or never & set(ids) for ids in wanted)
    assert all(ids in wanted and len(ids) > 1 for ids in sampling.bad_words)
    assert never == {ids[0] for ids in wanted if len(ids) == 1}


def test_the_tokens_of_longer_words_are_bounded(byte_level_tokenizer: Tokenizer) -> None:
    """By the same limit that the table shows; the refusal does not quote them."""
    long = "\u2603" * 250  # three tokens each
    assert byte_level_tokenizer.forbid(parsed(bad_words=[long, "secretword"])).sampling.bad_words
    with pytest.raises(Refusal, match="at most 4096 tokens") as refused:
        byte_level_tokenizer.forbid(parsed(bad_words=[long + str(at) for at in range(4)]))
    assert (refused.value.code, refused.value.param, refused.value.limit) == ("too_long", "bad_words", WORD_TOKENS)
    assert table.LIMITS["bad_words tokens"].high == WORD_TOKENS


@pytest.mark.parametrize(
    ("words", "code"),
    [(["a"] * 1025, "too_many"), ([""], "too_long"), (["x" * 257], "too_long"), ("a", "invalid_type")],
)
def test_bounds(words: Any, code: str) -> None:
    with pytest.raises(Refusal) as refused:
        parsed(bad_words=words)
    assert (refused.value.code, refused.value.param) == (code, "bad_words")


def test_a_bias_of_the_same_token_cannot_undo_it_and_a_token_must_be_left(byte_level_tokenizer: Tokenizer) -> None:
    [token] = byte_level_tokenizer._backend.encode("o").ids
    valid = byte_level_tokenizer.forbid(parsed(bad_words=["o"], logit_bias={str(token): 100, "7": 1}))
    found = dict(valid.sampling.logit_bias)
    assert (found[token], found[7], len(found)) == (-math.inf, 1, len(valid.sampling.logit_bias))
    assert fitting.fit(valid, [[5]], LIMITS)
    alone = byte_level_tokenizer.forbid(parsed(bad_words=["o"], allowed_token_ids=[token]))
    with pytest.raises(Refusal, match=r"bad_words: .*must be left") as refused:
        fitting.fit(alone, [[5]], LIMITS)
    assert refused.value.param == "bad_words"


@pytest.mark.parametrize(("able", "status"), [([True, True], 200), ([False, False], 400), ([True, False], 503)])
def test_only_engines_that_know_longer_words_get_them(able: list[bool], status: int) -> None:
    """Any engine may claim a request, so all must honour it; words of one token are older than the field."""
    loads = [a_load(f"e{i}", honours=["bad_words"] if one else []) for i, one in enumerate(able)]
    fleet = Fleet(loads, queued=0, queued_tokens=0, time_ms=1)
    admission.require_fields(fleet, Sampling(logit_bias=[(5, -math.inf)]))
    if status == 200:
        admission.require_fields(fleet, Sampling(bad_words=[[5, 6]]))
        return
    with pytest.raises(Refusal) as refused:
        admission.require_fields(fleet, Sampling(bad_words=[[5, 6]]))
    assert (refused.value.status, refused.value.param) == (status, "bad_words")


async def test_engines_get_it_on_both_endpoints(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    expected = forbidden(byte_level_tokenizer, "o")
    longer = byte_level_tokenizer.forbid(parsed(bad_words=["secretword"])).sampling.bad_words
    assert longer
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        for path, needed in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            body = {"max_tokens": 1, "bad_words": ["o"], **needed}
            async with served.session.post(path, json=body) as response:
                assert response.status == 200, await response.text()
            assert {token for token, _ in fake.seen[-1].sampling.logit_bias} == expected
            fake.load_changes = {}
            await settled(lambda: not served.streams.fleet.engines[0].honours)
            async with served.session.post(path, json={**body, "bad_words": ["secretword"]}) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"], error["param"]) == (400, "unsupported", "bad_words")
                assert "secret" not in error["message"]
            fake.load_changes = {"honours": ["bad_words"]}
            await settled(lambda: bool(served.streams.fleet.engines[0].honours))
            async with served.session.post(path, json={**body, "bad_words": ["o", "secretword"]}) as response:
                assert response.status == 200, await response.text()
            assert fake.seen[-1].sampling.bad_words == [ids for ids in longer if expected.isdisjoint(ids)]
        assert len(fake.seen) == 4
