"""Requests in: each bad input is refused by field, limit and value.  Answers out: OpenAI's shapes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.wire.messages import Sampling, TokenLogprob
from quire.engine.wire.prefixes import prefix_digests
from quire.service.api import api, fitting
from quire.service.api import fields as body_fields
from quire.service.api.bodies import CompletionBody
from quire.service.api.envelope import Envelope, generates
from quire.service.api.fitting import EngineLimits
from quire.service.api.format import Format, Prompted
from quire.service.api.trace_context import tracestate
from quire.service.api.valid_request import ValidRequest
from quire.service.common.limits import CONTENT_PARTS, TOOL_CALLS
from quire.service.common.pacing import Pacer
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.output.choice_delta import ChoiceDelta
from quire.service.output.content_scores import Score
from quire.service.text import generation_config
from quire.service.text.vocabulary import ModelError

CONFIG = GatewayConfig(max_n=4, max_stop_strings=16)
LIMITS = EngineLimits(max_model_len=100, vocab_size=50, block_size=16, total_blocks=5, eos_ids=frozenset([2]))


def completion(**fields: Any) -> ValidRequest:
    body = {"model": "m", "prompt": "hi", **fields}
    return api.parse_completion(json.dumps(body).encode(), CONFIG, "m", 600.0)


def chat(**fields: Any) -> ValidRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return api.parse_chat(json.dumps(body).encode(), CONFIG, "m", 600.0)


def refused(call: Any, *args: Any, **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call(*args, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "limit", "given"),
    [
        ({"temperature": -1}, "temperature", ">= 0 and <= 2", -1),
        ({"temperature": float("nan")}, "temperature", "finite", "NaN or Infinity"),
        ({"top_p": 0}, "top_p", "> 0 and <= 1", 0),
        ({"top_k": -2}, "top_k", ">= 0 and <= 2147483647", -2),
        ({"min_p": 1.5}, "min_p", ">= 0 and <= 1", 1.5),
        ({"max_tokens": 0}, "max_tokens", ">= 1 and <= 2147483647", 0),
        ({"n": 5}, "n", ">= 1 and <= 4", 5),
        ({"n": 0}, "n", ">= 1 and <= 4", 0),
        ({"stop": ["x"] * 1000}, "stop", 16, 1000),
        ({"stop": ""}, "stop", ">= 1 and <= 256", 0),
        ({"stop": "x" * 300}, "stop", ">= 1 and <= 256", 300),
        ({"presence_penalty": 3}, "presence_penalty", ">= -2 and <= 2", 3),
        ({"frequency_penalty": -3}, "frequency_penalty", ">= -2 and <= 2", -3),
        ({"repetition_penalty": 0}, "repetition_penalty", ">= 0.01 and <= 100", 0),
        ({"repetition_penalty": 1e-320}, "repetition_penalty", ">= 0.01 and <= 100", 1e-320),
        ({"repetition_penalty": 101}, "repetition_penalty", ">= 0.01 and <= 100", 101),
        ({"cache_salt": "s" * 257}, "cache_salt", 256, 257),
        ({"seed": 2**63}, "seed", f">= {-(2**63)} and <= {2**63 - 1}", 2**63),
        ({"logit_bias": {"3" * 11: 1}}, "logit_bias", 10, 11),
        ({"logit_bias": {"3": 101}}, "logit_bias", ">= -100 and <= 100", 101),
        ({"stop_token_ids": [1] * 2000}, "stop_token_ids", 1024, 2000),
        ({"timeout": 0}, "timeout", "> 0 and <= 3600", 0),
        ({"timeout": -2.5}, "timeout", "> 0 and <= 3600", -2.5),
        ({"timeout": 3601}, "timeout", "> 0 and <= 3600", 3601),
        ({"timeout": float("inf")}, "timeout", "finite", "NaN or Infinity"),
        ({"priority": "urgent"}, "priority", "high, normal, low, or a whole number from -100 (first) to 100", "urgent"),
        ({"priority": 101}, "priority", "high, normal, low, or a whole number from -100 (first) to 100", 101),
        ({"min_tokens": -1}, "min_tokens", ">= 0 and <= 2147483647", -1),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ">= 1 and <= 2147483647", 0),
    ],
)
@pytest.mark.parametrize("call", [completion, chat])
def test_a_value_out_of_range_is_named_with_its_limit(
    call: Any, fields: dict[str, Any], param: str, limit: Any, given: Any
) -> None:
    refusal = refused(call, **fields)
    assert (refusal.status, refusal.param, refusal.limit, refusal.given) == (400, param, limit, given)
    error = msgspec.json.decode(refusal.body())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{param}: ")
    assert str(given) in error["message"] or refusal.limit == "finite"


@pytest.mark.parametrize(
    ("call", "fields", "param", "code"),
    [
        (completion, {"best_of": 2, "stream": True}, "best_of", "unsupported"),
        (completion, {"best_of": 129}, "best_of", "invalid_value"),
        (chat, {"n": 3, "best_of": 2}, "best_of", "invalid_value"),
        (completion, {"logprobs": 21}, "logprobs", "invalid_value"),
        (completion, {"prompt": []}, "prompt", "empty_prompt"),
        (completion, {"prompt": [[1], []]}, "prompt", "empty_prompt"),
        (completion, {"prompt": ["a", 3]}, "prompt", "invalid_type"),
        (completion, {"prompt": [[1], 3]}, "prompt", "invalid_type"),
        (completion, {"prompt": 3}, "prompt", "invalid_type"),
        (completion, {"prompt": ["a"] * 1025}, "prompt", "too_many"),
        (completion, {"prompt": ["a"] * 300, "n": 4}, "n", "too_many"),
        (completion, {"max_tokens": "ten"}, "max_tokens", "invalid_type"),
        (completion, {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        (completion, {"logit_bias": {"": 1}}, "logit_bias", "invalid_value"),
        (completion, {"logit_bias": {"\u0663": 1}}, "logit_bias", "invalid_value"),  # an Arabic three
        (completion, {"logits_processors": ["x"]}, "logits_processors", "unsupported"),
        (completion, {"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        (completion, {"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
        (completion, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "invalid_value"),
        (completion, {"truncation_side": "middle"}, "truncation_side", "invalid_value"),
        (completion, {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (completion, {"response_format": {"type": "grammar"}}, "response_format.type", "unsupported"),
        (completion, {"tools": [{"type": "function"}]}, "tools", "unsupported"),
        (completion, {"tool_choice": "required"}, "tool_choice", "unsupported"),
        (chat, {"functions": [{"name": "f"}]}, "functions", "unsupported"),
        (chat, {"messages": []}, "messages", "empty_prompt"),
        (chat, {"messages": [{"role": "a wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "unsupported",
        ),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text"}]}]},
            "messages[0].content[1].text",
            "invalid_type",
        ),
        (chat, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_type"),
        (chat, {"chat_template": "{{ 1 }}"}, "chat_template", "unsupported"),
        (chat, {"add_special_tokens": True}, "add_special_tokens", "unsupported"),
        (chat, {"prompt_logprobs": 3, "stream": True}, "prompt_logprobs", "invalid_value"),
        (chat, {"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        (chat, {"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(call: Any, fields: dict[str, Any], param: str, code: str) -> None:
    refusal = refused(call, **fields)
    assert (refusal.status, refusal.param, refusal.code) == (400, param, code)


def test_an_image_is_refused_by_a_server_of_text() -> None:
    """Also where the model itself could see it: only the text part of such models is loaded."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    refusal = refused(chat, messages=[{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}])
    assert refusal.message == "messages[0].content[1].type: this server takes text only"
    assert refusal.given == "image_url"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


