"""A client gets the arguments of a call as valid JSON, with keys and numbers as the model wrote them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.service.api.anthropic.messages import read_input
from quire.service.common.surrogates import json_of
from quire.service.output.argument_types import reduced
from quire.service.output.calls import calls_of
from quire.service.output.notations import Notation
from quire.service.output.regions import Reading
from quire.service.text.call_form import AGAIN, CallForm
from tests.service.text.call_notations import NOTATIONS, notation, written

KINDS = {"a": "integer", "b": "number", "c": "object", "d": "string"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in KINDS.items()}},
        },
    }
]
READING = Reading("", calls=True, tools=reduced(TOOLS))
DIGITS = "1234567890" * 500  # more than Python reads as an integer
WRITTEN: dict[str, list[tuple[str, str]]] = {
    "a key twice": [("a", "1"), ("a", "2")],
    "a key twice, others between": [("a", "1"), ("d", '"x"'), ("a", "2"), ("d", '"y"')],
    "a key twice, the first value is long": [("d", json.dumps("x" * 300)), ("a", "1"), ("d", '"y"')],
    "a key of an inner object twice": [("c", '{"x": 1, "x": 2}')],
    "numbers beyond a float": [("b", "1e400"), ("a", "-1"), ("b", "-1e400"), ("c", '{"x": 1e999}')],
    "an integer of 5,000 digits": [("a", DIGITS), ("b", "-" + DIGITS), ("c", f'{{"x": [{DIGITS}]}}')],
}


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def values(text: str) -> Any:
    """JSON with all pairs of its objects in their order, and the text of its numbers."""
    return json.loads(
        text,
        object_pairs_hook=lambda pairs: ("object", pairs),
        parse_int=lambda digits: ("number", digits),
        parse_float=lambda digits: ("number", digits),
        parse_constant=refuse,
    )


def answer(form: CallForm, pairs: list[tuple[str, str]]) -> str:
    """A call in the notation of a family; the values are JSON."""
    tags = form.tags
    if tags is None:
        arguments = "{" + ", ".join(f'"{key}": {value}' for key, value in pairs) + "}"
        return f"{form.head}f{form.middle}{arguments}{form.tail}"
    each = []
    for key, value in pairs:
        is_text = value.startswith('"')
        before, after = tags.text if is_text else tags.value
        each.append(f"{key}{before}{json.loads(value) if is_text else value}{after.replace(AGAIN, key)}")
    return f"{form.head}f{tags.first}{tags.between.join(each)}{tags.last}{form.tail}"


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("name", NOTATIONS)
def test_every_notation_keeps_keys_and_numbers_as_they_are_written(name: str, kind: str) -> None:
    form, responses = notation(name)
    assert form is not None
    pairs = WRITTEN[kind]
    content, _, calls = written(responses, answer(form, pairs), READING)
    assert content.strip() == ""
    [(_, arguments)] = calls
    assert values(arguments) == ("object", [(key, values(value)) for key, value in pairs])


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_list_of_calls_and_one_call_have_the_same_arguments(kind: str) -> None:
    given = "{" + ", ".join(f'"{key}": {value}' for key, value in WRITTEN[kind]) + "}"
    call = f'{{"name": "f", "arguments": {given}}}'
    for one in (call, f'{{"type": "function", "function": {call}}}', call.replace(given, json.dumps(given))):
        for text in (one, f"[{one}]"):
            assert calls_of(text, Notation(open=None)) == [("f", given)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_input_of_a_tool_use_is_the_arguments(kind: str) -> None:
    given = "{" + ", ".join(f'"{key}": {value}' for key, value in WRITTEN[kind]) + "}"
    assert values(bytes(read_input(given)).decode()) == values(given)


def test_values_that_json_does_not_know_are_written_as_json() -> None:
    value = {"x": [float("inf"), -float("inf"), float("nan")], "NaN": 'Infinity "NaN" \\'}
    found = values(json_of(value))
    assert found == values('{"x": [1e999, -1e999, null], "NaN": "Infinity \\"NaN\\" \\\\"}')


def test_digits_of_other_scripts_are_text() -> None:
    _, responses = notation("hermes")
    text = '<tool_call>{"name": "f", "arguments": {"d": 1\u0663}}</tool_call>'
    [(_, arguments)] = written(responses, text, READING)[2]
    assert values(arguments) == ("object", [("d", "1\u0663")])
