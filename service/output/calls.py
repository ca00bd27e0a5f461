"""Parts that all readers of tool calls share: their interface, their context, and the calls in a JSON text."""

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
from quire.service.output.notations import Notation

_BESIDE = "id|type|index|tool_call_id"  # keys of a call that are no arguments
BESIDE = frozenset(_BESIDE.split("|"))
_NO_ITEMS = re.compile(r"\[\s*\]")
_ID_MEMBER = re.compile(rf"""["']?(?:{_BESIDE})["']?\s*[:=]\s*(?:"[\w.:-]*"|'[\w.:-]*'|[\w.:-]+)\s*""")

End = Literal["", "cut", "whole"]  # end of the answer: not reached; cut by a limit; ended by the model
CallPart = tuple[str | None, str]  # (name or None, a part of a call's arguments), or (TEXT, text that is content)
TEXT = ""  # no call has this name


class Status(Enum):
    """What a reader has found at the position that it returns."""

    MORE = auto()  # the end of the text, within a call: read on once more text has come
    NEXT = auto()  # the end of a complete call, and the beginning of another one
    DONE = auto()  # the end of the last call: the text that follows is content or reasoning
    BROKEN = auto()  # text that is no call: all text since the last complete call becomes content


class Context(msgspec.Struct, frozen=True):
    """What a reader knows of its answer."""

    notation: Notation
    name: str  # the name in the marker, or ""
    tools: Tools
    parallel: bool
    ends: Markers  # markers that end calls, of the kinds `close`, `call`, `argument` and `junk`
    value_ends: Markers  # markers that end an argument in tags


class CallReader(Protocol):
    """Reads the text after an opening marker."""

    parts: list[CallPart]  # new ones; the caller takes them
    committed: bool  # a part of the current call was passed on

    def read(self, text: str, at: int, end: End) -> tuple[int, Status]:
        """Read the text from a position on; return the position that was reached, and what was found there.

        After MORE the text from that position on is given again, with more text after it."""


def string_of(text: str) -> str | None:
    """Return the string that a JSON text holds; None if it holds no string."""
    try:
        value = json.loads(text) if text.lstrip().startswith('"') else None
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def arguments_of(text: str) -> str | None:
    """Return the JSON object in the JSON of a call's arguments, as written; "": no arguments; None: no object.

    An object within a string is repaired."""
    text = text.strip()
    if text in ("", "null") or _NO_ITEMS.fullmatch(text):  # PHP writes an object without members as a list
        return ""
    if (within := string_of(text)) is not None:
        if not within.strip():
            return ""
        text = repaired(without_surrogates(within)) or ""
    return text if text.lstrip().startswith("{") else None


def members_of(text: str) -> list[tuple[str, str]]:
    """Return keys and values of a JSON object, values and their order as written; a repeated key is there again."""
    reader, found, at = JsonReader(watch=1), list[tuple[str, str]](), 0
    while True:
        at, event = reader.read(text, at, final=True)
        value = reader.take()
        if event is Event.VALUE:
            found.append((reader.key, value.strip()))
        elif event is not Event.KEY:
            return found


def _elements(text: str) -> list[str] | None:
    """Return the elements of a JSON list, or the one value of any other JSON, as written; None if it is no JSON."""
    try:
        if not text.lstrip().startswith("["):
            return [text]
        return [bytes(one).decode() for one in msgspec.json.decode(text, type=list[msgspec.Raw])]
    except (ValueError, RecursionError):
        return None


def is_id(member: str) -> bool:
    """Return whether a member of a call, as it was written, is an id or a type."""
    return _ID_MEMBER.fullmatch(member) is not None


def calls_of(text: str, notation: Notation) -> list[CallPart] | None:
    """Return names and arguments of the calls in a JSON object or list; None if it holds anything else.

    Arguments stay as written: a repeated key, and a number beyond a float, too.  Members of a call that are no part of
    one become content, after the call."""
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
    """Return the call that an object's members are, and what else it holds as content; None if it is no call."""
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
    filled = [(one, arguments) for one, arguments in every if arguments not in ("", "{}")]
    used = [names[0], *(one for one, arguments in every if arguments in ("", "{}")), *(one for one, _ in filled[:1])]
    name, arguments = (string_of(names[0][1]) or "").strip(), filled[0][1] if filled else ""
    texts = [f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members if (key, value) not in used]
    beside = [text for text in texts if not is_id(text)]
    if not name or None in (arguments for _, arguments in every) or (beside and (notation.bare or not filled)):
        return None  # or its arguments stand elsewhere
    call: list[CallPart] = [(name, arguments or "{}")]
    return [*call, (TEXT, "{" + ", ".join(beside) + "}")] if beside else call
