"""Reading a stream of events, and what a refusal leads to."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.loadtest.answers import MAX_RETRIES, Answer, announced_pause, pause


def event(body: dict[str, Any]) -> bytes:
    return b"id: x:1\ndata: " + json.dumps(body).encode() + b"\n\n"


def stream(texts: list[str]) -> bytes:
    chat = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    chunks = chat + [{"choices": [{"index": 0, "text": text, "logprobs": None}], "usage": None} for text in texts]
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 99, "total_tokens": 102}}
    return b": keep-alive\n\n" + b"".join(map(event, [*chunks, usage])) + b"data: [DONE]\n\n"


@given(st.lists(st.text(min_size=1), max_size=8), st.data())
def test_a_stream_reads_the_same_however_it_is_cut(texts: list[str], data: st.DataObject) -> None:
    whole = stream(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    answer = Answer()
    for at, (low, high) in enumerate(zip([0, *cuts], [*cuts, len(whole)], strict=True)):
        answer.feed(whole[low:high], float(at))
    assert answer.complete
    assert (answer.text, answer.count, len(answer.times)) == (texts, 99, len(texts))
    assert answer.times == sorted(answer.times)
    assert len(answer.gaps) == max(0, len(texts) - 1)


def test_tokens_are_counted_by_events_where_the_server_does_not_say() -> None:
    answer = Answer()
    answer.feed(event({"choices": [{"text": "a"}]}) + event({"choices": [{"delta": {"content": "b"}}]}), 1.0)
    assert (answer.count, answer.complete) == (2, False)


def test_gaps_are_those_of_one_choice() -> None:
    answer = Answer()
    for at, index in ((0.0, 0), (0.1, 1), (1.0, 0), (3.1, 1)):
        answer.feed(event({"choices": [{"index": index, "text": "x"}]}), at)
    assert answer.gaps == [1.0, 3.0]


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (event({"error": {"message": "too late", "code": "deadline"}}) + b"data: [DONE]\n\n", "deadline: too late"),
        (b"data: <html>\n\n", "not an event"),
    ],
)
def test_a_stream_that_fails_is_not_complete(block: bytes, says: str) -> None:
    answer = Answer()
    answer.feed(block, 0.0)
    assert not answer.complete
    assert answer.error is not None
    assert answer.error.startswith(says)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "3", "retry-after-ms": "2345"}, 2.345),
        ({"Retry-After": "3"}, 3.0),
        ({"retry-after": "1.5", "Retry-After-Ms": "soon"}, 1.5),
        ({"Retry-After": "Thu, 01 Jan 1970 00:01:40 GMT"}, 90.0),
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:01 GMT"}, 0.0),
        ({"Retry-After": "later"}, None),
        ({}, None),
    ],
)
def test_announced_pause(headers: dict[str, str], seconds: float | None) -> None:
    assert announced_pause(headers, 10.0) == seconds


def test_who_obeys_waits_as_told() -> None:
    rng = random.Random(0)
    assert pause("obey", 0, 7.5, rng) == 7.5
    assert pause("ignore", 0, 7.5, rng) == 0.5
    assert pause("never", 0, 7.5, rng) is None
    assert pause("obey", MAX_RETRIES, 1.0, rng) is pause("ignore", MAX_RETRIES, 1.0, rng) is None
    for attempt in range(MAX_RETRIES):
        alone = pause("obey", attempt, None, rng)
        assert alone is not None
        assert 0.75 * min(8, 0.5 * 2**attempt) <= alone <= min(8, 0.5 * 2**attempt)
