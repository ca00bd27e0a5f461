"""Answers cut into regions: every response template of the data file, complete and streamed, well-formed and not."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.service.output.markers import Markers
from quire.service.output.regions import CallDelta, Reading, ResponseTemplate, digest, find, known, name_of
from tests.matrix import examples
from tests.pace import patience
from tests.service.output.merged import merged

Calls = list[tuple[str, Any]]


class Message(NamedTuple):
    """All that a client can make of an answer."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


TEMPLATES = {name: ResponseTemplate(described) for name, described in known().response_templates.items()}


def read(name: str, pieces: list[str], reading: Reading | None = None, *, cut: bool = False) -> Message:
    """Read an answer piece by piece, and merge what is returned as a client does."""
    return Message(*merged(TEMPLATES[name].reader(reading or Reading("", calls=True)), pieces, cut=cut))


# response template -> an answer as its models write it, and what it says
ANSWERS: dict[str, list[tuple[str, str, str, Calls]]] = {
    "hermes": [
        (
            'Two.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"{", "b": [1, {"c": 2}]}}\n</tool_call>\n'
            '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>',
            "Two.",
            "",
            [("f", {"a": 'x}"{', "b": [1, {"c": 2}]}), ("g", {})],
        )
    ],
    "hermes-thinking": [
        (
            '<think>\nhm\n\nok\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            "",
            "hm\n\nok",
            [("f", {"a": 1})],
        ),
        ("<think>\nhm\n</think>\n\nHello. ", "Hello. ", "hm", []),
    ],
    "function-tags": [
        (
            "<think>hm</think>ok\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\ny\n"
            "</parameter>\n</function>\n</tool_call>",
            "ok",
            "hm",
            [("f", {"a": "1", "b": "x\ny"})],
        )
    ],
    "thinking": [("<think>hm</think>\nHello", "Hello", "hm", [])],
    "llama3": [
        ('{"name": "f", "parameters": {"a": 1}}', "", "", [("f", {"a": 1})]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", "", [("f", {"a": 1})]),
        ('So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', "", []),
    ],
    "mistral-list": [
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}, "id": "abcdefghi"}]',
            "",
            "",
            [("f", {"a": 1}), ("g", {})],
        ),
        ('[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}', "", "", [("f", {"a": 1})]),
    ],
    "mistral": [
        (
            '[THINK]hm[/THINK]ok[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": {}}',
            "ok",
            "hm",
            [("f", {"a": 1}), ("g", {"b": {}})],
        )
    ],
    "harmony": [
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
            '{"city": "Paris"}<|call|>',
            "I look.",
            "hm",
            [("f", {"city": "Paris"})],
        ),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "Yes.", "hm", []),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', "", "", [("f", {"a": 1})]),
    ],
    "gemma4": [
        (
            '<|channel>thought\nhm<channel|>ok<|tool_call>call:f{a:<|"|>x y<|"|>,b:1}<tool_call|>',
            "ok",
            "hm",
            [("f", {"a": "x y", "b": 1})],
        )
    ],
    "glm": [
        (
            "<think>hm</think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>two</arg_value>\n</tool_call>",
            "",
            "hm",
            [("f", {"a": "1", "b": "two"})],
        )
    ],
    "granite3": [
        ("<think>hm</think><response>Hi</response>", "Hi", "hm", []),
        ('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", "", [("f", {"a": 1})]),
    ],
    "granite4": [('ok<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "ok", "", [("f", {})])],
    "phi4-mini": [
        ('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', "", "", [("f", {"a": 1})]),
        ('<|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|>', "", "", [("f", {"a": 1})]),
        ('functools[{"name": "f", "arguments": {"a": 1}}]', "", "", [("f", {"a": 1})]),
    ],
    "phi4-reasoning": [("<think>hm</think>Yes", "Yes", "hm", [])],
    "deepseek-thinking": [("<think>\nhm\n</think>\n\nYes", "Yes", "hm", [])],
    "deepseek": [
        (
            "<think>\nhm</think>a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "a",
            "hm",
            [("f", {"a": 1}), ("g", {})],
        )
    ],
    "deepseek-dsml": [
        (
            '<think>hm</think>ok\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
            '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="b" string="true">2\n</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            "ok",
            "hm",
            [("f", {"a": 1, "b": "2\n"}), ("g", {})],
        ),
        (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">{"x": []}'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
            "",
            "",
            [("f", {"a": {"x": []}})],
        ),
    ],
    "kimi-k2": [
        (
            "<think>hm</think>ok<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
            '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
            "<|tool_calls_section_end|>",
            "ok",
            "hm",
            [("f", {"a": 1}), ("g", {})],
        )
    ],
    "minimax-m2": [
        (
            '<think>\nhm\n</think>\n\nok\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x y</parameter>\n'
            '<parameter name="b">[1]</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
            "ok",
            "hm",
            [("f", {"a": "x y", "b": "[1]"}), ("g", {})],
        )
    ],
    "seed-oss": [
        (
            "<seed:think>hm</seed:think>\nok\n<seed:tool_call>\n<function=f>\n<parameter=a>x\ny</parameter>\n</function>\n"
            "</seed:tool_call>",
            "ok",
            "hm",
            [("f", {"a": "x\ny"})],
        )
    ],
    "nemotron-v2": [
        (
            '<think>\nhm\n</think>\n<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
            "</TOOLCALL>",
            "",
            "hm",
            [("f", {"a": 1}), ("g", {})],
        )
    ],
    "cohere": [
        (
            "<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n"
            '    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>',
            "",
            "hm",
            [("f", {"a": 1})],
        ),
        ("<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Yes.", "", []),
    ],
    "lfm2": [
        (
            '<think>hm</think>ok<|tool_call_start|>[f(a="x\\"y", b=[1, None]), m.g()]<|tool_call_end|>Done.',
            "okDone.",
            "hm",
            [("f", {"a": 'x"y', "b": [1, None]}), ("m.g", {})],
        )
    ],
    "apertus": [
        (
            '<|inner_prefix|>hm<|inner_suffix|>ok<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>',
            "ok",
            "hm",
            [("f", {"a": 1}), ("g", {})],
        )
    ],
    "hunyuan": [
        (
            '<think>\nhm\n</think>\n<answer>\nok<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>\n'
            "</answer>",
            "ok",
            "hm",
            [("f", {"a": 1})],
        ),
        (
            '<tool_calls>\n<tool_call>f\n```json\n{"a": 1}\n```\n</tool_call>\n</tool_calls>',
            "",
            "",
            [("f", {"a": 1})],
        ),
    ],
    "hunyuan-v3": [
        (
            "<think:new>hm</think:new>ok<tool_calls:new>\n<tool_call:new>f<tool_sep:new>\n<arg_key:new>a</arg_key:new>\n"
            "<arg_value:new>x</arg_value:new>\n</tool_call:new>\n</tool_calls:new>",
            "ok",
            "hm",
            [("f", {"a": "x"})],
        )
    ],
    "minicpm5": [
        (
            '<think>hm</think>ok<function name="f"><param name="a">1</param><param name="b"><![CDATA[<b>\n</param>]]>'
            '</param></function>\n<function name="g"></function>',
            "ok",
            "hm",
            [("f", {"a": "1", "b": "<b>\n</param>"}), ("g", {})],
        )
    ],
    "deepseek-v3.1": [
        (
            '</think>a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>",
            "a",
            "",
            [("f", {"a": 1})],
        )
    ],
    "kimi-k3": [
        (
            "<|open|>think<|sep|>hm<|close|>think<|sep|>"
            "<|open|>response<|sep|>ok<|close|>response<|sep|><|open|>tools<|sep|>"
            '<|open|>call tool="f" index="1"<|sep|>'
            '<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'
            '<|open|>argument key="b" type="string"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>'
            '<|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
            "ok",
            "hm",
            [("f", {"a": 1, "b": "2"}), ("g", {})],
        ),
        ("<|open|>response<|sep|>ok<|close|>response<|sep|><|close|>message<|sep|>", "ok", "", []),
    ],
    "minimax-m1": [
        (
            '<think>hm</think>ok<tool_calls>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}\n'
            "</tool_calls>",
            "ok",
            "hm",
            [("f", {"a": 1}), ("g", {})],
        )
    ],
    "minimax-m3": [
        ("<mm:think>hm</mm:think>ok", "ok", "hm", []),
        ("</mm:think>ok", "ok", "", []),
        (
            "<mm:think>hm</mm:think>ok]<]minimax[>[<tool_call>\n"
            ']<]minimax[>[<invoke name="f">]<]minimax[>[<a>1]<]minimax[>[</a>]<]minimax[>[<b>x </c> y]<]minimax[>[</b>'
            "]<]minimax[>[</invoke>\n"
            ']<]minimax[>[<invoke name="g">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
            "ok",
            "hm",
            [("f", {"a": 1, "b": "x </c> y"}), ("g", {})],
        ),
    ],
    "gigachat": [
        (
            'ok<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}<|message_sep|>\n\n',
            "ok",
            "",
            [("f", {"a": 1})],
        ),
        ('ok<|function_call|>{"name": "f", "arguments": {"a": 1}}', "ok", "", [("f", {"a": 1})]),
    ],
    "functionary-v3.1": [('ok<function=f>{"a": 1}</function>', "ok", "", [("f", {"a": 1})])],
    "functionary-v3.2": [
        ('>>>all\nok>>>f\n{"a": 1}>>>g\n{}', "ok", "", [("f", {"a": 1}), ("g", {})]),
        ('>>>f\n{"a": 1}', "", "", [("f", {"a": 1})]),
    ],
    "firefunction": [
        (
            'ok functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
            "ok",
            "",
            [("f", {"a": 1}), ("g", {})],
        ),
    ],
    "command-r-plus": [
        (
            'Action:\n```json\n[\n    {\n        "tool_name": "f",\n        "parameters": {"a": 1}\n    }\n]\n```',
            "",
            "",
            [("f", {"a": 1})],
        ),
    ],
    "apriel": [
        (
            "Here are my reasoning steps:\nhm\n[BEGIN FINAL RESPONSE]\nok\n"
            '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>',
            "ok",
            "hm",
            [("f", {"a": 1})],
        ),
        ("[BEGIN FINAL RESPONSE]ok[END FINAL RESPONSE]", "ok", "", []),
    ],
    "solar-open": [
        (
            "<|think|>hm<|end|><|begin|>assistant<|content|>ok<|end|><|begin|>assistant<|tool_calls|>"
            '<|tool_call:begin|>k3<|tool_call:name|>f<|tool_call:args|>{"a": 1}<|tool_call:end|><|calls|>',
            "ok",
            "hm",
            [("f", {"a": 1})],
        )
    ],
    "muse": [
        (
            " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>ok<|eom|>"
            "<|start|>assistant to=f<|message|><atem:function_calls>\n"
            '<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
            "</atem:function_calls><|eot|>",
            "ok",
            "hm",
            [("f", {"a": "1"})],
        )
    ],
}
ALL = [(name, *answer) for name, answers in ANSWERS.items() for answer in answers]


# Templates whose calls are JSON, with the markers that end them
CLOSING = {
    name: [close] if isinstance(close, str) else close
    for name, described in known().response_templates.items()
    for field, form in described["fields"].items()
    if field == "tool_calls"
    and form.get("content") == "json"
    and not form.get("content_args")
    and not form.get("keyed")
    for close in [form.get("close", [])]
    if close
}


@given(data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_a_closing_marker_inside_a_string_of_a_call_does_not_end_it(data: st.DataObject) -> None:
    """A model that edits a chat template, say, writes markers into its arguments.  Wherever the text is cut."""
    assert {"hermes", "granite4"} <= CLOSING.keys()
    name = data.draw(st.sampled_from(sorted(CLOSING)))
    text, content, reasoning, calls = next(one for one in ANSWERS[name] if one[3])
    places = [*CLOSING[name], '"', "\\", "{", "}", "x", "\\u0022", "\n"]
    value = data.draw(st.lists(st.sampled_from(places), max_size=6).map("".join)) + CLOSING[name][0]
    called, arguments = calls[0]
    first = json.dumps({**arguments, "z": value})
    whole = text.replace(json.dumps(arguments), first)
    assert whole != text, "the answer does not hold its arguments as json.dumps writes them"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=8)))
    pieces = [whole[a:b] for a, b in itertools.pairwise([0, *cuts, len(whole)])]
    found = read(name, pieces)
    assert (found.content, found.reasoning) == (content, reasoning)
    wanted = [(called, {**arguments, "z": value}), *calls[1:]]
    assert [(one, json.loads(written)) for one, written in found.calls] == wanted


