"""/generative_scoring: probabilities of label tokens after a query and each item."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.engine.wire.messages import Finish, Generate
from quire.service.api import generative_scoring
from quire.service.api.scoring import Scoring
from quire.service.common.refusal import Refusal, field_name, renamed
from quire.service.config import GatewayConfig
from quire.service.text.tokenizer import Tokenizer
from tests.docs.test_api import rows, section
from tests.service.api.test_api import refused
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import raw

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
PATH = "/generative_scoring"
ASK = {"query": "Is it? ", "items": ["Yes it is.", "No"], "label_token_ids": [20, 30]}


def parsed(**fields: Any) -> Any:
    body = {name: value for name, value in {**ASK, **fields}.items() if value is not None}
    return generative_scoring.parse(json.dumps(body).encode(), GatewayConfig(max_prompts=4), "m", 600.0)


def silent(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
    return [5], None


def scorer(engine: EngineMaker) -> FakeEngine:
    """An engine that reports log probabilities of given tokens."""
    fake = engine(silent)
    fake.load_changes = {"honours": ["logprob_token_ids"]}
    return fake


async def test_each_item_has_a_score_and_a_prompt(
    serve: Serve, engine: EngineMaker, sentencepiece_tokenizer: Tokenizer
) -> None:
    served = await serve(sentencepiece_tokenizer)
    encode = sentencepiece_tokenizer._encode
    query = encode("Is it? ", special=True)
    items = [encode(item, special=False) for item in ("Yes it is.", "No")]
    async with scorer(engine) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        status, answer, headers = await raw(served.session, PATH, **ASK)
        prompts = sorted((one.id, one.token_ids) for one in fake.seen)
        sampling = [one.sampling for one in fake.seen]
    assert status == 200, answer
    assert [ids for _, ids in prompts] == [query + item for item in items]
    assert all(one.logprob_token_ids == [20, 30] and one.temperature == 0 for one in sampling)
    assert all(one.max_new_tokens == 1 for one in fake.seen)
    assert answer["id"].startswith("generative-scoring-")
    assert (answer["object"], bool(answer["model"])) == ("list", True)
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(0, "score"), (1, "score")]
    assert all(0 <= one["score"] <= 1 for one in answer["data"])
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(len(ids) for _, ids in prompts)
    assert (usage["completion_tokens"], usage["total_tokens"]) == (2, usage["prompt_tokens"] + 2)
    assert "x-unknown-fields" not in headers


def test_a_score_is_a_probability_among_the_labels_or_the_vocabulary() -> None:
    logprobs = {7: math.log(0.3), 8: math.log(0.1)}
    assert Scoring("", [7, 8], True, False).score(logprobs) == pytest.approx(0.75)
    assert Scoring("", [8, 7], True, False).score(logprobs) == pytest.approx(0.25)
    assert Scoring("", [8, 7], False, False).score(logprobs) == pytest.approx(0.1)
    assert Scoring("", [7], True, False).score({7: -5000.0}) == 1.0
    assert Scoring("", [7, 8], True, False).score({7: -1e4, 8: -1e4 - 700}) == pytest.approx(1.0)
    assert Scoring("", [7], True, False).score({7: -math.inf}) == 0.0


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("special", [False, True])
async def test_a_text_that_begins_a_prompt_gets_special_tokens(
    sentencepiece_tokenizer: Tokenizer, item_first: bool, special: bool
) -> None:
    def encode(text: str, begins: bool) -> list[int]:
        return sentencepiece_tokenizer._encode(text, special=special and begins)

    found = await sentencepiece_tokenizer.encode(parsed(item_first=item_first, add_special_tokens=special))
    query = encode("Is it? ", not item_first)
    items = [encode(item, item_first) for item in ("Yes it is.", "No")]
    assert found == [item + query if item_first else query + item for item in items]
    given = await sentencepiece_tokenizer.encode(parsed(query=[4, 5], items=[[6], [7, 8]], item_first=item_first))
    assert given == ([[6, 4, 5], [7, 8, 4, 5]] if item_first else [[4, 5, 6], [4, 5, 7, 8]])


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"query": None}, "query", "invalid_type"),
        ({"items": None}, "items", "invalid_type"),
        ({"label_token_ids": None}, "label_token_ids", "invalid_type"),
        ({"items": []}, "items", "invalid_value"),
        ({"items": ["a", [1]]}, "items", "invalid_type"),
        ({"items": [[]]}, "items", "empty_prompt"),
        ({"items": ["a"] * 5}, "items", "too_many"),
        ({"label_token_ids": []}, "label_token_ids", "invalid_value"),
        ({"label_token_ids": list(range(129))}, "label_token_ids", "too_many"),
        ({"label_token_ids": ["yes"]}, "label_token_ids[0]", "invalid_type"),
        ({"priority": "soon"}, "priority", "invalid_value"),
        ({"model": "other"}, "model", "model_not_found"),
    ],
)
def test_a_bad_body_is_refused_by_field(fields: dict[str, Any], param: str, code: str) -> None:
    refusal = refused(parsed, **fields)
    assert (refusal.param, refusal.code) == (param, code)
    assert refusal.message.startswith(param)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"label_token_ids": [9_999_999_999, 1]}, "label_token_ids", "invalid_token_id"),
        ({"label_token_ids": [-1]}, "label_token_ids", "invalid_token_id"),
        ({"items": [[4], [9_999]]}, "items", "invalid_token_id"),
        ({"query": "", "items": [""]}, "items", "empty_prompt"),
        ({"query": [4] * 600}, "items", "context_length_exceeded"),
        ({"items": ["word " * 3000]}, "items", "context_length_exceeded"),
    ],
)
async def test_what_the_engines_cannot_serve_is_refused_by_field(
    serve: Serve, engine: EngineMaker, fields: dict[str, Any], param: str, code: str
) -> None:
    served = await serve()
    async with scorer(engine):
        await settled(lambda: bool(served.streams.fleet.engines))
        status, error, _ = await raw(served.session, PATH, **{**ASK, **fields})
    assert (status, error["error"]["param"], error["error"]["code"]) == (400, param, code)


async def test_it_needs_a_key_and_repeats_its_answer_under_an_idempotency_key(
    serve: Serve, engine: EngineMaker
) -> None:
    guarded = await serve(api_keys=["k"])
    status, error, _ = await raw(guarded.session, PATH, **ASK)
    assert (status, error["error"]["code"]) == (401, "invalid_api_key")
    served = await serve()
    async with scorer(engine) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        answers = []
        for _ in range(2):
            async with served.session.post(PATH, json=ASK, headers={"Idempotency-Key": "a"}) as response:
                answers.append(await response.json())
        assert len(fake.seen) == 2
    assert answers[0]["data"] == answers[1]["data"]
    assert answers[0]["id"] == answers[1]["id"]


def test_fields_of_the_format_are_listed() -> None:
    listed = {name.strip("` ") for row in rows(section("POST /generative_scoring")) for name in row[0].split(",")}
    assert listed == set(generative_scoring.ScoringBody.__struct_fields__)


def test_a_field_that_is_not_renamed_keeps_its_name() -> None:
    for given, name in (("prompt", "items"), ("prompt[0]", "items[0]"), ("prompt_embeds", "prompt_embeds")):
        assert field_name(given, generative_scoring.NAMES) == name
        refusal = renamed(Refusal(400, "invalid_value", f"{given}: no", param=given), generative_scoring.NAMES)
        assert (refusal.param, refusal.message) == (name, f"{name}: no")
