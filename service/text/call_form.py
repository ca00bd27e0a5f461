"""Finds a model's notation of tool calls (CallForm) by rendering calls with placeholder names and arguments.

    chat template --calls with placeholders--> texts --differences--> CallForm --parsed again--> accepted

The texts around the placeholders are what the model was trained to write.  Arguments may be one JSON object, or each
argument may stand between texts of its own, as in `<parameter=KEY>VALUE</parameter>`.  A form is accepted only if the
response template parses calls written in it to the same calls.  So no code or data is needed per model.  If a chat
template shows no call, the `example` of the response template is used instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from quire.service.api.history import for_template
from quire.service.chat_templates.template_probe import Dialect
from quire.service.output.argument_types import reduced
from quire.service.output.marker_beginnings import beginnings, shared_beginning
from quire.service.output.notations import Notation
from quire.service.output.regions import Reading, ResponseTemplate
from quire.service.text.call_beginnings import CallBeginnings, beginnings_of_calls

NAME = "quireprobename"
KEYS = ("quireprobekeya", "quireprobekeyb", "quireprobekeyc", "quireprobekeyd")
CALL_ID = "quire0Aa9"  # nine letters and digits, since some templates accept no other length
INDEX = "70415"  # placeholder for the index of a call in the answer, in ids that contain it
NO_FORM = "the model's chat template does not show how calls are written"

Arguments = dict[str, Any]
ONE: Arguments = {KEYS[0]: "quireprobevaluea"}
MIXED: Arguments = {KEYS[0]: "quireprobevaluea", KEYS[1]: 290633, KEYS[2]: "quireprobevalueb", KEYS[3]: 481516}
SPACED: Arguments = {KEYS[0]: "\n quireprobevaluea \n"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "tool",
        "parameters": {
            "type": "object",
            "properties": {
                key: {"type": "string" if isinstance(value, str) else "integer", "description": key}
                for key, value in MIXED.items()
            },
            "required": [KEYS[0]],
        },
    },
}
JSON_ARGUMENTS = re.compile(rf'\{{\s*"{KEYS[0]}"\s*:\s*"{ONE[KEYS[0]]}"\s*\}}')
AGAIN = "\ue001"  # stands for the key in the text after a value, if a closing tag repeats it
CDATA = "<![CDATA["  # opening mark that the parser removes from a value, with its closing mark


class TagForm(msgspec.Struct, frozen=True):
    """The notation of arguments written one by one: `first` ARGUMENT (`between` ARGUMENT)* `last`.

    An ARGUMENT is its key, the text before its value, the value, and the text after the value."""

    text: tuple[str, str]  # texts before and after a string value, which is written without quotes
    value: tuple[str, str]  # texts before and after any other value, which is written as JSON
    first: str
    between: str
    last: str
    empty: str | None  # text instead of `first` in a call without arguments; None: not known
    body: tuple[str, str] | None  # texts around all arguments as one JSON object; None: the parser cannot read that
    barred: tuple[str, ...]  # beginnings of markers, which a string must not contain
    named: bool  # the texts around a value show whether it is a string
    quoted: bool  # strings are written as JSON, too
    spaces: bool  # the parser keeps white space at both ends of a string
    # Objects and lists are tags within tags: the text before each tag, also a closing one.  None: they are JSON.
    nested: str | None = None


class CallForm(msgspec.Struct, frozen=True):
    """The notation of calls: `head` NAME `middle` ARGUMENTS (`between` NAME `middle` ARGUMENTS)* `tail`.

    All of these texts may contain special tokens."""

    head: str
    middle: str
    tail: str
    between: str | None  # None: at most one call per answer
    begin: CallBeginnings  # the texts that begin a call, which free text must not contain
    reasoning: tuple[str, str] | None = None  # opening and closing marker of reasoning
    tags: TagForm | None = None  # notation of single arguments; None: arguments are one JSON object
    goes_on: bool = False  # a JSON object or list that follows a call, after brackets and commas, is a call, too


def form_of(
    render: Callable[[list[dict[str, Any]], list[dict[str, Any]]], str],
    dialect: Dialect,
    template: str,
    responses: ResponseTemplate,
    ends: frozenset[str],
) -> CallForm | None:
    """Return the notation in which a model writes calls; None if its chat template does not show it.

    render  renders messages and tools; may raise any error
    ends    special tokens that end a call: all special tokens that are no markers of the response template"""
    shown = _Shown(render, dialect, template, responses, ends)
    for example in ("", responses.example):
        shown.example = example
        form = _json_form(shown) or _tag_form(shown)
        if form is not None and not _holds_marks(form) and _is_read(form, responses):
            return _with_spaces(form, responses)
        if not responses.example:
            break
    return None


def _holds_marks(form: CallForm) -> bool:
    """Return whether fixed text of a form contains a placeholder, for example because calls repeat their name."""
    texts = msgspec.json.encode(form).decode()
    return any(mark in texts for mark in (NAME, *KEYS, *(str(value) for value in MIXED.values())))


class _Shown:
    """Writes calls as the chat template, or the response template's example, shows them."""

    def __init__(
        self,
        render: Callable[..., str],
        dialect: Dialect,
        template: str,
        responses: ResponseTemplate,
        ends: frozenset[str],
    ) -> None:
        self._render, self._dialect, self._template, self._ends = render, dialect, template, ends
        self.responses = responses
        self.example = ""

    def __call__(self, *calls: Arguments) -> str:
        """Return the text of an answer with these calls; "" if the template shows none."""
        text = _of_example(self.example, calls) if self.example else self._rendered(calls)
        return _after_reasoning(text, self.responses.reasoning_markers)

    def _rendered(self, calls: tuple[Arguments, ...]) -> str:
        made = [
            {"id": self.responses.call_id(NAME, INDEX) or CALL_ID, "type": "function", "function": function}
            for arguments in calls
            for function in [{"name": NAME, "arguments": arguments}]
        ]
        question: dict[str, Any] = {"role": "user", "content": "a"}
        answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": made}
        try:
            entries = for_template([question, answer], self._dialect, self._template)
            text = self._render([message for message, _ in entries], [TOOL])
        except Exception:  # a template may raise any error, which means that it shows no such calls
            return ""
        return self.responses.opening(text) or ""

    def without_end(self, text: str) -> str:
        """Return the part of the text after a call that belongs to the call: up to the first token of `ends`."""
        first = min((at for end in self._ends if (at := text.find(end)) >= 0), default=len(text))
        return text[:first].rstrip()