def test_there_is_an_answer_for_every_response_template_and_a_template_for_every_chat_template() -> None:
    assert set(ANSWERS) == set(TEMPLATES)
    assert {entry.response_template for entry in known().chat_templates} == set(TEMPLATES)


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), ALL)
def test_an_answer_says_the_same_whole_and_in_pieces(
    name: str, text: str, content: str, reasoning: str, calls: Calls
) -> None:
    whole = read(name, [text])
    assert (whole.content, whole.reasoning) == (content, reasoning)
    assert [(called, json.loads(arguments)) for called, arguments in whole.calls] == calls
    for size in (1, 2, 3, 7):
        assert read(name, [text[at : at + size] for at in range(0, len(text), size)]) == whole
    for at in range(1, len(text)):
        assert read(name, [text[:at], text[at:]]) == whole, at


@st.composite
def broken(draw: st.DrawFn) -> tuple[str, str, list[str]]:
    """A response template, and text made of parts of its answers and of words that occur once."""
    name = draw(st.sampled_from(sorted(TEMPLATES)))
    parts, words = [], []
    for number in range(draw(st.integers(1, 6))):
        text = draw(st.sampled_from(ANSWERS[name]))[0]
        first, last = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        words.append(f"w{number}w")
        parts += [text[first:last], draw(st.sampled_from(["", " ", "\n"])), words[-1]]
    return name, "".join(parts), words


