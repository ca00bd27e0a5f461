"""thinking_token_budget: after so many tokens of reasoning its closing marker is the only token that may follow."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from quire.service.common.refusal import Refusal
from quire.service.grammar.grammar import compile_grammar
from quire.service.text.thinking_budget import thinking_rules
from quire.service.text.tokenizer import Tokenizer
from tests.matrix import examples
from tests.service.fakes import TOOLS_TEMPLATE, FakeEngine, Served, byte_level, settled, with_template
from tests.service.test_app import says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
MARKERS = ("<think>", "</think>")
MESSAGES = [{"role": "user", "content": "Hi"}]
EOS = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = byte_level(tmp_path_factory.mktemp("thinking") / "m")
    return with_template(made, TOOLS_TEMPLATE, (*MARKERS, "<tool_call>"))


@pytest.fixture(scope="module")
def thinker(folder: Path) -> Tokenizer:
    return Tokenizer(str(folder))


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> LLTokenizer:
    return LLTokenizer(str(folder / "tokenizer.json"), eos_token=[EOS])


def drawn(vocabulary: LLTokenizer, grammar: str, seed: int, shy: Sequence[int], size: int) -> list[int]:
    """Tokens of an answer that draws at random among those that the grammar allows, `shy` ones rarely."""
    dice, matcher, found = random.Random(seed), LLMatcher(vocabulary, grammar, log_level=0), list[int]()
    for _ in range(60):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:size]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, matcher.get_error()
        likely = [token for token in allowed if token not in shy]
        found.append(dice.choice(likely if likely and dice.random() < 0.95 else allowed))
        if found[-1] == EOS:
            break
        assert matcher.consume_token(found[-1]), matcher.get_error()
    return found


@given(budget=st.integers(0, 12), opened=st.booleans(), seed=st.integers(0, 10**6), eager=st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_no_answer_thinks_longer_than_its_budget(
    thinker: Tokenizer, vocabulary: LLTokenizer, budget: int, opened: bool, seed: int, eager: bool
) -> None:
    special = thinker.vocabulary.grammar_tokens
    opening, closing = (special[marker] for marker in MARKERS)
    grammar = compile_grammar(thinking_rules(budget, MARKERS, special, opened=opened)).grammar
    shy = [EOS, closing] if eager else [EOS, opening, closing]
    tokens = drawn(vocabulary, grammar, seed, shy, len(thinker.vocabulary.table))
    assert tokens.count(opening) <= (not opened)  # it does not begin again
    if opened or opening in tokens:
        thoughts = tokens if opened else tokens[tokens.index(opening) + 1 :]
        length = thoughts.index(closing) if closing in thoughts else len(thoughts)
        assert length <= budget


def test_the_rest_of_an_answer_may_hold_any_token(thinker: Tokenizer, vocabulary: LLTokenizer) -> None:
    special, size = thinker.vocabulary.grammar_tokens, len(thinker.vocabulary.table)
    opening, closing = (special[marker] for marker in MARKERS)
    grammar = compile_grammar(thinking_rules(5, MARKERS, special, opened=True)).grammar
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert matcher.consume_tokens([40, 41, closing])
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:size]
    assert np.flatnonzero(bits == 0).tolist() == [opening]


def test_a_model_without_such_markers_is_refused_by_name(thinker: Tokenizer) -> None:
    for markers, special in (
        (None, thinker.vocabulary.grammar_tokens),
        (("<|x|>thought", "</x>"), thinker.vocabulary.grammar_tokens),
    ):
        with pytest.raises(Refusal, match="thinking_token_budget") as refused:
            thinking_rules(5, markers, special, opened=False)
        assert (refused.value.status, refused.value.code) == (400, "unsupported")


async def test_engines_get_it_where_they_follow_grammars(serve: Serve, engine: EngineMaker, thinker: Tokenizer) -> None:
    served = await serve(thinker)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

    async def post(**fields: Any) -> tuple[int, str]:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "thinking_token_budget": 7, **fields}
        async with served.session.post("/v1/chat/completions", json=body) as response:
            error = (await response.json()).get("error") or {}
            return response.status, f"{error.get('code')} {error.get('param')}"

    async with engine(says(thinker)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        assert await post() == (400, "unsupported thinking_token_budget")  # as engines on a GPU
        fake.load_changes = {"grammars": True}
        await settled(lambda: served.streams.fleet.engines[0].grammars)
        assert (await post())[0] == 200
        assert "[max_tokens=7]" in fake.seen[-1].sampling.grammar
        assert (await post(tools=[tool]))[0] == 200
        for more in ({"response_format": schema}, {"tools": [tool], "tool_choice": "required"}):
            assert (await post(**more))[0] == 200
            assert "[max_tokens=7]" in fake.seen[-1].sampling.grammar
        assert await post(ignore_eos=True) == (400, "unsupported thinking_token_budget")
        assert await post(thinking_token_budget=-1) == (400, "invalid_value thinking_token_budget")
        assert len(fake.seen) == 4


async def test_the_budget_of_a_message_is_held_where_it_can_be(
    serve: Serve, engine: EngineMaker, thinker: Tokenizer, vocabulary: LLTokenizer
) -> None:
    served = await serve(thinker)

    async def post(budget: Any, **fields: Any) -> tuple[int, str]:
        thinking = {"type": "enabled", "budget_tokens": budget}
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "thinking": thinking, **fields}
        async with served.session.post("/v1/messages", json=body) as response:
            return response.status, (await response.text())

    tool = {"name": "f", "input_schema": {"type": "object"}}
    async with engine(says(thinker)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        assert (await post(7))[0] == 200  # engines that follow no grammar: a target, as at Anthropic
        assert fake.seen[-1].sampling.grammar == ""
        fake.load_changes = {"grammars": True}
        await settled(lambda: served.streams.fleet.engines[0].grammars)
        assert (await post(7))[0] == 200
        assert "[max_tokens=7]" in fake.seen[-1].sampling.grammar
        assert (await post(7, tools=[tool], tool_choice={"type": "any"}))[0] == 200
        grammar = fake.seen[-1].sampling.grammar
        assert "[max_tokens=7]" in grammar  # both the budget and the calls are held
        assert "tool0" in grammar
        assert (await post(10**18))[0] == 200
        assert LLMatcher.validate_grammar(fake.seen[-1].sampling.grammar, vocabulary) == ""
        assert (await post(None))[0] == 200
        assert fake.seen[-1].sampling.grammar == ""
        for wrong in ("7", True, 1.5, -1):
            status, text = await post(wrong)
            assert (status, "thinking.budget_tokens" in text) == (400, True)
        assert len(fake.seen) == 5
