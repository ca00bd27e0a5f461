"""Finds the features of a chat template by rendering small test chats when the model is loaded.

    template --probe: some small chats--> Dialect --> `fit_history.py` changes messages, `chat_template.py` options

The source of a template shows only names, not their effects: the name `thinking` may be a field of messages.  So each
feature is tested by a rendering that contains a marker, or by two renderings that differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
from jinja2 import Environment, TemplateSyntaxError

from quire.service.chat_templates.literal import KeyOrder

TEMPLATES_KEPT = 4  # size of the cache of `names_in`
PROBE = "quireprobe"
EFFORT = "reasoning_effort"
SWITCHES = ("enable_thinking", "thinking")  # template variables that switch reasoning on and off, by frequency

Render = Callable[..., Any]  # (messages, tools, **variables) -> the text; may raise any error


class Dialect(msgspec.Struct, frozen=True):
    """The features of a chat template."""

    parts: bool = False  # reads content that is a list of parts
    text: bool = True  # reads content that is a string
    text_roles: frozenset[str] = frozenset()  # roles for which it cannot read a list of several parts
    arguments: bool = True  # needs arguments of tool calls as an object; False: as a string of JSON
    tools: bool = False  # `tools` changes the prompt
    effort: bool = False  # `reasoning_effort` changes the prompt
    effort_none: bool = False  # supports the value "none" of `reasoning_effort`
    constants: frozenset[str] = frozenset()  # string constants in its source, for which it may search content
    switch: str = ""  # the variable of SWITCHES that changes the prompt; "": none does
    # Shapes of a conversation that it renders without loss.  `fit_history.py` changes other shapes to these.
    system: bool = True  # a system message at the beginning
    developer: bool = False  # messages of role developer, which its source names
    any_role: bool = False  # messages of any unknown role, whose name it writes into the prompt
    several_systems: bool = True  # several system messages at the beginning
    later_system: bool = True  # system messages after a user or assistant message
    system_alone: bool = True  # a system message without any other message
    system_beside_results: bool = True  # a system message, if the last message is not the user's
    userless: bool = True  # a chat without user messages
    users_in_row: bool = True  # two user messages in a row
    assistants_in_row: bool = True  # two assistant messages in a row
    assistant_first: bool = True  # an assistant message first
    calls: bool = True  # tool calls of the assistant
    results: bool = True  # messages of role tool
    orphan_results: bool = True  # tool results that follow no call
    parallel_calls: bool = True  # more than one call in a message
    content_with_calls: bool = True  # content next to calls in a message, even if other messages follow
    nine_letter_ids: bool = False  # call ids must have nine letters or digits
    sorts: KeyOrder = ""  # the order in which it writes the keys of an object
    any_arguments: bool = True  # a string of arguments that is no JSON object


@lru_cache(maxsize=TEMPLATES_KEPT)
def names_in(template: str) -> frozenset[str]:
    """Return all words in a template's source, which include all variables that it can read.

    Cached, since a client may send thousands of template arguments, each of which is looked up."""
    return frozenset(re.findall(r"\w+", template))


def probe(render: Render, template: str) -> Dialect:
    """Find the features of a chat template.  `template`: its source.

    If the template rejects a test chat for any reason, the tested feature counts as missing."""
    user = {"role": "user", "content": PROBE}
    parts = {"role": "user", "content": [{"type": "text", "text": PROBE}]}
    of_text, of_parts = _rendered(render, [user]), _rendered(render, [parts])
    reads_text = PROBE in of_text
    # A template that expects a string writes a list of parts as Python or JSON would.
    reads_parts = PROBE in of_parts and (of_parts == of_text or not (reads_text or "'type'" in of_parts))
    question = user if reads_text or not reads_parts else parts
    effort = _changes(render, [question], template, EFFORT, "low", "high")
    constants = _constants(template)
    found = Dialect(
        parts=reads_parts,
        text=reads_text or not reads_parts,
        arguments=_reads_objects(render, question),
        tools=_rendered(render, [question], [_tool()]) not in ("", _rendered(render, [question])),
        constants=constants,
        effort=effort,
        effort_none=effort and "none" in constants and bool(_rendered(render, [question], None, **{EFFORT: "none"})),
        switch=next((name for name in SWITCHES if _changes(render, [question], template, name, False, True)), ""),
    )
    return _Shapes(render, template, found).probe() if reads_text or reads_parts else found


def effort_variables(dialect: Dialect, effort: str) -> dict[str, Any]:
    """Return the template's variables for a reasoning effort; {} if it has none: then the effort has no effect.

    "none" switches reasoning off.  A template with only a switch supports no other effort."""
    if effort == "none" and not dialect.effort_none:
        return {dialect.switch: False} if dialect.switch else {}
    return {EFFORT: effort} if dialect.effort else {}


def thinking_variables(dialect: Dialect, thinking: bool) -> dict[str, Any]:
    """Return the template's variable that switches reasoning on or off; {} if the template has no such switch."""
    return {dialect.switch: thinking} if dialect.switch else {}


