"""Arguments that nest without end: valid JSON that parsers of clients read, and no text of the call in the content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.service.output.deep_values import nests_deeper
from quire.service.output.lenient_json import DEPTH
from quire.service.output.part_writer import CallDelta
from quire.service.output.regions import Reading, ResponseTemplate, known

TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": ["object", "array"]}}}}}]
CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": VALUE}}</tool_call>',
    "llama3": '{"name": "f", "parameters": {"a": VALUE}}',
    "mistral": '[TOOL_CALLS]f{"a": VALUE}',
    "mistral-list": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": VALUE}}]',
    "harmony": '<|channel|>commentary to=functions.f<|message|>{"a": VALUE}<|call|>',
    "function-tags": "<tool_call>\n<function=f>\n<parameter=a>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    "gemma4": "<|tool_call>call:f{a:VALUE}<tool_call|>",
    "lfm2": "<|tool_call_start|>[f(a=VALUE)]<|tool_call_end|>",
    "firefunction": 'functools[{"name": "f", "arguments": {"a": VALUE}}]',
}
VALUES = {"[": ("[", "1", "]"), "{": ('{"k": ', '"]}"', "}"), "mixed": ('[{"\\\\\\"[": ', "null", "}]")}


def read(name: str, text: str, piece: int) -> tuple[str, str]:
    """Return the arguments of the one call, and the content."""
    reader = ResponseTemplate(known().response_templates[name], name).reader(Reading("", calls=True, tools=TOOLS))
    parts = []
    for at in range(0, len(text), piece):
        reader.push(text[at : at + piece])
        parts += reader.take_parts()
    reader.finish(cut=False)
    parts += reader.take_parts()
    assert {one.index for one in parts if isinstance(one, CallDelta)} == {0}
    arguments = "".join(one.arguments for one in parts if isinstance(one, CallDelta))
    return arguments, "".join(one.text for one in parts if not isinstance(one, CallDelta))


def innermost(value: Any) -> tuple[Any, int]:
    """Return what stands in all objects and lists, and how many there are."""
    depth = 0
    while isinstance(value, dict | list):
        depth += 1
        [value] = value.values() if isinstance(value, dict) else value
    return value, depth


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", CALLS)
def test_a_value_within_too_many_others_is_a_string(name: str, kind: str) -> None:
    opens, inside, closes = VALUES[kind]
    for times in (20, DEPTH + 1, 2 * DEPTH):
        written = opens * times + inside + closes * times
        arguments, content = read(name, CALLS[name].replace("VALUE", written), 7)
        assert (arguments, content) == (read(name, CALLS[name].replace("VALUE", written), len(written))[0], "")
        value, depth = innermost(json.loads(arguments))
        assert depth <= DEPTH + 1  # with the object of all arguments
        if times == 20:
            assert json.loads(arguments) == {"a": json.loads(written)}
        elif name not in ("function-tags", "glm"):  # there a value that is no JSON is a text
            assert depth >= DEPTH - 3
            assert value in written


@pytest.mark.parametrize(("text", "depth"), [("[[]]", 2), ('{"[[": "]{[\\"["}', 1), ('[{"a": [1]}, {}]', 3)])
def test_only_brackets_outside_of_strings_nest(text: str, depth: int) -> None:
    assert not nests_deeper(text, depth)
    assert nests_deeper(text, depth - 1)