def _of_example(example: str, calls: tuple[Arguments, ...]) -> str:
    """Return calls written as an `example` shows: HEAD {call} ONE CALL {next} TEXT BETWEEN CALLS {end} TAIL."""
    head, _, rest = example.partition("{call}")
    one, _, rest = rest.partition("{next}")
    between, _, tail = rest.partition("{end}")
    written = [
        one.replace("{name}", NAME)
        .replace("{python}", ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items()))
        .replace("{json}", json.dumps(arguments))
        for arguments in calls
    ]
    return head + between.join(written) + tail


def _after_reasoning(head: str, markers: tuple[str, str] | None) -> str:
    before, at, after = head.partition(NAME)
    _, closed, rest = before.rpartition(markers[1]) if markers is not None else ("", "", before)
    return (rest.lstrip() if closed else rest) + at + after


# ------------------------------------------------------------------------------------------------- arguments as JSON


def _json_form(shown: _Shown) -> CallForm | None:
    body = shown(ONE)
    arguments = JSON_ARGUMENTS.search(body)
    at = body.find(NAME)
    if at < 0 or arguments is None or at > arguments.start():
        return None
    middle = body[at + len(NAME) : arguments.start()]
    both = shown(ONE, ONE)
    first, second = both.find(NAME), both.rfind(NAME)
    read = JSON_ARGUMENTS.search(both)
    between = None
    if read is not None and first < read.start() < second and both[second + len(NAME) :].startswith(middle):
        between = both[read.end() : second]
    tail = shown.without_end(body[arguments.end() :])
    return _form(shown.responses, body[:at], middle, tail, between)