def _constants(template: str) -> frozenset[str]:
    """Return the string constants in a template's source."""
    try:
        written = [text[1:-1] for _, kind, text in Environment().lex(template) if kind == "string"]
        return frozenset(text.encode("ascii", "backslashreplace").decode("unicode-escape") for text in written)
    except (TemplateSyntaxError, UnicodeError):
        return frozenset()


def _changes(render: Render, messages: list[dict[str, Any]], template: str, name: str, *values: Any) -> bool:
    """Return whether a variable changes the prompt."""
    if name not in names_in(template):
        return False
    given = [{}, *({name: value} for value in values)]  # {}: no value, since a template may refuse all values but one
    texts = {_rendered(render, messages, None, add_generation_prompt=True, **variables) for variables in given}
    return len(texts - {""}) > 1


def _tool() -> dict[str, Any]:
    schema = {"type": "object", "properties": {PROBE: {"type": "string", "description": PROBE}}, "required": [PROBE]}
    return {"type": "function", "function": {"name": PROBE, "description": PROBE, "parameters": schema}}


def _reads_objects(render: Render, question: dict[str, Any]) -> bool:
    """Return whether the template writes arguments given as an object as JSON, not as a Python dict."""
    texts = []
    for arguments in ({PROBE: "x"}, json.dumps({PROBE: "x"})):
        function = {"name": PROBE, "arguments": arguments}
        call = {"id": "quire0123", "type": "function", "function": function}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "quire0123", "name": PROBE, "content": "1"}
        texts.append(_rendered(render, [question, answer, result], [_tool()]))
    return not texts[1] or (bool(texts[0]) and f"{{'{PROBE}'" not in texts[0])


def _rendered(
    render: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **variables: Any
) -> str:
    try:
        return str(render(messages, tools, **variables))
    except Exception:  # a template may raise any error, which means that it does not support this chat
        return ""


