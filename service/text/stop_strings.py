"""Stop strings: one Aho-Corasick automaton for all stop strings of a request, shared by its choices.

    stop strings --StopStrings--> automaton <--one state per choice-- StopSearch --push--> text that may be sent, match

A state stands for the longest suffix of the text that is a prefix of a stop string.  This suffix is held back until
further text decides whether the stop string follows.  Each character costs amortised O(1) transitions, however many
stop strings there are.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import cached_property

import msgspec

from quire.service.api.valid_request import ValidRequest

Arcs = dict[tuple[int, str], int]
# Maximum characters of stop strings whose automaton is built on the event loop, in 1 ms. Larger automata are built on a
# thread, in up to 15 ms.
INLINE_CHARS = 1024


class _Automaton:
    """States and arcs of an Aho-Corasick automaton."""

    __slots__ = ("arcs", "depths", "fails", "matches")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.arcs: Arcs = {}  # (state, next character) -> state; state 0 is the empty text
        self.depths = [0]  # by state: length of its text in characters
        self.fails = [0]  # by state: state of the longest proper suffix of its text
        self.matches = [""]  # by state: longest stop string that is a suffix of its text
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
        """The automaton.  It is built when a text first has a character with which a stop string begins."""
        return _Automaton(self._stops)

    async def prepare(self) -> None:
        """Build a large automaton on a thread, before any text arrives."""
        if sum(map(len, self._stops)) > INLINE_CHARS:
            await asyncio.to_thread(lambda: self.automaton)

    def may_begin(self, text: str) -> int:
        """Return the first position in a text at which a stop string may begin; -1 if there is none."""
        found = self._begin.search(text) if self._begin is not None else None
        return -1 if found is None else found.start()


class StopSearch:
    """Searches one text, which arrives in parts, for stop strings.

    If one part completes several matches, the match that begins first counts; of matches that begin together, the
    shortest."""

    __slots__ = ("_held", "_include", "_state", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, include: bool) -> None:
        """`include`: keep the stop string at the end of the text (vLLM's `include_stop_str_in_output`)."""
        self._stops, self._include = stops, include
        self._state, self._held = 0, ""  # `_held`: text that is held back, the text of the state
        self.matched: str | None = None  # the stop string that was found; `push` must not be called after that

    def push(self, new: str) -> str:
        """Add text; return text that can no longer be part of a stop string, or after a match the rest before it."""
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
        """Return the text that is held back, at the end of the answer."""
        held, self._held, self._state = self._held, "", 0
        return held


def with_stop_tokens(valid: ValidRequest, special: Mapping[str, int]) -> ValidRequest:
    """Return the request with stop token ids added for stop strings that are special tokens.

    Special tokens do not appear in the text that is searched.  `special`: text of special tokens -> id."""
    found = [special[stop] for stop in valid.stop if stop in special]
    if not found:
        return valid
    ids = list(dict.fromkeys([*valid.sampling.stop_token_ids, *found]))
    return msgspec.structs.replace(valid, sampling=msgspec.structs.replace(valid.sampling, stop_token_ids=ids))
