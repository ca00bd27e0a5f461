"""Common code of all readers of tool calls: interface, context, and parsing of calls in complete JSON."""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Literal, Protocol

import msgspec

from quire.service.common.surrogates import without_surrogates
from quire.service.output.argument_types import Tools
from quire.service.output.json_repair import repaired
from quire.service.output.lenient_json import Event, JsonReader
from quire.service.output.markers import Markers
from quire.service.output.notations import OTHER_ARGUMENTS, Notation

_BESIDE = "id|type|index|tool_call_id"  # keys of a call object that are ignored
BESIDE = frozenset(_BESIDE.split("|"))
NO_ITEMS = re.compile(r"\[\s*\]")
_ID_MEMBER = re.compile(rf"""["']?(?:{_BESIDE})["']?\s*[:=]\s*(?:"[\w.:-]*"|'[\w.:-]*'|[\w.:-]+)\s*""")

End = Literal["", "cut", "whole"]  # end of the answer: not reached; cut by a limit; ended by the model
CallPart = tuple[str | None, str]  # (name, only in a call's first part; arguments), or (TEXT, content)
TEXT = ""  # stands for a name in a part that is content


class Status(Enum):
    """State of a reader at the position that it returns."""

    MORE = auto()  # the text ends within a call: continue when more text has arrived
    NEXT = auto()  # a call is complete, and another call begins here
    DONE = auto()  # the last call is complete: the following text is content or reasoning
    BROKEN = auto()  # the text is no call: all text since the last complete call becomes content


class Context(msgspec.Struct, frozen=True):
    """Parameters of a reader of calls."""

    notation: Notation
    name: str  # name of the called function if the opening marker contains it, else ""
    tools: Tools
    parallel: bool
    ends: Markers  # markers that end calls, of the kinds `close`, `call`, `argument` and `junk`
    value_ends: Markers  # markers that end an argument in tags


class CallReader(Protocol):
    """Reads the text after an opening marker."""

    parts: list[CallPart]  # new parts, which the caller removes
    committed: bool  # a part of the current call was emitted

    def read(self, text: str, at: int, end: End) -> tuple[int, Status]:
        """Read the text from position `at` on.  Returns the position that was reached, and the status there.

        After MORE, the caller passes the text from that position on again, with more text appended."""


def string_of(text: str) -> str | None:
    """Return the value of a JSON text that is a string; None if it is no string."""
    try:
        value = json.loads(text) if text.lstrip().startswith('"') else None
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def arguments_of(text: str) -> str | None:
    """Return a call's arguments, a JSON object, as the model wrote it; "": no arguments; None: not an object.

    Arguments that are a string with an object in it are unwrapped and repaired, a list with one object is unwrapped."""
    text = text.strip()
    if text in ("", "null") or NO_ITEMS.fullmatch(text):  # PHP encodes an empty object as a list
        return ""
    if (within := string_of(text)) is not None:
        if not within.strip():
            return ""
        text = repaired(without_surrogates(within)) or ""
    elements = _elements(text) or []
    if len(elements) == 1:  # an object, or a list with one object
        text = elements[0]
    return text if text.lstrip().startswith("{") else None


def members_of(text: str) -> list[tuple[str, str]]:
    """Return (key, JSON of the value) for each member of a JSON object, in order, with repeated keys."""
    reader, found, at = JsonReader(watch=1), list[tuple[str, str]](), 0
    while True:
        at, event = reader.read(text, at, final=True)
        value = reader.take()
        if event is Event.VALUE:
            found.append((reader.key, value.strip()))
        elif event is not Event.KEY:
            return found


def _elements(text: str) -> list[str] | None:
    """Return the JSON of each element of a list; for other JSON, the text itself; None if the list is invalid."""
    try:
        if not text.lstrip().startswith("["):
            return [text]
        return [bytes(one).decode() for one in msgspec.json.decode(text, type=list[msgspec.Raw])]
    except (ValueError, RecursionError):
        return None


def is_id(member: str) -> bool:
    """Return whether the text of a member of a call object is an id, an index or a type."""
    return _ID_MEMBER.fullmatch(member) is not None


def calls_of(text: str, notation: Notation) -> list[CallPart] | None:
    """Return names and arguments of the calls in a JSON object or list; None if it contains anything else.

    Arguments are not changed, so repeated keys and numbers beyond a float's range stay.  Members of a call object that
    do not belong to a call become content, after the call."""
    found: list[CallPart] = []
    for one in _elements(text) or [""]:
        if not one.lstrip().startswith("{"):
            return None
        parts = _call_of(members_of(one), notation)
        if parts is None:
            return None
        found += parts
    return found


def _call_of(members: list[tuple[str, str]], notation: Notation) -> list[CallPart] | None:
    """Return the call in the members of an object, then its other members as content; None if it is no call."""
    if notation.keyed and len(members) == 1 and members[0][0] != "name":
        [(name, value)] = members
        arguments = arguments_of(value)
        return [(name, arguments or "{}")] if name and arguments is not None else None
    inner = next((value for key, value in members if key == "function" and value.startswith("{")), None)
    if inner is not None:
        members = [one for one in members if one != ("function", inner)] + members_of(inner)
    keys = [*notation.names, "function"]
    names = [one for key in keys for one in members if one[0] == key and one[1].startswith('"')]
    if not names or sum(key == names[0][0] for key, _ in members) > 1:
        return None
    every = [(one, arguments_of(one[1])) for key in notation.arguments for one in members if one[0] == key]
    every = [(one, arguments) for one, arguments in every if one[0] not in OTHER_ARGUMENTS or arguments]
    filled = [(one, arguments) for one, arguments in every if arguments not in ("", "{}")]
    used = [names[0], *(one for one, arguments in every if arguments in ("", "{}")), *(one for one, _ in filled[:1])]
    name, arguments = (string_of(names[0][1]) or "").strip(), filled[0][1] if filled else ""
    texts = [f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members if (key, value) not in used]
    beside = [text for text in texts if not is_id(text)]
    if not name or None in (arguments for _, arguments in every) or (beside and (notation.bare or not filled)):
        return None  # no call, or the arguments are under an unknown key
    call: list[CallPart] = [(name, arguments or "{}")]
    return [*call, (TEXT, "{" + ", ".join(beside) + "}")] if beside else call