UNSERVED = [
    (call, name, value)
    for name, rule in body_fields.UNSERVED.items()
    for call, endpoint in ((completion, "completions"), (chat, "chat"))
    if endpoint in rule.endpoints
    for value in (2.5, "yes", {"a": 1}, [1], True if False in rule.neutral else 0.5)
]


@pytest.mark.parametrize(("call", "name", "value"), UNSERVED)
def test_an_undeclared_field_that_would_change_the_answer_is_refused(call: Any, name: str, value: Any) -> None:
    refusal = refused(call, **{name: value})
    assert (refusal.status, refusal.param, refusal.code) == (400, name, "unsupported")


def test_neutral_and_harmless_fields_are_no_unknown_ones() -> None:
    for call, endpoint in ((completion, "completions"), (chat, "chat")):
        for name, rule in body_fields.UNSERVED.items():
            if endpoint in rule.endpoints:
                for value in (None, *rule.neutral):
                    assert call(**{name: value}).unknown == (), (name, value)
        for name, harmless in body_fields.HARMLESS.items():
            if endpoint in harmless.endpoints:
                assert call(**{name: {"any": "thing"}}).unknown == (), name
    assert chat(stream=True, stream_options={"include_obfuscation": False}).unknown == ()


def test_unknown_fields_are_named_or_refused() -> None:
    options = {"include_usage": True, "speed": 9}
    assert completion(stream=True, stream_options=options, typo=1, best_off=2).unknown == (
        "stream_options.speed",
        "typo",
        "best_off",
    )
    assert chat(suffix="x").unknown == ("suffix",)  # a field of the other endpoint
    body = b'{"model": "m", "prompt": "x", "typo": 1}'
    refusal = refused(api.parse_completion, body, GatewayConfig(strict_fields=True), "m", 600.0)
    assert (refusal.status, refusal.code, refusal.param) == (400, "unknown_field", "typo")
    for bad in (b'"regex": "\xff"', b'"typical_p": 1e999', b'"lora_path": ' + b"[" * 2000 + b"]" * 2000):
        body = b'{"model": "m", "prompt": "x", %s}' % bad
        assert refused(api.parse_completion, body, CONFIG, "m", 600.0).status == 400


