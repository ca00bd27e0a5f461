"""What a chat template reads, found out by rendering it when the model is loaded.

    template --probe: some small chats--> Dialect --> `history.py` makes messages fit, `tokenizer.py` checks options

A source shows names, not effects: a template may name `thinking` and mean a field of messages.  So each ability is a
rendering that holds a marker, or two renderings that differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

TEMPLATES_KEPT = 4  # most recently read: the model's, and those of clients
PROBE = "quireprobe"
EFFORT = "reasoning_effort"
SWITCHES = ("enable_thinking", "thinking")  # template variables that switch reasoning on and off, by frequency

Render = Callable[..., Any]  # (messages, tools, **variables) -> the text; may raise anything


class Dialect(msgspec.Struct, frozen=True):
    """What a chat template reads."""

    parts: bool = False  # content as a list of parts
    text: bool = True  # content as a string
    arguments: bool = True  # arguments of tool calls as an object; else as JSON in a string
    tools: bool = False  # `tools` changes the prompt
    effort: bool = False  # `reasoning_effort` changes the prompt
    effort_none: bool = False  # "none" is a value of `reasoning_effort` that it knows
    switch: str = ""  # the variable of SWITCHES that changes the prompt; "": none does


@lru_cache(maxsize=TEMPLATES_KEPT)
def names_in(template: str) -> frozenset[str]:
    """Return the words of a template's source: all variables that it can read.

    A client may send thousands of arguments with a long template of its own, so this is read once, not once each."""
    return frozenset(re.findall(r"\w+", template))


def probe(render: Render, template: str) -> Dialect:
    """Return what a chat template reads.  `template`: its source.

    A template that rejects a probe for other reasons counts as one that does not read it."""
    user = {"role": "user", "content": PROBE}
    parts = {"role": "user", "content": [{"type": "text", "text": PROBE}]}
    of_text, of_parts = _rendered(render, [user]), _rendered(render, [parts])
    reads_text = PROBE in of_text
    # A template that takes a list for text shows it as Python or JSON would.
    reads_parts = PROBE in of_parts and (of_parts == of_text or not (reads_text or "'type'" in of_parts))
    question = user if reads_text or not reads_parts else parts
    effort = _changes(render, [question], template, EFFORT, "low", "high")
    return Dialect(
        parts=reads_parts,
        text=reads_text or not reads_parts,
        arguments=_reads_objects(render, question),
        tools=_rendered(render, [question], [_tool()]) not in ("", _rendered(render, [question])),
        effort=effort,
        effort_none=effort and _names_none(template) and bool(_rendered(render, [question], None, **{EFFORT: "none"})),
        switch=next((name for name in SWITCHES if _changes(render, [question], template, name, False, True)), ""),
    )


def effort_variables(dialect: Dialect, effort: str) -> dict[str, Any]:
    """Return the template's variables for a reasoning effort; {}: the template reads none, so it has no effect.

    "none" switches reasoning off.  A switch knows no degrees, so it takes no other effort."""
    if effort == "none" and not dialect.effort_none:
        return {dialect.switch: False} if dialect.switch else {}
    return {EFFORT: effort} if dialect.effort else {}


def thinking_variables(dialect: Dialect, thinking: bool) -> dict[str, Any]:
    """Return the template's variables that switch reasoning on or off; {}: the template has no such switch."""
    return {dialect.switch: thinking} if dialect.switch else {}


def _names_none(template: str) -> bool:
    return "none" in re.findall(r"['\"](\w+)['\"]", template)


def _changes(render: Render, messages: list[dict[str, Any]], template: str, name: str, *values: Any) -> bool:
    """Return whether a variable changes the prompt of an answer."""
    if name not in names_in(template):
        return False
    given = [{}, *({name: value} for value in values)]  # without it, too: a template may refuse one of the values
    texts = {_rendered(render, messages, None, add_generation_prompt=True, **variables) for variables in given}
    return len(texts - {""}) > 1


def _tool() -> dict[str, Any]:
    schema = {"type": "object", "properties": {PROBE: {"type": "string", "description": PROBE}}, "required": [PROBE]}
    return {"type": "function", "function": {"name": PROBE, "description": PROBE, "parameters": schema}}


def _reads_objects(render: Render, question: dict[str, Any]) -> bool:
    """Return whether the template writes arguments from an object, and not as Python would show it."""
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
    except Exception:  # whatever a template raises: it does not read this
        return ""
