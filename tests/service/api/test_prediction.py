"""OpenAI's `prediction`: it reaches engines that draft as tokens, and `usage` counts what became of these drafts."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.messages import Delta, Finish, Generate
from quire.engine.wire.records import Fleet
from quire.service.api import api
from quire.service.api.usage import UsageCount
from quire.service.api.valid_request import ValidRequest
from quire.service.common.limits import LIMITS, PREDICTED_TOKENS
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery import admission, resume
from quire.service.output.choice_delta import ChoiceDelta
from quire.service.text.tokenizer import Tokenizer
from tests.service.fakes import FakeEngine, Served, a_load, settled
from tests.service.test_app import events, says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
CHAT = {"messages": [{"role": "user", "content": "a"}]}
TEXT = "def area(r): return 3"


def predicts(content: Any = TEXT) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def parsed(**fields: Any) -> ValidRequest:
    return api.parse_chat(json.dumps({**CHAT, **fields}).encode(), GatewayConfig(), "tiny", 60.0)


def a_fleet(*able: bool) -> Fleet:
    loads = [a_load(f"e{at}", honours=["predicted"] if one else []) for at, one in enumerate(able)]
    return Fleet(loads, queued=0, queued_tokens=0, time_ms=1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, None),
        ({"prediction": None}, None),
        (predicts(), TEXT),
        (predicts(""), ""),
        (predicts([]), ""),
        (predicts([{"type": "text", "text": "def "}, {"type": "text", "text": "f"}]), "def f"),
    ],
)
def test_the_forms_of_a_prediction(fields: dict[str, Any], text: str | None) -> None:
    valid = parsed(**fields)
    assert valid.prediction == text
    assert valid.unknown == ()


@pytest.mark.parametrize(
    "wrong",
    [
        "text",
        {"type": "content"},
        {"content": "x"},
        {"type": "other", "content": "x"},
        {"type": "content", "content": 5},
        {"type": "content", "content": [{"type": "image_url", "text": "x"}]},
        {"type": "content", "content": [{"type": "text"}]},
        {"type": "content", "content": ["x"]},
    ],
)
def test_another_shape_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(Refusal) as refused:
        parsed(prediction=wrong)
    assert refused.value.status == 400
    assert str(refused.value.param).startswith("prediction")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("best_of", 2),
        ("use_beam_search", True),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [5]),
        ("min_tokens", 3),
    ],
)
def test_what_is_not_served_beside_it(name: str, value: Any) -> None:
    assert parsed(**{name: value}).prediction is None
    with pytest.raises(Refusal) as refused:
        parsed(**predicts(), **{name: value})
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "unsupported", name)


def test_neutral_values_and_what_drafts_go_with_are_served_beside_it() -> None:
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "bad_words": []}
    more = {"logprobs": True, "max_completion_tokens": 5, "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert parsed(**predicts(), **neutral, **more).prediction == TEXT


def test_other_endpoints_have_no_prediction() -> None:
    body = json.dumps({"prompt": "x", **predicts()}).encode()
    assert api.parse_completion(body, GatewayConfig(), "tiny", 60.0).unknown == ("prediction",)


def test_it_needs_every_engine_that_may_claim_the_request() -> None:
    assert admission.drafts(a_fleet(True, True))
    assert not admission.drafts(a_fleet(True, False))


@pytest.mark.parametrize("unit", ["a", "\u2603 "])
def test_its_length_is_limited(byte_level_tokenizer: Tokenizer, unit: str) -> None:
    """By tokens; a text that cannot be short enough is not encoded first."""
    config = GatewayConfig()
    assert LIMITS["prediction"].bounds(config)[1] == PREDICTED_TOKENS
    least = PREDICTED_TOKENS * (byte_level_tokenizer._longest_token or 1) + 1
    with pytest.raises(Refusal) as refused:
        byte_level_tokenizer.predicted(unit * least)
    assert (refused.value.code, refused.value.param) == ("too_long", "prediction")
    assert (refused.value.limit, str(refused.value.given).isdigit()) == (PREDICTED_TOKENS, True)


def test_a_record_keeps_that_there_was_one_but_not_its_text() -> None:
    valid = parsed(**predicts())
    fields: dict[str, Any] = {"owner": "o", "tenant": "t", "prompts": [], "model": "m", "created": 1}
    for given, kept in ((valid, ""), (parsed(), None)):
        record = resume.Record(valid=given, fingerprint=None, deadline_ms=1, **fields)
        assert resume.decode(record.encode()).valid.prediction == kept


class DraftingEngine(FakeEngine):
    """Counts a draft accepted for every second token, and one refused for every third."""

    def _delta(self, generate: Generate, index: int, at: int, tokens: list[int], finish: Finish | None) -> Delta | None:
        delta = super()._delta(generate, index, at, tokens, finish)
        if delta is None or not generate.predicted:
            return delta
        end = at + len(delta.token_ids)
        counts = end // 2, end // 3
        finish = delta.finish and msgspec.structs.replace(delta.finish, predictions=counts)
        return msgspec.structs.replace(delta, predictions=counts, finish=finish)


@pytest.fixture
def drafting(redis_server: EmbeddedRedis, namespace: str, byte_level_tokenizer: Tokenizer) -> DraftingEngine:
    engine = DraftingEngine(redis_server.url, namespace, says(byte_level_tokenizer))
    engine.load_changes = {"honours": ["predicted"]}
    return engine


async def test_engines_that_draft_get_its_tokens_and_usage_counts_them(
    serve: Serve, drafting: DraftingEngine, byte_level_tokenizer: Tokenizer
) -> None:
    served, other = await serve(), await serve()
    url = "/v1/chat/completions"
    async with drafting as fake:
        await settled(lambda: all(bool(one.streams.fleet.engines) for one in (served, other)))
        body = {**CHAT, "max_tokens": 12, **predicts()}
        async with served.session.post(url, json=body) as response:
            usage = (await response.json())["usage"]
            assert "x-unknown-fields" not in response.headers
        assert fake.seen[-1].predicted == byte_level_tokenizer._encode(TEXT, special=False)
        expected = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 4}
        assert usage["completion_tokens_details"] == expected
        assert usage["completion_tokens"] == 12
        options = {"include_usage": True, "continuous_usage_stats": True, "include_ids": True}
        async with served.session.post(url, json={**body, "stream": True, "stream_options": options}) as response:
            told = [(name, data) async for name, data in events(response) if data != "[DONE]" and name]
        counts = [data["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for _, data in told]
        assert counts == sorted(counts)
        assert told[-1][1]["usage"]["completion_tokens_details"] == expected
        # A client that resumes late, or for the end alone, gets the same counts.
        for name, _ in (told[1], told[-2]):
            request_id = str(name).partition(":")[0]
            headers = {"Last-Event-ID": str(name)}
            async with other.session.get(f"/v1/streams/{request_id}", headers=headers) as response:
                rest = [data async for name, data in events(response) if data != "[DONE]" and name]
            assert rest[-1]["usage"]["completion_tokens_details"] == expected
        async with served.session.post(url, json={**body, "prediction": None}) as response:
            assert "completion_tokens_details" not in (await response.json())["usage"]
        assert fake.seen[-1].predicted == []


async def test_an_answer_that_a_stop_string_ends_has_the_counts_up_to_there(
    serve: Serve, drafting: DraftingEngine
) -> None:
    served = await serve()
    async with drafting:
        await settled(lambda: bool(served.streams.fleet.engines))
        body = {**CHAT, "max_tokens": 300, "stop": ["END of"], **predicts()}
        async with served.session.post("/v1/chat/completions", json=body) as response:
            answer = await response.json()
        usage = answer["usage"]
        assert answer["choices"][0]["finish_reason"] == "stop"
        counted = usage["completion_tokens_details"]
        assert counted["accepted_prediction_tokens"] >= usage["completion_tokens"] // 2 > 0


def test_drafts_behind_a_stop_string_are_not_in_the_answer() -> None:
    """The engine accepted five drafts in its last step; the answer ends after two more tokens."""
    usage = UsageCount(parsed(**predicts()), [4])
    usage.add(ChoiceDelta(0, "", [7], predictions=(0, 1)))
    usage.add(ChoiceDelta(0, "", [8, 9], predictions=(5, 1)))
    details = usage.fields()["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 3}


async def test_without_drafts_it_has_no_effect_and_a_header_names_it(
    serve: Serve, drafting: DraftingEngine, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    drafting.load_changes = {}
    async with drafting as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        body = {**CHAT, "max_tokens": 4, **predicts()}
        async with served.session.post("/v1/chat/completions", json=body) as response:
            assert response.headers["x-unknown-fields"] == "prediction"
            details = (await response.json())["usage"]["completion_tokens_details"]
        assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        assert fake.seen[-1].predicted == []
        long = predicts("x " * (PREDICTED_TOKENS + 1))
        async with served.session.post("/v1/chat/completions", json={**body, **long}) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (400, "too_long", "prediction")
        assert str(PREDICTED_TOKENS) in error["message"]