@given(st.dictionaries(st.text(max_size=8) | st.sampled_from(sorted(body_fields.UNSERVED)), JSON, max_size=6))
def test_every_field_is_declared_refused_harmless_or_unknown(extra: dict[str, Any]) -> None:
    with contextlib.suppress(Refusal):
        valid = completion(**extra)
        known = {*CompletionBody.__struct_fields__, *body_fields.HARMLESS, *body_fields.UNSERVED}
        assert set(valid.unknown) >= {name for name in extra if name not in known}
        shown = body_fields.header(valid.unknown)
        assert shown.isascii()
        assert shown.isprintable()


def test_fields_that_change_nothing_are_taken() -> None:
    chat(add_generation_prompt=True, continue_final_message=False, echo=False, chat_template_kwargs={}, documents=[])
    chat(add_special_tokens=False, prompt_logprobs=None, truncation_side="left")
    chat(top_logprobs=0, logprobs=False)
    completion(add_special_tokens=True, logits_processors=[], suffix="", stop=["x"] * 16)
    api.parse_completion(
        b'{"model": "m", "prompt": "", "stop": ' + json.dumps(["x"] * 64).encode() + b"}", GatewayConfig(), "m", 9
    )


def test_a_request_may_name_no_model_or_an_alias() -> None:
    for name in ("", None):
        assert completion(model=name).prompts == ["hi"]
    body = b'{"prompt": "hi", "model": "b"}'
    served = api.Served(aliases=("b", "c"))
    assert api.parse_completion(body, CONFIG, "a", 600.0, served).prompts == ["hi"]
    assert refused(api.parse_completion, body, CONFIG, "a", 600.0).code == "model_not_found"


def test_the_models_own_sampling_defaults_hold_unless_a_request_names_others() -> None:
    text = json.dumps({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True})
    served = api.Served(defaults=generation_config.parse(text, CONFIG))
    for parse, body in (
        (api.parse_completion, b'{"prompt": "x"%s}'),
        (api.parse_chat, b'{"messages": [{"role": "user", "content": "x"}]%s}'),
    ):
        plain = parse(body % b"", CONFIG, "m", 600.0, served).sampling
        assert plain == Sampling(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05)
        named = parse(body % b', "temperature": 0, "top_k": -1, "top_p": null', CONFIG, "m", 600.0, served).sampling
        assert (named.temperature, named.top_k, named.top_p) == (0, 0, 0.9)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{}", ""),
        ('{"temperature": null, "top_k": 0, "eos_token_id": [1, 2]}', ""),
        ('{"temperature": 1.0, "top_k": -1, "min_p": 0.05}', "min_p 0.05"),
        ('{"temperature": 0}', "temperature 0"),
    ],
)
def test_what_a_generation_config_may_hold(text: str, found: str) -> None:
    assert generation_config.describe(generation_config.parse(text, CONFIG)) == found


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"temperature": -1}',
        '{"temperature": "0.5"}',
        '{"top_p": NaN}',
        '{"top_k": 2.5}',
        '{"top_p": true}',
        '{"repetition_penalty": 0}',
    ],
)
def test_a_generation_config_with_a_bad_value_is_refused_at_start(text: str) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json.*--generation-config none"):
        generation_config.parse(text, CONFIG)


def test_a_generation_config_is_read_from_the_models_directory(tmp_path: Path) -> None:
    assert generation_config.read(GatewayConfig(model=str(tmp_path))) == Sampling()
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    assert generation_config.read(GatewayConfig(model=str(tmp_path))) == Sampling(top_k=7)
    assert generation_config.read(GatewayConfig(model=str(tmp_path), generation_config="none")) == Sampling()
    (tmp_path / "generation_config.json").write_bytes(b'{"top_k": 7, "a": "\xff"}')
    with pytest.raises(ModelError, match=r"is not UTF-8: invalid start byte at byte 19; correct it, or start with"):
        generation_config.read(GatewayConfig(model=str(tmp_path)))


def test_another_model_is_not_found() -> None:
    refusal = refused(completion, model="gpt-5")
    assert (refusal.status, refusal.code, refusal.param) == (404, "model_not_found", "model")
    assert msgspec.json.decode(refusal.body())["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"", "invalid_json", None),
        (b"[1]", "invalid_type", "body"),
        (b'{"model": "m"}', "invalid_type", "prompt"),
        (b'{"model": 5, "prompt": "x"}', "invalid_type", "model"),
        (b'{"model": "m", "prompt": "\xff\xfe"}', "invalid_utf8", None),
        (b'{"model": "m", "prompt": "x", "tools": ' + b"[" * 100_000, "invalid_json", None),
    ],
)
def test_a_body_that_is_no_request(body: bytes, code: str, param: str | None) -> None:
    refusal = refused(api.parse_completion, body, CONFIG, "m", 600.0)
    assert (refusal.status, refusal.code) == (400, code)
    if param != "body":
        assert refusal.param == param


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_body_is_parsed_or_refused(body: bytes) -> None:
    with pytest.raises(Refusal):
        api.parse_chat(body, CONFIG, "m", 600.0)


