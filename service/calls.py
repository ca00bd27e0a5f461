"""What readers of tool calls share: how a reader goes on, what it knows, and calls of a value that was read."""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import Any, Literal, Protocol

import msgspec

from service.argument_types import Tools
from service.lenient_json import repaired
from service.markers import Markers
from service.notations import Notation

BESIDE = frozenset({"type", "id", "index", "tool_call_id"})  # keys of a call that are no arguments

End = Literal["", "cut", "whole"]  # end of the answer: not reached; cut by a limit; ended by the model
CallPart = tuple[str | None, str]  # a new call's name or None, and a part of its arguments


class Status(Enum):
    """How a reader goes on."""

    MORE = auto()  # it needs more text
    NEXT = auto()  # what was read is complete, and another call begins here
    DONE = auto()  # the text of calls ends here
    BROKEN = auto()  # what was read since the beginning, or since NEXT, is no call


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
        """Read on from a position; return where it stands, and how it goes on.

        After MORE the rest of the text is given again, with more."""


def loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def object_of(value: Any) -> str | None:
    """Return arguments as the JSON of an object; "": there are none; None: they are none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return ""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        found = repaired(value)
        return found if found is not None and found.lstrip().startswith("{") else None
    return None


def calls_of(value: Any, notation: Notation) -> list[CallPart] | None:
    """Return names and arguments of the calls that a value holds; None if it holds anything else."""
    found: list[CallPart] = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict):
            return None
        if notation.keyed and len(one) == 1 and "name" not in one:
            [(name, given)] = one.items()
            arguments = object_of(given)
        else:
            function = one.get("function")
            call = function if isinstance(function, dict) else one
            names = [call[key] for key in notation.names if isinstance(call.get(key), str)]
            name = (names + ([function] if isinstance(function, str) else []) + [""])[0].strip()
            every = [object_of(call[key]) for key in notation.arguments if key in call]
            arguments = None if None in every else next((one for one in every if one and one != "{}"), "")
            known = {*notation.names, *notation.arguments, "function", *BESIDE}
            if not known.issuperset(call):
                return None
        if not name or arguments is None:
            return None
        found.append((name, arguments or "{}"))
    return found or None
