"""Stop strings: the matches of a naive search, wherever the text is cut, by work that grows with the text alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.service.text.stop_strings import StopSearch, StopStrings
from quire.service.text.token_decoder import TextStream
from quire.service.text.tokenizer import Tokenizer


class Naive:
    """The specification, in terms of the complete text and of every length of every stop string."""

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self.stops, self.include, self.text, self.sent = stops, include, "", 0
        self.matched: str | None = None

    def push(self, new: str) -> str:
        self.text += new
        unsent = self.text[self.sent :]
        found = [(at, stop) for stop in self.stops if (at := unsent.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            return unsent[: at + len(self.matched) * self.include]
        begun = (length for stop in self.stops for length in range(len(stop)) if unsent.endswith(stop[:length]))
        new_text = unsent[: len(unsent) - max(begun, default=0)]
        self.sent += len(new_text)
        return new_text


STOPS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=5), min_size=1, max_size=5).map(tuple)


@given(
    text=st.text(alphabet="abx🙂", max_size=40), stops=STOPS, cuts=st.lists(st.integers(0, 40)), include=st.booleans()
)
@example(text="aab", stops=("ab", "aab"), cuts=[1, 2], include=False)
@example(text="xaabab", stops=("abab", "ba"), cuts=[], include=False)
def test_the_match_and_what_is_held_back_are_those_of_a_naive_search(
    text: str, stops: tuple[str, ...], cuts: list[int], include: bool
) -> None:
    naive, search = Naive(stops, include), StopSearch(StopStrings(stops), include=include)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for begin, end in itertools.pairwise(places):
        assert search.push(text[begin:end]) == naive.push(text[begin:end])
        assert search.matched == naive.matched
        if naive.matched is not None:
            return
    assert search.flush() == text[naive.sent :]


class Counting(dict[Any, Any]):
    """Counts look-ups."""

    looked = 0

    def get(self, *args: Any) -> Any:
        self.looked += 1
        return super().get(*args)


HOSTILE = (*(f"q{at:03}" + "a" * 252 for at in range(62)), "a" * 255 + "z", "b" + "a" * 254 + "y")


@pytest.mark.parametrize("unit", ["a", "b" + "a" * 254, "q001" + "a" * 251, "ab", "q"])
@pytest.mark.parametrize("cut", [1, 4, 1000])
def test_each_character_costs_at_most_two_transitions(unit: str, cut: int) -> None:
    """Whatever the stop strings are, and however much of the text is held back."""
    stops = StopStrings(HOSTILE)
    counting = stops.automaton.arcs = Counting(stops.automaton.arcs)
    search, text = StopSearch(stops, include=False), (unit * 20_000)[:20_000]
    for at in range(0, len(text), cut):
        search.push(text[at : at + cut])
    assert search.matched is None
    assert 0 < counting.looked <= 2 * len(text) + len(HOSTILE[0])


def test_text_without_the_beginning_of_a_stop_string_costs_no_transition() -> None:
    stops = StopStrings(HOSTILE)
    search = StopSearch(stops, include=False)
    assert search.push("Moon.") == "Moon."
    assert "automaton" not in vars(stops), "nothing was built"


async def test_a_large_automaton_is_built_before_the_text_arrives() -> None:
    large, small = StopStrings(HOSTILE), StopStrings(("###",))
    await large.prepare()
    await small.prepare()
    assert ["automaton" in vars(stops) for stops in (large, small)] == [True, False]


def test_choices_share_the_automaton(byte_level_tokenizer: Tokenizer) -> None:
    stops = StopStrings(("###",))
    ids = byte_level_tokenizer._encode("#", special=False)
    streams = [TextStream(byte_level_tokenizer, stop=stops) for _ in range(2)]
    assert [stream.push(ids) for stream in streams] == ["", ""]
    assert streams[0]._stops._stops.automaton is streams[1]._stops._stops.automaton