@given(st.dictionaries(st.sampled_from(CompletionBody.__struct_fields__[1:]), JSON, max_size=5))
def test_any_field_value_is_parsed_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(Refusal):
        valid = completion(**fields)
        assert valid.prompts
        assert [] not in valid.prompts
        assert 0 <= valid.sampling.temperature <= 2
        assert 1 <= valid.n <= CONFIG.max_n


def test_priorities_by_name_and_number() -> None:
    names = [completion(priority=name).priority for name in ("high", "normal", None, "low")]
    assert names == [-1, 0, 0, 1]
    assert [completion(priority=number).priority for number in (-100, 5, "-100", "5")] == [-100, 5, -100, 5]
    assert refused(completion, priority="101").given == 101
    strict = GatewayConfig(strict_fields=True)
    body = b'{"prompt": "x", "priority": "5"}'
    assert refused(api.parse_completion, body, strict, "m", 600.0).param == "priority"


def test_the_least_an_answer_takes() -> None:
    assert completion().min_output_tokens(9) == 1
    assert completion(min_tokens=4).min_output_tokens(9) == 4
    assert completion(ignore_eos=True).min_output_tokens(9) == 9
    assert completion(ignore_eos=True, stop="x").min_output_tokens(9) == 1


def test_defaults_are_openais() -> None:
    valid = completion()
    assert valid.max_tokens == 16
    assert valid.sampling == Sampling()
    assert (valid.n, valid.stop, valid.stream, valid.echo) == (1, (), False, False)
    assert chat().max_tokens is None
    assert completion(max_tokens=None).max_tokens is None
    assert chat(max_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=4).max_tokens == 4


@pytest.mark.parametrize("call", [completion, chat])
def test_minus_one_and_null_mean_what_fits(call: Any) -> None:
    for fields in ({"max_tokens": -1}, {"max_tokens": None}, {"max_tokens": "-1"}):
        assert call(**fields).max_tokens is None, fields
        assert fitting.fit(call(**fields), [[1] * 10], LIMITS) == [70]
    assert chat(max_tokens=5, max_completion_tokens=-1).max_tokens is None
    refusal = refused(call, max_tokens=-2)
    assert (refusal.param, refusal.given) == ("max_tokens", -2)


def test_a_prompt_may_be_scored_without_an_answer() -> None:
    valid = completion(max_tokens=0, echo=True, logprobs=0)
    assert valid.max_tokens == 0
    assert fitting.fit(valid, [[1] * 79], LIMITS) == [1]  # engines compute one token; the gateway drops it
    assert refused(fitting.fit, valid, [[1] * 100], LIMITS).code == "context_length_exceeded"
    assert refused(chat, max_tokens=0).param == "max_tokens"


LAX = [
    ("max_tokens", "5", 5),
    ("max_tokens", 5.0, 5),
    ("max_tokens", "5.0", 5),
    ("temperature", "0.5", 0.5),
    ("n", "2", 2),
    ("seed", 7.0, 7),
    ("echo", "true", True),
    ("echo", 1, True),
    ("stop_token_ids", ["5", 6.0], [5, 6]),
    ("logit_bias", {"5": "0.5"}, {"5": 0.5}),
]


@pytest.mark.parametrize(("field", "given", "meant"), LAX)
def test_numbers_may_be_strings_unless_fields_are_strict(field: str, given: Any, meant: Any) -> None:
    def strictly(value: Any) -> ValidRequest:
        body = json.dumps({"model": "m", "prompt": "hi", field: value}).encode()
        return api.parse_completion(body, GatewayConfig(strict_fields=True), "m", 600.0)

    assert completion(**{field: given}) == completion(**{field: meant}) == strictly(meant)
    refusal = refused(strictly, given)
    assert refusal.code == "invalid_type"
    assert (refusal.param or "").startswith(field)


def test_strings_that_are_no_numbers_are_refused() -> None:
    for fields in ({"max_tokens": "five"}, {"max_tokens": 5.5}, {"n": "2x"}, {"temperature": "warm"}):
        assert refused(completion, **fields).code == "invalid_type"
    assert refused(completion, temperature="nan").code == "invalid_value"
    assert completion(prompt="5").prompts == ["5"]
    assert completion(stop="null", prompt=["5", "null"]).stop == ("null",)


