"""Repair of JSON as models write it, a part at a time: no step is long, however long the text is.

parts of a text --Repair.push--> JsonReader --Repair.finish--> valid JSON of an object or a list, or None

Valid JSON stays as it was written, half surrogates aside.
"""

from __future__ import annotations

import json
from typing import Any

from quire.service.common.surrogates import without_escaped_halves
from quire.service.output.deep_values import nests_deeper
from quire.service.output.lenient_json import DEPTH, Dialect, Event, JsonReader

MOST_ESCAPES = 50_000  # backslashes of a text whose half surrogates are replaced at once
WHOLE_CHARS = 4096  # longest text that is repaired at once: 10 to 20 ms


class Repair:
    """Repairs one object or list, as its text arrives."""

    __slots__ = ("_event", "_opens", "_reader", "_rest")

    def __init__(self, dialect: Dialect | None = None) -> None:
        self._reader = JsonReader(dialect)
        self._reader.strict = False
        self._rest = ""  # text that was not read yet
        self._event: Event | None = None  # why reading ended
        self._opens = False  # a bracket was seen

    def push(self, text: str) -> None:
        """Add text."""
        self._read(text, final=False)

    def finish(self) -> str | None:
        """Return the object or list that the text holds as valid JSON; None if it holds anything else."""
        self._read("", final=True)
        reader = self._reader
        if self._event is Event.BAD or not (reader.pairs or self._opens):
            return None
        if self._event is not Event.END:
            reader.complete()
        elif self._rest.strip():
            return None
        found = reader.take()
        return found if found.strip() else None

    def _read(self, text: str, *, final: bool) -> None:
        self._opens = self._opens or "{" in text or "[" in text
        self._rest += text
        if self._event is not None:
            self._rest = self._rest.strip()[:1]  # it only counts whether anything follows
            return
        at, event = self._reader.read(self._rest, 0, final=final)
        self._rest = self._rest[at:]
        if event is not Event.MORE:
            self._event = event


def repaired(text: str) -> str | None:
    """Return the object or list that a text holds as valid JSON; None if it holds anything else.

    A text of more than WHOLE_CHARS must be valid JSON, half surrogates aside."""
    if len(text) > WHOLE_CHARS:
        return valid(text)
    repair = Repair()
    repair.push(text)
    return repair.finish()


def valid(text: str) -> str | None:
    """Return valid JSON of an object or a list, with U+FFFD for half surrogates; None for any other text.

    None as well if it nests deeper than DEPTH."""
    if text.count("\\") > MOST_ESCAPES:
        return None
    try:
        found = json.loads(text, parse_constant=_refuse, parse_int=float)  # an int has at most 4,300 digits
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict | list) or nests_deeper(text, DEPTH):
        return None
    return without_escaped_halves(text)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