# Ids are no text: of a call, and in a marker that has a variable part.
IN_AN_ID = r'"(?:id|type|index|tool_call_id)"\s*:\s*"[\w.:-]*WORD|\[CALL_ID\][^\[]*WORD|:\w*WORD\w*>'


def lost(found: Message, text: str, words: list[str]) -> list[str]:
    """The words of a text that an answer does not show."""
    shown = found.content + found.reasoning + "".join(called + arguments for called, arguments in found.calls)
    return [word for word in words if word not in shown and not re.search(IN_AN_ID.replace("WORD", word), text)]


@settings(max_examples=examples(400), deadline=None)
@given(broken(), st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_any_text_is_read_alike_however_it_is_cut_and_no_word_of_it_is_lost(
    asked: tuple[str, str, list[str]], cuts: list[int], cut: bool
) -> None:
    name, text, words = asked
    whole = read(name, [text], cut=cut)
    ends = [0, *sorted(min(end, len(text)) for end in cuts), len(text)]
    assert read(name, [text[a:b] for a, b in itertools.pairwise(ends)], cut=cut) == whole
    assert read(name, list(text), cut=cut) == whole
    assert not lost(whole, text, words)


# Members of a call that are no part of one, in the forms that models write, and keys that are there twice
MEMBERS = [
    '"W": 1', '"W": "W"', '"W": {"x": [1]}', "W: 1", "W=1", '"W"', "W", '"W": ', '"W": "', '"name": "W"',
    '"arguments": {"W": 1}', '"arguments": "W"', '"parameters": {"W": 1}',
]  # fmt: skip
IN_JSON = sorted(name for name in ANSWERS if any('"' in answer[0] and ":" in answer[0] for answer in ANSWERS[name]))
TYPED = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": ["string"]}}}}}]


@st.composite
def with_members(draw: st.DrawFn) -> tuple[str, str, list[str]]:
    """A response template, and one of its answers with members at any place, maybe cut off."""
    name = draw(st.sampled_from(IN_JSON))
    text, words = draw(st.sampled_from(ANSWERS[name]))[0], []
    for number in range(draw(st.integers(1, 2))):
        place = draw(st.sampled_from([at for at, char in enumerate(text) if char in ',{}[]"'] or [0]))
        place += draw(st.integers(0, 1))
        words.append(f"w{number}w")
        member = draw(st.sampled_from(MEMBERS)).replace("W", words[-1])
        before, after = draw(st.sampled_from([("", ","), ("", ", "), (",", ""), (", ", ""), ("", "")]))
        text = text[:place] + before + member + after + text[place:]
    text = text[: draw(st.sampled_from([len(text), draw(st.integers(0, len(text)))]))]
    return name, text, [word for word in words if word in text]


@settings(max_examples=examples(300), deadline=None)
@given(with_members(), st.lists(st.integers(0, 400), max_size=6), st.booleans(), st.booleans())
def test_a_member_beside_a_calls_arguments_is_content_however_the_text_is_cut(
    asked: tuple[str, str, list[str]], cuts: list[int], cut: bool, tools: bool
) -> None:
    name, text, words = asked
    reading = Reading("", calls=True, tools=TYPED if tools else [])
    whole = read(name, [text], reading, cut=cut)
    ends = [0, *sorted(min(end, len(text)) for end in cuts), len(text)]
    assert read(name, [text[a:b] for a, b in itertools.pairwise(ends)], reading, cut=cut) == whole
    assert read(name, list(text), reading, cut=cut) == whole
    assert not lost(whole, text, words)
    for _, arguments in whole.calls:
        assert cut or isinstance(json.loads(arguments), dict), text


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"why": "x", "name": "f", "arguments": {"a": 1}}', '"why": "x"', [("f", {"a": 1})]),
        ('{"name": "f", "arguments": {"a": 1}, "why": [1], "n": 2}', '"why": [1], "n": 2', [("f", {"a": 1})]),
        ('{"name": "f", "city": "Paris"}', None, []),
        ('{"name": "f", "arguments": {}, "city": "Paris"}', None, []),
        ('[{"name": "f", "arguments": {"a": 1}, "why": "x"}]', '{"why": "x"}', [("f", {"a": 1})]),
        ('[{"name": "f", "arguments": {"a": 1}, "name": "g"}]', None, []),
    ],
)
def test_a_call_with_further_members_stays_a_call_and_they_are_content(
    text: str, content: str | None, calls: Calls
) -> None:
    """Without arguments, other members may be the arguments, so such a call is content."""
    text = f"<tool_call>{text}</tool_call>"
    found = read("hermes", list(text))
    assert (found.content, [(name, json.loads(given)) for name, given in found.calls]) == (content or text, calls)