@pytest.mark.parametrize("seed", [-(2**63), -2, 0, 2**63 - 1])
def test_any_seed_of_64_bits_is_one(seed: int) -> None:
    valid = completion(seed=seed)
    assert valid.seeded
    assert 0 <= valid.sampling.seed < 2**63
    assert not completion(seed=-1).seeded


def test_fields_arrive() -> None:
    valid = completion(
        prompt=[[1, 2], [3]], stop=["a", "b"], seed=7, logprobs=2, echo=True, logit_bias={"5": -3}, top_k=-1, unknown=1
    )
    assert valid.prompts == [[1, 2], [3]]
    assert valid.stop == ("a", "b")
    assert valid.seeded
    assert valid.sampling == Sampling(seed=7, logprobs=2, prompt_logprobs=2, logit_bias=[(5, -3.0)])
    assert chat(logprobs=True).sampling.logprobs == 0
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts, "name": "x"}]).messages == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"}
    ]


@pytest.mark.parametrize(
    ("fields", "ids", "code", "limit", "given"),
    [
        ({"max_tokens": 1}, [1] * 100, "context_length_exceeded", 100, 101),
        ({"max_tokens": 95}, [1] * 6, "context_length_exceeded", 100, 101),
        ({"max_tokens": 80}, [1] * 6, "kv_cache_exceeded", 80, 86),
        ({}, [1, 50], "invalid_token_id", 49, 50),
        ({}, [-1], "invalid_token_id", 49, -1),
        ({"stop_token_ids": [99]}, [1], "invalid_token_id", 49, 99),
        ({"logit_bias": {"77": 1}}, [1], "invalid_token_id", 49, 77),
        ({}, [], "empty_prompt", ">= 1", 0),
        ({"min_tokens": 17}, [1], "invalid_value", 16, 17),
        (
            {"min_tokens": 1, "allowed_token_ids": [2, 3], "stop_token_ids": [3]},
            [1],
            "invalid_value",
            ">= 1 token that does not end the answer",
            0,
        ),
        (
            {"min_tokens": 1, "stop_token_ids": list(range(50)), "ignore_eos": True},
            [1],
            "invalid_value",
            ">= 1 token that does not end the answer",
            0,
        ),
    ],
)
def test_what_only_the_engines_limits_can_tell(
    fields: dict[str, Any], ids: list[int], code: str, limit: Any, given: Any
) -> None:
    refusal = refused(fitting.fit, completion(**fields), [ids], LIMITS)
    assert (refusal.status, refusal.code, refusal.limit, refusal.given) == (400, code, limit, given)
    if code == "context_length_exceeded":
        assert "this model's maximum context length is 100 tokens" in refusal.message


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [2]},  # min_tokens is 0: the answer may end at once
        {"min_tokens": 1, "allowed_token_ids": [2], "ignore_eos": True},
        {"min_tokens": 1, "allowed_token_ids": [2, 4]},
        {"min_tokens": 1, "stop_token_ids": list(range(49))},
    ],
)
def test_a_token_is_left_before_min_tokens(fields: dict[str, Any]) -> None:
    assert fitting.fit(completion(**fields), [[1]], LIMITS) == [16]


def test_chat_may_use_the_rest_of_the_context_or_of_the_pool() -> None:
    assert fitting.fit(chat(), [[1] * 10], LIMITS) == [70]
    assert fitting.fit(chat(), [[1] * 10], msgspec.structs.replace(LIMITS, total_blocks=50)) == [90]
    assert fitting.fit(completion(), [[1], [2]], LIMITS) == [16, 16]


def test_the_order_of_a_chat_names_the_end_of_its_last_turn() -> None:
    """Prompts of /v1/completions have no turns."""
    for valid, anchors in ((chat(), [3]), (completion(), [])):
        (order,) = generates(valid, [[1, 2, 3, 4]], [5], Envelope("r", "g", 1), lambda ids: [len(ids) - 1])
        assert order.anchors == anchors


def test_every_order_carries_the_digests_of_its_prompts_prefixes() -> None:
    """Salted by tenant; none where prompt logprobs switch prefix reuse off."""
    prompts = [[1] * 130, [2] * 63]
    salted = msgspec.structs.replace(completion(prompt=["a", "b"]), cache_salt="tenant")
    orders = generates(salted, prompts, [5, 5], Envelope("r", "g", 1))
    assert [order.prefixes for order in orders] == [prefix_digests(prompts[0], "tenant"), b""]
    assert len(orders[0].prefixes) == 16
    scored = msgspec.structs.replace(salted, sampling=msgspec.structs.replace(salted.sampling, prompt_logprobs=0))
    assert [order.prefixes for order in generates(scored, prompts, [5, 5], Envelope("r", "g", 1))] == [b"", b""]


