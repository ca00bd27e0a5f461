"""Calls as models write them: almost in the notation of their family, repaired by rule or left as content."""

# ruff: noqa: E501  (an answer is read best in one line)

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.service.common.surrogates import without_surrogates
from quire.service.output.argument_types import ArgumentText, Tools, reduced, typed
from quire.service.output.json_repair import WHOLE_CHARS, Repair, repaired
from quire.service.output.lenient_json import Event, JsonReader
from quire.service.output.regions import Reading, ResponseTemplate, find, known
from tests.service.output.merged import Read, merged
from tests.system.chaos.near_calls import FAMILIES, near_calls

TEMPLATES = {name: ResponseTemplate(described) for name, described in known().response_templates.items()}
PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "area": {"$ref": "#/$defs/Area"},
    "unit": {"enum": ["C", "F"]},
    "hint": {"anyOf": [{"$ref": "#/$defs/Area"}, {"type": "null"}]},
}
AREA = {"type": "object", "properties": {"x": {"type": "number"}}}
TOOLS = reduced(
    [
        {"function": {"name": "weather", "parameters": {"properties": PROPERTIES, "$defs": {"Area": AREA}}}},
        {"function": {"name": "time"}},
    ]
)
PARIS, ROME = ("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})


def read(
    template: ResponseTemplate, pieces: list[str], *, opening: str = "", cut: bool = False, parallel: bool = True
) -> Read:
    reader = template.reader(Reading(opening, calls=True, tools=TOOLS, parallel=parallel))
    return merged(reader, pieces, cut=cut)


def says(name: str | ResponseTemplate, text: str, **options: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the parse results of an answer: as one text, one character at a time, and split in two at every position."""
    template = TEMPLATES[name] if isinstance(name, str) else name
    whole = read(template, [text], **options)
    assert read(template, list(text), **options) == whole
    for at in range(1, len(text)):
        assert read(template, [text[:at], text[at:]], **options) == whole, at
    return whole[0], whole[1], [(called, json.loads(arguments)) for called, arguments in whole[2]]


HERMES_CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
ROME_CALL = HERMES_CALL.replace("Paris", "Rome")
# what is odd about it, response template, answer, its content, its calls
WRITTEN: list[tuple[str, str, str, str, list[Any]]] = [
    ("parameters for arguments", "hermes", '<tool_call>\n{"name": "weather", "parameters": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    ("arguments for parameters", "llama3", HERMES_CALL, "", [PARIS]),
    ("both, one is empty", "hermes", '<tool_call>{"parameters": {}, "name": "weather", "arguments": {"city": "Paris"}}</tool_call>', "", [PARIS]),
    ("arguments in a string", "hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", [PARIS]),
    ("a function around it", "granite4", '<tool_call>{"type": "function", "function": ' + HERMES_CALL + "}</tool_call>", "", [PARIS]),
    ("two in one marker", "hermes", f"<tool_call>\n{HERMES_CALL}\n{ROME_CALL}\n</tool_call>", "", [PARIS, ROME]),
    ("a list in one marker", "hermes", f"<tool_call>[{HERMES_CALL}, {ROME_CALL}]</tool_call>", "", [PARIS, ROME]),
    ("no closing marker", "hermes", f"<tool_call>\n{HERMES_CALL}", "", [PARIS]),
    ("no closing marker before the next", "hermes", f"<tool_call>{HERMES_CALL}<tool_call>{ROME_CALL}</tool_call>", "", [PARIS, ROME]),
    ("no opening marker", "hermes", f"I look.\n{HERMES_CALL}\n</tool_call>", "I look.", [PARIS]),
    ("no marker at all", "hermes", HERMES_CALL, "", [PARIS]),
    ("no marker, in prose", "hermes", f"Like\n{HERMES_CALL}\nas an example.", f"Like\n{HERMES_CALL}\nas an example.", []),
    ("no marker, an unknown function", "hermes", HERMES_CALL.replace("weather", "w"), HERMES_CALL.replace("weather", "w"), []),
    ("a bracket is missing", "hermes", f"<tool_call>{HERMES_CALL[:-1]}\n</tool_call>ok", "ok", [PARIS]),
    ("a bracket too many", "hermes", f"<tool_call>{HERMES_CALL}}}\n</tool_call>ok", "ok", [PARIS]),
    ("a list around markers", "hermes", f"<tool_call>{HERMES_CALL}</tool_call>,\n<tool_call>{ROME_CALL}</tool_call>]", "", [PARIS, ROME]),
    ("a code fence", "hermes", f"<tool_call>\n```json\n{HERMES_CALL}\n```\n</tool_call>", "", [PARIS]),
    ("as in Python", "hermes", "<tool_call>{'name': 'weather', 'arguments': {'city': 'Paris', 'a': True, 'b': None,},}</tool_call>", "", [("weather", {"city": "Paris", "a": True, "b": None})]),
    ("a raw line end", "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Pa\nris"}}</tool_call>', "", [("weather", {"city": "Pa\nris"})]),
    ("a marker in a string", "hermes", f"<tool_call>{HERMES_CALL.replace('Paris', '</tool_call>')}</tool_call>", "", [("weather", {"city": "</tool_call>"})]),
    ("arguments under no key", "hermes", '<tool_call>{"name": "weather", "city": "Paris"}</tool_call>', '<tool_call>{"name": "weather", "city": "Paris"}</tool_call>', []),
    ("type first", "llama3", '{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("parted by semicolons", "llama3", f"{HERMES_CALL}; {ROME_CALL}", "", [PARIS, ROME]),
    ("prose around", "llama3", f"So: {HERMES_CALL} Good?", "So:Good?", [PARIS]),
    ("no JSON", "llama3", '{"name": "weather", "parameters": {city Paris}', '{"name": "weather", "parameters": {city Paris}', []),
    ("the tool's own description", "llama3", '{"name": "weather", "description": "d", "parameters": {"type": "object"}}', '{"name": "weather", "description": "d", "parameters": {"type": "object"}}', []),
    ("the marker of the interpreter", "llama3", "<|python_tag|>print(1)", "print(1)", []),
    ("text after the list", "phi4-mini", f"functools[{HERMES_CALL}]\nAnything else?", "Anything else?", [PARIS]),
    ("text after the list", "mistral-list", f"[TOOL_CALLS] [{HERMES_CALL}]\nDone.", "Done.", [PARIS]),
    ("text after the list", "granite3", f"<|tool_call|> [{HERMES_CALL}]\nDone.", "Done.", [PARIS]),
    ("the marker of 3.1", "granite3", f"<tool_call> [{HERMES_CALL}]", "", [PARIS]),
    ("no [ARGS]", "mistral", '[TOOL_CALLS]weather{"city": "Paris"}[TOOL_CALLS]weather{"city": "Rome"}', "", [PARIS, ROME]),
    ("the older notation", "mistral", f"[TOOL_CALLS][{HERMES_CALL}]", "", [PARIS]),
    ("no opening marker", "function-tags", "I look.\n\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "I look.", [PARIS]),
    ("no marker, an unknown function", "function-tags", "Use <function=w>\n</function> here", "Use <function=w>\n</function> here", []),
    ("no closing markers", "function-tags", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</parameter>\n</function>", "", [("weather", {"city": "Paris", "days": 3})]),
    ("tags in a value", "function-tags", "<tool_call>\n<function=weather>\n<parameter=city>\na </parameter> and </function>\nb\n</parameter>\n</function>\n</tool_call>ok", "ok", [("weather", {"city": "a </parameter> and </function>\nb"})]),
    ("types by reference", "function-tags", '<tool_call>\n<function=weather>\n<parameter=area>\n{"x": 1.5}\n</parameter>\n<parameter=hint>\nnull\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>', "", [("weather", {"area": {"x": 1.5}, "hint": None, "unit": "C"})]),
    ("markers in a string of JSON", "function-tags", '<tool_call>\n<function=weather>\n<parameter=area>\n{"\\"</parameter>\n</function>": "<parameter=city>\n</parameter>\n<parameter=city>"}\n</parameter>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>ok', "ok", [("weather", {"area": {'"</parameter>\n</function>': "<parameter=city>\n</parameter>\n<parameter=city>"}, "city": "Paris"})]),
    ("a quote is missing in JSON", "function-tags", '<tool_call>\n<function=weather>\n<parameter=area>\n{"x": "1}\n</parameter>\n<parameter=city>\nthe "Old" Town\n</parameter>\n</function>\n</tool_call>ok', "ok", [("weather", {"area": {"x": "1}"}, "city": 'the "Old" Town'})]),
    ("and nothing closes it", "function-tags", '<tool_call>\n<function=weather>\n<parameter=area>\n{"x": "1}\n</parameter>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>ok', "ok", [("weather", {"area": {"x": "1}"}, "city": "Paris"})]),
    ("JSON in tags", "function-tags", f"<tool_call>\n{HERMES_CALL}\n</tool_call>", "", [PARIS]),
    ("no arguments", "glm", "<tool_call>time\n</tool_call>", "", [("time", {})]),
    ("JSON in tags", "glm", f"<tool_call>\n{HERMES_CALL}\n</tool_call>", "", [PARIS]),
    ("no markers", "gemma4", 'call:weather{city:<|"|>Paris<|"|>}', "", [PARIS]),
    ("a quote in a string", "gemma4", '<|tool_call>call:weather{city:<|"|>a "b"\\<|"|>,days:3}<tool_call|>', "", [("weather", {"city": 'a "b"\\', "days": 3})]),
    ("lone channel markers", "gemma4", "<|channel><|channel>thought<channel|>Hello.<channel|>", "Hello.", []),
    ("analysis calls", "harmony", '<|channel|>analysis to=functions.weather code<|message|>{"city": "Paris"}<|call|>', "", [PARIS]),
    ("no namespace", "harmony", '<|start|>assistant<|channel|>commentary to=weather json<|message|>{"city": "Paris"}<|call|>', "", [PARIS]),
    ("to the user", "harmony", "<|channel|>commentary to=assistant<|channel|>final<|message|>Hello.<|end|>", "Hello.", []),
    ("no JSON", "harmony", "<|channel|>commentary to=functions.weather<|message|>Paris<|call|>", "Paris", []),
    ("a section without begin", "kimi-k2", '<|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>{"city": "Paris"}', "", [PARIS]),
    ("JSON instead", "lfm2", f"<|tool_call_start|>[{HERMES_CALL}]<|tool_call_end|>", "", [PARIS]),
    ("a link, no call", "lfm2", "See [weather](https://a.b) [1].", "See [weather](https://a.b) [1].", []),
    ("the opening marker twice", "hermes", f"<tool_call>\n<tool_call>\n{HERMES_CALL}\n</tool_call>\n</tool_call>", "", [PARIS]),
    ("the opening marker twice", "function-tags", "<tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "", [PARIS]),
    ("the opening marker twice", "glm", "<tool_call><tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>", "", [PARIS]),
    ("no arguments, as PHP writes them", "hermes", '<tool_call>{"name": "time", "arguments": []}</tool_call>', "", [("time", {})]),
    ("no arguments, as PHP writes them", "mistral-list", '[TOOL_CALLS] [{"name": "time", "arguments": [ ]}]', "", [("time", {})]),
    ("no marker, in a code fence", "hermes", f"Look.\n\n```json\n{HERMES_CALL}\n```", "Look.", [PARIS]),
    ("no marker, a list", "hermes", f"[{HERMES_CALL}, {ROME_CALL}]", "", [PARIS, ROME]),
    ("no marker, a list", "mistral-list", f"[{HERMES_CALL}, {ROME_CALL}]", "", [PARIS, ROME]),
    ("code, no call", "hermes", f"```json\n{HERMES_CALL.replace('weather', 'w')}\n```", f"```json\n{HERMES_CALL.replace('weather', 'w')}\n```", []),
    ("code about a call", "mistral-list", f"Write\n```json\n[{HERMES_CALL}]\n```\nfor it.", f"Write\n```json\n[{HERMES_CALL}]\n```\nfor it.", []),
    ("spaces around the marker", "mistral", '[TOOL_CALLS] weather [ARGS] {"city": "Paris"}', "", [PARIS]),
    ("names in quotes", "function-tags", '<tool_call>\n<function="weather">\n<parameter="city">\nParis\n</parameter>\n</function>\n</tool_call>', "", [PARIS]),
    ("names as attributes", "function-tags", "<tool_call>\n<function name='weather'>\n<parameter name=\"city\">Paris</parameter>\n</function>\n</tool_call>", "", [PARIS]),
    ("names as attributes, no marker", "function-tags", '<function name="weather">\n<parameter name="city">\nParis\n</parameter>\n</function>', "", [PARIS]),
    ("the notation of V3", "deepseek-v3.1", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", [PARIS]),
    ("the notation of V3.1", "deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", [PARIS]),
    ("another channel", "harmony", '<|channel|>commentary to=functions.weather<|channel|>json<|message|>{"city": "Paris"}<|call|>', "", [PARIS]),
    ("another constraint", "harmony", '<|channel|>commentary to=functions.weather <|constrain|>response<|message|>{"city": "Paris"}<|call|>', "", [PARIS]),
    ("a result made up", "harmony", "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>sunny<|end|>", "sunny", []),
    ("an opening marker after the call", "hermes", f"<tool_call>\n{HERMES_CALL}\n<tool_call>\n", "", [PARIS]),
    ("an empty pair after the call", "hermes", f"<tool_call>{HERMES_CALL}</tool_call>\n<tool_call>\n</tool_call>", "", [PARIS]),
    ("a namespace", "hermes", f"<tool_call>{HERMES_CALL.replace('weather', 'functions.weather')}</tool_call>", "", [PARIS]),
    ("another's name with a dot", "hermes", '<tool_call>{"name": "mail.send", "arguments": {"a": 1}}</tool_call>', "", [("mail.send", {"a": 1})]),
    ("a namespace", "function-tags", "<tool_call>\n<function=functions.weather>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", "", [("weather", {"days": 3})]),
    ("a namespace", "minimax-m2", '<minimax:tool_call>\n<invoke name="functions.weather">\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>', "", [("weather", {"days": 3})]),
    ("a namespace", "mistral", '[TOOL_CALLS]functions.weather[ARGS]{"city": "Paris"}', "", [PARIS]),
    ("a namespace", "lfm2", '<|tool_call_start|>[default_api.weather(city="Paris")]<|tool_call_end|>', "", [PARIS]),
    ("two namespaces", "kimi-k2", '<|tool_call_begin|>functions.default_api.weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>', "", [PARIS]),
    ("no arguments at all", "mistral", "[TOOL_CALLS]time[ARGS]", "", [("time", {})]),
    ("an empty list", "granite3", "<|tool_call|>[]", "", []),
    ("an empty list", "mistral-list", "[TOOL_CALLS] []", "", []),
    ("an empty list", "phi4-mini", "functools[ ]", "", []),
    ("arguments as args", "hermes", HERMES_CALL.join(("<tool_call>", "</tool_call>")).replace("arguments", "args"), "", [PARIS]),
    ("arguments as input", "hermes", HERMES_CALL.replace("arguments", "input"), "", [PARIS]),
    ("arguments as input", "llama3", HERMES_CALL.replace("arguments", "input"), "", [PARIS]),
    ("arguments as kwargs in a list", "mistral-list", f"[TOOL_CALLS][{HERMES_CALL.replace('arguments', 'kwargs')}]", "", [PARIS]),
    ("arguments as params", "function-tags", f"<tool_call>{HERMES_CALL.replace('arguments', 'params')}</tool_call>", "", [PARIS]),
    ("a name under another key", "hermes", f"<tool_call>{HERMES_CALL.replace('name', 'tool_name')}</tool_call>", "", [PARIS]),
    ("an input that is text", "hermes", '<tool_call>{"name": "weather", "input": "x", "arguments": {"city": "Paris"}}</tool_call>', '"input": "x"', [PARIS]),
    ("an input that is text", "mistral-list", '[TOOL_CALLS][{"name": "weather", "input": "x", "arguments": {"city": "Paris"}}]', '{"input": "x"}', [PARIS]),
    ("only an input that is text", "hermes", '<tool_call>{"name": "weather", "input": "x"}</tool_call>', '<tool_call>{"name": "weather", "input": "x"}</tool_call>', []),
    ("a tool that is no name", "hermes", '<tool_call>{"tool": {"x": 1}, "name": "weather", "arguments": {"city": "Paris"}}</tool_call>', '"tool": {"x": 1}', [PARIS]),
    ("the name before the object", "hermes", '<tool_call>\nweather\n{"city": "Paris"}\n</tool_call>', "", [PARIS]),
    ("in a code fence", "llama3", f"Look:\n```json\n{HERMES_CALL}\n```\nDone", "Look:Done", [PARIS]),
    ("as in Python", "llama3", '[weather(city="Paris"), time()]', "", [PARIS, ("time", {})]),
    ("as in Python, an unknown function", "llama3", '[w(city="Paris")]', '[w(city="Paris")]', []),
    ("an opening marker after the call", "function-tags", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n", "", [PARIS]),
    ("an empty pair after the call", "glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call><tool_call>\n</tool_call>", "", [PARIS]),
    ("an opening marker after the call", "kimi-k2", '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>', "", [PARIS]),
    ("an opening marker after the call", "mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]', "", [PARIS]),
    ("an opening marker after the call", "gemma4", '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_call>', "", [PARIS]),
    ("text after an opening marker after the call", "function-tags", "<tool_call>\n<function=time>\n</function>\n</tool_call><tool_call>ok", "<tool_call>ok", [("time", {})]),
    ("in a code fence", "glm", "Look:\n```xml\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>\n```\nDone", "Look:Done", [PARIS, ("time", {})]),
    ("in a code fence, with markers around", "deepseek-v3.1", '```json\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>\n```', "", [PARIS]),
    ("after code", "hermes", f"```python\nx = 1\n```\n<tool_call>{HERMES_CALL}</tool_call>\n```\nend", "```python\nx = 1\n``````\nend", [PARIS]),
    ("code before the end", "harmony", "<|channel|>final<|message|>```py\nx = 1\n```<|return|>", "```py\nx = 1\n```", []),
    ("the opening marker twice", "lfm2", '<|tool_call_start|><|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>', "", [PARIS]),
    ("the opening marker twice", "gemma4", '<|tool_call><|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>', "", [PARIS]),
    ("the opening marker twice", "mistral", '[TOOL_CALLS][TOOL_CALLS]weather[ARGS]{"city": "Paris"}', "", [PARIS]),
    ("the opening marker twice", "seed-oss", "<seed:tool_call><seed:tool_call>\n<function=time>\n</function>\n</seed:tool_call>", "", [("time", {})]),
    ("line ends of Windows", "function-tags", "<tool_call>\r\n<function=weather>\r\n<parameter=city>\r\nParis\r\n</parameter>\r\n</function>\r\n</tool_call>", "", [PARIS]),
    ("line ends of Windows", "functionary-v3.2", '>>>all\r\nI look.>>>weather\r\n{"city": "Paris"}', "I look.", [PARIS]),
    ("no line ends", "deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather```json{"city": "Paris"}```<｜tool▁call▁end｜>', "", [PARIS]),
    ("a channel of another name", "harmony", "<|channel|>analysisword<|message|>Hi", "analysiswordHi", []),
    ("a name and no more after the call", "deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>w', "<｜tool▁call▁begin｜>function<｜tool▁sep｜>w", [PARIS]),
    ("tools around it", "hermes", f"I look.\n<tools>\n{HERMES_CALL}\n</tools>", "I look.", [PARIS]),
    ("tool_calls as a key", "hermes", f'{{"tool_calls": [{HERMES_CALL}, {ROME_CALL}]}}', "", [PARIS, ROME]),
    ("tool_calls as a key, OpenAI's calls", "llama3", '{"tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}}]}', "", [PARIS]),
    ("tool_calls as a key, after a marker", "hermes", f'<tool_call>\n{{"tool_calls": [{HERMES_CALL}]}}\n</tool_call>', "", [PARIS]),
    ("tool_calls as a key, in a fence", "hermes", f'I look.\n```json\n{{ "tool_calls" : [ {HERMES_CALL} ] }}\n```', "I look.", [PARIS]),
    ("tool_calls as a key, an unknown name", "hermes", f'{{"tool_calls": [{HERMES_CALL}, {{"name": "f", "arguments": {{}}}}]}}', f'{{"tool_calls": [{HERMES_CALL}, {{"name": "f", "arguments": {{}}}}]}}', []),
    ("tool_calls as a key, beside others", "llama3", f'{{"tool_calls": [{HERMES_CALL}], "n": 1}}', f'{{"tool_calls": [{HERMES_CALL}], "n": 1}}', []),
    ("tool_calls as a key, empty", "hermes", '{"tool_calls": []}', '{"tool_calls": []}', []),
    ("tool_calls as a key, no list", "llama3", '{"tool_calls": "weather"}', '{"tool_calls": "weather"}', []),
    ("action and action_input", "hermes", '{"action": "weather", "action_input": {"city": "Paris"}}', "", [PARIS]),
    ("action and action_input", "hermes", '<tool_call>{"action_input": {"city": "Paris"}, "action": "weather"}</tool_call>', "", [PARIS]),
    ("action and action_input", "llama3", '```json\n{"action": "weather", "action_input": {"city": "Paris"}}\n```', "", [PARIS]),
    ("an action that is no function", "llama3", '{"action": "Final Answer", "action_input": "Hi."}', '{"action": "Final Answer", "action_input": "Hi."}', []),
    ("an action among other keys", "hermes", '{"action": "weather", "at": 3}', '{"action": "weather", "at": 3}', []),
    ("arguments as a string", "mistral", '[TOOL_CALLS]weather[ARGS]"{\\"city\\": \\"Paris\\"}"', "", [PARIS]),
    ("arguments as a string", "mistral", 'ok[TOOL_CALLS]weather "{ \\"city\\": \\"Paris\\" }" [TOOL_CALLS]weather{"city": "Rome"}', "ok", [PARIS, ROME]),
    ("arguments as a string", "kimi-k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"{\\"city\\": \\"Paris\\"}"<|tool_call_end|><|tool_calls_section_end|>', "", [PARIS]),
    ("arguments as a string", "harmony", '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"{\\n\\"city\\": \\"Paris\\"}"<|call|>', "", [PARIS]),
    ("arguments as a string", "functionary-v3.2", '>>>weather\n"{\\"city\\": \\"Paris\\"}"', "", [PARIS]),
    ("a string without an object", "mistral", '[TOOL_CALLS]weather[ARGS]"Paris"', '[TOOL_CALLS]weather[ARGS]"Paris"', []),
    ("a string that is not closed", "mistral", '[TOOL_CALLS]weather[ARGS]"{\\"city\\": 1}', '[TOOL_CALLS]weather[ARGS]"{\\"city\\": 1}', []),
    ("tool_calls around it", "hermes", f"<tool_calls>\n[{HERMES_CALL}, {ROME_CALL}]\n</tool_calls>", "", [PARIS, ROME]),
    ("tool_calls around its marker", "hermes", f"<tool_calls>\n<tool_call>\n{HERMES_CALL}\n</tool_call>\n</tool_calls>", "", [PARIS]),
    ("function_call around it", "granite4", f"<function_call>\n{HERMES_CALL}\n</function_call>", "", [PARIS]),
    ("the list of tools, no call", "hermes", "<tools>\nweather\n</tools>", "<tools>\nweather\n</tools>", []),
    ("the marker of Hermes", "llama3", f"<tool_call>{HERMES_CALL}</tool_call>", "", [PARIS]),
    ("the name under another key", "llama3", HERMES_CALL.replace("name", "function_name"), "", [PARIS]),
    ("no marker, no list", "mistral-list", HERMES_CALL, "", [PARIS]),
    ("two closing markers of text that is no call", "function-tags", "<tool_call>\n<function=time>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\nParis\n</function>\n</tool_call>", "<tool_call>\n<function=weather>\nParis\n</function>\n</tool_call>", [("time", {})]),
    ("positions, no names", "lfm2", '<|tool_call_start|>[weather("Paris", days=3)]<|tool_call_end|>', "", [("weather", {"city": "Paris", "days": 3})]),
    ("positions, no names, an unknown function", "lfm2", '<|tool_call_start|>[w("Paris")]<|tool_call_end|>', '<|tool_call_start|>[w("Paris")]<|tool_call_end|>', []),
    ("an object around the arguments", "lfm2", '<|tool_call_start|>[weather(**{"city": "Paris"}), weather({"city": "Rome"})]<|tool_call_end|>', "", [PARIS, ROME]),
    ("keys in quotes", "lfm2", '<|tool_call_start|>[weather("city"="Paris")]<|tool_call_end|>', "", [PARIS]),
    ("a string over lines", "lfm2", '<|tool_call_start|>[weather(city="""Pa\n"r"is""")]<|tool_call_end|>', "", [("weather", {"city": 'Pa\n"r"is'})]),
    ("as in Python", "hermes", '<tool_call>\nweather(city="Paris")\n</tool_call>', "", [PARIS]),
    ("as in Python, a list, not closed", "granite4", '<tool_call>[weather(city="Paris"), time()]', "", [PARIS, ("time", {})]),
    ("as in Python", "glm", '<tool_call>weather(city="Paris", days=3)</tool_call>ok', "ok", [("weather", {"city": "Paris", "days": 3})]),
    ("as in Python", "function-tags", '<tool_call>\nweather(city="Paris")\n</tool_call>', "", [PARIS]),
    ("as in Python", "mistral", '[TOOL_CALLS]weather(city="Paris")', "", [PARIS]),
    ("as in Python", "gemma4", '<|tool_call>call:weather(city="Paris")<tool_call|>', "", [PARIS]),
    ("as in Python, after the marker of the interpreter", "llama3", '<|python_tag|>weather(city="Paris")', "", [PARIS]),
    ("as in Python, no marker", "lfm2", '[weather(city="Paris")]<|tool_call_end|>', "", [PARIS]),
    ("positions, no names", "hermes", '<tool_call>weather("Paris", 3)</tool_call>', "", [("weather", {"city": "Paris", "days": 3})]),
    ("positions, no names", "llama3", '[weather("Paris")]', "", [PARIS]),
    ("arguments in a list", "hermes", '<tool_call>{"name": "weather", "arguments": [{"city": "Paris"}]}</tool_call>', "", [PARIS]),
    ("arguments in a list, before the name", "llama3", '{"parameters": [{"city": "Paris"}], "name": "weather"}', "", [PARIS]),
    ("arguments in a list", "mistral-list", '[TOOL_CALLS] [{"name": "weather", "arguments": [{"city": "Paris"}]}]', "", [PARIS]),
    ("arguments in a list", "mistral", '[TOOL_CALLS]weather[ARGS][{"city": "Paris"}]', "", [PARIS]),
    ("arguments in a list", "harmony", '<|channel|>commentary to=functions.weather<|message|>[{"city": "Paris"}]<|call|>', "", [PARIS]),
    ("two objects for arguments", "hermes", '<tool_call>{"name": "weather", "arguments": [{"city": "Paris"}, {"days": 1}]}</tool_call>', '<tool_call>{"name": "weather", "arguments": [{"city": "Paris"}, {"days": 1}]}</tool_call>', []),
    ("no opening marker", "glm", "weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>", "", [PARIS, ("time", {})]),
    ("no opening marker, after prose", "glm", "I look.\nweather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>", "I look.", [PARIS]),
    ("no opening marker, after reasoning", "glm", "<think></think>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>", "", [PARIS]),
    ("no opening marker, an unknown function", "glm", "w\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>", "w\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>", []),
    ("a function's name in prose", "glm", "weather\n\ntime is\nweather", "weather\n\ntime is\nweather", []),
    ("no opening marker", "mistral", 'I look.\nweather[ARGS]{"city": "Paris"}', "I look.", [PARIS]),
    ("no opening marker", "mistral-list", 'weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}', "", [PARIS]),
    ("no opening marker, no arguments", "mistral", "weather[ARGS] ends the name", "weather[ARGS] ends the name", []),
    ("no opening marker in a section", "kimi-k2", '<|tool_calls_section_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>', "", [PARIS]),
    ("no marker before the arguments", "kimi-k2", '<|tool_call_begin|>functions.weather:0{"city": "Paris"}<|tool_call_end|>', "", [PARIS]),
    ("no opening marker", "deepseek-v3.1", '<｜tool▁calls▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", [PARIS]),
    ("no opening marker", "deepseek", 'function<｜tool▁sep｜>weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>', "", [PARIS]),
    ("no opening marker", "hunyuan-v3", "weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>", "", [PARIS]),
    ("no opening marker", "lfm2", '[weather(city="Paris")]', "", [PARIS]),
    ("a name without its tag", "function-tags", "<tool_call>\nweather\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "", [PARIS]),
    ("a name without its tag, no opening marker", "function-tags", "I look.\nweather\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "I look.", [PARIS]),
    ("half a tag", "function-tags", "=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "", [PARIS]),
    ("the tag is not closed", "function-tags", "<tool_call>\n<function=weather\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "", [PARIS]),
    ("an unknown name without its tag", "function-tags", "w\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "w\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", []),
    ("no markers, JSON", "function-tags", HERMES_CALL, "", [PARIS]),
    ("the name before the object", "function-tags", '<tool_call>weather\n{"city": "Paris"}</tool_call>', "", [PARIS]),
    ("tags of Qwen3-Coder", "hermes", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "", [PARIS]),
    ("tags of Qwen3-Coder", "glm", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "", [PARIS]),
    ("no call:", "gemma4", '<|tool_call>weather{city:<|"|>Paris<|"|>}<tool_call|>', "", [PARIS]),
    ("JSON instead", "gemma4", f"<|tool_call>{HERMES_CALL}<tool_call|>", "", [PARIS]),
    ("JSON instead", "minimax-m2", f"<minimax:tool_call>\n{HERMES_CALL}\n</minimax:tool_call>", "", [PARIS]),
    ("JSON instead", "deepseek-v3.1", f"<｜tool▁calls▁begin｜>{HERMES_CALL}<｜tool▁calls▁end｜>", "", [PARIS]),
    ("JSON instead", "kimi-k2", f"<|tool_calls_section_begin|>{HERMES_CALL}<|tool_calls_section_end|>", "", [PARIS]),
    ("JSON instead", "seed-oss", f"<seed:tool_call>{HERMES_CALL}</seed:tool_call>", "", [PARIS]),
    ("JSON instead", "hunyuan-v3", f"<tool_call>{HERMES_CALL}</tool_call>", "", [PARIS]),
    ("JSON instead", "deepseek-dsml", f"<｜DSML｜tool_calls>\n{HERMES_CALL}\n</｜DSML｜tool_calls>", "", [PARIS]),
    ("tags without their prefix", "deepseek-dsml", '<function_calls>\n<invoke name="weather">\n<parameter name="city" string="true">Paris</parameter>\n</invoke>\n</function_calls>', "", [PARIS]),
    ("another's opening marker", "seed-oss", "<tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>", "", [PARIS]),
    ("no marker, a list", "phi4-mini", f"[{HERMES_CALL}]", "", [PARIS]),
    ("no marker, a list", "granite3", f"[{HERMES_CALL}]", "", [PARIS]),
    ("only the name", "hermes", "<tool_call>\ntime\n</tool_call>ok", "ok", [("time", {})]),
    ("only the name", "function-tags", "<tool_call>\ntime\n</tool_call>", "", [("time", {})]),
    ("only a name, an unknown function", "hermes", "Write <tool_call>name</tool_call> for it.", "Write <tool_call>name</tool_call> for it.", []),
    ("the name as the key", "hermes", '<tool_call>{"weather": {"city": "Paris"}}</tool_call>', "", [PARIS]),
    ("the name as the key, and a name", "hermes", '<tool_call>{"weather": {"x": 1}, "name": "time", "arguments": {"a": 1}}</tool_call>', '"weather": {"x": 1}', [("time", {"a": 1})]),
    ("two names as keys", "hermes", '<tool_call>{"weather": {"x": 1}, "time": {}}</tool_call>', '<tool_call>{"weather": {"x": 1}, "time": {}}</tool_call>', []),
    ("doubled braces", "hermes", '<tool_call>{{"name": "weather", "arguments": {{"city": "Paris"}}}}</tool_call>', "", [PARIS]),
    ("doubled braces, then more", "hermes", '<tool_call>{"arguments": {{"area": {{"x": 1}}, "city": "Paris"}}, "name": "weather"}</tool_call>ok', "ok", [("weather", {"area": {"x": 1}, "city": "Paris"})]),
    ("a string in triple quotes", "hermes", '<tool_call>{"name": "weather", "arguments": {"city": """Pa"r"\nis"""}}</tool_call>', "", [("weather", {"city": 'Pa"r"\nis'})]),
    ("a name without quotes", "hermes", '<tool_call>{"name": weather, "arguments": {"city": "Paris"}}</tool_call>', "", [PARIS]),
    ("two code fences", "hermes", f"```json\n{HERMES_CALL}\n```\n```json\n{ROME_CALL}\n```", "", [PARIS, ROME]),
    ("tags of Qwen3-Coder, no marker", "hermes", "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>", "", [PARIS]),
    ("the key in the closing tag", "function-tags", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter=city>\n</function>\n</tool_call>", "", [PARIS]),
    ("no tag closes the argument", "function-tags", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</function>\n</tool_call>", "", [PARIS]),
    ("only the call is closed", "function-tags", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</tool_call>", "", [PARIS]),
    ("a tag that closes itself", "function-tags", "<tool_call>\n<function=time/>\n</tool_call>", "", [("time", {})]),
    ("tools around it", "function-tags", "<tools>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tools>", "", [PARIS]),
    ("spaces in the tags", "function-tags", "<tool_call>\n<function = weather>\n<param = city>\nParis\n</param>\n</function>\n</tool_call>", "", [PARIS]),
    ("tags of MiniMax", "function-tags", '<tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n</tool_call>', "", [PARIS]),
    ("no tag closes the argument", "glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris\n</tool_call>", "", [PARIS]),
    ("single quotes", "minimax-m2", "<minimax:tool_call>\n<invoke name='weather'>\n<parameter name='city'>Paris</parameter>\n</invoke>\n</minimax:tool_call>", "", [PARIS]),
    ("another's marker around it", "minimax-m2", '<function_calls>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n</function_calls>', "", [PARIS]),
    ("the call is not closed", "minimax-m2", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</minimax:tool_call>ok', "ok", [PARIS]),
    ("no tag closes the argument", "minimax-m2", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris\n</invoke>\n</minimax:tool_call>', "", [PARIS]),
    ("no tag closes the argument", "deepseek-dsml", '<｜DSML｜tool_calls><｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Paris\n</｜DSML｜invoke></｜DSML｜tool_calls>', "", [PARIS]),
    ("a section in the singular", "kimi-k2", '<|tool_call_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_section_end|>', "", [PARIS]),
    ("no separator", "deepseek-v3.1", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather\n{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", [PARIS]),
    ("no separator", "deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>', "", [PARIS]),
    ("the other bars", "deepseek-v3.1", '<|tool_calls_begin|><|tool_call_begin|>weather<|tool_sep|>{"city": "Paris"}<|tool_call_end|><|tool_calls_end|>', "", [PARIS]),
    ("another section", "deepseek", '<｜tool▁calls｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool calls end｜>', "", [PARIS]),
    ("spaces", "gemma4", '<|tool_call>call: weather {city: <|"|>Paris<|"|>}<tool_call|>', "", [PARIS]),
    ("another's marker", "gemma4", '<tool_call>call:weather{city:<|"|>Paris<|"|>}</tool_call>', "", [PARIS]),
    ("no opening marker", "cohere", '[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}]<|END_ACTION|>', "", [PARIS]),
    ("the marker of Granite 3", "granite4", f"<|tool_call|>{HERMES_CALL}", "", [PARIS]),
    ("only the closing marker", "nemotron-v2", f"[{HERMES_CALL}]</TOOLCALL>", "", [PARIS]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"), [one[1:] for one in WRITTEN], ids=[f"{one[1]}: {one[0]}" for one in WRITTEN]
)
def test_a_call_that_is_almost_in_its_notation(name: str, text: str, content: str, calls: list[Any]) -> None:
    assert says(name, text) == (content, "", calls)


def test_calls_almost_in_the_notation_of_every_family_are_read_alike_however_they_are_cut() -> None:
    """A sample of `make chaos ARGS='near-calls'`."""
    assert set(FAMILIES) == {name for name, template in TEMPLATES.items() if template.has_calls}
    found, failures = near_calls(answers=400, seed=36)
    assert not failures
    assert found["fits"] == 400


MARKED = {
    "hermes-thinking": (f"<tool_call>\n{HERMES_CALL}\n</tool_call>", "<think>\n"),
    "function-tags": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "<think>\n",
    ),
    "glm": ("<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>", "<think>"),
    "deepseek-dsml": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Paris'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "<think>",
    ),
    "kimi-k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        "<think>",
    ),
    "lfm2": ('<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>', "<think>"),
}


@pytest.mark.parametrize("name", MARKED)
def test_a_call_in_open_reasoning_counts_if_the_answer_ends_with_it(name: str) -> None:
    call, opening = MARKED[name]
    assert says(name, f"I look.\n\n{call}", opening=opening) == ("", "I look.", [PARIS])
    assert says(name, f"I look.\n\n{call}\n", opening=opening, parallel=False) == ("", "I look.", [PARIS])
    draft = f"I could\n{call}\nbut no."
    assert says(name, f"{draft}</think>\nHi.", opening=opening) == ("Hi.", draft, [])
    assert says(name, draft, opening=opening) == ("", draft, [])
    assert says(name, f"{draft}\n{call}", opening=opening) == ("", draft, [PARIS])
    assert says(name, f"I look.\n{call}", opening=opening, cut=True)[2] == [], "the reasoning may have gone on"
    assert says(name, f"hm</think>\n{call}", opening=opening) == ("", "hm", [PARIS])


@pytest.mark.parametrize(
    "name", ["hermes-thinking", "function-tags", "glm", "deepseek-thinking", "minimax-m2", "thinking"]
)
@pytest.mark.parametrize(
    ("opening", "text", "said"),
    [
        ("<think>\n", "hm</think></think>Hi", ("Hi", "hm")),
        ("<think>\n", "hm\n</think>\n</think>\n\nHi", ("Hi", "hm")),
        ("<think>\n\n</think>\n\n", "</think>\n\nHi", ("Hi", "")),
        ("", "</think>", ("", "")),
        ("", "<think></think>Hi", ("Hi", "")),
        ("", "<think>hm</think>\n<think></think>Hi", ("Hi", "hm")),
        ("", "Close with `</think>`", ("Close with `</think>`", "")),
        ("<think>", "hm</think>Hi</think>x", ("Hi</think>x", "hm")),
    ],
)
def test_reasoning_that_is_closed_again_leaves_no_marker(
    name: str, opening: str, text: str, said: tuple[str, str]
) -> None:
    """Text before a marker stays as it is: the marker may be what the text is about."""
    assert says(name, text, opening=opening)[:2] == said


def test_an_opening_marker_that_the_model_writes_again_is_no_reasoning() -> None:
    for text in ("<think>hm</think>ok", "\n<think>\nhm</think>\nok", "<think><think>hm</think>ok"):
        assert says("hermes-thinking", text, opening="<think>\n") == ("ok", "hm", [])
    assert says("hermes-thinking", "a <think> b</think>ok", opening="<think>\n")[1] == "a <think> b"


@pytest.mark.parametrize(
    "recipient", ["python", "container.exec", "browser.search", "assistant", "user", "functions.x"]
)
@pytest.mark.parametrize("form", ["analysis to={} code", "commentary to={} <|constrain|>json", "analysis to={}"])
def test_no_marker_of_gpt_oss_is_content(recipient: str, form: str) -> None:
    text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>{form.format(recipient)}<|message|>ls<|call|>"
    content, reasoning, _ = says("harmony", text + "<|start|>assistant<|channel|>final<|message|>Done.<|return|>")
    assert content.endswith("Done.")
    assert "<|" not in content + reasoning
    assert "ls" in content + reasoning


def test_a_long_string_between_tags_is_passed_on_as_it_is_written() -> None:
    reader = TEMPLATES["function-tags"].reader(Reading("", calls=True, tools=TOOLS))
    reader.push("<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\n")
    sent = []
    for line in range(200):
        reader.push(f'line "{line}"\n')
        sent.append(sum(len(call.arguments) for call in reader.take()[2]))
    assert sum(sent[:10]) == 0, "a short call is passed on when it is complete"
    assert all(sent[100:])
    reader.push("</parameter>\n</function>\n</tool_call>")
    reader.finish(cut=False)


def test_the_template_that_transformers_ships_for_qwen3() -> None:
    """Its closing marker is that of the call, so the tag of the function stays in the body."""
    fields = {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "repeats": True,
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    }
    template = find("", {"start_anchor": "<|im_start|>assistant\n", "fields": fields})
    assert template is not None
    text = "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    assert says(template, f"ok\n{text}\n{text}") == ("ok", "", [("weather", {"days": 3})] * 2)


# --------------------------------------------------------------------------------------------------- JSON and types


def written(text: str, pieces: list[str]) -> tuple[str, Event]:
    """Read a JSON text in chunks, and complete it."""
    reader, rest, out = JsonReader(), "", ""
    reader.strict = False
    for piece in [*pieces, None]:
        rest += piece or ""
        at, event = reader.read(rest, 0, final=piece is None)
        rest, out = rest[at:], out + reader.take()
        if event in (Event.END, Event.BAD):
            return out, event
    reader.complete()
    return out + reader.take(), Event.MORE


def test_valid_json_passes_as_it_is() -> None:
    rng = random.Random(1)
    leaves = [1, -2.5, 1e300, True, False, None, "x", 'a"b\\ \n é 😀 \x01', "</tool_call>", "", "it's"]

    def value(depth: int) -> Any:
        kind = rng.randrange(3) if depth < 4 else 0
        if kind == 0:
            return rng.choice(leaves)
        if kind == 1:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice('ab"\\é '): value(depth + 1) for _ in range(rng.randrange(4))}

    for _ in range(2000):
        text = json.dumps({"a": value(0)}, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5)
        at = rng.randrange(len(text))
        assert written(text, [text[:at], text[at:]]) == written(text, list(text)) == (text, Event.END)


def test_whatever_a_model_writes_becomes_valid_json_and_the_same_in_pieces() -> None:
    rng = random.Random(2)
    parts = [*"{}[]\"':, a1\\\n()=<-", "true", "None", "u12", "\\ud83d", '"k": ']
    for _ in range(20_000):
        text = "{" + "".join(rng.choice(parts) for _ in range(rng.randrange(1, 15)))
        found = written(text, [text])
        assert written(text, list(text)) == found
        if found[1] is not Event.BAD:
            json.loads(found[0])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{'a': 'it\\'s', b: [1, 2,], c: Rome, }", {"a": "it's", "b": [1, 2], "c": "Rome"}),
        ('{"a": "he said "hi" twice", "b": 1 "c": 2}', {"a": 'he said "hi" twice', "b": 1, "c": 2}),
        ('{"a": "\\d+", "b": "\\ud83d.", "c": "\\ud83d\\ude00"}', {"a": "\\d+", "b": "\ufffd.", "c": "😀"}),
        ('{"a": {"b": [1', {"a": {"b": [1]}}),
        ('{"a": NaN, "b": (1, 2), "c":}', {"a": None, "b": [1, 2], "c": None}),
        ('{"a": 1}} x', None),
        ("a", None),
    ],
)
def test_what_is_almost_json_is_repaired_by_rule(text: str, found: Any) -> None:
    written = repaired(text)
    assert (None if written is None else json.loads(written)) == found


@pytest.mark.parametrize(
    ("text", "types", "found"),
    [
        ("3", ["string"], '"3"'),
        ("3", [], '"3"'),
        ("3.0", ["integer"], "3"),
        (" 3 ", ["integer", "string"], "3"),
        ("1e999", ["number"], "1e999"),
        ("1", ["boolean", "integer"], "1"),
        ("1", ["boolean"], "true"),
        ("True", ["boolean"], "true"),
        ("null", ["string", "null"], "null"),
        ("{'a': 1}", ["object"], '{"a": 1}'),
        ("{not json", ["object", "string"], '"{not json"'),
    ],
)
def test_a_text_becomes_a_value_of_its_type(text: str, types: list[str], found: str) -> None:
    assert typed(text, types) == found


def test_references_are_followed_and_end() -> None:
    loop = {"$ref": "#/$defs/Loop"}
    tool = {
        "function": {"name": "f", "parameters": {"properties": {"a": loop}, "$defs": {"Loop": {"anyOf": [loop, loop]}}}}
    }
    [found] = reduced([tool])
    assert found["function"]["parameters"]["properties"] == {"a": {"type": []}}
    assert Tools([found]).is_text("f", "a")


@pytest.mark.parametrize("types", [["object"], ["array"], ["object", "null"]])
def test_a_long_argument_is_repaired_as_it_arrives(types: list[str]) -> None:
    """Each part costs work for its own characters; the end costs none for those before it."""
    begin = "{" if "object" in types else "["
    member = "'a': 'x\ny', " if begin == "{" else "'x\ny', "
    argument, reads = ArgumentText(types), Counter[int]()
    inner = JsonReader.read

    def counted(reader: JsonReader, text: str, at: int, *, final: bool = False) -> tuple[int, Event]:
        reads[len(text) - at] += 1
        return inner(reader, text, at, final=final)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonReader, "read", counted)
        argument.push(begin)
        for _ in range(1000):
            argument.push(member)
        written = argument.value()
    assert len(argument.text) > WHOLE_CHARS
    assert max(reads) <= 2 * len(member)
    assert json.loads(written) == ({"a": "x\ny"} if begin == "{" else ["x\ny"] * 1000)


def test_a_long_string_of_arguments_is_not_repaired_but_stays_text() -> None:
    """Work at the end of a call is bounded; valid JSON of any length is an object."""
    valid_text, broken = json.dumps({"a": "x" * 2 * WHOLE_CHARS}), "{'a': '" + "x" * 2 * WHOLE_CHARS + "'}"
    assert repaired(valid_text) == valid_text
    assert repaired(broken) is None
    assert repaired(broken.replace("x" * WHOLE_CHARS, "")) == '{"a": ""}'


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.lists(st.integers(1, 60)))
def test_json_is_repaired_alike_however_it_is_cut(value: Any, cuts: list[int]) -> None:
    text = json.dumps([value], ensure_ascii=False)
    repair = Repair()
    for first, end in itertools.pairwise([0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]):
        repair.push(text[first:end])
    assert json.loads(repair.finish() or "") == [value]


@pytest.mark.parametrize(
    "text", ['{"a": "\\ud83d"}', '{"\\ude00": 1}', '["\\ud83d\\ud83d\\ude00"]', '{"a": "\\\\ud83d"}']
)
@pytest.mark.parametrize("types", [["object", "array"], ["object", "array", "string"]])
def test_half_surrogates_of_typed_arguments_become_replacement_characters(text: str, types: list[str]) -> None:
    written = typed(text, types)
    assert json.loads(written.encode()) == json.loads(written)
    assert json.loads(written) == without_surrogates(json.loads(text))
