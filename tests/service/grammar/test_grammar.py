"""Structured output at the gateway: what is served becomes a grammar, and everything else a 400 with its path."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.wire.messages import EngineLoad
from quire.engine.wire.records import Fleet
from quire.service.api import api
from quire.service.api.valid_request import ValidRequest
from quire.service.common.limits import CHOICES, GRAMMAR_BYTES
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery import admission
from quire.service.grammar.grammar import NO_ANSWER, AfterReasoning, Constraint, asked, compile_grammar
from quire.service.grammar.grammar_checks import GrammarChecks
from quire.service.grammar.grammar_errors import NotServed
from quire.service.grammar.json_schema import ANNOTATIONS, ENFORCED, PARTNERS
from tests.pace import python_s
from tests.service.fakes import a_load

CONFIG = GatewayConfig()
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# A value with which each enforced keyword stands in a schema of its type.
EXAMPLES: dict[str, dict[str, Any]] = {
    "type": {"type": "null"},
    "enum": {"enum": ["a", 1, None]},
    "const": {"const": {"a": [1]}},
    "anyOf": {"anyOf": [{"type": "null"}, {"const": 1}]},
    "oneOf": {"oneOf": [{"type": "null"}, {"type": "string"}]},
    "allOf": {"allOf": [{"type": "string"}, {"maxLength": 3}]},
    "$ref": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}},
    "properties": OBJECT,
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^a": {"type": "null"}},
        "additionalProperties": False,
    },
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "null"}},
    "required": OBJECT,
    "minProperties": {"type": "object", "minProperties": 1},
    "maxProperties": {"type": "object", "maxProperties": 2},
    "items": {"type": "array", "items": {"type": "null"}},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "null"}], "items": False, "minItems": 1},
    "additionalItems": {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
    "minItems": {"type": "array", "minItems": 1},
    "maxItems": {"type": "array", "maxItems": 1},
    "minLength": {"type": "string", "minLength": 2},
    "maxLength": {"type": "string", "maxLength": 2},
    "pattern": {"type": "string", "pattern": "^a"},
    "format": {"type": "string", "format": "date"},
    "minimum": {"type": "integer", "minimum": 3},
    "maximum": {"type": "integer", "maximum": 3},
    "exclusiveMinimum": {"type": "number", "exclusiveMinimum": 3},
    "exclusiveMaximum": {"type": "number", "exclusiveMaximum": 3},
    "multipleOf": {"type": "integer", "multipleOf": 7},
}
# An instance that breaks each of them, as the grammar must.
BROKEN: dict[str, Any] = {
    "type": 1, "enum": "b", "const": {"a": [2]}, "anyOf": 2, "oneOf": 1, "allOf": "abcd", "$ref": 1,
    "additionalItems": ["a", 1],
    "properties": {"a": "x"}, "patternProperties": {"ab": 1}, "additionalProperties": {"b": 1},
    "required": {}, "minProperties": {}, "maxProperties": {"a": 1, "b": 1, "c": 1}, "items": [1], "prefixItems": [1],
    "minItems": [], "maxItems": [1, 2], "minLength": "a", "maxLength": "abc", "pattern": "b", "format": "today",
    "minimum": 2, "maximum": 4, "exclusiveMinimum": 3, "exclusiveMaximum": 3, "multipleOf": 8,
}  # fmt: skip
RIGHT: dict[str, Any] = {
    "type": None, "enum": 1, "const": {"a": [1]}, "anyOf": 1, "oneOf": "x", "allOf": "abc", "$ref": None,
    "additionalItems": ["a"],
    "properties": {"a": 1}, "patternProperties": {"ab": None}, "additionalProperties": {"b": None},
    "required": {"a": 5}, "minProperties": {"x": 1}, "maxProperties": {"a": 1, "b": 1}, "items": [None],
    "prefixItems": [None], "minItems": [1], "maxItems": [1], "minLength": "ab", "maxLength": "ab", "pattern": "ab",
    "format": "2026-11-22", "minimum": 3, "maximum": 3, "exclusiveMinimum": 3.5, "exclusiveMaximum": 2.5,
    "multipleOf": 14,
}  # fmt: skip


def completion(**fields: Any) -> ValidRequest:
    body = msgspec.json.encode({"model": "m", "prompt": "x", **fields})
    return api.parse_completion(body, CONFIG, "m", 600.0)


def refused(**fields: Any) -> tuple[str, str]:
    """(param, code) of the 400 for a request with these fields."""
    with pytest.raises((Refusal, NotServed)) as raised:
        compile_grammar(completion(**fields).constraint)  # type: ignore[arg-type]
    error: Any = raised.value
    refusal = api.not_served(error) if isinstance(error, NotServed) else error
    assert refusal.status == 400
    msgspec.json.decode(refusal.body())
    return str(refusal.param), refusal.code


def schema_error(schema: Any) -> tuple[str, str]:
    with pytest.raises(NotServed) as caught:
        compile_grammar(Constraint("s", "json", schema))
    assert caught.value.param in str(caught.value)
    assert len(str(caught.value)) < 600
    return caught.value.param, caught.value.code


def matches(grammar: str, text: str) -> bool:
    """Whether a complete text follows a grammar, byte by byte."""
    from llguidance import LLMatcher

    from quire.service.grammar.grammar import byte_tokenizer

    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
    for byte in text.encode():
        if not matcher.consume_token(byte):
            return False
    return bool(matcher.is_accepting())


# ------------------------------------------------------------------------------------------------------ the fields


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}}, "json", OBJECT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": OBJECT},
                }
            },
            "json",
            OBJECT,
        ),
        ({"response_format": {"type": "json_object", "schema": OBJECT}}, "json", OBJECT),
        ({"response_format": {"type": "json_schema", "schema": OBJECT, "json_schema": None}}, "json", OBJECT),
        ({"response_format": {"type": "json_object", "schema": None, "json_schema": None}}, "json", {"type": "object"}),
        ({"structured_outputs": {"json": OBJECT, "regex": None}}, "json", OBJECT),
        ({"structured_outputs": {"json_object": True}}, "json", {"type": "object"}),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"guided_json": OBJECT}, "json", OBJECT),
        ({"guided_json": json.dumps(OBJECT)}, "json", json.dumps(OBJECT)),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", ["a"]),
        ({"guided_grammar": 'start: "a"', "response_format": {"type": "text"}}, "grammar", 'start: "a"'),
    ],
)
def test_every_field_that_asks_for_a_grammar(fields: dict[str, Any], kind: str, value: Any) -> None:
    constraint = completion(**fields).constraint
    assert constraint is not None
    assert (constraint.kind, constraint.value) == (kind, value)
    assert compile_grammar(constraint).grammar


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": None}, {"response_format": {"type": "text", "json_schema": None}}]
)
def test_a_text_needs_no_grammar(fields: dict[str, Any]) -> None:
    assert completion(**fields).constraint is None


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": "json"}, "response_format", "invalid_type"),
        ({"response_format": {}}, "response_format.type", "unsupported"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "unsupported"),
        ({"response_format": {"type": "text", "schema": OBJECT}}, "response_format.schema", "unsupported"),
        (
            {"response_format": {"type": "json_schema", "schema": OBJECT, "mode": 1}},
            "response_format.mode",
            "unsupported",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "invalid_type",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT, "strict": 1}}},
            "response_format.json_schema.strict",
            "invalid_type",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT, "style": 1}}},
            "response_format.json_schema.style",
            "unsupported",
        ),
        ({"structured_outputs": "a"}, "structured_outputs", "invalid_type"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "unsupported"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unsupported"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "invalid_value"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "invalid_value"),
        ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "guided_choice", "invalid_value"),
        ({"guided_regex": ""}, "guided_regex", "invalid_type"),
        ({"guided_regex": 3}, "guided_regex", "invalid_type"),
        ({"guided_regex": "("}, "guided_regex", "unsupported"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "unsupported"),
        ({"guided_choice": []}, "guided_choice", "invalid_type"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "invalid_type"),
        ({"guided_choice": "ab"}, "guided_choice", "invalid_type"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", "unsupported"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "unsupported"),
        ({"guided_grammar": '{"grammars": []}'}, "guided_grammar", "unsupported"),
        ({"guided_grammar": 'start: %json {"minlength": 1}'}, "guided_grammar", "unsupported"),
        ({"guided_grammar": 'start[temperature=0.1]: "a"'}, "guided_grammar", "unsupported"),
        ({"guided_grammar": 'start: <|im_end|> "a"'}, "guided_grammar", "unsupported"),
        ({"guided_json": "{"}, "guided_json", "invalid_type"),
        ({"guided_json": 3}, "guided_json", "invalid_type"),
        ({"guided_json": OBJECT, "ignore_eos": True}, "ignore_eos", "unsupported"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    assert refused(**fields) == (param, code)


# --------------------------------------------------------------------------------------------------------- keywords


def test_every_keyword_that_is_served_has_examples() -> None:
    assert set(EXAMPLES) == set(BROKEN) == set(RIGHT) == ENFORCED


@pytest.mark.parametrize("keyword", sorted(ENFORCED))
def test_every_keyword_that_is_served_is_enforced(keyword: str) -> None:
    grammar = compile_grammar(Constraint("s", "json", EXAMPLES[keyword])).grammar
    assert matches(grammar, json.dumps(RIGHT[keyword], separators=(",", ":")))
    assert not matches(grammar, json.dumps(BROKEN[keyword], separators=(",", ":")))


UNKNOWN = ("id", "x-order", "self", "nullable", "minlength", "", "typo")  # no draft of JSON Schema asserts them


@pytest.mark.parametrize("keyword", sorted({*ANNOTATIONS, *PARTNERS, *UNKNOWN}))
def test_words_that_assert_nothing_change_nothing(keyword: str) -> None:
    values: dict[str, Any] = {"examples": [1], "deprecated": True, "$defs": {}, "definitions": {}, "maxContains": 1}
    values |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "then": False, "else": False}
    value = values.get(keyword, "x")
    grammar = compile_grammar(Constraint("s", "json", {**OBJECT, keyword: value})).grammar
    assert matches(grammar, '{"a":1}')
    assert not matches(grammar, '{"a":"x"}')


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        (False, "s"),
        ([], "s"),
        ({"properties": {"a": 3}}, "s.properties.a"),
        ({"anyOf": {}}, "s"),
        ({"type": "text"}, "s"),
        ({"enum": []}, "s"),
        ({"type": "object", "minProperties": 3}, "s.minProperties"),
        ({"$ref": "http://example.com/schema"}, "s"),
        ({"$ref": "#/nowhere"}, "s"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "s.$defs.a"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "pattern": "a"}]}, "s.oneOf"),
        (
            {"type": "object", "properties": {"a": {"minimum": 3, "maximum": 2, "type": "integer"}}, "required": ["a"]},
            "s.properties.a",
        ),
        ({"type": "array", "items": {"type": "string", "pattern": "(?<=a)"}, "minItems": 1}, "s.items.pattern"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "s"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "s"),
    ],
)  # fmt: skip
def test_a_schema_at_fault_is_named_by_path(schema: Any, param: str) -> None:
    assert schema_error(schema)[0] == param


def test_whitespace_is_bounded() -> None:
    grammar = compile_grammar(Constraint("s", "json", OBJECT)).grammar
    for text in ('{"a":1}', '{"a": 1}', '{\n    "a": 1\n}', '{ "a" : 1 }'):
        assert matches(grammar, text), text
    for text in ('{  "a":1}', '{\n\n"a":1}', '{"a":\n' + " " * 17 + "1}", ' {"a":1}', '{"a":1} ', '{\t"a":1}'):
        assert not matches(grammar, text), text


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6, unique=True), st.text(max_size=8))
def test_choices_are_taken_literally(texts: list[str], other: str) -> None:
    grammar = compile_grammar(Constraint("c", "choice", texts)).grammar
    assert all(matches(grammar, text) for text in texts)
    assert matches(grammar, other) == (other in texts)


NAMES = st.sampled_from([*ENFORCED, "x", "a"]) | st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.sampled_from(["response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"]), JSON)
def test_anything_is_a_grammar_or_refused(field: str, value: Any) -> None:
    """No other exception, whatever stands in the field."""
    for given_value in (value, {"type": "json_schema", "json_schema": {"schema": value}}, {"json": value}):
        with contextlib.suppress(NotServed):
            if (constraint := asked({field: given_value})) is not None:
                compile_grammar(constraint)


# ---------------------------------------------------------------------------------------------------------- hostile


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    return schema


def chain(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, Constraint] = {
    "10,000 enum values": Constraint("s", "json", {"enum": [f"value {i}" for i in range(10_000)]}),
    "deep": Constraint("s", "json", chain(300)),
    "wide and deep": Constraint("s", "json", nested(9)),
    "product of unions": Constraint(
        "s",
        "json",
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "null"}}} for j in range(4)]} for i in range(8)]},
    ),
    "recursive without end": Constraint(
        "s", "json", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    ),
    "self reference": Constraint("s", "json", {"$ref": "#"}),
    "references of references": Constraint(
        "s",
        "json",
        {
            "$defs": {
                f"d{i}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "ab"}}
                for i in range(60)
            }
            | {"d60": {"type": "null"}},
            "$ref": "#/$defs/d0",
        },
    ),
    "contradictory": Constraint("s", "json", {"allOf": [{"type": "string"}, {"type": "integer"}]}),
    "long arrays": Constraint("s", "json", {"type": "array", "items": {"type": "null"}, "minItems": 10**6}),
    "regex of powers": Constraint("s", "regex", "((a{1,100}){1,100}){1,100}"),
    "regex of counters": Constraint("s", "regex", "(x+x+)+y(a|b|ab)*c.{500}"),
    "long regex": Constraint("s", "regex", "a?" * 2000),
    "many choices": Constraint("s", "choice", [f"choice {i}" for i in range(CHOICES)]),
    "ambiguous grammar": Constraint("s", "grammar", 'start: start start | "a" | ""'),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_schema_delays_no_other_stream(name: str) -> None:
    """The event loop runs on while it is checked, and the check ends."""
    constraint, grammars, gaps = HOSTILE[name], GrammarChecks(), []
    work = asyncio.ensure_future(grammars.compile(constraint))
    last = time.thread_time()
    while not work.done():
        await asyncio.sleep(0.001)
        now = time.thread_time()  # CPU time of this thread: a busy machine does not count
        gaps.append(now - last)
        last = now
    with contextlib.suppress(NotServed):
        assert work.result()
    assert max(gaps) < 100 * python_s()  # 50 ms


@pytest.mark.parametrize(
    ("constraint", "param", "limit"),
    [
        (Constraint("s", "regex", "a?" * 30_000), "s", 4096),
        (Constraint("s", "json", {"type": "string", "pattern": "a?" * 3000}), "s.pattern", 4096),
        (Constraint("s", "json", {"patternProperties": {"a?" * 3000: {}}}), "s", 4096),
        (Constraint("s", "grammar", "start: /" + "a?" * 10_000 + "/"), "s", 16_384),
    ],
)
def test_a_regex_whose_check_would_take_seconds_is_too_long(constraint: Constraint, param: str, limit: int) -> None:
    with pytest.raises(NotServed) as caught:
        compile_grammar(constraint)
    assert (caught.value.param, caught.value.code, caught.value.limit) == (param, "grammar_too_large", limit)


def test_the_longest_list_of_choices_can_be_followed_to_the_end_and_a_longer_one_is_refused() -> None:
    """Also behind reasoning, whose rules take some of what llguidance follows at once."""
    texts = [f"w{i}x" for i in range(CHOICES)]
    plain = Constraint("s", "choice", texts)
    reasoned = Constraint("s", "reasoned", AfterReasoning('start: "t"{0,3} /[a-q]*/ "</think>" @answer', plain))
    for constraint, before in ((plain, ""), (reasoned, "tt</think>")):
        assert matches(compile_grammar(constraint).grammar, before + texts[-1])
    with pytest.raises(NotServed, match=rf"s: at most 1,900 choices, got {CHOICES + 1:,}") as caught:
        compile_grammar(Constraint("s", "choice", [*texts, "one more"]))
    assert (caught.value.code, caught.value.limit, caught.value.given) == ("grammar_too_large", CHOICES, CHOICES + 1)


@pytest.mark.parametrize(
    "wide",
    [
        Constraint("s", "grammar", "start: " + "|".join(f'"{i:x}"' for i in range(2100))),
        Constraint("s", "json", {"properties": {f"p{i}": {} for i in range(2100)}, "type": "object"}),
    ],
    ids=["alternatives", "optional properties"],
)
def test_a_grammar_too_wide_for_an_engine_is_refused_by_the_gateway(wide: Constraint) -> None:
    """Engines ended it after the first token."""
    with pytest.raises(NotServed, match=r"Current row has \d+ items; max is 2000"):
        compile_grammar(wide)


def test_a_large_schema_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(NotServed) as caught:
        compile_grammar(Constraint("s", "json", {"const": "x" * GRAMMAR_BYTES}))
    assert (caught.value.code, caught.value.limit) == ("grammar_too_large", GRAMMAR_BYTES)


# ----------------------------------------------------------------------------------------------------------- engines


def a_fleet(*engines: EngineLoad) -> Fleet:
    return Fleet(list(engines), queued=0, queued_tokens=0, time_ms=1)


@pytest.mark.parametrize(
    ("able", "status"), [([True], 0), ([True, True], 0), ([False], 400), ([False, False], 400), ([True, False], 503)]
)
def test_only_engines_that_can_get_a_grammar(able: list[bool], status: int) -> None:
    """Any engine may claim a request, so all of them must honour it."""
    fleet = a_fleet(*[a_load(f"e{i}", grammars=grammars) for i, grammars in enumerate(able)])
    if not status:
        admission.require_grammars(fleet, "response_format")
        return
    with pytest.raises(Refusal) as caught:
        admission.require_grammars(fleet, "response_format")
    assert (caught.value.status, caught.value.param) == (status, "response_format")
    assert (caught.value.retry_after_s is not None) == (status == 503)


def test_an_engine_that_leaves_does_not_count() -> None:
    fleet = a_fleet(a_load("old", grammars=False, draining=True), a_load("new", grammars=True))
    admission.require_grammars(fleet, "response_format")


@pytest.mark.parametrize(
    ("kind", "value"),
    [("grammar", "start: start"), ("grammar", "start: A\nA: /a/ & /b/"), ("regex", r"[^\x00-\x{10FFFF}]")],
)
def test_what_no_text_matches_is_refused_in_the_words_of_a_schema_without_answer(kind: Any, value: str) -> None:
    with pytest.raises(NotServed, match=f"^x: {NO_ANSWER}$"):
        compile_grammar(Constraint("x", kind, value))