def test_arguments_in_json_are_passed_on_as_they_are_written() -> None:
    reader = TEMPLATES["hermes"].reader(Reading("", calls=True))
    got = []
    for piece in ['<tool_call>{"name": ', '"f", "argu', 'ments": {"a": "b', 'c"}', "}</tool_call>"]:
        reader.push(piece)
        got.append(reader.take()[2])
    assert got == [[], [], [CallDelta(0, "f", '{"a": "b')], [CallDelta(0, None, 'c"}')], []]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'a <tool_call>{"name": f}</tool_call>\n b'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>["f"]</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("glm", "<tool_call>f <arg_key>a</arg_key> lost <arg_value>1</arg_value></tool_call>"),
        ("mistral-list", '[TOOL_CALLS] [{"name": "f"}, 3]'),
        ("llama3", '{"name": "f"}'),
    ],
)
def test_a_malformed_call_is_content(name: str, text: str) -> None:
    assert read(name, [text]) == Message(text, "", [])


def test_a_call_that_the_length_cuts_off() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "b'
    assert read("hermes", [text], cut=True) == Message("", "", [("f", '{"a": "b')])
    text = "ok <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b"
    assert read("glm", [text], cut=True) == Message(text, "", [])


def test_what_the_prompt_has_opened_goes_on() -> None:
    reading = Reading("<think>\n", calls=True)
    assert read("hermes-thinking", ["hm\n", "</think>", "\n\nYes"], reading) == Message("Yes", "hm", [])
    closed = Reading("<think>\n\n</think>\n\n")
    assert read("hermes-thinking", ["Yes"], closed) == Message("Yes", "", [])
    assert read("hermes-thinking", [" and more"], Reading("I said ")) == Message(" and more", "", [])