def test_every_order_has_its_seed_settled() -> None:
    orders = generates(completion(prompt=["a", "b"], n=2), [[1], [2]], [5, 6], Envelope("r", "g", 123))
    assert [(o.id, o.gateway, o.n, o.max_new_tokens, o.deadline_ms) for o in orders] == [
        ("r.0", "g", 2, 5, 123),
        ("r.1", "g", 2, 6, 123),
    ]
    assert orders[0].sampling.seed != orders[1].sampling.seed
    seeded = generates(completion(prompt=["a", "b"], seed=-2), [[1], [2]], [5, 5], Envelope("r", "g", 1))
    assert [o.sampling.seed for o in seeded] == [2**63 - 2] * 2
    unseeded = generates(completion(prompt=["a", "b"], seed=-1), [[1], [2]], [5, 5], Envelope("r", "g", 1))
    assert unseeded[0].sampling.seed != unseeded[1].sampling.seed


def test_retry_after_is_whole_seconds_and_exact_milliseconds() -> None:
    refusal = Refusal(429, "rate_limit_exceeded", "later", retry_after_s=1.25)
    assert refusal.headers() == {"Retry-After": "2", "retry-after-ms": "1250"}


# ------------------------------------------------------------------------------------------------------------- out

VOCABULARY = [b"<s>", b"a", b"b", b"\xf0\x9f", b"\x99\x82", b" c"]


def form(valid: ValidRequest, prompts: list[Prompted] | None = None) -> Format:
    return Format(
        valid,
        request_id="r",
        model="m",
        created=1,
        fingerprint=None,
        prompts=prompts or [Prompted([1, 2])],
        vocabulary=VOCABULARY,
    )


