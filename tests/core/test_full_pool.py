"""What the scheduler does when no block is free: it preempts the newest sequence, or pauses small ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.rig import Rig


def test_preemption_newest_first_all_or_nothing_and_the_text_is_the_same() -> None:
    """Under memory pressure the newest sequence gives up everything, resumes before any newer one, and its text is the
    same."""
    rig = Rig(blocks=12, size=4, caching=False)
    ids = [rig.add([5 + i] * 8, 24, ignore_eos=True, seed=i) for i in range(4)]
    victims: list[str] = []
    original = rig.core.preemption.preempt

    def spy(seq: Any, *, swap: bool = True) -> None:
        seated = [s for s in rig.core.live() if s.slot >= 0]
        assert seq.arrival == max(s.arrival for s in seated)
        original(seq, swap=swap)
        assert seq.table == []
        victims.append(seq.request.id)

    rig.core.preemption.preempt = spy  # type: ignore[method-assign]
    rig.run()
    assert victims
    assert rig.core.report.totals.preemptions == len(victims)
    assert rig.core.report.totals.recomputed_tokens > 0
    ended = [delta.id for delta in rig.deltas if delta.finish]
    assert ended[0] == ids[0]


def test_in_a_full_pool_the_small_wait_with_their_blocks_and_the_large_go_on() -> None:
    """Two that could outgrow the pool together.  The later one pauses, computes nothing twice, and its text is the
    same."""
    rig = Rig(blocks=12, size=4, admission="forecast")
    sizes = {rig.add([2, 3, 5] * 6, 20, seed=1): 5, rig.add([7, 11], 20, seed=2): 1}
    for seq in rig.core.waiting:
        assert seq.stops  # no end is known
    rig.core.admission.forecast.fits = lambda *_: True  # type: ignore[method-assign]  # a forecast that is wrong
    while not rig.core.paused and not rig.core.idle:
        rig.submit()
        rig.commit()
        rig.core.auditor.whole()
    (paused,) = rig.core.batch.paused
    assert sizes[paused.request.id] == 1
    assert paused.table
    assert rig.core.running == 1
    assert rig.core.headroom.startable()[0] == 0
    assert rig.core.headroom.predicted_peak() >= len(paused.table)  # a sequence that waits will resume, and counts
    rig.run()
    assert rig.core.report.totals.pauses > 0
    assert rig.core.report.totals.preemptions == rig.core.report.totals.recomputed_tokens == 0


@pytest.mark.parametrize("over", ["abort", "deadline"])
def test_who_is_paused_can_end_in_every_way(over: str) -> None:
    rig = Rig(blocks=12, size=4, admission="forecast")
    rig.add([2, 3, 5] * 6, 20, seed=1)
    rig.add([7, 11], 20, seed=2, deadline=1000)
    rig.core.admission.forecast.fits = lambda *_: True  # type: ignore[method-assign]
    while not rig.core.paused:
        rig.submit()
        rig.commit()
    if over == "abort":
        rig.core.abort("r1")
    else:
        rig.now = 2000
    rig.run()
    reason = {"abort": "cancelled", "deadline": "deadline"}[over]
    assert rig.finishes["r1", 0].reason == reason
    assert rig.core.paused == 0
    assert rig.pool.available == rig.pool.total


def test_who_is_paused_when_a_step_fails_says_the_same() -> None:
    rig = Rig(blocks=12, size=4, admission="forecast")
    rig.add([2, 3, 5] * 6, 20, seed=1)
    rig.add([7, 11], 20, seed=2)
    rig.core.admission.forecast.fits = lambda *_: True  # type: ignore[method-assign]
    while not rig.core.paused:
        rig.submit()
        rig.commit()
    rig.fail()
    rig.run()
    assert {finish.reason for finish in rig.finishes.values()} <= {"stop", "length"}
