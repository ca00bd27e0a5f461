"""bad_words: words of one token are never drawn; longer ones are refused by name, with no text of the request."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service import api
from service.api import EngineLimits, Refusal
from service.config import GatewayConfig
from service.tokenizer import Tokenizer
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
LIMITS = EngineLimits(512, 500, 16, 1000, frozenset([1]))


def parsed(**fields: Any) -> api.ValidRequest:
    return api.parse_completion(json.dumps({"prompt": "x", **fields}).encode(), GatewayConfig(), "tiny", 60.0)


def forbidden(tokenizer: Tokenizer, *words: str) -> set[int]:
    valid = tokenizer.forbid(parsed(bad_words=list(words)))
    return {token for token, bias in valid.sampling.logit_bias if bias == -math.inf}


def test_a_word_of_one_token_is_forbidden_with_and_without_a_blank(byte_level_tokenizer: Tokenizer) -> None:
    encode = byte_level_tokenizer._backend.encode
    assert len(encode("e").ids) == len(encode(" one").ids) == 1
    assert forbidden(byte_level_tokenizer, "o", "t") == {encode(text).ids[0] for text in ("o", " o", "t", " t")}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_spelling_of_a_served_word_is_left(byte_level_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Whatever is not refused: no token sequence that the tokenizer writes for the word may still be drawn."""
    tokens = data.draw(st.lists(st.integers(2, 499), min_size=1, max_size=3))
    encode = byte_level_tokenizer._backend.encode
    words = [byte_level_tokenizer.text_of([token]) for token in tokens]
    words = [word for word in words if word and "\ufffd" not in word]
    if not words:
        return

    def spellings(word: str) -> list[list[int]]:
        return [encode(text).ids for text in ((word.lstrip(), " " + word.lstrip()) if word.strip() else (word,))]

    try:
        banned = forbidden(byte_level_tokenizer, *words)
    except Refusal as refusal:
        found = refusal
    else:
        for word in words:
            assert all(banned & set(ids) for ids in spellings(word))
        return
    assert (found.status, found.code) == (400, "unsupported")
    at = int((found.param or "").removeprefix("bad_words[").removesuffix("]"))
    assert max(map(len, spellings(words[at]))) > 1


def test_a_longer_word_is_refused_by_its_place_and_not_quoted(byte_level_tokenizer: Tokenizer) -> None:
    with pytest.raises(Refusal, match=r"bad_words\[1\]: .* tokens") as refused:
        forbidden(byte_level_tokenizer, "z", "secretword")
    assert refused.value.param == "bad_words[1]"
    assert "secret" not in str(refused.value.body())


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
    assert api.fit(valid, [[5]], LIMITS)
    alone = byte_level_tokenizer.forbid(parsed(bad_words=["o"], allowed_token_ids=[token]))
    with pytest.raises(Refusal, match=r"bad_words: .*must be left") as refused:
        api.fit(alone, [[5]], LIMITS)
    assert refused.value.param == "bad_words"


async def test_engines_get_it_on_both_endpoints(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    expected = forbidden(byte_level_tokenizer, "o")
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
            async with served.session.post(path, json={**body, "bad_words": ["secretword"]}) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"], error["param"]) == (400, "unsupported", "bad_words[0]")
        assert len(fake.seen) == 2
