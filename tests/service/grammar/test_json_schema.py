"""Schemas in llguidance's keywords have the same instances as the client's, or are refused by path."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator
from llguidance import LLMatcher

from quire.service.grammar import grammar as grammars
from quire.service.grammar.grammar import Constraint, byte_tokenizer, compile_grammar
from quire.service.grammar.grammar_errors import NotServed
from quire.service.grammar.json_schema import ASSERTIONS, BRANCHES, ENFORCED, PARTNERS, PARTS, rewrite
from quire.service.grammar.look_ahead import without_look_ahead
from quire.service.grammar.schema_algebra import Schemas
from tests.matrix import examples

VALUES: st.SearchStrategy[Any] = st.sampled_from([None, True, False, 0, 1, 1.0, 2, 2.5, "", "a", "b", "abc", [], {}])
NAMES = st.sampled_from(["a", "b", "kind"])
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
BOUNDS = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
]
BOUNDS += ["minContains", "maxContains"]
INSTANCES = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)


def leaf() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.booleans(),
        st.just({}),
        TYPES.map(lambda kind: {"type": kind}),
        st.lists(TYPES, min_size=1, max_size=3, unique=True).map(lambda kinds: {"type": kinds}),
        VALUES.map(lambda value: {"const": value}),
        st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
        st.lists(NAMES, min_size=1, max_size=2, unique=True).map(lambda names: {"required": names}),
        st.tuples(
            st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), st.integers(0, 2)
        ).map(lambda bound: {bound[0]: bound[1]}),
        st.tuples(
            st.sampled_from(["minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains"]),
            st.integers(0, 2),
        ).map(lambda bound: {bound[0]: bound[1]}),
        st.sampled_from([{"$ref": "#/$defs/x"}, {"uniqueItems": True}, {"propertyNames": {"enum": ["a", "b"]}}]),
    )


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": TYPES,
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": inner,
        "items": inner,
        "prefixItems": several,
        "maxItems": st.integers(0, 2),
        "uniqueItems": st.booleans(),
        "contains": inner,
        "minContains": st.integers(0, 2),
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "oneOf": several,
        "anyOf": several,
        "allOf": several,
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
        "dependentSchemas": st.dictionaries(NAMES, inner, max_size=2),
        "propertyNames": st.sampled_from(
            [{}, {"type": "string"}, {"enum": ["a", "kind"]}, {"maxLength": 1}, {"format": "date"}]
        ),
        "unevaluatedProperties": st.sampled_from([True, False, {"type": "null"}]),
    }
    return st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=4, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: keywords[name] for name in chosen})
    )


SCHEMAS = st.recursive(leaf(), larger, max_leaves=8).map(
    lambda schema: {"$defs": {"x": {"enum": ["a", 1, None]}}, **schema} if isinstance(schema, dict) else schema
)
CLOSED = {"type": "object", "properties": {"a": True, "b": True}, "additionalProperties": False}
LIST = {"type": "array"}
KINDS = [{"a": "xy"}, {"a": "xy", "b": 1}, {"a": "x"}, {"a": ""}, {"a": 1}, {}, "xy", 3]
CONDITIONAL = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "a": {"type": "integer"}},
    "if": {"properties": {"kind": {"const": "a"}}, "required": ["kind"]},
    "then": {"required": ["a"]},
    "else": {"properties": {"a": False}},
}


@settings(max_examples=examples(400), deadline=None)
@given(schema=SCHEMAS, instances=st.lists(INSTANCES, min_size=1, max_size=12))
@example(CONDITIONAL, [{"kind": "a"}, {"kind": "a", "a": 1}, {"kind": "b"}, {"kind": "b", "a": 1}, {"a": 1}, {}])
@example({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {}, 3])
@example({"not": {"type": "integer"}, "type": ["integer", "string"]}, [1, 1.0, "a"])
@example({"not": {"properties": {"a": {"minimum": 1}}}}, [{"a": 0}, {"a": 1}, {}, {"a": "x"}, 3])
@example({"if": {"properties": {"a": {"const": "xy"}}}, "then": {"required": ["b"]}}, [*KINDS, {"a": "xyz", "b": 1}])
@example({"type": ["string", "integer"], "not": {"enum": ["xy", "x", 1, 3.0]}}, ["", "x", "xy", "xyz", "y", 0, 1, 2, 3])
@example({"not": {"enum": [True, "]", None]}}, [True, False, None, "]", "]]", "", 1, 1.5, [], {}])
@example(
    {"oneOf": [CLOSED, {**CLOSED, "properties": {"a": True, "c": True}}]}, [{}, {"a": 1}, {"b": 1}, {"c": 1}, {"d": 1}]
)
@example(
    {"oneOf": [{"items": {"type": "string"}, **LIST}, {"items": {"type": "null"}, **LIST}]}, [[], ["a"], [None], [1]]
)
def test_a_rewritten_schema_has_the_same_instances(schema: Any, instances: list[Any]) -> None:
    try:
        rewritten = rewrite(schema, "s").schema
    except NotServed:
        assume(False)
    dates = Draft202012Validator.FORMAT_CHECKER  # formats are enforced
    own, ours = Draft202012Validator(schema, format_checker=dates), Draft202012Validator(rewritten)
    for instance in instances:
        assert own.is_valid(instance) == ours.is_valid(instance), (rewritten, instance)


@settings(max_examples=examples(300), deadline=None)
@given(one=SCHEMAS, other=SCHEMAS, instance=INSTANCES)
def test_schemas_called_disjoint_have_no_common_instance(one: Any, other: Any, instance: Any) -> None:
    root = {"$defs": {"x": {"enum": ["a", 1, None]}}, "one": one, "other": other}
    if Schemas(root).disjoint(one, other):
        parts = [{"$defs": root["$defs"], **part} if isinstance(part, dict) else part for part in (one, other)]
        assert not all(Draft202012Validator(part).is_valid(instance) for part in parts)


@settings(max_examples=examples(150), deadline=None)
@given(schema=SCHEMAS, instances=st.lists(INSTANCES, min_size=1, max_size=12))
def test_no_grammar_takes_an_instance_that_the_schema_excludes(schema: Any, instances: list[Any]) -> None:
    try:
        grammar = compile_grammar(Constraint("s", "json", schema)).grammar
    except NotServed:
        assume(False)
    validator = Draft202012Validator(schema)
    for instance in instances:
        if not validator.is_valid(instance):
            assert not matches(grammar, json.dumps(instance, separators=(",", ":"))), instance


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
    return all(matcher.consume_token(byte) for byte in text.encode()) and bool(matcher.is_accepting())


def test_draft_4_and_7_notation_keeps_its_meaning() -> None:
    schema = {
        "id": "http://example.com/order",
        "type": "object",
        "definitions": {"pair": {"items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False}},
        "properties": {
            "pair": {"type": "array", "$ref": "http://example.com/order#/definitions/pair"},
            "price": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
        },
        "dependencies": {"pair": ["price"]},
        "additionalProperties": False,
    }
    rewritten, passed_over = rewrite(schema, "s")
    assert passed_over == ("s.id",)
    for valid in ({}, {"price": 1}, {"pair": [1, "a"], "price": 2}):
        assert Draft7Validator(rewritten).is_valid(valid)
    grammar = compile_grammar(Constraint("s", "json", schema)).grammar
    assert matches(grammar, '{"pair":[1,"a"],"price":2}')
    for invalid in ('{"pair":[1,"a"]}', '{"price":0}', '{"pair":[1,"a",2],"price":1}', '{"other":1}'):
        assert not matches(grammar, invalid)


def test_items_beyond_a_tuple_are_held_to_unevaluated_items() -> None:
    for tuple_ in ("items", "prefixItems"):
        for beyond, valid in ((False, '["a"]'), ({"type": "integer"}, '["a",1]')):
            schema = {"type": "array", tuple_: [{"type": "string"}], "unevaluatedItems": beyond}
            grammar = compile_grammar(Constraint("s", "json", schema)).grammar
            assert matches(grammar, valid)
            assert not matches(grammar, '["a","b"]')


def leap(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def test_dates_and_times_exist() -> None:
    """Every day of every month, in each kind of year; hours, minutes and seconds at their bounds."""
    grammars = {
        name: compile_grammar(Constraint("s", "json", {"type": "string", "format": name})).grammar
        for name in ("date", "time", "date-time")
    }

    def takes(name: str, text: str) -> bool:
        return matches(grammars[name], json.dumps(text))

    for year in (0, 4, 1900, 1996, 2000, 2020, 2021, 2023, 9999):
        for month, days in enumerate((31, 29 if leap(year) else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), 1):
            for day in (0, 1, days, days + 1):
                assert takes("date", f"{year:04}-{month:02}-{day:02}") == (1 <= day <= days)
    for wrong in ("2021-13-01", "2021-00-01", "21-01-01", "2021-1-01", "2021-01-01T00:00:00Z", ""):
        assert not takes("date", wrong)
    for time in ("00:00:00Z", "23:59:59.123z", "12:30:00+23:59", "12:30:00-00:00"):
        assert takes("time", time)
        assert takes("date-time", f"2020-02-29T{time}")
    for time in ("24:00:00Z", "00:60:00Z", "23:58:60Z", "22:59:60Z", "00:00:00", "00:00:00.Z", "00:00:00+24:00"):
        assert not takes("time", time)
        assert not takes("date-time", f"2020-02-29t{time}")
    assert not takes("date-time", "2021-02-29T00:00:00Z")
    listed = {"enum": ["2021-02-29", "2020-02-29", 7], "format": "date"}
    grammar = compile_grammar(Constraint("s", "json", listed)).grammar
    assert [matches(grammar, text) for text in ('"2021-02-29"', '"2020-02-29"', "7")] == [False, True, True]


# A value with which each assertion that is no keyword of llguidance cannot be rewritten.
UNSERVED: dict[str, Any] = {
    "not": {"pattern": "a"},
    "if": {"pattern": "a"},
    "uniqueItems": True,
    "contains": {"type": "null"},
    "dependentSchemas": {"a": {"not": {"pattern": "a"}}},
    "dependencies": {"a": {"not": {"pattern": "a"}}},
    "propertyNames": {"format": "email"},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
    "oneOf": [{"pattern": "a"}, {"pattern": "b"}],
} | dict.fromkeys(("$recursiveRef", "$dynamicRef", "extends", "disallow", "divisibleBy"), "#")


def test_every_assertion_is_enforced_or_has_an_example_of_its_refusal() -> None:
    assert ASSERTIONS - ENFORCED - {"dependentRequired"} == set(UNSERVED) - {"oneOf"}  # llguidance knows oneOf


@pytest.mark.parametrize("keyword", UNSERVED)
def test_an_assertion_that_is_not_enforced_is_refused_with_its_path(keyword: str) -> None:
    inner = {"anyOf": [{"type": "null"}, {"allOf": [{}], keyword: UNSERVED[keyword], "then": {"type": "null"}}]}
    with pytest.raises(NotServed) as refused:
        rewrite({"type": "object", "properties": {"a b": inner}}, "s")
    assert refused.value.param.startswith("s.properties.a b.anyOf[1].")
    assert (keyword if not keyword.startswith("depend") else "not") in refused.value.param
    assert refused.value.code == "unsupported"


@pytest.mark.parametrize("keyword", sorted(PARTNERS))
def test_a_partner_without_its_assertion_asserts_nothing(keyword: str) -> None:
    assert rewrite({"type": "null", keyword: False}, "s").schema == {"type": "null"}


def test_words_that_assert_nothing_are_named_once_and_bounded() -> None:
    properties = {f"p{at}": {"type": "string", "format": "phone", f"x-{at}": 1, "title": "t"} for at in range(40)}
    _, passed_over = rewrite({"type": "object", "properties": properties, "self": {"vendor": "v"}}, "s")
    assert passed_over[:3] == ("s.self", "s.properties.p0.x-0", "s.properties.p0.format")
    assert len(passed_over) == 16
    assert sum(path.endswith(".format") for path in passed_over) == 1


def test_options_of_the_grammar_library_do_not_reach_it() -> None:
    schema = {"x-guidance": {"lenient": True, "whitespace_pattern": ".*"}, "properties": {"a": {"x-guidance": {}}}}
    assert "x-guidance" not in json.dumps(rewrite(schema, "s").schema)


def test_what_a_reference_points_to_is_checked_wherever_it_stands() -> None:
    schema = {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"type": "null", "format": "phone"}}}}
    assert compile_grammar(Constraint("s", "json", schema)).grammar
    schema["components"]["schemas"]["a"] = {"not": {"pattern": "a"}}  # type: ignore[index]
    with pytest.raises(NotServed, match=r"^s\.components\.schemas\.a\.not: "):
        rewrite(schema, "s")


def test_the_work_of_rewriting_is_bounded() -> None:
    branch: Any = {"type": "null"}
    for depth in range(2):
        branch = {"oneOf": [{"properties": {"a": {"const": at}, f"d{depth}": branch}} for at in range(BRANCHES)]}
        branch["properties"] = {"a": {"enum": list(range(BRANCHES))}}
    with pytest.raises(NotServed) as refused:
        rewrite(json.loads(json.dumps(branch)), "s")
    assert (refused.value.code, refused.value.limit) == ("grammar_too_large", PARTS)


OF_NAMES = {
    "pydantic's dict[Color, int]": ({"$ref": "#/$defs/Color"}, ["red", "blue"], ["green"], ()),
    "a reference to a reference": ({"$ref": "#/$defs/Shade"}, ["red"], ["green"], ()),
    "zod's record of UUIDs": (
        {"type": "string", "format": "uuid", "pattern": "^[0-9a-f]{4}$"},
        ["00ff"],
        ["x"],
        ("s.propertyNames.format",),
    ),
    "pydantic's dict[date, int]": ({"format": "date"}, ["2020-02-29"], ["2021-02-29", "x"], ()),
    "an unknown format": ({"type": "string", "format": "path"}, ["x"], [], ("s.propertyNames.format",)),
}


@pytest.mark.parametrize("written", OF_NAMES)
def test_names_are_restricted_as_generators_write_it(written: str) -> None:
    names, allowed, refused, passed_over = OF_NAMES[written]
    color = {"enum": ["red", "blue"], "title": "Color", "type": "string"}
    schema = {
        "type": "object",
        "propertyNames": names,
        "additionalProperties": {"type": "integer"},
        "$defs": {"Color": color, "Shade": {"$ref": "#/$defs/Color"}},
    }
    found = compile_grammar(Constraint("s", "json", schema))
    assert found.passed_over == passed_over
    assert all(matches(found.grammar, json.dumps({name: 1})) for name in allowed)
    assert not any(matches(found.grammar, json.dumps({name: 1})) for name in refused)
    assert not any(matches(found.grammar, json.dumps({name: "x"})) for name in allowed)


# As zod writes them for `z.email()` and `z.iso.duration()`.
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
GENERATED: dict[str, dict[str, Any]] = {
    "zod": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "age": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
            "tags": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
            "when": {"type": "string", "format": "date-time"},
            "mail": {"type": "string", "format": "email", "pattern": EMAIL},
            "for": {"type": "string", "format": "duration", "pattern": DURATION},
            "kind": {"oneOf": [{"type": "string", "const": "a"}, {"type": "string", "const": "b"}]},
            "phone": {"type": "string", "format": "e164", "pattern": r"^\+[1-9]\d{6,14}$"},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "pydantic": {
        "$defs": {
            "Cat": {
                "properties": {"pet_type": {"const": "cat", "title": "Pet Type", "type": "string"}},
                "required": ["pet_type"],
                "title": "Cat",
                "type": "object",
            },
            "Dog": {
                "properties": {"pet_type": {"const": "dog", "title": "Pet Type", "type": "string"}},
                "required": ["pet_type"],
                "title": "Dog",
                "type": "object",
            },
        },
        "properties": {
            "pet": {
                "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "pet_type"},
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                "title": "Pet",
            },
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Note"},
            "pair": {
                "maxItems": 2,
                "minItems": 2,
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "type": "array",
            },
            "path": {"format": "path", "type": "string"},
            "flags": {"items": {"enum": ["x", "y"], "type": "string"}, "type": "array", "uniqueItems": True},
        },
        "required": ["pet", "pair"],
        "title": "Owner",
        "type": "object",
    },
    ".NET": {
        "type": ["object", "null"],
        "properties": {
            "Number": {"type": ["string", "integer"], "pattern": r"^-?(?:0|[1-9]\d*)$"},
            "Colour": {"enum": ["Red", "Green", None]},
            "Parent": {"type": ["object", "null"], "properties": {"Colour": {"$ref": "#/properties/Colour"}}},
            "At": {"type": "string", "format": "date-time"},
            "Span": {"type": ["string", "null"], "pattern": r"^-?(\d+\.)?\d{2}:\d{2}:\d{2}(\.\d{1,7})?$"},
        },
        "required": ["Number"],
        "additionalProperties": False,
    },
    "OpenAI": {
        "type": "object",
        "properties": {"steps": {"type": "array", "items": {"$ref": "#/$defs/step"}}, "answer": {"type": "string"}},
        "$defs": {
            "step": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                "required": ["text", "next"],
                "additionalProperties": False,
            }
        },
        "required": ["steps", "answer"],
        "additionalProperties": False,
    },
    "Snowplow": {
        "$schema": "http://iglucentral.com/schemas/com.snowplowanalytics.self-desc/schema/jsonschema/1-0-0#",
        "self": {"vendor": "com.example", "name": "event", "format": "jsonschema", "version": "1-0-0"},
        "type": "object",
        "properties": {"id": {"type": ["string", "null"], "maxLength": 36}},
        "additionalProperties": False,
    },
    "Kubernetes": {
        "type": "object",
        "properties": {
            "port": {"x-kubernetes-int-or-string": True, "oneOf": [{"type": "string"}, {"type": "integer"}]},
            "replicas": {"type": "integer", "format": "int32"},
        },
        "x-kubernetes-group-version-kind": [{"kind": "Pod"}],
    },
}


@pytest.mark.parametrize("generator", GENERATED)
def test_what_generators_write_by_default_is_served(generator: str) -> None:
    assert compile_grammar(Constraint("s", "json", GENERATED[generator])).grammar


@pytest.mark.parametrize(
    "dialect", ["http://json-schema.org/schema", "https://json-schema.org/draft-04/schema", "x", 1]
)
def test_a_dialect_that_the_grammar_library_does_not_know_is_passed_over(dialect: Any) -> None:
    assert compile_grammar(Constraint("s", "json", {"$schema": dialect, "type": "null"})).grammar


@pytest.fixture
def compiled_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the grammars that are checked."""
    sizes: list[int] = []
    check = grammars.problem

    def counted(grammar: str) -> str:
        sizes.append(len(grammar))
        return check(grammar)

    monkeypatch.setattr(grammars, "problem", counted)
    return sizes