def test_calls_of_an_earlier_message_in_the_prompt_do_not_count() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    reading = Reading(f"{call}<|im_end|>\n", calls=True, parallel=False)
    assert read("hermes", [call], reading).calls == [("f", "{}")]


def test_without_tools_a_call_is_text() -> None:
    text = 'Say <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read("hermes-thinking", [text], Reading("")) == Message(text, "", [])


def test_an_answer_ends_with_its_first_call_where_one_is_asked_for() -> None:
    call = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    for size in (1, 1000):
        reader = TEMPLATES["hermes"].reader(Reading("", calls=True, parallel=False))
        text = call % "f" + call % "g"
        for at in range(0, len(text), size):
            reader.push(text[at : at + size])
        assert reader.ended
        assert {delta.name for delta in reader.take()[2]} <= {"f", None}
        assert reader.calls == 1
    listed = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'
    message = read("mistral-list", [listed], Reading("", calls=True, parallel=False))
    assert message.calls == [("f", "{}")]


def test_arguments_that_are_no_json_get_the_types_of_their_schema() -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "string"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    arguments = "".join(f"<arg_key>{key}</arg_key><arg_value>{at}</arg_value>" for at, key in ((1, "a"), (2, "b")))
    text = f"<tool_call>f{arguments}</tool_call>"
    message = read("glm", [text], Reading("", calls=True, tools=tools))
    assert message.calls == [("f", '{"a": 1, "b": "2"}')]


