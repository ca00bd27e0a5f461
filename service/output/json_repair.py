"""Incremental repair of invalid JSON written by models, so that no single step takes long.

parts of a text --Repair.push--> JsonReader --Repair.finish--> valid JSON of an object or a list, or None

Valid JSON is not changed, except for lone surrogates.
"""

from __future__ import annotations

import json
from typing import Any

from quire.service.common.surrogates import without_escaped_halves
from quire.service.output.deep_values import nests_deeper
from quire.service.output.lenient_json import DEPTH, Dialect, Event, JsonReader

MAX_ESCAPES = 50_000  # maximum backslashes in a text whose lone surrogates are replaced in one step
WHOLE_CHARS = 4096  # maximum length of a text that is repaired in one step, which takes 10 to 20 ms


class Repair:
    """Repairs one object or list while its text arrives."""

    __slots__ = ("_event", "_opens", "_reader", "_rest")

    def __init__(self, dialect: Dialect | None = None) -> None:
        self._reader = JsonReader(dialect)
        self._reader.strict = False
        self._rest = ""  # text that was not read yet
        self._event: Event | None = None  # event that ended reading
        self._opens = False  # whether the text contains an opening bracket

    def push(self, text: str) -> None:
        """Add text."""
        self._read(text, final=False)

    def finish(self) -> str | None:
        """Return the object or list in the text as valid JSON; None if the text contains anything else."""
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
            self._rest = self._rest.strip()[:1]  # one character is enough to know that text follows
            return
        at, event = self._reader.read(self._rest, 0, final=final)
        self._rest = self._rest[at:]
        if event is not Event.MORE:
            self._event = event


def repaired(text: str) -> str | None:
    """Return the object or list in a text as valid JSON; None if the text contains anything else.

    A text of more than WHOLE_CHARS is not repaired: it must be valid JSON, except for lone surrogates."""
    if len(text) > WHOLE_CHARS:
        return valid(text)
    repair = Repair()
    repair.push(text)
    return repair.finish()


def valid(text: str) -> str | None:
    """Return the text if it is JSON of an object or a list, with U+FFFD for lone surrogates; otherwise None.

    Also returns None for JSON with deeper nesting than DEPTH."""
    if text.count("\\") > MAX_ESCAPES:
        return None
    try:
        # As floats, since Python refuses to parse an int of more than 4,300 digits.
        found = json.loads(text, parse_constant=_refuse, parse_int=float)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict | list) or nests_deeper(text, DEPTH):
        return None
    return without_escaped_halves(text)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
