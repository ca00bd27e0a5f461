"""Beam search as a request asks for it: every combination that is not served is refused by name, limit and value."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.engine.wire.messages import Beams, EngineLoad, Sampling
from quire.service.api import api, fitting
from quire.service.api.beams import NOT_WITH, ONLY_WITH, queue_extra, require_beams
from quire.service.api.best_of import likeliest
from quire.service.api.bodies import ChatBody, CompletionBody
from quire.service.api.fitting import EngineLimits
from quire.service.api.valid_request import ValidRequest
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from tests.service.fakes import a_load

CONFIG = GatewayConfig(max_beam_width=8)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
STRICT: dict[str, Any] = {"type": "function", "function": {**TOOL["function"], "strict": True}}


def completion(**fields: Any) -> ValidRequest:
    body = msgspec.json.encode({"prompt": [1, 2, 3], **fields})
    return api.parse_completion(body, CONFIG, "tiny", 600.0)


def chat(**fields: Any) -> ValidRequest:
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "x"}], **fields})
    return api.parse_chat(body, CONFIG, "tiny", 600.0)


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize(
    ("fields", "beams"),
    [
        ({"n": 3}, Beams(3)),
        ({"beam_width": 4}, Beams(4)),
        ({"num_beams": 4, "n": 2}, Beams(4)),
        ({"best_of": 8}, Beams(8)),
        ({"best_of": 8, "beam_width": 8}, Beams(8)),
        ({"beam_width": 2, "length_penalty": -1}, Beams(2, -1.0)),
        ({"beam_width": 2, "early_stopping": True}, Beams(2, early_stopping=True)),
        ({"beam_width": 2, "early_stopping": "never"}, Beams(2, early_stopping="never")),
        ({"beam_width": "2", "early_stopping": "true"}, Beams(2, early_stopping=True)),  # as strings: see decode
        ({"beam_width": 2, "temperature": 0, "top_p": 1, "top_k": -1, "stop": []}, Beams(2)),
        ({}, Beams(1)),
    ],
)
def test_fields_become_a_search(parse: Any, fields: dict[str, Any], beams: Beams) -> None:
    valid = parse(use_beam_search=True, **fields)
    assert valid.beams == beams
    assert valid.sampling == Sampling(temperature=0.0)


@pytest.mark.parametrize("parse", [completion, chat])
def test_without_the_switch_nothing_is_searched(parse: Any) -> None:
    for name, neutral in ONLY_WITH.items():
        for value in (None, *neutral):
            assert parse(**{name: value}).beams is None
        with pytest.raises(Refusal, match=rf"^{name}: only with use_beam_search=true") as refused:
            parse(**{name: "never" if name == "early_stopping" else 2})
        assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_value", name)


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize(
    ("fields", "param", "code", "limit", "given"),
    [
        ({"beam_width": 9}, "beam_width", "invalid_value", ">= 1 and <= 8", 9),
        ({"num_beams": 9}, "num_beams", "invalid_value", ">= 1 and <= 8", 9),
        ({"best_of": 0}, "best_of", "invalid_value", ">= 1 and <= 8", 0),
        ({"n": 9}, "n", "invalid_value", ">= 1 and <= 8", 9),
        ({"beam_width": 4, "num_beams": 5}, "num_beams", "invalid_value", 4, 5),
        ({"beam_width": 4, "n": 5}, "n", "invalid_value", 4, 5),
        ({"length_penalty": 5.5}, "length_penalty", "invalid_value", ">= -5 and <= 5", 5.5),
        ({"early_stopping": "soon"}, "early_stopping", "invalid_value", "true, false, never", "soon"),
        ({"stream": True}, "stream", "unsupported", "false", True),
        ({"stop": "x"}, "stop", "unsupported", "absent", "x"),
        ({"temperature": 0.5}, "temperature", "unsupported", "0 or 1", 0.5),
        ({"top_p": 0.5}, "top_p", "unsupported", "1", 0.5),
        ({"top_k": 5}, "top_k", "unsupported", "0 or -1", 5),
        ({"min_p": 0.5}, "min_p", "unsupported", "0", 0.5),
        ({"presence_penalty": 1.0}, "presence_penalty", "unsupported", "0", 1.0),
        ({"frequency_penalty": 1.0}, "frequency_penalty", "unsupported", "0", 1.0),
        ({"repetition_penalty": 1.5}, "repetition_penalty", "unsupported", "1", 1.5),
        ({"logit_bias": {"3": 1}}, "logit_bias", "unsupported", "absent", None),
        ({"allowed_token_ids": [3]}, "allowed_token_ids", "unsupported", "absent", None),
        ({"bad_words": ["x"]}, "bad_words", "unsupported", "absent", None),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "unsupported", "absent", 0),
        ({"guided_regex": "a+"}, "guided_regex", "unsupported", "absent", None),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported", "absent", None),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    parse: Any, fields: dict[str, Any], param: str, code: str, limit: Any, given: Any
) -> None:
    with pytest.raises(Refusal) as refused:
        parse(use_beam_search=True, **fields)
    refusal = refused.value
    assert (refusal.status, refusal.param, refusal.code) == (400, param, code)
    assert (refusal.limit, refusal.given) == (limit, given)
    assert refusal.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("parse", "fields", "param"),
    [
        (completion, {"logprobs": 1}, "logprobs"),
        (completion, {"logprobs": 0, "echo": True}, "echo"),
        (completion, {"max_tokens": 0, "echo": True}, "max_tokens"),
        (chat, {"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        (chat, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (chat, {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        (chat, {"tools": [STRICT]}, "tools[0].function.strict"),
    ],
)
def test_fields_of_one_endpoint_are_refused_too(parse: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as refused:
        parse(use_beam_search=True, **fields)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, "unsupported")


def test_log_probabilities_of_the_answers_are_served() -> None:
    assert completion(use_beam_search=True, logprobs=0).sampling.logprobs == 0
    assert chat(use_beam_search=True, logprobs=True).sampling.logprobs == 0
    assert chat(use_beam_search=True, tools=[TOOL]).options.tools == [TOOL]


def test_a_penalty_that_is_no_number_is_refused() -> None:
    body = b'{"prompt": "x", "use_beam_search": true, "length_penalty": %s}'
    for bad in (b"NaN", b"Infinity", b"1e999"):
        with pytest.raises(Refusal) as refused:
            api.parse_completion(body % bad, CONFIG, "tiny", 600.0)
        assert (refused.value.status, refused.value.param, refused.value.code) == (
            400,
            "length_penalty",
            "invalid_value",
        )


def test_the_models_repetition_penalty_is_not_dropped() -> None:
    """Its other defaults shape draws, and a search draws nothing."""
    served = api.Served(defaults=Sampling(temperature=0.2, top_p=0.9, repetition_penalty=1.1))
    body = {"prompt": "x", "use_beam_search": True}
    with pytest.raises(Refusal, match=r"^repetition_penalty: ") as refused:
        api.parse_completion(msgspec.json.encode(body), CONFIG, "tiny", 600.0, served)
    assert refused.value.given == 1.1
    body["repetition_penalty"] = 1
    valid = api.parse_completion(msgspec.json.encode(body), CONFIG, "tiny", 600.0, served)
    assert valid.sampling == Sampling(temperature=0.0)


def test_every_field_that_is_not_served_has_a_case_here() -> None:
    assert set(NOT_WITH) < {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__}


LIMITS = EngineLimits(max_model_len=1000, vocab_size=100, block_size=16, total_blocks=20)


def test_a_search_that_no_pool_holds_is_refused() -> None:
    """3 prompt tokens share no block: 8 beams of 33 tokens take 24 blocks."""
    valid = completion(use_beam_search=True, beam_width=8, max_tokens=30)
    with pytest.raises(Refusal) as refused:
        fitting.fit(valid, [[1, 2, 3]], LIMITS)
    refusal = refused.value
    assert (refusal.status, refusal.code, refusal.param) == (400, "kv_cache_exceeded", "beam_width")
    assert (refusal.limit, refusal.given) == (320, 384)
    assert fitting.fit(completion(use_beam_search=True, beam_width=8, max_tokens=29), [[1, 2, 3]], LIMITS) == [29]


def test_without_max_tokens_the_answers_are_as_long_as_the_pool_allows() -> None:
    """5 beams of 4 blocks each; with 32 tokens of prompt, 2 blocks are shared and 5 x 3 are not."""
    valid = chat(use_beam_search=True, beam_width=5)
    assert fitting.fit(valid, [[1, 2, 3]], LIMITS) == [64 - 3]
    assert fitting.fit(valid, [[1] * 32], LIMITS) == [80 - 32]
    rooms = fitting.fit(valid, [[1] * 32], LIMITS)
    assert Beams(5).max_blocks(32, 32 + rooms[0], 16) <= 20 < Beams(5).max_blocks(32, 33 + rooms[0], 16)


def engines(*widths: int) -> list[EngineLoad]:
    return [a_load(f"e{at}", beams=width) for at, width in enumerate(widths)]


@pytest.mark.parametrize(
    ("widths", "status", "param", "limit", "given"),
    [
        ((0, 0), 400, "use_beam_search", None, None),
        ((4, 0), 400, "beam_width", 4, 5),
        ((5, 0), 503, "beam_width", None, None),
        ((4, 5), 503, "beam_width", None, None),
    ],
)
def test_engines_that_cannot_search_are_named(
    widths: tuple[int, ...], status: int, param: str, limit: Any, given: Any
) -> None:
    with pytest.raises(Refusal) as refused:
        require_beams(Beams(5), engines(*widths))
    refusal = refused.value
    assert (refusal.status, refusal.param, refusal.limit, refusal.given) == (status, param, limit, given)
    require_beams(None, engines(*widths))


def test_an_engine_that_leaves_need_not_search() -> None:
    able, leaving = engines(8, 0)
    require_beams(Beams(8), [able, msgspec.structs.replace(leaving, draining=True)])


def test_a_search_counts_a_block_for_each_further_beam() -> None:
    assert [queue_extra(beams, 16) for beams in (None, Beams(1), Beams(4))] == [0, 0, 48]


def test_the_likeliest_answers_are_first() -> None:
    assert likeliest([[-1.0, -3.0], [-1.5], [], [-2.0, -2.0, -2.0]], 3) == [1, 0, 3]


@pytest.mark.parametrize("parse", [completion, chat])
def test_a_choice_among_samples_asks_for_their_log_probabilities(parse: Any) -> None:
    valid = parse(n=2, best_of=5)
    assert (valid.n, valid.best, valid.sampling.logprobs, valid.hide_logprobs) == (5, 2, 0, True)
    assert parse(n=2, best_of=2) == parse(n=2)


def test_asked_log_probabilities_of_a_choice_among_samples_are_shown() -> None:
    valid = completion(best_of=5, logprobs=3)
    assert (valid.n, valid.best, valid.sampling.logprobs, valid.hide_logprobs) == (5, 1, 3, False)