@pytest.mark.parametrize("odd", [{"type": "text"}, {"type": "string", "pattern": "(?<=a)"}, {"required": True}])
def test_a_refusal_compiles_little_more_than_the_schema(odd: dict[str, Any], compiled_bytes: list[int]) -> None:
    properties = {f"p{at}": {"type": "object", "properties": {"a": {"type": "string"}}} for at in range(300)}
    schema = {"type": "object", "properties": {**properties, "odd": odd}, "$defs": {"x": {"enum": list(range(500))}}}
    with pytest.raises(NotServed):
        compile_grammar(Constraint("s", "json", schema))
    whole = len(json.dumps(schema))
    assert sum(compiled_bytes) < 2.5 * whole


LOOKING_AHEAD = [
    EMAIL,
    DURATION,
    r"^(?=.*[A-Z])(?=.*\d).{2,}$",
    r"^(?=.{1,4}\.?$)[a-z](?:[a-z-]{0,3}[a-z])?\.?$",
    r"^(?!\s*$).+",
    r"^(?!abc$|T)[a-zA-Z]*",
    r"^(?!\d\d-)[\s\S]*$",
    r"^(?!.*-)[a-z-]+$",
    r"^(?!.*[ab])[a-d\n]+$",
    r"^(?!.*aa)[Ab1a]*$",
    r"^(?![^a]).*$",
    r"^(?![.])(?!.*@@)[a.@]*$",
]