def _form(
    responses: ResponseTemplate, head: str, middle: str, tail: str, between: str | None, tags: TagForm | None = None
) -> CallForm:
    begun = head.lstrip()
    whole = f"{begun}{NAME}{middle}{{"
    own = next((notation for notation in responses.notations if notation.open.pattern.search(whole)), None)
    return CallForm(
        head,
        middle,
        tail,
        between,
        beginnings_of_calls(responses, begun),
        responses.reasoning_markers,
        tags,
        goes_on=own is not None and own.body == "json" and own.close is None and not own.captured,
    )


# ------------------------------------------------------------------------------------------------ arguments one by one


def _tag_form(shown: _Shown) -> CallForm | None:
    """Return the notation of calls with arguments one by one, found by comparing several rendered calls; or None."""
    mixed, one, none, two = shown(MIXED), shown(ONE), shown({}), shown(ONE, ONE)
    parts, alone = _parts(mixed, MIXED), _parts(one, ONE)
    if parts is None or alone is None:
        return None
    head, first, *between, after_last = parts
    around_text, around_value = (between[0], between[1]), (between[2], between[3])
    if alone[:3] != [head, first, around_text[0]] or between[4:6] != list(around_text) or between[6] != around_value[0]:
        return None
    tails = shown.without_end(alone[3]), shown.without_end(after_last)
    texts, values = _shared(around_text[1], tails[0]), _shared(around_value[1], tails[1])
    separator, tail = around_text[1][len(texts) :], tails[0][len(texts) :]
    if (separator, tail) != (around_value[1][len(values) :], tails[1][len(values) :]):
        return None
    second = two[two.find(NAME) + len(NAME) :]
    last, following = tail, None
    if alone[3] and (at := second.find(NAME)) >= 0:
        shared = first + KEYS[0] + around_text[0] + ONE[KEYS[0]] + texts.replace(AGAIN, KEYS[0])
        if second.startswith(shared) and second[at + len(NAME) :].startswith(shared):
            following = second[len(shared) : at]
            last = _shared(following, tail)
            following = following[len(last) :]
    return _tagged(
        shown,
        head,
        first,
        (around_text[0], texts),
        (around_value[0], values),
        separator,
        last,
        tail[len(last) :],
        following,
        none,
    )


def _parts(written: str, arguments: Arguments) -> list[str] | None:
    """Return the texts between name, keys and values in `written`, in order; None if a placeholder is missing."""
    found, at = [], 0
    for mark in (NAME, *(str(one) for pair in arguments.items() for one in pair)):
        place = written.find(mark, at)
        if place < 0:
            return None
        found.append(written[at:place])
        at = place + len(mark)
    found.append(written[at:])
    for number, key in enumerate(arguments):
        found[2 * number + 3] = found[2 * number + 3].replace(key, AGAIN)
    return found


def _shared(one: str, other: str) -> str:
    """Return the common prefix of two texts, without an unclosed tag at its end."""
    found = shared_beginning(one, other)
    opened = found.rfind("<")
    return found[:opened] if opened > found.rfind(">") else found


def _tagged(
    shown: _Shown,
    head: str,
    first: str,
    text: tuple[str, str],
    value: tuple[str, str],
    between: str,
    last: str,
    tail: str,
    following: str | None,
    none: str,
) -> CallForm | None:
    notation, opened = _notation(shown.responses, head, first)
    if notation is None or not text[1]:
        return None
    quoted = text[0].endswith('"') and text[1].startswith('"') and (text[0][:-1], text[1][1:]) == value
    barred = _barred(notation, text[1])
    if "" in barred and not quoted:
        return None
    _, named, rest = none.partition(NAME)
    rest = shown.without_end(rest)
    whole = last + tail
    empty = rest[: len(rest) - len(whole)] if named and rest.endswith(whole) else None
    body = None
    if named and notation.body in ("tags", "json"):
        closing = rest[len(opened) :]
        if notation.close is not None and (close := notation.close.pattern.search(closing)) is not None:
            closing = closing[close.start() :]
        if rest.startswith(opened) and closing.endswith(tail):
            body = opened, closing[: len(closing) - len(tail)]
    nested = _nested(notation, value[1])
    tags = TagForm(text, value, first, between, last, empty, body, barred, text != value, quoted, True, nested)
    form = _form(shown.responses, head, "", tail, following, tags)
    if body is not None and not _reads(shown.responses, form, [{}], body=True):
        tags = msgspec.structs.replace(tags, body=None)
    if empty is not None and not _reads(shown.responses, msgspec.structs.replace(form, tags=tags), [{}]):
        tags = msgspec.structs.replace(tags, empty=None)
    return msgspec.structs.replace(form, tags=tags)


