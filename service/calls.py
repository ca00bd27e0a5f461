"""Parts that all readers of tool calls share: their interface, their context, and the calls in a decoded JSON value."""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Any, Literal, Protocol

import msgspec

from service.argument_types import Tools
from service.json_repair import repaired
from service.markers import Markers
from service.notations import Notation
from service.surrogates import json_of, without_surrogates

_BESIDE = "id|type|index|tool_call_id"  # keys of a call that are no arguments
BESIDE = frozenset(_BESIDE.split("|"))
_ID = re.compile(r"[\w.:-]*")
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


def loaded(text: str) -> Any:
    """Return the value of JSON; None if it is none, or if an object has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def object_of(value: Any) -> str | None:
    """Return arguments as the JSON of an object; "": there are none; None: they are none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return ""
    if isinstance(value, dict):
        return json_of(value)
    if isinstance(value, str):
        found = repaired(without_surrogates(value))
        return found if found is not None and found.lstrip().startswith("{") else None
    return None


def is_id(member: str) -> bool:
    """Return whether a member of a call, as it was written, is an id or a type."""
    return _ID_MEMBER.fullmatch(member) is not None


def _is_id(key: str, value: Any) -> bool:
    plain = isinstance(value, int | None) or (isinstance(value, str) and _ID.fullmatch(value) is not None)
    return key in BESIDE and plain


def calls_of(value: Any, notation: Notation) -> list[CallPart] | None:
    """Return names and arguments of the calls that a value holds; None if it holds anything else.

    Members of a call that are no part of one become content, after the call."""
    found: list[CallPart] = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict):
            return None
        beside: dict[str, Any] = {}
        if notation.keyed and len(one) == 1 and "name" not in one:
            [(key, given)] = one.items()
            name = without_surrogates(key)
            arguments = object_of(given)
        else:
            function = one.get("function")
            call = function if isinstance(function, dict) else one
            names = [key for key in (*notation.names, "function") if isinstance(call.get(key), str)][:1]
            name = without_surrogates(call[names[0]]).strip() if names else ""
            every = {key: object_of(call[key]) for key in notation.arguments if key in call}
            filled = [key for key, given in every.items() if given and given != "{}"]
            arguments = None if None in every.values() else every[filled[0]] if filled else ""
            used = {*names, *(every.keys() - filled[1:]), "" if call is one else "function"}
            beside = {key: inner for key, inner in (one | call).items() if key not in used and not _is_id(key, inner)}
        if not name or arguments is None or (beside and (notation.bare or arguments in ("", "{}"))):
            return None  # or its arguments stand elsewhere
        found.append((name, arguments or "{}"))
        if beside:
            found.append((TEXT, json_of(beside)))
    return found or None
