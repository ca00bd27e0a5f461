"""When a waiting request may start, by admission mode, and what the forecast learns from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.machine import PREFIXES, SchedulerMachine
from tests.core.rig import FAR, Rig


def test_threshold_holds_new_work_back() -> None:
    """At 50 %, a second request waits until the first has left."""
    rig = Rig(blocks=20, size=4, threshold=0.5)
    rig.add([1] * 30, 2, ignore_eos=True)
    rig.add([2] * 30, 2, ignore_eos=True)
    rig.submit()
    assert rig.core.running == 1
    assert len(rig.core.waiting) == 1
    assert rig.core.headroom.startable()[0] == 0
    rig.run()


def test_watermark_keeps_a_twentieth_free_and_none_keeps_nothing() -> None:
    for admission, running in (("watermark", 1), ("none", 2)):
        rig = Rig(blocks=20, size=4, admission=admission)
        rig.add([1] * 39, 1, ignore_eos=True)
        rig.add([2] * 39, 1, ignore_eos=True)
        rig.submit()
        assert rig.core.running == running
        rig.run()


@pytest.mark.parametrize("ends_known", [True, False])
def test_forecast_counts_a_shared_prefix_once(ends_known: bool) -> None:
    """Thirteen requests behind one system prompt of 40 blocks in a pool of 120: all run at once."""
    rig = Rig(blocks=120, size=4, max_seqs=64, step_tokens=512, chunk_tokens=512, admission="forecast")
    system = [1 + i % 40 for i in range(160)]
    rig.add([*system, 1], 6, ignore_eos=ends_known)
    rig.submit()
    rig.commit()
    for i in range(11):
        rig.add([*system, 2 + i], 6, ignore_eos=ends_known)
    rig.add([*system, 30], 6, n=4, ignore_eos=ends_known)
    rig.submit()
    assert rig.core.running + 3 >= 13  # its siblings join after its prompt
    assert not rig.core.waiting
    held = rig.pool.total - rig.pool.available
    assert held <= rig.core.headroom.predicted_peak() <= (40 + 16 * 3 if ends_known else 120)
    rig.run()
    assert rig.core.report.totals.preemptions == 0
    assert rig.core.headroom.predicted_peak() == 0


def test_forecast_knows_when_the_others_end() -> None:
    """Both at their maximum length need 22 blocks of 20; but when the second has grown, the first will be gone."""
    for admission, running in (("forecast", 2), ("reserve", 1)):
        rig = Rig(blocks=20, size=4, admission=admission)
        rig.add([1] * 30, 4, ignore_eos=True)
        rig.add([2] * 8, 44, ignore_eos=True)
        rig.submit()
        assert rig.core.running == running
        assert (rig.core.headroom.startable()[0] > 0) == (running == 2)
        rig.run()
        assert rig.core.report.totals.preemptions == 0
        assert rig.core.headroom.startable() == (80, 8)


def test_only_ends_of_their_own_are_learnt() -> None:
    rig = Rig()
    rig.add([1] * 4, 30, ignore_eos=True)  # its length does not show what the model would generate
    rig.run()
    assert rig.core.admission.forecast.lengths.lengths("").weight == 0
    rig.add([1] * 4, 3)
    gone = rig.add([2] * 4, 500, seed=3)
    rig.submit()
    rig.commit()
    rig.core.abort(gone)  # seen to live on
    rig.collect_outputs()
    rig.run()
    assert rig.core.admission.forecast.lengths.lengths("").weight == pytest.approx(2, abs=0.01)
    assert max(rig.core.admission.forecast.calibration.judged) <= 1  # not the one that was aborted


def test_lengths_are_learnt_by_tenant_whatever_its_salts_are() -> None:
    rig = Rig()
    for at in range(3):
        rig.add([1] * 4, 3, tenant="acme", salt=f"salt {at}")
    rig.add([1] * 4, 3, salt="the client's own choice")
    rig.run()
    assert list(rig.core.admission.forecast.lengths._tenants) == ["acme"]
    assert rig.core.admission.forecast.lengths._tenants["acme"].weight == pytest.approx(3, abs=0.05)


def test_reserve_counts_blocks_that_two_sequences_computed_at_the_same_time() -> None:
    """Tables [0, 1, 5 ...] and [0, 2, 5 ...]: what they share is not their beginning alone."""
    machine = SchedulerMachine()
    machine.choose(preempt="recompute", caching=True, host_blocks=40, admission="reserve")
    plain: dict[str, Any] = {"priority": 0, "prompt_logprobs": -1, "grammar": "", "tenant": ("", 1.0)}
    own, own_salt = [45, 10, 12, 29, 32, 1, 31, 34], "tenant"
    machine.add(prefix=PREFIXES[0], tail=own, new=6, n=1, seed=7, ignore_eos=False, life=FAR, salt=own_salt, **plain)
    machine.several_steps(steps=9)
    machine.add(prefix=PREFIXES[1], tail=[31, 48], new=6, n=3, seed=0, ignore_eos=True, life=40, salt="", **plain)
    machine.several_steps(steps=3)
    machine.several_steps(steps=1)
    machine.commit()
    machine.add(prefix=PREFIXES[0], tail=[], new=3, n=1, seed=3, ignore_eos=False, life=FAR, salt="", **plain)
    machine.crash()
    machine.crash()
    machine.several_steps(steps=8)
    first, second, *_ = [seq.table for seq in machine.rig.core.batch.holders()]
    assert first[1] != second[1]
    assert first[2] == second[2]
    machine.room_agrees_with_the_mode()
