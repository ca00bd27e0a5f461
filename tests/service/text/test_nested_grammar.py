"""Demanded calls of MiniMax M3, whose objects and lists are tags within tags."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.service.api.tools import ChatOptions
from quire.service.common.refusal import Refusal
from quire.service.grammar.grammar import Constraint, compile_grammar
from quire.service.output.argument_types import OUTLINES, reduced
from quire.service.output.regions import Reading
from quire.service.text.call_grammar import call_rules
from tests.service.text.call_notations import NS, accepts, notation, read
from tests.service.text.test_forced_calls import drawn

TEXTS = [
    f"{NS}</k>{NS}",
    f"{NS}<item>",
    f"{NS}</item>{NS}",
    f"{NS}<a>",
    f"{NS}</invoke>",
    "</a>",
    "</item>",
    "</note>",
    "7",
    "null",
    "[",
    "{",
    '"',
]
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "note": {"type": "string"}},
    "required": ["x"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "objects in a list": {"a": {"type": "array", "items": POINT, "minItems": 1, "maxItems": 3}},
    "lists in lists": {
        "a": {"type": "array", "items": {"type": "array", "items": {"type": ["number", "null"]}, "maxItems": 2}}
    },
    "strings in a list": {
        "a": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 2, "maxItems": 2}
    },
    "an object that may be null": {
        "a": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
        "b": {"type": "boolean"},
    },
    "an object in an object": {"a": {"type": "object", "properties": {"a": POINT, "item": {"enum": ["é", "<b>", 4]}}}},
    "an object with no keys": {"a": {"type": "object", "properties": {}, "additionalProperties": False}},
    "any object": {"a": {"type": "object"}, "b": {"type": "array", "maxItems": 3}},
    "a string or a list": {"a": {"type": ["string", "array"], "items": {"type": "string"}, "maxItems": 2}},
    "a string or an object": {"a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/point"}]}},
    "a number or a list": {"a": {"type": ["integer", "array"], "items": {"type": "integer"}, "minimum": 5}},
}


def parameters(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": ["a"], "$defs": {"point": POINT}}


def demanding(schema: dict[str, Any], *, strict: bool = True) -> tuple[str, Reading]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}]
    form, _ = notation("minimax-m3")
    assert form is not None
    rules = call_rules(form, ChatOptions(tools=tools, demanded=["f"], parallel=False), {}, "", None)
    made = compile_grammar(Constraint("tool_choice", "calls", rules)).grammar
    return made, Reading("", calls=True, tools=reduced(tools, nested=True))


@pytest.mark.parametrize("what", SCHEMAS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_the_grammar_allows_fits_the_schema(what: str, seed: int) -> None:
    schema = parameters(SCHEMAS[what])
    grammar, reading = demanding(schema)
    text = drawn(grammar, seed, TEXTS)
    if text is None:
        return
    content, _, calls = read(notation("minimax-m3")[1], text, reading)
    assert (content.strip(), [name for name, _ in calls]) == ("", ["f"]), text
    jsonschema.validate(calls[0][1], schema)


def tag(key: str, *inner: str) -> str:
    return f"{NS}<{key}>{''.join(inner)}{NS}</{key}>"


def call(*inner: str) -> str:
    return f'{NS}<tool_call>\n{NS}<invoke name="f">{"".join(inner)}{NS}</invoke>\n{NS}</tool_call>'


ALLOWED: list[tuple[str, str, Any]] = [
    (
        "objects in a list",
        tag("a", tag("item", tag("x", "1")), tag("item", tag("x", "2"), tag("note", ""))),
        [{"x": 1}, {"x": 2, "note": ""}],
    ),
    ("lists in lists", tag("a", tag("item", tag("item", "1.5"), tag("item", "null")), tag("item")), [[1.5, None], []]),
    ("lists in lists", tag("a"), []),
    ("strings in a list", tag("a", tag("item", "7"), tag("item", " é\n</b> ")), ["7", " é\n</b> "]),
    ("an object that may be null", tag("a", "null"), None),
    ("an object that may be null", tag("a", tag("x", "3")), {"x": 3}),
    ("an object in an object", tag("a", tag("item", "4")), {"item": 4}),
    ("an object with no keys", tag("a"), {}),
    ("any object", tag("a", '{"k": ["v"]}'), {"k": ["v"]}),
    ("a string or a list", tag("a", tag("item", "x")), ["x"]),
    ("a string or a list", tag("a", "[]"), []),
    ("a string or an object", tag("a", tag("x", "3")), {"x": 3}),
    ("a string or an object", tag("a", ""), ""),
]
REFUSED = [
    ("objects in a list", tag("a")),
    ("objects in a list", tag("a", tag("item", tag("note", "")))),
    ("objects in a list", tag("a", *4 * [tag("item", tag("x", "1"))])),
    ("objects in a list", tag("a", tag("item", tag("x", "10")))),
    ("strings in a list", tag("a", tag("item", "7"))),
    ("strings in a list", tag("a", tag("item", "7"), tag("item", "x</item>"))),
    ("an object that may be null", tag("a", tag("note", "x"))),
    ("an object in an object", tag("a", tag("item", "5"))),
    ("any object", tag("a", "[1]")),
    ("any object", tag("a", json.dumps({"k": f"{NS}</a>"}))),
    ("a number or a list", tag("a", "4")),
]


@pytest.mark.parametrize(("what", "inner", "value"), ALLOWED)
def test_what_a_model_writes_is_allowed(what: str, inner: str, value: Any) -> None:
    grammar, reading = demanding(parameters(SCHEMAS[what]))
    assert accepts(grammar, call(inner))
    assert read(notation("minimax-m3")[1], call(inner), reading)[2] == [("f", {"a": value})]


@pytest.mark.parametrize(("what", "inner"), REFUSED)
def test_what_breaks_the_schema_is_not_allowed(what: str, inner: str) -> None:
    assert not accepts(demanding(parameters(SCHEMAS[what]))[0], call(inner))


NODE = {"type": "object", "properties": {"up": {"$ref": "#/$defs/node"}}}
TREE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}}
MANY = {f"k{at}": {"type": "integer"} for at in range(OUTLINES)}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (parameters({"a": {"type": "array", "items": POINT, "uniqueItems": True}}), "a.uniqueItems"),
        (parameters({"a": {"type": "array", "items": POINT, "maxItems": 1000}}), "a.maxItems"),
        (parameters({"a": {"type": "object", "additionalProperties": {"type": "integer"}}}), "a.additionalProperties"),
        (parameters({"a": {"anyOf": [POINT, {"type": "object", "properties": {"y": POINT}}]}}), "a"),
        (parameters({"a": {"enum": [[1], "x"]}}), "a"),
        (parameters({"a": {"type": "object", "properties": MANY}}), "a.properties.k127"),
        (TREE, "a.properties.up"),
    ],
)
def test_arguments_that_tags_cannot_say_are_refused_by_their_path(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(Refusal) as refused:
        demanding(schema, strict=False)
    assert str(refused.value.param).startswith(f"tools[0].function.parameters.properties.{path}")
