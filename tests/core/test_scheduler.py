"""The scheduler: random runs, and the order in which requests are batched."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.core.machine import SchedulerMachine
from tests.core.rig import Rig
from tests.matrix import examples

TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("caching", [True, False])
def test_same_text_whatever_the_chunks(depth: int, chunk: int, caching: bool) -> None:
    rig = Rig(step_tokens=520, chunk_tokens=chunk, depth=depth, caching=caching)
    for i in range(12):
        rig.add([1 + i % 3] * (3 + 5 * i), 5 + i, n=1 + i % 3, seed=i)
    rig.run()
    assert len(rig.finishes) == 24


def test_first_come_first_served() -> None:
    """With one slot, equal requests end in the order of their arrival."""
    rig = Rig(max_seqs=1)
    ids = [rig.add([9, 9, i + 1], 5, ignore_eos=True) for i in range(5)]
    rig.run()
    assert [delta.id for delta in rig.deltas if delta.finish] == ids


def test_a_short_request_joins_and_leaves_a_running_batch() -> None:
    """Iteration-level batching."""
    rig = Rig()
    long = rig.add([1] * 8, 60, ignore_eos=True)
    for _ in range(5):
        rig.submit()
        rig.commit()
    short = rig.add([2] * 8, 3, ignore_eos=True)
    rig.run()
    order = [delta.id for delta in rig.deltas if delta.finish]
    assert order == [short, long]


def test_chunked_prefill_keeps_decodes_going() -> None:
    rig = Rig(blocks=200, step_tokens=16, chunk_tokens=16)
    talker = rig.add([1] * 4, 100, ignore_eos=True)
    rig.submit()
    rig.commit()
    rig.add([2] * 150, 1, ignore_eos=True)
    before = len(rig.answers[talker, 0])
    for _ in range(8):
        rig.submit()
        rig.commit()
    assert len(rig.answers[talker, 0]) == before + 8  # a token every step while the prompt is chunked in
    rig.run()


def test_a_request_delivered_twice_runs_once() -> None:
    rig = Rig()
    request = rig.add([1] * 4, 6, ignore_eos=True)
    rig.core.accept(rig.requests[request])
    rig.run()
    assert len(rig.answers[request, 0]) == 6
