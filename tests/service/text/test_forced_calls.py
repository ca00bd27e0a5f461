"""Demanded and strict calls of every family of the table: whatever their grammar allows is read as calls that fit."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import llguidance
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from quire.service.api.tools import ChatOptions
from quire.service.common.refusal import Refusal
from quire.service.grammar.grammar import BOUNDS, Constraint, byte_tokenizer, compile_grammar
from quire.service.grammar.grammar_errors import NotServed
from quire.service.output.argument_types import reduced
from quire.service.output.marker_beginnings import beginnings
from quire.service.output.regions import Reading, ResponseTemplate, known
from quire.service.text.call_form import AGAIN, CallForm
from quire.service.text.call_grammar import Reasoning, call_rules
from tests.service.text.call_notations import NOTATIONS, NS, accepts, notation, read

NUMBERS: dict[str, Any] = {"minimum": 0, "maximum": 99}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "properties": {
            "city": {"enum": ["Paris", "Rome", "São Paulo", "</b>", " 7 ", "true"]},
            "days": {"type": "integer", **NUMBERS},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "3d-write_file": {
        "properties": {
            "text": {"type": "string"},
            "title": {"type": ["string", "null"], "minLength": 1, "maxLength": 9},
            "when": {"type": "string", "format": "date"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$"},
        },
        "required": ["text", "title"],
    },
    "set": {
        "properties": {
            "on": {"type": "boolean"},
            "level": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "boolean"}]},
            "factor": {"type": "number"},
            "tags": {"type": "array", "items": {"enum": ["a", "<b>", 3]}, "maxItems": 3},
            "at": {"$ref": "#/$defs/point"},
            "kind": {"enum": ["x", 1, None]},
            "some": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
        },
        "$defs": {"point": {"type": "object", "properties": {"x": NUMBERS | {"type": "integer"}}, "required": ["x"]}},
    },
    "any-thing": {},
    "pairs": {"additionalProperties": {"type": "integer", **NUMBERS}, "minProperties": 1, "maxProperties": 2},
    "now": {"properties": {}, "additionalProperties": False},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}, "strict": True}}
    for name, schema in SCHEMAS.items()
]
TOOLS.append({"type": "function", "function": {"name": "time"}})
READ = reduced(TOOLS, nested=True)
READING = Reading("", calls=True, tools=READ)


def drawn(grammar: str, seed: int, words: list[str], most: int = 1200) -> str | None:
    """A random text that the grammar allows, with markers wherever it allows them; None: longer than `most` bytes."""
    rng, matcher = random.Random(seed), LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=BOUNDS)
    assert not matcher.is_error(), matcher.get_error()
    said = bytearray()
    while len(said) < most:
        if rng.random() < 0.25:  # also the beginning of a marker, as far as it is allowed
            word = list(rng.choice(words).encode())
            said += bytes(word[: matcher.try_consume_tokens(word)])
        accepting = matcher.is_accepting()
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        assert not matcher.is_error(), matcher.get_error()
        if accepting and (not allowed or rng.random() < 0.4):
            return said.decode("utf-8", "replace")
        byte = rng.choice([one for one in allowed if one < 128] or allowed)
        assert matcher.consume_token(byte)
        said.append(byte)
    return None


def form_of(name: str) -> tuple[CallForm, ResponseTemplate]:
    form, responses = notation(name)
    assert form is not None
    return form, responses


def compiled(name: str, reasoning: Reasoning = "", tools: list[dict[str, Any]] = TOOLS, **options: Any) -> str:
    rules = call_rules(form_of(name)[0], ChatOptions(tools=tools, **options), {}, reasoning, None)
    return compile_grammar(Constraint("tool_choice", "calls", rules)).grammar


@cache
def demanding(name: str, wanted: tuple[str, ...], parallel: bool) -> str:
    return compiled(name, demanded=[*wanted], parallel=parallel)


@cache
def words_of(name: str) -> list[str]:
    form, responses = form_of(name)
    tags = form.tags
    texts = [
        form.tail,
        form.between or "",
        form.begin.marker,
        *form.begin.texts,
        '"',
        '"}',
        "1",
        "null",
        "<![CDATA[",
        "]]>",
    ]
    if tags is not None:
        texts += [*tags.text, *tags.value, tags.last, tags.between, *tags.barred, tags.text[1] + tags.last]
        texts = [
            text.replace(AGAIN, key) for text in texts for key in (("text", "some", "item") if AGAIN in text else ("",))
        ]
    patterns = [notation.open.pattern.pattern for notation in responses.notations]
    return [text for text in [*texts, *(one for pattern in patterns for one in beginnings(pattern))] if text]


def fits(called: str, arguments: Any) -> None:
    schema = SCHEMAS.get(called, {"maxProperties": 0})
    jsonschema.validate(arguments, {"type": "object", **schema}, format_checker=jsonschema.FormatChecker())


def test_every_family_of_the_table_is_here() -> None:
    described = known().response_templates
    calling = {name for name, one in described.items() if "tool_calls" in one["fields"]}
    assert calling == {*NOTATIONS}


def test_arguments_that_a_notation_cannot_say_are_refused_by_their_path() -> None:
    with pytest.raises(Refusal, match=r"^tools\[4\]\.function\.parameters\.maxProperties: ") as refused:
        compiled("lfm2", demanded=["pairs"])
    assert refused.value.param == "tools[4].function.parameters.maxProperties"


@pytest.mark.parametrize("name", NOTATIONS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_the_grammar_of_a_demanded_call_allows_is_read_as_calls_that_fit(name: str, seed: int) -> None:
    form, responses = form_of(name)
    tags = form.tags
    names = [one for one in SCHEMAS if one != "pairs" or tags is None or tags.body is not None]
    for wanted in ([names[seed % len(names)]], [*names, "time"]):
        parallel = len(wanted) > 1
        text = drawn(demanding(name, tuple(wanted), parallel), seed, words_of(name))
        if text is None:
            continue
        content, reasoning, calls = read(responses, text, msgspec.structs.replace(READING, parallel=parallel))
        assert (content.strip(), reasoning) == ("", ""), text
        assert calls, text
        assert len(calls) == 1 or parallel, text
        for called, arguments in calls:
            assert called in wanted, text
            fits(called, arguments)


def said(name: str, called: str, **arguments: str) -> str:
    """A call in a notation with tags; values are written as they are given."""
    form, _ = form_of(name)
    tags = form.tags
    assert tags is not None
    each = []
    for key, value in arguments.items():
        schema = SCHEMAS[called]["properties"][key]
        is_text = schema.get("type") == "string" or not value[:1].isdigit()
        before, after = tags.text if is_text else tags.value
        each.append(f"{key}{before}{value}{after.replace(AGAIN, key)}")
    begin = tags.first + tags.between.join(each) if each else tags.empty
    return f"{form.head}{called}{begin}{tags.last}{form.tail}"


TAGGED = [name for name in NOTATIONS if (tags := form_of(name)[0].tags) is not None and not tags.quoted]


@pytest.mark.parametrize("name", TAGGED)
def test_what_a_model_writes_between_tags_is_allowed(name: str) -> None:
    write, change = (demanding(name, (one,), False) for one in ("3d-write_file", "set"))
    for text, title in (("", "x"), ("a\n\n", "été"), ("if a < b:\n  print('<p>')", "null")):
        if title == "null" and form_of(name)[0].tags.named:  # type: ignore[union-attr]
            continue
        call = said(name, "3d-write_file", text=text, title=title, when="2028-02-29", code="AB/12")
        assert accepts(write, call), call
    for call in (
        said(name, "3d-write_file", title="x"),  # one is missing
        said(name, "3d-write_file", text="a", title=""),
        said(name, "3d-write_file", text="a", title="0123456789"),
        said(name, "3d-write_file", text="a", title="x", when="2026-02-29"),
        said(name, "3d-write_file", text="a", title="x", code="ab/12"),
    ):
        assert not accepts(write, call), call
    for arguments in ({}, {"level": "7"}, {"level": "high"}, {"factor": "1.5e3"}, {"kind": "1"}, {"kind": "x"}):
        assert accepts(change, said(name, "set", **arguments)), arguments
    for arguments in ({"kind": "y"}, {"kind": "2"}):
        assert not accepts(change, said(name, "set", **arguments)), arguments


@pytest.mark.parametrize("name", ["function-tags", "glm", "minimax-m2"])
def test_values_other_than_strings_are_json_between_the_tags(name: str) -> None:
    form, responses = form_of(name)
    tags = form.tags
    assert tags is not None
    grammar = demanding(name, ("set",), False)
    pairs = {"on": "true", "tags": '["a", "<b>"]', "at": '{"x": 3}', "some": "[1, 2]"}
    each = tags.between.join(f"{key}{tags.value[0]}{value}{tags.value[1]}" for key, value in pairs.items())
    text = f"{form.head}set{tags.first}{each}{tags.last}{form.tail}"
    assert accepts(grammar, text)
    assert read(responses, text, READING)[2] == [("set", {key: json.loads(value) for key, value in pairs.items()})]
    assert not accepts(grammar, text.replace('"x": 3', '"x": 300'))
    assert not accepts(grammar, text.replace("true", "True"))


@pytest.mark.parametrize("name", [name for name in NOTATIONS if form_of(name)[0].reasoning is not None])
@pytest.mark.parametrize("reasoning", ["open", "may"])
def test_a_demanded_call_follows_the_reasoning(name: str, reasoning: Reasoning) -> None:
    form, responses = form_of(name)
    assert form.reasoning is not None
    opened, closed = form.reasoning
    grammar = compiled(name, reasoning, demanded=["now"])
    call = drawn(compiled(name, demanded=["now"], parallel=False), 1, words_of(name))
    assert call is not None
    thought = f"Now? {closed}\n\n{call.lstrip()}"
    text = thought if reasoning == "open" else opened + thought
    assert accepts(grammar, text)
    assert accepts(grammar, call) == (reasoning == "may")
    reader = responses.reader(Reading(opened if reasoning == "open" else "", calls=True, tools=READ))
    reader.push(text)
    reader.finish(cut=False)
    content, thoughts, calls = reader.take()
    assert (content.strip(), thoughts.strip()) == ("", "Now?")
    assert [one.name for one in calls if one.name] == ["now"]


STRICT = [name for name in NOTATIONS if form_of(name)[0].begin.marker]


def test_strict_calls_of_an_answer_that_may_be_text_need_a_marker() -> None:
    assert [*NOTATIONS] == STRICT
    form = form_of("hermes")[0]
    hidden = msgspec.structs.replace(form, begin=form.begin._replace(marker=""))
    options = ChatOptions(tools=TOOLS, strict="tools[0].function.strict")
    with pytest.raises(Refusal, match=r"^tools\[0\]\.function\.strict: "):
        call_rules(hidden, options, {}, "", None)


@pytest.mark.parametrize("name", STRICT)
def test_strict_arguments_hold_where_the_model_decides_to_call(name: str) -> None:
    form, responses = form_of(name)
    tools = [tool for tool in TOOLS if tool["function"]["name"] in ("weather", "now")]
    grammar = compiled(name, tools=tools)
    call = drawn(compiled(name, tools=tools, demanded=["weather"], parallel=False), 3, words_of(name))
    assert call is not None
    call = call.lstrip()
    text = f"I look.\n{call}"
    for allowed in ("", "It rains.\n", text, call):
        assert accepts(grammar, allowed), allowed
    for wrong in (
        text.replace("weather", "rain"),
        text.replace("city", "town"),
        f"{form.begin.marker} and",
        f"{call}{form.begin.marker}",
    ):
        assert not accepts(grammar, wrong), wrong
    [(called, arguments)] = read(responses, text, READING)[2]
    assert called == "weather"
    fits(called, arguments)


@pytest.mark.parametrize(
    "name", [name for name in STRICT if form_of(name)[0].begin.patterns or form_of(name)[0].goes_on]
)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
@example(seed=304)  # a text for which the grammar of `function-tags` needed more states than a gateway allows
def test_no_call_in_a_free_text_escapes_its_schema_where_no_marker_closes_calls(name: str, seed: int) -> None:
    form, responses = form_of(name)
    tools = [tool for tool in TOOLS if tool["function"]["name"] in ("weather", "now")]
    heads = [form.head, form.head.replace(" ", ""), form.head.replace("[", "[ "), "[", form.middle, form.tail]
    text = drawn(compiled(name, tools=tools), seed, [*words_of(name), *heads, '{"type":', "weather", "city"], most=300)
    if text is not None:
        for called, arguments in read(responses, text, READING)[2]:
            assert called in ("weather", "now")
            fits(called, arguments)


@pytest.mark.parametrize("name", [name for name in STRICT if form_of(name)[0].goes_on])
def test_a_second_call_without_a_marker_is_held_to_its_schema_too(name: str) -> None:
    """The parser reads on after a call that no marker closes."""
    _, responses = form_of(name)
    tools = [tool for tool in TOOLS if tool["function"]["name"] in ("weather", "now")]
    grammar = compiled(name, tools=tools)
    call = drawn(compiled(name, tools=tools, demanded=["weather"], parallel=False), 3, words_of(name))
    assert call is not None
    later = '{"id": "a", "name": "weather", "arguments": {"city": 7}}'
    for between in ("", ", ", "\n", ";", "}"):
        text = f"{call.lstrip()}{between}{later}"
        assert not accepts(grammar, text), text
    assert read(responses, f"{call.lstrip()}\n{later}", READING)[2][1:] == [("weather", {"city": 7})]
    assert accepts(grammar, f"{call.lstrip()}\nThat is {{}}, or [1].")


def test_a_pattern_that_no_grammar_can_follow_is_refused_where_the_tool_is_strict() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=b)a"}}, "required": ["a"]}
    for strict in (True, False):
        tool = {"type": "function", "function": {"name": "f", "parameters": odd, "strict": strict}}
        if strict:
            with pytest.raises(NotServed, match=r"^tools\[0\]\.function\.parameters\.properties\.a"):
                compiled("function-tags", tools=[tool], demanded=["f"])
        else:
            grammar = compiled("function-tags", tools=[tool], demanded=["f"])
            call = "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>"
            assert accepts(grammar, call)


def test_special_tokens_of_a_notation_are_named_by_their_ids() -> None:
    form = form_of("gemma4")[0]
    ids = {"<|tool_call>": 300, "<tool_call|>": 301, '<|"|>': 302}
    for demanded in (["3d-write_file"], []):
        rules = call_rules(form, ChatOptions(tools=TOOLS, demanded=demanded), ids, "", None)
        assert '"<|' not in rules.grammar
        assert all(f"<[{token}]>" in rules.grammar for token in ids.values())
        assert "<[" not in rules.plain


@pytest.mark.parametrize("name", [name for name in TAGGED if form_of(name)[0].tags.nested is None])  # type: ignore[union-attr]
def test_markers_within_json_between_tags_are_text(name: str) -> None:
    """Grammars allow any text in the strings and keys of an object."""
    form, responses = form_of(name)
    tags = form.tags
    assert tags is not None
    marks = [*tags.barred, tags.last, form.tail, tags.value[1] + tags.last, '"', "\\", "\n", "{", "x"]
    dice = random.Random(5)
    for _ in range(10):
        texts = ["".join(dice.choices(marks, k=4)) for _ in range(4)]
        value = {"x": 3, texts[0]: texts[1], "l": [texts[2], {texts[3]: 1}]}
        pairs = {"at": json.dumps(value), "factor": "1.5"}
        each = tags.between.join(f"{key}{tags.value[0]}{written}{tags.value[1]}" for key, written in pairs.items())
        text = f"{form.head}set{tags.first}{each}{tags.last}{form.tail}"
        content, _, calls = read(responses, text, READING)
        assert (content.strip(), calls) == ("", [("set", {"at": value, "factor": 1.5})]), text


class _Marked:
    """A vocabulary of bytes and of special tokens, as llguidance reads it."""

    eos_token_id = 256
    bos_token_id = None
    unk_token_id = None

    def __init__(self, special: list[str]) -> None:
        self.ids = {text: 257 + at for at, text in enumerate(special)}
        self.special_token_ids = [256, *self.ids.values()]
        texts = [text.encode() for text in special]
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"\xff<eos>", *(b"\xff" + text for text in texts)]
        self.n_vocab = len(self.tokens)

    def __call__(self, text: str | bytes) -> list[int]:
        return [*(text.encode() if isinstance(text, str) else text)]

    def encoded(self, text: str) -> list[int]:
        found: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, self.ids)) + ")", text):
            found += [self.ids[part]] if part in self.ids else part.encode()
        return found


# special tokens of a family, answers that a strict request allows, and answers that it does not
MARKED: dict[str, tuple[list[str], list[str], list[str]]] = {
    "harmony": (
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"],
        [
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>A goto=1 is it.",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.weather<|channel|>commentary json"
            '<|message|>{"city": "Paris"}<|call|>',
            '<|channel|>commentary to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
        ],
        [
            " to=functions.rain<|channel|>commentary json<|message|>{}<|call|>",
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "x"}<|call|>',
            '<|channel|>commentary to=weather<|message|>{"city": "x"}<|call|>',
        ],
    ),
    "kimi-k3": (
        ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
        [
            "<|open|>response<|sep|>The tools call.<|close|>response<|sep|>",
            '<|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="now" '
            'index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        ],
        [
            '<|open|>tools<|sep|><|open|>call tool="rain" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
            '<|open|>call tool="now" index="1"<|sep|>',
            "<|open|>tools<|sep|>text",
        ],
    ),
    "minimax-m3": (
        [NS],
        [
            f'I look.{NS}<tool_call>\n{NS}<invoke name="weather">{NS}<city>Rome{NS}</city>'
            f"{NS}</invoke>\n{NS}</tool_call>"
        ],
        [f'{NS}<tool_call>\n{NS}<invoke name="rain">', f'{NS}<invoke name="now">{NS}</invoke>', f"{NS}x"],
    ),
    "muse": (
        ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"],
        [
            "It rains.<|eot|>",
            'I look.<|eom|><|start|>assistant to=weather<|message|><atem:function_calls>\n<atem:invoke name="now">\n'
            "</atem:invoke>\n</atem:function_calls>",
        ],
        ['<atem:invoke name="now">', '<atem:function_calls>\n<atem:invoke name="rain">'],
    ),
    "cohere": (
        ["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>"],
        ["<|START_RESPONSE|>It rains.<|END_RESPONSE|>"],
        ["<|START_ACTION|>It"],
    ),
}


@pytest.mark.parametrize("name", MARKED)
def test_free_text_beside_strict_calls_may_have_the_markers_of_its_family(name: str) -> None:
    special, allowed, wrong = MARKED[name]
    marked = _Marked(special)
    tools = [tool for tool in TOOLS if tool["function"]["name"] in ("weather", "now")]
    rules = call_rules(form_of(name)[0], ChatOptions(tools=tools, strict="tools"), marked.ids, "", None)
    made = compile_grammar(Constraint("tool_choice", "calls", rules)).grammar
    vocabulary = LLTokenizer(llguidance.TokenizerWrapper(marked))
    for text in [*allowed, *wrong]:
        matcher = LLMatcher(vocabulary, made, log_level=1, limits=BOUNDS)
        ids = marked.encoded(text)
        consumed = matcher.try_consume_tokens(ids)
        assert not matcher.is_error(), matcher.get_error()
        assert (consumed == len(ids) and matcher.is_accepting()) == (text in allowed), text[:consumed]
