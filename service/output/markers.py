"""Search for the markers of a response template, in linear time.

    text --first characters--> where a marker may begin --patterns, within a window--> match | pending | none

A marker has at most WINDOW characters.  So each position costs at most a window, whatever patterns and text are:
a pattern is never searched for, it is matched at single positions only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

WINDOW = 512  # characters of a marker at most; a longer one is text
KNOWN_CHARS = 2**16  # characters known to begin a marker or not; beyond, any other may
# Patterns in which the text before a marker counts.
_LOOKS_BEHIND = re.compile(r"\(\?<[=!]|\\[bBGmM]|(?<!\[)\^")


class Marker(msgspec.Struct, frozen=True, eq=False):
    """What may end or interrupt a region."""

    kind: str
    pattern: Any  # compiled by the module `regex`: it tells whether a text could become a match
    field: Any = None  # belongs to the caller
    grows: bool = True  # a match at the end of the text may become longer with more text
    empty: bool = True  # a match without characters counts
    wins: bool = False  # over longer ones at the same position


class Match(msgspec.Struct, frozen=True):
    """A marker in a text."""

    marker: Marker
    found: Any  # match of the pattern


class Markers:
    """The markers that are looked for in one state of a reader."""

    __slots__ = ("_begin", "_candidates", "_known", "_last", "_markers")

    def __init__(self, markers: list[Marker]) -> None:
        self._markers = markers
        self._known, self._begin = set[str](), dict[str, list[Marker]]()  # the markers that begin with a character
        self._last = ""  # text whose characters are known
        # None: any character may begin a marker, since a pattern looks at the text before it.
        behind = any(_LOOKS_BEHIND.search(one.pattern.pattern) for one in markers)
        self._candidates: re.Pattern[str] | None = None if behind else re.compile(r"(?!)")

    def may_begin_in(self, text: str) -> bool:
        """Return whether a marker may begin in a text that is not the first of an answer."""
        if self._candidates is None:
            return bool(self._markers)
        self._learn(text)
        return any(char in self._begin for char in text) or len(self._known) > KNOWN_CHARS

    def candidate(self, text: str, at: int, end: int) -> int:
        """Return the first position of a stretch where a marker may begin, or its end."""
        if self._candidates is None:
            return at
        self._learn(text[at:end])
        if len(self._known) > KNOWN_CHARS:
            return at
        found = self._candidates.search(text, at, end)
        return end if found is None else found.start()

    def next(self, text: str, at: int, *, final: bool) -> tuple[Match | None, int]:
        """Return the first marker at or after `at`, and the position before which none begins.

        Without a match, a marker may begin at that position once more text has come.  `final`: no more text comes."""
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
        """Yield where a marker may begin: the beginning of the answer, and characters that begin one."""
        if not self._markers:
            return
        if at == 0:
            yield 0
        first = max(at, 1)
        if self._candidates is not None and text is not self._last:  # it is searched again after each of its markers
            self._learn(text)
            self._last = text
        if self._candidates is None or len(self._known) > KNOWN_CHARS:
            yield from range(first, len(text))
            return
        for found in self._candidates.finditer(text, first):
            yield found.start()

    def at(self, text: str, at: int, *, final: bool, without: tuple[Marker, ...] = ()) -> tuple[Match | None, bool]:
        """Return the longest marker at a position, and whether more text decides about it."""
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