@pytest.mark.parametrize("pattern", LOOKING_AHEAD)
def test_patterns_without_look_ahead_hold_for_the_same_texts(pattern: str) -> None:
    patterns = without_look_ahead(pattern)
    assert "(?=" not in "".join(patterns)
    assert "(?!" not in "".join(patterns)
    rng, words = random.Random(pattern), [*"aAb1.-@\nPTWDS0cYM", "a@b.co", "P1D", "abc", "11-"]
    texts = {"".join(rng.choice(words) for _ in range(rng.randrange(7))) for _ in range(4000)}

    def says(one: str, text: str) -> bool:
        return re.search(one.replace("$", r"\Z"), text) is not None

    assert [text for text in texts if says(pattern, text) != all(says(one, text) for one in patterns)] == []
    assert len({says(pattern, text) for text in texts}) == 2  # some hold and some don't


@pytest.mark.parametrize(
    "pattern",
    [r"^(?!a)b|c$", r"^a(?!b)", r"^(?!.*\s\s)a", r"^(?!(a|b)c)a", r"^(?!a)*b", r"(?<=a)b", r"^(?!.*ab)b", "^(?!a"],
)
def test_look_ahead_without_a_short_opposite_is_left_to_the_refusal(pattern: str) -> None:
    assert without_look_ahead(pattern) == [pattern]
    with pytest.raises(NotServed, match=r"^s\.pattern: "):
        compile_grammar(Constraint("s", "json", {"type": "string", "pattern": pattern}))


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # pydantic's pattern


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": ["string", "null"], "format": "date-time"}, [None, "2026-11-27T04:00:00Z"], ["x", 1]),
        ({"type": ["string", "integer"], "format": "date"}, [7, "2026-11-27"], ["x", None]),
        ({"type": ["string"], "format": "time"}, ["04:00:00Z"], ["x", None]),
        ({"type": ["null", "string"], "format": "uuid"}, [None], ["x", 1]),
        ({"format": "json-pointer"}, [None, "/a", [1]], ["a"]),
        ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}, [1.5, "1.5", "-.5"], ["-", "+.", ""]),
        ({"type": "string", "pattern": "^(?!^[^ab]*$)[a-d]{2}$"}, ["ad", "bb"], ["cd", "abc"]),
        (
            {"type": "string", "format": "email", "pattern": EMAIL},
            ["a.b@c.de", "x_y+1@d-e.f.org"],
            [".a@c.de", "a..b@c.de", "a@c", "a.@c.de"],
        ),
        ({"type": "string", "format": "duration", "pattern": DURATION}, ["P1D", "P2W", "PT5M"], ["P", "PT", "P1DT"]),
        ({"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d).{3,}$"}, ["aB1", "1zzZ"], ["ab1", "AB", "ABC"]),
    ],
)
def test_a_format_or_pattern_asserts_of_texts_only_what_it_says(
    schema: dict[str, Any], valid: list[Any], invalid: list[Any]
) -> None:
    grammar = compile_grammar(Constraint("s", "json", schema)).grammar
    for instance in [*valid, *invalid]:
        assert matches(grammar, json.dumps(instance)) == (instance in valid), instance