def read(events: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(event id, decoded data) of each frame."""
    found = []
    for frame in events.decode().split("\n\n")[:-1]:
        event_id, data = frame.split("\n")
        assert event_id.startswith("id: ")
        assert data.startswith("data: ")
        found.append((event_id[4:], json.loads(data[6:])))
    return found


def test_fast_and_slow_chunks_have_the_same_shape() -> None:
    for call in (completion, chat):
        written = form(call(stream=True))
        *_, (_, slow) = read(written.chunk(ChoiceDelta(0, "x", [1])))
        [(event_id, fast)] = read(written.chunk(ChoiceDelta(0, 'y"\n🙂', [1])))
        assert event_id == "r:2"
        assert fast.keys() == slow.keys()
        assert fast["choices"][0].keys() == slow["choices"][0].keys()
        choice = fast["choices"][0]
        assert (choice["delta"]["content"] if call is chat else choice["text"]) == 'y"\n🙂'
        assert fast["object"] == ("chat.completion.chunk" if call is chat else "text_completion")


def test_a_chat_stream_begins_with_a_role_and_ends_with_a_reason() -> None:
    written = form(chat(stream=True, n=2, stream_options={"include_usage": True}))
    first = read(written.chunk(ChoiceDelta(1, "x", [1], cached_tokens=1)))
    assert [event["choices"][0]["delta"] for _, event in first] == [
        {"role": "assistant", "content": ""},
        {"content": "x"},
    ]
    assert [event_id for event_id, _ in first] == ["r:,0", "r:,1"]
    assert first[0][1]["usage"] is None
    last = read(written.chunk(ChoiceDelta(1, "", [2], finish="stop", stop_reason="END")))
    assert [(e["choices"][0]["delta"], e["choices"][0]["finish_reason"]) for _, e in last] == [
        ({"content": ""}, "stop")
    ]
    assert last[0][1]["choices"][0]["stop_reason"] == "END"
    written.chunk(ChoiceDelta(0, "", [1, 1, 1], cached_tokens=1, finish="length"))
    [(event_id, usage)] = read(written.usage_chunk())
    assert event_id == "r:3,2:usage"
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_piece_nobody_can_see_makes_no_event_but_counts() -> None:
    written = form(completion(stream=True))
    assert written.chunk(ChoiceDelta(0, "", [3])) == b""
    assert [e["choices"][0]["text"] for _, e in read(written.chunk(ChoiceDelta(0, "🙂", [4])))] == ["🙂"]
    assert sum(written.tokens) == 2
    assert written.usage_chunk() == b""


def test_continuous_usage_counts_up() -> None:
    written = form(completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [read(written.chunk(ChoiceDelta(0, "a", [1])))[0][1]["usage"]["completion_tokens"] for _ in range(3)]
    assert counts == [1, 2, 3]
    written = form(completion(stream=True, stream_options={"continuous_usage_stats": True}))
    assert "usage" not in read(written.chunk(ChoiceDelta(0, "a", [1])))[0][1]
    assert written.usage_chunk() == b""


def whole_answer(written: Format, pieces: list[ChoiceDelta]) -> Any:
    return json.loads(b"".join(asyncio.run(written.whole(pieces, Pacer()))))


def logprob(value: float, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(value, list(top))


def test_completion_logprobs_with_echo() -> None:
    valid = completion(echo=True, logprobs=1)
    written = form(valid, [Prompted([0, 1], "<s>a", [0, 3])])
    pieces = [
        ChoiceDelta(0, "", [3], [logprob(-1.0, (3, -1.0))], [0], prompt_logprobs=[logprob(-2.0, (5, -0.1))]),
        ChoiceDelta(0, "🙂", [4], [logprob(float("-inf"), (1, 0.0))], [0], finish="length"),
    ]
    answer = whole_answer(written, pieces)
    choice = answer["choices"][0]
    assert choice["text"] == "<s>a🙂"
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "\ufffd", "\ufffd\ufffd"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -1.0, -9999.0]
    assert choice["logprobs"]["text_offset"] == [0, 3, 4, 4]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert list(choice["logprobs"]["top_logprobs"][1].items()) == [("a", -2.0), (" c", -0.1)]  # the chosen one first
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 2)


def scored_a() -> ChoiceDelta:
    """A non-streaming answer of one token with its log probabilities, as counted in completions and chats."""
    at = logprob(-0.5, (1, -0.5), (3, -1.5))
    return ChoiceDelta(0, "a", [1], [at], [0], finish="stop", content=[Score(1, at, None)])


def test_chat_logprobs_carry_bytes() -> None:
    written = form(chat(logprobs=True, top_logprobs=2, return_token_ids=True))
    answer = whole_answer(written, [scored_a()])
    choice = answer["choices"][0]
    message = choice["message"]
    assert (message["role"], message["content"], message["refusal"]) == ("assistant", "a", None)
    assert choice["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "\ufffd", "logprob": -1.5, "bytes": [0xF0, 0x9F]},
            ],
        }
    ]
    assert (choice["token_ids"], answer["prompt_token_ids"]) == ([1], [1, 2])
    assert "prompt_token_ids" not in choice


@pytest.mark.parametrize("call", [completion, chat])
def test_token_ids_stand_where_vllm_puts_them(call: Any) -> None:
    """Those of the prompt: at the top of a chat, in each choice of a completion; in a stream with the first event."""
    written = form(call(stream=True, return_token_ids=True, n=2), [Prompted([1, 2])])
    events = [
        event for _, event in read(written.chunk(ChoiceDelta(0, "a", [1])) + written.chunk(ChoiceDelta(0, "b", [2, 3])))
    ]
    events += [event for _, event in read(written.chunk(ChoiceDelta(0, "", [5], finish="stop")))]
    places = events if call is chat else [event["choices"][0] for event in events]
    assert [place.get("prompt_token_ids") for place in places] == [[1, 2]] + [None] * (len(places) - 1)
    assert [token for event in events for token in event["choices"][0].get("token_ids", [])] == [1, 2, 3, 5]
    *_, (_, unasked) = read(form(call(stream=True)).chunk(ChoiceDelta(0, "a", [1])))
    assert (unasked if call is chat else unasked["choices"][0]).get("prompt_token_ids") is None


@pytest.mark.parametrize("turn", [4096, 4])
@pytest.mark.parametrize("call", [completion, chat])
def test_prompt_logprobs_as_vllm_writes_them(call: Any, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.service.api.logprobs.TURN_ALTERNATIVES", turn)
    valid = call(prompt_logprobs=1, n=2)
    assert (valid.sampling.logprobs, valid.sampling.prompt_logprobs) == (-1, 1)
    found = [logprob(-2.0, (5, -0.1)), logprob(float("-inf"), (1, -0.2))]
    pieces = [ChoiceDelta(at, "a", [1], prompt_logprobs=found, finish="stop") for at in (0, 1)]
    answer = whole_answer(form(valid, [Prompted([2, 1, 2])]), pieces)
    wanted = [
        None,
        {
            "1": {"logprob": -2.0, "rank": None, "decoded_token": "a"},
            "5": {"logprob": -0.1, "rank": 1, "decoded_token": " c"},
        },
        {
            "2": {"logprob": -9999.0, "rank": None, "decoded_token": "b"},
            "1": {"logprob": -0.2, "rank": 1, "decoded_token": "a"},
        },
    ]
    assert [place["prompt_logprobs"] for place in ([answer] if call is chat else answer["choices"])] == [wanted] * (
        1 if call is chat else 2
    )
    assert answer["choices"][0]["logprobs"] is None


def test_tokens_may_be_named_by_their_ids() -> None:
    asked = {"return_tokens_as_token_ids": True}
    piece = scored_a()
    [choice] = whole_answer(form(chat(logprobs=True, top_logprobs=2, **asked)), [piece])["choices"]
    assert [one["token"] for one in choice["logprobs"]["content"][0]["top_logprobs"]] == ["token_id:1", "token_id:3"]
    assert choice["logprobs"]["content"][0]["bytes"] == [97]
    [choice] = whole_answer(form(completion(logprobs=2, **asked)), [piece])["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:1"]
    assert list(choice["logprobs"]["top_logprobs"][0]) == ["token_id:1", "token_id:3"]


def test_prompt_logprobs_count_as_entries() -> None:
    config = GatewayConfig(max_logprob_entries=100)
    valid = chat(prompt_logprobs=4, n=2)
    assert fitting.bound_logprobs(valid, [[1] * 10], [50], config) == [50]
    refusal = refused(fitting.bound_logprobs, valid, [[1] * 11], [50], config)
    assert (refusal.code, refusal.given) == ("too_many_logprobs", 110)


def test_streamed_and_whole_agree() -> None:
    def pieces() -> list[ChoiceDelta]:
        return [
            ChoiceDelta(1, "x", [1]),
            ChoiceDelta(0, "a", [1]),
            ChoiceDelta(0, "b", [2], finish="stop"),
            ChoiceDelta(1, "y", [1], finish="stop"),
        ]

    prompts = [Prompted([1], "P"), Prompted([2], "Q")]
    streamed = form(completion(stream=True, echo=True), prompts)
    texts = ["", ""]
    for piece in pieces():
        for _, event in read(streamed.chunk(piece)):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    whole = whole_answer(form(completion(echo=True), prompts), pieces())
    assert [choice["text"] for choice in whole["choices"]] == texts == ["Pab", "Qxy"]


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 2}, {"logprobs": 2}, {}])
def test_long_logprobs_are_encoded_in_turns_to_the_same_json(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed and non-streaming, completions and chats."""

    def pieces() -> list[ChoiceDelta]:
        found = [logprob(-0.5, (1, -0.5), (3, -1.5)), logprob(float("-inf"), (1, 0.0)), logprob(-1.0)]
        first = ChoiceDelta(0, "ab", [1, 2, 1], found, [0, 1, 2], prompt_logprobs=[logprob(-2.0, (2, -1.0))])
        return [first, ChoiceDelta(0, "c", [3], found[:1], [3], finish="length")]

    valid = completion(**fields) if fields else chat(logprobs=True, top_logprobs=2)
    prompts = [Prompted([0, 3], "<s>a", [0, 3])]

    async def streamed() -> list[Any]:
        written, events = form(valid, prompts), []
        for piece in pieces():
            await written.prepare(piece)
            events += list(read(written.chunk(piece)))
        return events

    at_once = whole_answer(form(valid, prompts), pieces()), asyncio.run(streamed())
    monkeypatch.setattr("quire.service.api.logprobs.TURN_ALTERNATIVES", 4)
    in_turns = whole_answer(form(valid, prompts), pieces()), asyncio.run(streamed())
    assert in_turns == at_once


def test_messages_their_parts_and_tool_calls_are_counted() -> None:
    config = GatewayConfig(max_messages=3)
    message = {"role": "user", "content": "a"}

    def asked(messages: list[Any]) -> ValidRequest:
        return api.parse_chat(json.dumps({"model": "m", "messages": messages}).encode(), config, "m", 600.0)

    assert len(asked([message] * 3).messages) == 3
    refusal = refused(asked, [message] * 4)
    assert (refusal.code, refusal.param, refusal.limit, refusal.given) == ("too_many", "messages", 3, 4)
    part = {"type": "text", "text": "a"}
    refusal = refused(asked, [{"role": "user", "content": [part] * (CONTENT_PARTS + 1)}])
    assert (refusal.param, refusal.limit) == ("messages[].content", CONTENT_PARTS)
    refusal = refused(asked, [{**message, "tool_calls": [{}] * (TOOL_CALLS + 1)}])
    assert (refusal.param, refusal.limit) == ("messages[].tool_calls", TOOL_CALLS)


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        ("", ""),
        ("a=1", "a=1"),
        (" a=1 ,\tb@c=x y ,, ", "a=1,b@c=x y"),  # empty members are allowed
        ("a=1,b=2,a=3", ""),  # a key twice
        ("A=1", ""),
        ("a=", ""),
        ("a=1=2", ""),
        ("a=\u00e9", ""),
        ("a", ""),
        (",".join(f"k{i}=v" for i in range(33)), ""),
        (",".join(f"k{i}=v" for i in range(32)), ",".join(f"k{i}=v" for i in range(32))),
        ("a=" + "x" * 256 + ",b=" + "y" * 251 + ",c=1", "a=" + "x" * 256 + ",b=" + "y" * 251),  # 512 characters stay
        ("a=" + "x" * 257, ""),
    ],
)
def test_a_trace_state_is_whole_members_or_nothing(header: str, kept: str) -> None:
    assert tracestate(header) == kept
    assert len(kept) <= 512
