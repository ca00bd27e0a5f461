"""Grammars for llguidance that force tool calls, or enforce the schemas of their arguments.

    CallForm, tools, other parts of the answer --lark--> a Lark grammar, in which @tool0 ... are the tools' schemas

`call_form.py` finds the notation of a model's calls.  `tag_arguments.py` and `tag_grammar.py` make rules
for arguments written one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from quire.service.api.tools import ChatOptions
from quire.service.common.refusal import Refusal
from quire.service.grammar.grammar import ANY_OBJECT, SPACES, CallRules, Constraint, Parameters
from quire.service.text.call_form import CallForm
from quire.service.text.free_text import FreeText
from quire.service.text.lark_text import LarkText
from quire.service.text.tag_arguments import Argument, arguments_of
from quire.service.text.tag_grammar import Named, Parts, ToolRules
from quire.service.text.thinking_budget import quoted as quoted_marker
from quire.service.text.thinking_budget import thought_rules

# Lark regex of text after a call that does not continue with a JSON object or list.
NO_CALL = r"/[\s,;}\])]*([^\s,;}\])\[{](?s:.*))?/"
NO_PARAMETERS: dict[str, Any] = {"properties": {}, "additionalProperties": False}

Reasoning = Literal["", "may", "open"]  # no reasoning; optional reasoning first; reasoning opened by the prompt


class _Tool(NamedTuple):
    """A function that may be called."""

    name: str
    arguments: list[Named] | None = None  # None: arguments are one JSON object


def call_rules(
    form: CallForm,
    options: ChatOptions,
    special: Mapping[str, int],
    reasoning: Reasoning,
    answer: Constraint | None,
    budget: int | None = None,
) -> CallRules:
    """Return the grammar of an answer with tool calls.  Parameters: see `lark`.

    Raises Refusal for a tool whose arguments cannot be written in the model's notation, and if calls may follow text
    but no marker shows where a call begins."""
    if not (options.demanded or answer is not None or form.begin.marker):
        field = options.strict or "tools"
        message = f"{field}: with tool_choice auto, text in the model's notation does not show where a call begins"
        raise Refusal(400, "unsupported", message, param=field)
    tools, parts = list[_Tool](), Parts()
    for at, tool in enumerate(options.tools):
        function = tool["function"]
        if options.demanded and function["name"] not in options.demanded:
            continue
        path, strict = f"{options.path(at)}.function.parameters", bool(function.get("strict"))
        schema = {"type": "object", **(function.get("parameters") or NO_PARAMETERS)}
        arguments = _arguments(form, schema, path, strict)
        if arguments is None:
            parts.values.append(Parameters(path, schema, strict, f"tool{len(tools)}", ANY_OBJECT))
        named = None if arguments is None else parts.named(arguments, schema, strict)
        tools.append(_Tool(function["name"], named))

    def written(special: Mapping[str, int]) -> str:
        return lark(
            form,
            tools,
            special,
            demanded=bool(options.demanded),
            parallel=options.parallel,
            reasoning=reasoning,
            answer=answer is not None,
            budget=budget if special else None,
        )

    return CallRules(written(special), written({}), parts.values, parts.strings, answer)


def _arguments(form: CallForm, schema: dict[str, Any], path: str, strict: bool) -> list[Argument] | None:
    """Return a tool's arguments, to be written one by one; None: write them as one JSON object.  Raises Refusal."""
    tags = form.tags
    if tags is None:
        return None
    found = arguments_of(schema, path, tags)
    some = tags.empty is not None or (not isinstance(found, str) and any(one.required for one in found))
    if not isinstance(found, str) and some:
        return found
    if tags.body is not None:
        return None
    at = found if isinstance(found, str) else path
    raise Refusal(400, "unsupported", f"{at}: the model's notation of calls cannot say such arguments", param=at)


def lark(
    form: CallForm,
    tools: list[_Tool],
    special: Mapping[str, int],
    *,
    demanded: bool,
    parallel: bool,
    reasoning: Reasoning = "",
    answer: bool = False,
    budget: int | None = None,
) -> str:
    """Return the Lark grammar of an answer.  The arguments of tool i are @tool{i}, or rules of their own.

    special   text -> id of special tokens that the form may contain; others are treated as plain text
    demanded  the answer must be calls, after optional reasoning; else calls may stand anywhere in a text, which needs
              `form.begin.marker`
    answer    without `demanded`: the answer must be either @answer or calls
    budget    maximum number of reasoning tokens"""
    quoted = LarkText(special)
    repeat = parallel and form.between is not None
    calls = f"call ({quoted(form.between or '')} call)*" if repeat else "call"
    rules = ["call: " + " | ".join(f"call{i}" for i in range(len(tools)))]
    by_tags = ToolRules(form.tags, quoted) if form.tags is not None else None
    rules += by_tags.common if by_tags is not None else []
    for i, tool in enumerate(tools):
        if by_tags is not None:
            rules += by_tags.of(i, tool.name, tool.arguments)
        else:
            rules.append(f"call{i}: {json.dumps(tool.name)} {quoted(form.middle)} @tool{i}")
    bare = form.head.lstrip()
    made = f"{'' if bare == form.head else SPACES} {quoted(bare)} {calls} {quoted(form.tail)}"
    thought = ""
    if reasoning and form.reasoning is not None:
        opened = quoted_marker(form.reasoning[0], special)
        rules += thought_rules(form.reasoning, special, budget)
        thought = "thought" if reasoning == "open" else f"({opened} thought)?"
    if demanded:
        start = f"{thought} {made}"
    elif answer:
        start = f"{thought} (@answer | {made})"
    else:
        marker, free = form.begin.marker, FreeText(form.begin, [tool.name for tool in tools], special, quoted)
        opens = max((one for one in special if bare.startswith(one)), key=len, default="")
        if not opens.startswith(marker) and not (opens and marker.startswith(opens)):
            opens = marker
        rest = f"{quoted(bare.removeprefix(opens))} {calls} {quoted(form.tail)}"
        text, before = free.of("TEXT", opens)
        if form.goes_on:
            last, again = free.of("LATER", opens, f" & {NO_CALL}")
            more = f"({again} {rest})*" if parallel else ""
            start = f"{thought} ({text} | {before} {rest} {more} {last})"
        else:
            start = f"{thought} ({before} {rest}){'*' if parallel else '?'} {text}"
        rules += free.rules
    return "\n".join([f"start: {start}", *rules]) + "\n"