@pytest.mark.parametrize("depth", [65, 500, 900])
def test_a_schema_within_too_many_others_is_refused_with_the_limit(depth: int) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    with pytest.raises(NotServed, match="at most 64 deep"):
        compile_grammar(Constraint("s", "json", schema))


LONG = 2**63 - 1024  # largest double among 64-bit numbers


@pytest.mark.parametrize(
    ("bounds", "allowed", "refused"),
    [
        (
            {"minimum": -(2**63), "maximum": 2**63 - 1},
            [0, LONG, -LONG],
            [2**63, -(2**63) - 1],
        ),  # int64, as Go and .NET emit it
        ({"minimum": 2**53 + 1}, [2**53 + 2, 2**53 + 3], [2**53, 2**53 + 1 - 2]),
        ({"maximum": -(2**53) - 1, "type": ["integer", "null"]}, [None, -(2**53) - 2], [-(2**53), 1]),
        ({"maximum": 10**400}, [0, LONG], ["x"]),
        ({"exclusiveMaximum": 2**53 + 1}, [2**53 - 1], [2**53 + 1, 2**53 + 2]),
    ],
)
def test_bounds_beyond_a_double_hold(bounds: dict[str, Any], allowed: list[Any], refused: list[Any]) -> None:
    grammar = compile_grammar(Constraint("s", "json", {"type": "integer", **bounds})).grammar
    for instance in [*allowed, *refused]:
        assert matches(grammar, json.dumps(instance)) == (instance in allowed), instance


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"enum": [1, {"a": [-(2**53) - 1]}]},
        {"properties": {"a": {"const": 10**22 + 1}}},
        {"const": 10**400},
        {"type": "integer", "minimum": 2**63},
    ],
)
def test_a_number_that_would_be_written_as_another_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(NotServed, match=r"^s.*(const|enum|minimum)"):
        compile_grammar(Constraint("s", "json", schema))


def test_a_large_number_that_is_a_double_is_written_as_itself() -> None:
    grammar = compile_grammar(Constraint("s", "json", {"enum": [2**53 + 2, 7]})).grammar
    assert [matches(grammar, str(one)) for one in (2**53 + 2, 7, 2**53)] == [True, True, False]
