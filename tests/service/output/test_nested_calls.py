"""Calls of MiniMax M3: arguments named by tags, which nest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.service.output.argument_types import reduced
from quire.service.output.nested_calls import DEEPEST
from quire.service.output.regions import CallDelta, Reading, ResponseTemplate, TextDelta, known

NS = "]<]minimax[>["
SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "place": {"type": "object", "properties": {"zip": {"type": "string"}, "at": {"$ref": "#/$defs/at"}}},
        "at": {"type": "array", "items": {"type": "number"}},
    },
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"$ref": "#/$defs/place"},
        "item": {"type": "object", "properties": {"item": {"type": "boolean"}}},
        "maybe": {"type": ["integer", "null"]},
        "more": {"type": "object"},
        "other": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
}
READING = Reading(
    "", calls=True, tools=reduced([{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}], nested=True)
)


def tag(key: str, inner: str) -> str:
    return f"{NS}<{key}>{inner}{NS}</{key}>"


def call(inner: str, name: str = "f") -> str:
    return f'{NS}<tool_call>\n{NS}<invoke name="{name}">{inner}{NS}</invoke>\n{NS}</tool_call>'


def read(text: str, size: int) -> tuple[str, list[tuple[str | None, str]]]:
    """The content of an answer and its calls, fed in pieces."""
    template = ResponseTemplate(known().response_templates["minimax-m3"], "minimax-m3")
    reader, parts = template.reader(READING), []
    for at in range(0, len(text), size):
        reader.push(text[at : at + size])
        parts += reader.take_parts()
    reader.finish(cut=False)
    parts += reader.take_parts()
    content = "".join(part.text for part in parts if isinstance(part, TextDelta))
    return content, [(part.name, part.arguments) for part in parts if isinstance(part, CallDelta)]


ARGUMENTS: dict[str, tuple[str, Any]] = {
    "types of the schema": (
        tag("city", "12") + "\n" + tag("days", "3") + tag("maybe", "null"),
        {"city": "12", "days": 3, "maybe": None},
    ),
    "a string keeps its blanks, quotes and tags": (tag("city", ' "a" <b>\n </b> '), {"city": ' "a" <b>\n </b> '}),
    "a list": (tag("tags", tag("item", "1") + tag("item", "x")), {"tags": ["1", "x"]}),
    "a list of one": (tag("tags", tag("item", "1")), {"tags": ["1"]}),
    "an empty list": (tag("tags", ""), {"tags": []}),
    "a list as JSON": (tag("tags", '["1", "x"]'), {"tags": ["1", "x"]}),
    "references": (
        tag("place", "\n" + tag("zip", "0123") + "\n" + tag("at", tag("item", "1.5") + tag("item", "2"))),
        {"place": {"zip": "0123", "at": [1.5, 2]}},
    ),
    "an object that may be null": (
        tag("other", tag("zip", "0123") + tag("at", tag("item", "2"))),
        {"other": {"zip": "0123", "at": [2]}},
    ),
    "an object whose key is item": (tag("item", tag("item", "true")), {"item": {"item": True}}),
    "what no schema says": (
        tag("more", tag("n", "6") + tag("s", "six") + tag("l", tag("item", "null")) + tag("o", '{"a": 1}')),
        {"more": {"n": 6, "s": "six", "l": [None], "o": {"a": 1}}},
    ),
    "closing tags without their marker": (f"{NS}<city>Paris</city>{NS}<days>6</days>\n", {"city": "Paris", "days": 6}),
    "no arguments": ("\n", {}),
    "lists of lists": (
        tag("more", tag("l", 2 * tag("item", tag("item", "1")))),
        {"more": {"l": [[1], [1]]}},
    ),
}


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_are_json(what: str, size: int) -> None:
    inner, value = ARGUMENTS[what]
    content, calls = read("ok" + call(inner) + call(tag("x", "1"), "g"), size)
    assert content == "ok"
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", value), ("g", {"x": 1})]


@pytest.mark.parametrize(
    "inner",
    [
        tag("city", "Paris")[:-1],
        f"{NS}<city>Paris",
        tag("city", "Paris") + "Rome",
        tag("more", "x" + tag("a", "1")),
        f"{NS}<city>Paris{NS}</days>",
        f"{NS}</city>",
        "".join(f"{NS}<a>" for _ in range(DEEPEST + 1)) + "".join(f"{NS}</a>" for _ in range(DEEPEST + 1)),
    ],
)
def test_what_is_no_call_is_content(inner: str) -> None:
    text = f'{NS}<invoke name="f">{inner}{NS}</invoke>'
    for size in (1, 10_000):
        assert read(text, size) == (text, [])


def test_a_marker_is_no_content() -> None:
    assert read(f'ok<tool_call>\n{NS}<invoke name="f">{NS}</invoke>\n{NS}</tool_call>', 3) == ("ok", [("f", "{}")])
