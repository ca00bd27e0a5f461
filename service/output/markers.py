"""Search for the markers of a response template, in linear time.

    text --first characters--> positions at which a marker may begin --patterns--> match | pending | none

Patterns are only matched at single positions, and a marker has at most WINDOW characters.  So each position costs at
most WINDOW steps, whatever the patterns and the text are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

WINDOW = 512  # maximum length of a marker in characters; a longer marker is text
KNOWN_CHARS = 2**16  # maximum size of the cache of first characters; beyond it, any character may begin a marker
# Finds patterns whose match depends on the text before it.
_LOOKS_BEHIND = re.compile(r"\(\?<[=!]|\\[bBGmM]|(?<!\[)\^")


class Marker(msgspec.Struct, frozen=True, eq=False):
    """A pattern that may end or interrupt a region."""

    kind: str
    pattern: Any  # compiled by the module `regex`, which supports partial matches
    field: Any = None  # data of the caller
    grows: bool = True  # a match at the end of the text may become longer with more text
    empty: bool = True  # accept an empty match
    wins: bool = False  # takes precedence over longer matches at the same position


class Match(msgspec.Struct, frozen=True):
    """A marker found in a text."""

    marker: Marker
    found: Any  # regex match of the pattern


class Markers:
    """The markers that a reader searches for in one of its states."""

    __slots__ = ("_begin", "_candidates", "_known", "_last", "_markers")

    def __init__(self, markers: list[Marker]) -> None:
        self._markers = markers
        # Characters that were tested as first characters of markers; and first character -> markers that may begin with
        # it.
        self._known, self._begin = set[str](), dict[str, list[Marker]]()
        self._last = ""  # last text whose characters were all tested
        # Regex of characters that may begin a marker.  None: any character may, since a pattern has a lookbehind.
        behind = any(_LOOKS_BEHIND.search(one.pattern.pattern) for one in markers)
        self._candidates: re.Pattern[str] | None = None if behind else re.compile(r"(?!)")

    def may_begin_in(self, text: str) -> bool:
        """Return whether a marker may begin in a text that is not at the beginning of an answer."""
        if self._candidates is None:
            return bool(self._markers)
        self._learn(text)
        return not self._begin.keys().isdisjoint(text) or len(self._known) > KNOWN_CHARS

    def candidate(self, text: str, at: int, end: int) -> int:
        """Return the first position from `at` to `end` at which a marker may begin; `end` if there is none."""
        if self._candidates is None:
            return at
        self._learn(text[at:end])
        if len(self._known) > KNOWN_CHARS:
            return at
        found = self._candidates.search(text, at, end)
        return end if found is None else found.start()

    def next(self, text: str, at: int, *, final: bool) -> tuple[Match | None, int]:
        """Return the first marker at or after `at`, and its position.

        Without a match, the position is the one at which a marker may begin, depending on further text, or the text's
        end.  `final`: no further text comes."""
        for here in self._positions(text, at):
            match, pending = self.at(text, here, final=final)
            if match is not None or pending:
                return match, here
        return None, len(text)

    def _learn(self, text: str) -> None:
        if self._known.issuperset(text) or len(self._known) > KNOWN_CHARS:
            return
        new = set(text) - self._known
        begin = {
            char: fitting
            for char in new
            if (fitting := [one for one in self._markers if one.pattern.match("x" + char, 1, partial=True)])
        }
        self._known |= new
        if begin:
            self._begin |= begin
            self._candidates = re.compile("[" + "".join(map(re.escape, sorted(self._begin))) + "]")

    def _positions(self, text: str, at: int) -> Iterator[int]:
        """Yield the positions at which a marker may begin: the start of the answer, and characters that begin one."""
        if not self._markers:
            return
        if at == 0:
            yield 0
        first = max(at, 1)
        if self._candidates is not None and text is not self._last:  # after each marker, the same text is searched on
            self._learn(text)
            self._last = text
        if self._candidates is None or len(self._known) > KNOWN_CHARS:
            yield from range(first, len(text))
            return
        for found in self._candidates.finditer(text, first):
            yield found.start()

    def at(self, text: str, at: int, *, final: bool, without: tuple[Marker, ...] = ()) -> tuple[Match | None, bool]:
        """Return the longest marker at a position, and whether further text is needed to decide."""
        end = min(len(text), at + WINDOW)
        open_ended = not final and end == len(text) and end < at + WINDOW
        best: Match | None = None
        fitting = self._markers
        if at and self._candidates is not None and text[at : at + 1] in self._known:
            fitting = self._begin.get(text[at], [])
        for marker in fitting:
            found = marker.pattern.match(text, at, end, partial=open_ended)
            if found is None or marker in without:
                continue
            if open_ended and (found.partial or (found.end() == end and (marker.grows or found.end() == at))):
                return None, True
            if found.end() == at and not marker.empty:
                continue
            if best is None or marker.wins or (found.end() > best.found.end() and not best.marker.wins):
                best = Match(marker, found)
        return best, False