def _notation(responses: ResponseTemplate, head: str, first: str) -> tuple[Notation | None, str]:
    """Return the notation in which this call is written, and the text from its name to the opening marker's end."""
    text = head + NAME + first
    for notation in responses.notations:
        for match in notation.open.pattern.finditer(text):
            if notation.captured and match.groupdict().get(notation.captured) == NAME:
                return notation, text[len(head) + len(NAME) : match.end()]
            if notation.body == "python" and match.end() <= len(head):
                return notation, ""
    return None, ""


def _nested(notation: Notation, closing: str) -> str | None:
    """Return the field `nested` of a form.  `closing`: closing tag, and the beginning of the next tag."""
    tag = notation.tag.match(closing) if notation.tag is not None else None
    return closing[tag.end() :] if tag is not None and closing.startswith(closing[tag.end() :]) else None


def _barred(notation: Notation, closing: str) -> tuple[str, ...]:
    """Return the texts that would end a string value, so that it must not contain them; "" if not all are known."""
    patterns = [pattern for pattern in notation.argument if pattern]
    if patterns and notation.close is not None:
        patterns.append(notation.close.pattern.pattern)
    if notation.tag is not None:
        return tuple(text for text in beginnings(notation.tag.pattern) if text and closing.startswith(text)) or ("",)
    found = [text for pattern in patterns for text in beginnings(pattern)]
    return tuple(dict.fromkeys([*found, CDATA] if patterns else [closing.strip()]))


# ------------------------------------------------------------------------------------------------------------- reading


def written_call(form: CallForm, arguments: Arguments, *, body: bool = False) -> str:
    """Return a call written in a form, from its name on.  `body`: with its arguments as one JSON object."""
    tags = form.tags
    if tags is None:
        return f"{NAME}{form.middle}{json.dumps(arguments)}"
    if body and tags.body is not None:
        return f"{NAME}{tags.body[0]}{json.dumps(arguments)}{tags.body[1]}"
    each = []
    for key, value in arguments.items():
        before, after = tags.text if isinstance(value, str) else tags.value
        each.append(f"{key}{before}{value}{after.replace(AGAIN, key)}")
    begin = tags.first + tags.between.join(each) if each else tags.empty or ""
    return f"{NAME}{begin}{tags.last}"


def _is_read(form: CallForm, responses: ResponseTemplate) -> bool:
    """Return whether calls that are written in a form are the same after the parser has read them."""
    calls = [[ONE]] if form.tags is None else [[ONE], [MIXED]]
    if form.between is not None:
        calls.append([ONE, ONE])
    return all(_reads(responses, form, some) for some in calls)


def _reads(responses: ResponseTemplate, form: CallForm, calls: list[Arguments], *, body: bool = False) -> bool:
    made = (form.between or "").join(written_call(form, one, body=body) for one in calls)
    reader = responses.reader(Reading("", calls=True, tools=reduced([TOOL])))
    reader.push(form.head + made + form.tail)
    reader.finish(cut=False)
    content, _, found = reader.take()
    names = [call.name for call in found if call.name]
    if content.strip() or names != [NAME] * len(calls):
        return False
    try:
        return bool(json.loads("[" + "".join(_parted(found)) + "]") == calls)
    except ValueError:
        return False


def _parted(found: list[Any]) -> list[str]:
    """Return the arguments of calls, with a comma between two calls."""
    return [("," if call.name and at else "") + call.arguments for at, call in enumerate(found)]


def _with_spaces(form: CallForm, responses: ResponseTemplate) -> CallForm:
    """Return the form with `spaces` set: whether the parser keeps white space around a string."""
    if form.tags is None or form.tags.quoted or _reads(responses, form, [SPACED]):
        return form
    return msgspec.structs.replace(form, tags=msgspec.structs.replace(form.tags, spaces=False))