class _Shapes:
    """Finds the shapes of a conversation that a template renders.

    Each text of a test chat is a distinct word.  A template supports the chat if the rendered text has all words."""

    def __init__(self, render: Render, template: str, dialect: Dialect) -> None:
        self._render, self._template, self._dialect = render, template, dialect
        self._count = 0

    def probe(self) -> Dialect:
        """Return the dialect with the fields for shapes set."""
        return msgspec.structs.replace(
            self._dialect, **self._of_turns(), **self._of_calls(), text_roles=self._text_roles()
        )

    def _text_roles(self) -> frozenset[str]:
        if not (self._dialect.parts and self._dialect.text):
            return frozenset()
        say, call, result = self._say, self._call("quire0123"), self._result("quire0123")
        shapes = {
            "system": [say("system"), say("user")],
            "user": [say("user")],
            "assistant": [say("user"), say("assistant"), say("user")],
            "tool": [say("user"), call, result],
        }
        found = []
        for role, messages in shapes.items():
            parts = [{"type": "text", "text": self._word()} for _ in range(2)]
            given = [{**message, "content": parts} if message["role"] == role else message for message in messages]
            if self._renders(*messages) and not self._renders(*given):
                found.append(role)
        return frozenset(found)

    def _of_turns(self) -> dict[str, bool]:
        say, renders = self._say, self._renders
        named = re.search(r"""['"]developer['"]""", self._template) is not None
        system = renders(say("system"), say("user")) and renders(
            say("system"), say("user"), say("assistant"), say("user")
        )
        head = [say("system")] if system else []
        return {
            "system": system,
            "system_alone": renders(say("system")),
            "developer": named
            and renders(*head, say("developer"), say("user"))
            and self._differs("system", "developer"),
            "any_role": renders(say("user"), say(self._word())),
            "several_systems": renders(say("system"), say("system"), say("user")),
            "later_system": renders(*head, say("user"), say("system"))
            and renders(*head, say("user"), say("assistant"), say("system"), say("user")),
            "userless": renders(say("assistant"), say("assistant")) or renders(say("assistant")),
            "users_in_row": renders(say("user"), say("user")),
            "assistants_in_row": renders(say("user"), say("assistant"), say("assistant"), say("user")),
            "assistant_first": renders(say("assistant"), say("user")),
        }

    def _of_calls(self) -> dict[str, Any]:
        say, renders, call, result = self._say, self._renders, self._call, self._result
        shown = {ids: renders(say("user"), call(ids), result(ids)) for ids in ("call_quire_0", "quire0123")}
        ids = next((ids for ids, whole in shown.items() if whole), "")
        if not ids:
            calls = renders(say("user"), call("quire0123"))
            # A template without tool calls may write the role "tool" into a header that the model has never seen.
            known = "tool" in self._dialect.constants and not calls
            results = known and renders(say("user"), result("quire0123"), say("user"))
            return {"calls": calls, "results": results, "orphan_results": results}
        other = ids[:-1] + "7"
        text = self._word()
        speaking, final = {**call(ids), "content": self._content(text)}, [say("assistant"), say("user")]
        raw = call(ids, raw=self._word())
        return {
            "nine_letter_ids": not shown["call_quire_0"],
            "system_beside_results": renders(say("system"), say("user"), call(ids), result(ids)),
            "orphan_results": renders(say("user"), result(ids), say("user")),
            "parallel_calls": renders(say("user"), call(ids, other), result(ids), result(other)),
            "content_with_calls": renders(say("user"), speaking, result(ids))
            and renders(say("user"), speaking, result(ids), *final),
            "any_arguments": renders(say("user"), raw, result(ids)),
            "sorts": self._sorts(call(ids)),
        }

    def _sorts(self, message: dict[str, Any]) -> KeyOrder:
        """Return the order in which the template writes the keys of a call's arguments."""
        keys = [f"{PROBE}{last}" for last in ("c", "a", "B")]
        arguments: Any = dict.fromkeys(keys, 1)
        call = message["tool_calls"][0]
        function = {**call["function"], "arguments": arguments if self._dialect.arguments else json.dumps(arguments)}
        given = [self._say("user"), {**message, "tool_calls": [{**call, "function": function}]}]
        text = _rendered(self._render, given) or _rendered(self._render, given, [_tool()])
        found = [key for _, key in sorted((text.rfind(key), key) for key in keys)]
        orders: dict[KeyOrder, list[str]] = {"": keys, "exact": sorted(keys), "lower": sorted(keys, key=str.lower)}
        return next((order for order, wanted in orders.items() if found == wanted), "")

    def _word(self) -> str:
        self._count += 1
        return f"{PROBE}{self._count}x"

    def _content(self, text: str) -> Any:
        return text if self._dialect.text else [{"type": "text", "text": text}]

    def _say(self, role: str) -> dict[str, Any]:
        return {"role": role, "content": self._content(self._word())}

    def _result(self, call: str) -> dict[str, Any]:
        return {**self._say("tool"), "tool_call_id": call, "name": PROBE}

    def _call(self, *ids: str, raw: str = "") -> dict[str, Any]:
        """Return a message with a call per id.  `raw`: arguments that are a plain string, no object."""
        calls = []
        for each in ids:
            arguments: Any = {self._word(): self._word()}
            if not self._dialect.arguments:
                arguments = json.dumps(arguments)
            calls.append({"id": each, "type": "function", "function": {"name": PROBE, "arguments": raw or arguments}})
        return {"role": "assistant", "content": self._content("") if self._dialect.text else [], "tool_calls": calls}

    def _differs(self, *roles: str) -> bool:
        """Return whether the rendered text depends on which of these roles the first message has."""
        texts = {
            _rendered(
                self._render,
                [{"role": role, "content": self._content("a")}, {"role": "user", "content": self._content("b")}],
            )
            for role in roles
        }
        return len(texts) > 1

    def _renders(self, *messages: dict[str, Any]) -> bool:
        """Return whether all words of the messages are in the rendered text, either with or without tools."""
        words = set(re.findall(rf"{PROBE}\d+x", json.dumps(messages)))
        for tools in (None, [_tool()]):
            text = _rendered(self._render, list(messages), tools)
            if text and words <= set(re.findall(rf"{PROBE}\d+x", text)):
                return True
        return False
