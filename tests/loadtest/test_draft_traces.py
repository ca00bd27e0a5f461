"""Traces of drafts: recorded from an answer, and replayed as drafts that are right where those were."""

from __future__ import annotations

from quire.engine.executor import ops
from quire.loadtest.studies.draft_traces import read_trace, trace, word
from quire.loadtest.studies.scripted_drafts import Text, Traces

VOCAB = 100


def test_a_trace_names_match_tokens_and_right_tokens_of_each_draft() -> None:
    ops.load()
    prompt = [1, 2, 3, 4, 5, 6, 7]
    assert read_trace(trace(prompt, [2, 3, 4, 9, 9])) == [(0, 0, 0), (0, 0, 0), (2, 2, 1), (3, 2, 0), (0, 0, 0)]
    assert word(24, [4, 5, 6], [4, 5]) == "24/2/2"


def test_a_replayed_draft_is_right_as_far_as_the_recorded_one() -> None:
    answer = [10, 20, 30, 40, 50, 60]
    scripts = Traces(["- 3/2/1 - 4/2/2"])
    found = scripts.script(answer, 0, 0, VOCAB)
    assert found[:4] == [(0, []), (3, [20, 31]), (0, []), (4, [40, 50])]
    assert [bool(tokens) for _, tokens in found[4:]] == [False, True]  # the trace is repeated for a longer answer


def test_streams_and_rounds_replay_other_traces() -> None:
    scripts = Traces([f"- {match}/1/1" for match in range(2, 9)])
    first = [scripts.script([1, 2], stream, 0, VOCAB) for stream in range(7)]
    assert len({str(one) for one in first}) == 7
    assert scripts.script([1, 2], 0, 1, VOCAB) != first[0]


def test_a_scripted_text_has_its_share_of_drafts() -> None:
    answer = list(range(VOCAB)) * 20
    script = Text(0.5, 32, 0.9, 8).script(answer, 0, 0, VOCAB)
    assert 0.2 < sum(bool(tokens) for _, tokens in script) / len(answer) < 0.8
    assert all(len(tokens) <= 8 for _, tokens in script)
