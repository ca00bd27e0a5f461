"""Stop strings: one Aho-Corasick automaton for all of a request, built once and shared by its choices.

    stop strings --StopStrings--> automaton <--one state each-- StopSearch --push--> text that may be sent, match

A state stands for the longest end of the text that begins a stop string.  Its depth is the number of characters that
are held back.  Each character costs amortised O(1) transitions, however many stop strings there are.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import cached_property

import msgspec

from quire.service.api.valid_request import ValidRequest

Arcs = dict[tuple[int, str], int]
INLINE_CHARS = 1024  # all stop strings together: their automaton is built in a millisecond; longer ones take up to 15


class _Automaton:
    """The arcs between states, and what each state says of the text."""

    __slots__ = ("arcs", "depths", "fails", "matches")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.arcs: Arcs = {}  # (state, next character) -> state; state 0 is the empty text
        self.depths = [0]  # characters of each state's text
        self.fails = [0]  # the state of the longest proper end of its text
        self.matches = [""]  # the longest stop string with which its text ends
        parents: list[tuple[int, str]] = [(0, "")]
        for stop in stops:
            state = 0
            for char in stop:
                if (after := self.arcs.get((state, char))) is None:
                    after = self.arcs[state, char] = len(self.depths)
                    self.depths.append(self.depths[state] + 1)
                    parents.append((state, char))
                    self.fails.append(0)
                    self.matches.append("")
                state = after
            self.matches[state] = stop
        for state in sorted(range(1, len(parents)), key=self.depths.__getitem__):
            parent, char = parents[state]
            if parent:
                self.fails[state] = self.step(self.fails[parent], char)
            self.matches[state] = self.matches[state] or self.matches[self.fails[state]]

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        while (after := self.arcs.get((state, char))) is None and state:
            state = self.fails[state]
        return after or 0


class StopStrings:
    """The stop strings of one request.  None of them is empty."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._begin = re.compile("[" + "".join(map(re.escape, {stop[0] for stop in stops})) + "]") if stops else None

    def __bool__(self) -> bool:
        return bool(self._stops)

    @cached_property
    def automaton(self) -> _Automaton:
        """The automaton, built when a text first holds a character with which a stop string begins."""
        return _Automaton(self._stops)

    async def prepare(self) -> None:
        """Build a large automaton on a thread, before any text arrives."""
        if sum(map(len, self._stops)) > INLINE_CHARS:
            await asyncio.to_thread(lambda: self.automaton)

    def may_begin(self, text: str) -> int:
        """Return where a stop string may begin first; -1: nowhere."""
        found = self._begin.search(text) if self._begin is not None else None
        return -1 if found is None else found.start()


class StopSearch:
    """Looks for stop strings in one text, which arrives in parts.

    Of the matches that one part completes, the one that begins first counts; of those the shortest."""

    __slots__ = ("_held", "_include", "_state", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, include: bool) -> None:
        """`include`: the text ends with the stop string, not before it."""
        self._stops, self._include = stops, include
        self._state, self._held = 0, ""  # `_held`: the text of the state
        self.matched: str | None = None  # `push` must not be called any more

    def push(self, new: str) -> str:
        """Add text; return what can no longer be part of a stop string, or everything before the match."""
        at = 0
        if not self._state and (at := self._stops.may_begin(new)) < 0:
            return new
        automaton, state = self._stops.automaton, self._state
        step, matches = automaton.step, automaton.matches
        text, held = self._held + new, len(self._held)
        begin, found = len(text), ""
        for end, char in enumerate(new[at:] if at else new, held + at + 1):
            state = step(state, char)
            if (match := matches[state]) and end - len(match) < begin:
                begin, found = end - len(match), match
        if found:
            self.matched, self._state, self._held = found, 0, ""
            return text[: begin + len(found)] if self._include else text[:begin]
        cut = len(text) - automaton.depths[state]
        self._state, self._held = state, text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the text that is held back: nothing that follows belongs to it."""
        held, self._held, self._state = self._held, "", 0
        return held


def with_stop_tokens(valid: ValidRequest, special: Mapping[str, int]) -> ValidRequest:
    """Return a request that also stops at special tokens which a stop string names: they are no text to search.

    `special`: token ids of special tokens."""
    found = [special[stop] for stop in valid.stop if stop in special]
    if not found:
        return valid
    ids = list(dict.fromkeys([*valid.sampling.stop_token_ids, *found]))
    return msgspec.structs.replace(valid, sampling=msgspec.structs.replace(valid.sampling, stop_token_ids=ids))