def test_a_long_answer_keeps_little_of_itself() -> None:
    reader = TEMPLATES["llama3"].reader(Reading("", calls=True))
    text = 'word {"name": ' * 5000
    for at in range(0, len(text), 7):
        reader.push(text[at : at + 7])
    assert len(reader._text) < 10_000
    reader.finish(cut=False)
    assert reader.take()[0] == text


@pytest.mark.parametrize("name", ["hermes", "hermes-thinking", "llama3", "mistral", "phi4-mini", "glm", "deepseek"])
def test_text_in_which_no_marker_can_begin_is_not_searched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of content and of a tool call alike: a search costs more than all else that a token's text takes."""
    search, searched = Markers.next, list[str]()

    def count(self: Markers, text: str, at: int, *, final: bool) -> Any:
        searched.append(text[at:])
        return search(self, text, at, final=final)

    monkeypatch.setattr(Markers, "next", count)
    words = [f" word{at}" for at in range(2000)]  # no f: phi4-mini has a marker that begins with it
    assert read(name, words).content.strip() == "".join(words).strip()
    assert len([text for text in searched if text]) <= 2  # until the first word turns out to be no name of a call
    searched.clear()
    opening, rest = "<tool_call>", [f'"{at}", ' for at in range(500)]
    if name == "hermes":
        call = [opening, '{"name": "f", "arguments": {"a": [', *rest, "0]}}", "</tool_call>"]
        [(_, arguments)] = read(name, call).calls
        assert len(json.loads(arguments)["a"]) == 501
        assert len([text for text in searched if text]) <= 2  # at the opening marker, and at what follows it


@pytest.mark.parametrize("pattern", ["(?<=b)a", r"\Ba", "a(?=b)|<a"])
def test_a_marker_that_depends_on_its_neighbours_is_found_in_pieces(pattern: str, monkeypatch: Any) -> None:
    fields = {"thinking": {"open_pattern": pattern, "close": ")"}, "content": {}}
    template = ResponseTemplate({"start_anchor": "A:", "fields": fields})
    monkeypatch.setitem(TEMPLATES, "test", template)
    text = "one ba ab) two <ab) three"
    whole = read("test", [text])
    assert whole.reasoning
    assert read("test", list(text)) == whole
    assert read("test", [text[at : at + 2] for at in range(0, len(text), 2)]) == whole


def test_few_characters_are_kept_of_those_that_begin_no_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.service.output.markers.KNOWN_CHARS", 20)
    template = ResponseTemplate(known().response_templates["hermes"])
    reader = template.reader(Reading("", calls=True))
    text = "".join(map(chr, range(0x4E00, 0x4F00)))
    for char in text:
        reader.push(char)
    assert reader.take()[0] == text
    assert len(reader._watches.outside._known) <= 22


# ---------------------------------------------------------------------------------------------- which template is whose


def test_a_shipped_template_wins_and_a_wrong_one_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    chat_template = "<|im_start|> <tool_call>"
    shipped = {"start_anchor": "A:", "fields": {"thinking": {"open": "(", "close": ")"}, "content": {}}}
    found = find(chat_template, shipped)
    assert found is not None
    assert (found.has_calls, found.has_reasoning) == (False, True)
    found = find(chat_template, {"version": 99, "fields": {"content": {}}})
    assert found is not None
    assert found.has_calls
    assert "response_template cannot be used" in caplog.text
    assert find("{{ messages }}") is None


def test_a_digest_ignores_spaces_at_the_ends_of_lines_only() -> None:
    assert digest("a  \r\nb\n\n") == digest("\na\nb")
    assert digest("a b") != digest("a  b")


@pytest.mark.parametrize("entry", known().chat_templates, ids=lambda entry: entry.response_template)
def test_every_entry_can_be_reached(entry: Any) -> None:
    assert name_of(" ".join(entry.contains)) == entry.response_template


def test_a_field_that_is_none_of_ours_is_content() -> None:
    shipped = {"start_anchor": "A:", "fields": {"plan": {"open": "(", "close": ")"}, "content": {}}}
    found = find("", shipped)
    assert found is not None
    reader = found.reader(Reading(""))
    reader.push("(first)then")
    reader.finish(cut=False)
    assert reader.take() == ("firstthen", "", [])


def test_the_parser_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from quire.service.output import regions; "
        "regions.find('<tool_call><|im_start|>').reader(regions.Reading('')); print('numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=patience(250)
    )
    assert done.returncode == 0, done.stderr
