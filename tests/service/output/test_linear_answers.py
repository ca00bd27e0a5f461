"""Reading an answer takes time that is linear in its characters, whatever a client makes the model write."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest

from quire.service.output.regions import Reading, ResponseTemplate, known

TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": ["string"]}}}}}]
READING = Reading("", calls=True, tools=TOOLS)
UNITS = [
    "    ", "\n\n\n\n", "\t \n ", "<", "</", "<|", "<｜", "{", "[", "(", "}{", "] ,", "=(", '"a": ', '"a", ', "\\", "'",
    "a ", "ab", "```", "<think>", "<tool_call>", "</tool_call>", "<function=f>", "<parameter=a>", "</parameter>",
    "<arg_key>", "<|channel|>", "to=", '{"name": "f", ', '{"name": "f", "arguments": {}}', "[TOOL_CALLS]", "<invoke ",
]  # fmt: skip
BEGINNINGS = [
    "", "<think>", "<tool_call>", '{"name": "f", "arguments": {"a": "', "[TOOL_CALLS] [", "f(a=",
    "<tool_call>\n<function=f>\n<parameter=a>\n", "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "<|channel|>commentary to=functions.f<|message|>{",
]  # fmt: skip
SHORT, FACTOR, PIECE = 1200, 3, 16  # longer than a marker may be


def cpu_s(template: ResponseTemplate, beginning: str, unit: str, chars: int, piece: int) -> float:
    """CPU seconds of one answer, fed in pieces of a number of characters."""
    reader, text = template.reader(READING), unit * (chars // len(unit))
    begin = time.thread_time()
    reader.push(beginning)
    for at in range(0, len(text), piece):
        reader.push(text[at : at + piece])
        reader.take_parts()
    reader.finish(cut=False)
    reader.take_parts()
    return time.thread_time() - begin


def grows_faster(template: ResponseTemplate, beginning: str, unit: str, piece: int) -> bool:
    """Return whether three times the text takes more than six times the time, tried again and again."""
    short = long = 1e9
    for _ in range(6):
        short = min(short, cpu_s(template, beginning, unit, SHORT, piece))
        long = min(long, cpu_s(template, beginning, unit, FACTOR * SHORT, piece))
        if long <= 2 * FACTOR * max(short, 0.0003):
            return False
    return True


TEXTS = list(itertools.product(BEGINNINGS, (PIECE, FACTOR * SHORT), UNITS))
EACH = 17  # each template tries one text in 17, the next template others: all texts are tried, and each pair
assert math.gcd(EACH, len(UNITS)) == 1  # so that a template sees every unit


@pytest.mark.parametrize("every", [EACH, pytest.param(1, marks=pytest.mark.nightly)], ids=["some", "all"])
@pytest.mark.parametrize("name", sorted(known().response_templates))
def test_time_is_linear_in_the_characters_of_every_template_and_repeated_text(name: str, every: int) -> None:
    template = ResponseTemplate(known().response_templates[name], name)
    first = sorted(known().response_templates).index(name) % every
    slow = [
        (beginning, unit, piece)
        for beginning, piece, unit in TEXTS[first::every]
        if grows_faster(template, beginning, unit, piece)
    ]
    assert not slow


SHIPPED: dict[str, dict[str, Any]] = {
    "spaces before a marker": {"open_pattern": r"\s*<call>\s*", "close_pattern": r"\s*</call>", "content": "json"},
    "anything in a marker": {"open_pattern": r"<call.*?>", "close": "</call>", "content": "json"},
    "tags": {
        "open_pattern": r"<call>(?P<name>\w+)",
        "close": "</call>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>(?P<value>.*?)</parameter>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
}


@pytest.mark.parametrize("shipped", SHIPPED.values(), ids=SHIPPED)
def test_time_is_linear_for_templates_that_models_ship(shipped: dict[str, Any]) -> None:
    fields = {"tool_calls": {"repeats": True, **shipped}, "content": {}}
    template = ResponseTemplate({"start_anchor": "A:", "fields": fields})
    slow = [
        (beginning, unit, piece)
        for beginning in ("", "<call>", "<call>f<parameter=a>")
        for unit in [*UNITS, "<call>", "<call "]
        for piece in (PIECE, FACTOR * SHORT)
        if grows_faster(template, beginning, unit, piece)
    ]
    assert not slow
