"""Tool calls that must be made, or must fit their schemas: how a model writes a call -> a grammar for llguidance.

    chat template, shown a call with marked name and arguments --form_of--> CallForm, the text around them
    CallForm + names of tools + what else the answer may hold --lark--> a Lark grammar; @tool0 ... are their schemas

The chat template itself tells how its model writes calls, so no data and no code is kept for any model.  Templates that
write arguments in another notation than JSON have no form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from service.grammar import ANY_TEXT, SPACES, CallRules, Constraint, Parameters
from service.history import for_template
from service.regions import Reading, ResponseTemplate
from service.template_probe import Dialect
from service.thinking_budget import quoted as quoted_marker
from service.thinking_budget import thought_rules
from service.tools import ChatOptions

NAME, KEY, VALUE = "quireprobename", "quireprobekey", "quireprobevalue"
CALL_ID = "quire0Aa9"  # nine letters and digits: some templates take no other length
ANY_ID = "/[a-zA-Z0-9]{9}/"
ARGUMENTS = re.compile(rf'\{{\s*"{KEY}"\s*:\s*"{VALUE}"\s*\}}')
NO_FORM = "the model's chat template does not show how calls are written in JSON"

NO_PARAMETERS: dict[str, Any] = {"properties": {}, "additionalProperties": False}

Reasoning = Literal["", "may", "open"]  # none; before the calls, as the model likes; the prompt has opened it


class CallForm(msgspec.Struct, frozen=True):
    """How an answer with calls is written: `head` NAME `middle` ARGUMENTS (`between` NAME `middle` ARGUMENTS)* `tail`.

    Any of them may hold special tokens."""

    head: str
    middle: str
    tail: str
    between: str | None  # None: one call an answer
    marker: str  # with which `head` begins, and which no other text holds; "": there is none
    reasoning: tuple[str, str] | None = None  # its markers


def form_of(
    render: Callable[[list[dict[str, Any]], list[dict[str, Any]]], str],
    dialect: Dialect,
    template: str,
    responses: ResponseTemplate,
    ends: frozenset[str],
) -> CallForm | None:
    """Return how a model writes calls; None if its chat template does not show it.

    render  renders messages and tools; may raise anything
    ends    special tokens that are no part of a call: all that are no markers of the response template"""

    def written(calls: int) -> str:
        return _written(render, dialect, template, responses, calls)

    body = written(1)
    arguments = ARGUMENTS.search(body)
    at = body.find(NAME)
    if at < 0 or arguments is None or at > arguments.start():
        return None
    middle, tail = body[at + len(NAME) : arguments.start()], _cut(body[arguments.end() :], ends)
    head = _after_reasoning(body[:at], responses.reasoning_markers)
    form = CallForm(
        head,
        middle,
        tail,
        _between(written(2), middle),
        marker=next((marker for marker in responses.call_markers if head.lstrip().startswith(marker)), ""),
        reasoning=responses.reasoning_markers,
    )
    return form if _is_read(form, responses) else None


def _written(
    render: Callable[..., str], dialect: Dialect, template: str, responses: ResponseTemplate, count: int
) -> str:
    """Return what the chat template writes for an answer with `count` equal calls; "" if it cannot."""
    function = {"name": NAME, "arguments": {KEY: VALUE}}
    call = {"id": CALL_ID, "type": "function", "function": function}
    schema = {"type": "object", "properties": {KEY: {"type": "string", "description": KEY}}, "required": [KEY]}
    tool = {"type": "function", "function": {"name": "tool", "description": "tool", "parameters": schema}}
    question: dict[str, Any] = {"role": "user", "content": "a"}
    answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call] * count}
    try:
        entries = for_template([question, answer], dialect, template)
        text = render([message for message, _ in entries], [tool])
    except Exception:  # whatever a template raises: it does not show this
        return ""
    return responses.opening(text) or ""


def _cut(text: str, ends: frozenset[str]) -> str:
    """Return what belongs to the call of the text that follows it."""
    first = min((at for end in ends if (at := text.find(end)) >= 0), default=len(text))
    return text[:first].rstrip()


def _after_reasoning(head: str, markers: tuple[str, str] | None) -> str:
    _, closed, rest = head.rpartition(markers[1]) if markers is not None else ("", "", head)
    return rest.lstrip() if closed else rest


def _between(body: str, middle: str) -> str | None:
    """Return what stands between the arguments of a call and the name of the next."""
    first, second = body.find(NAME), body.rfind(NAME)
    arguments = ARGUMENTS.search(body)
    if arguments is None or not first < arguments.start() < second:
        return None
    return body[arguments.end() : second] if body[second + len(NAME) :].startswith(middle) else None


def _is_read(form: CallForm, responses: ResponseTemplate) -> bool:
    """Return whether answers of this form are read as the calls that they make."""
    arguments = json.dumps({KEY: VALUE})
    first = f"{form.head}{NAME}{form.middle}{arguments}"
    texts = [first + form.tail]
    if form.between is not None:
        texts.append(f"{first}{form.between}{NAME}{form.middle}{arguments}{form.tail}")
    for count, text in enumerate(texts, 1):
        reader = responses.reader(Reading("", calls=True))
        reader.push(text)
        reader.finish(cut=False)
        content, _, calls = reader.take()
        names = [call.name for call in calls if call.name]
        if content.strip() or names != [NAME] * count or "".join(call.arguments for call in calls) != arguments * count:
            return False
    return True


# --------------------------------------------------------------------------------------------------------- the grammar


def call_rules(
    form: CallForm,
    options: ChatOptions,
    special: Mapping[str, int],
    reasoning: Reasoning,
    answer: Constraint | None,
    budget: int | None = None,
) -> CallRules:
    """Return what holds an answer to its tools.  The other parameters are those of `lark`."""
    allowed = [
        (at, tool["function"])
        for at, tool in enumerate(options.tools)
        if not options.demanded or tool["function"]["name"] in options.demanded
    ]

    def written(special: Mapping[str, int]) -> str:
        return lark(
            form,
            [function["name"] for _, function in allowed],
            special,
            demanded=bool(options.demanded),
            parallel=options.parallel,
            reasoning=reasoning,
            answer=answer is not None,
            budget=budget if special else None,
        )

    parameters = [
        Parameters(
            f"{options.path(at)}.function.parameters",
            {"type": "object", **(function.get("parameters") or NO_PARAMETERS)},
            bool(function.get("strict")),
        )
        for at, function in allowed
    ]
    return CallRules(written(special), written({}), parameters, answer)


def lark(
    form: CallForm,
    names: list[str],
    special: Mapping[str, int],
    *,
    demanded: bool,
    parallel: bool,
    reasoning: Reasoning = "",
    answer: bool = False,
    budget: int | None = None,
) -> str:
    """Return the grammar of an answer.  Tool i's arguments are @tooli.

    special   token ids of the special tokens that the form may hold; those not listed are taken for plain text
    demanded  calls, and nothing else but reasoning; else calls anywhere in a text, which needs `form.marker`
    answer    not demanded: the answer is @answer or calls, no other text
    budget    most tokens of the reasoning"""
    quoted = _Quoted(special)
    repeat = parallel and form.between is not None
    calls = f"call ({quoted(form.between or '')} call)*" if repeat else "call"
    rules = ["call: " + " | ".join(f"call{i}" for i in range(len(names)))]
    rules += [f"call{i}: {json.dumps(name)} {quoted(form.middle)} @tool{i}" for i, name in enumerate(names)]
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
        rest = quoted(bare.removeprefix(form.marker))
        inside = re.escape(form.marker).replace("/", "\\/")
        rules.append(f"TEXT: {ANY_TEXT} & ~/(?s:.*){inside}(?s:.*)/")
        if form.marker in special:
            rules.append(f"before: TEXT {quoted(form.marker)}")
        else:
            rules.append(f"before[suffix={quoted(form.marker)}]: {ANY_TEXT}")
        start = f"{thought} (before {rest} {calls} {quoted(form.tail)}){'*' if parallel else '?'} TEXT"
    return "\n".join([f"start: {start}", *rules]) + "\n"


class _Quoted:
    """Writes text as Lark does: special tokens by their ids, the probe's call id as any id, all else in quotes."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        known = sorted([*special, CALL_ID], key=len, reverse=True)
        self._parts = re.compile("(" + "|".join(map(re.escape, known)) + ")")

    def __call__(self, text: str) -> str:
        written = []
        for part in self._parts.split(text):
            if part in self._special:
                written.append(f"<[{self._special[part]}]>")
            elif part:
                written.append(ANY_ID if part == CALL_ID else json.dumps(part))
        return " ".join(written)
