"""How many drafts a step computes, by what they have cost and how often they were right."""

from __future__ import annotations

import pytest

from quire.engine.core.plan import Draft
from quire.engine.core.policy.drafts import (
    KNOWN,
    MATCHES,
    MAX_CREDIT,
    PROBE_TOKENS,
    PROBES,
    SEARCHES,
    DraftController,
)
from quire.engine.core.policy.step_cost import StepCostModel
from quire.engine.core.sequence import Sequence
from quire.engine.wire.messages import Generate, Sampling

DECODE_S = 0.01  # seconds of a step without drafts
LENGTH = 8  # drafts offered to each sequence


def sequences(count: int) -> list[Sequence]:
    requests = [Generate(f"r{at}", "gw", [1], 100, Sampling(), 2**60) for at in range(count)]
    return [Sequence(request, 0, (at, 0), frozenset(), 101, [1]) for at, request in enumerate(requests)]


def draft(slot: int, match: int = 16, length: int = LENGTH) -> Draft:
    return Draft(slot, list(range(length)), match, 0)


def controller(seqs: int, draft_s: float, fixed_s: float = 0.0, *, right: bool = True) -> DraftController:
    """A controller that knows what a step takes, alone and with 1 to 64 drafts.

    `right`: all drafts were; else as many as it takes to lose no time, so that the account of losses is as at first."""
    costs = StepCostModel()
    for _ in range(40):
        costs.record_step(DECODE_S, seqs, 0)
    made = DraftController(costs)
    for _ in range(40):
        for tokens in (1, 2, 4, 8, 16, 32, 64):
            extra_s = fixed_s + tokens * draft_s
            made.record(DECODE_S + extra_s, seqs, tokens, tokens if right else round(seqs * extra_s / DECODE_S), 0.0)
    for _ in range(KNOWN):  # else the time alone would be too old
        costs.record_step(DECODE_S, seqs, 0)
    return made


def teach(control: DraftController, seq: Sequence, right: int, match: int = 16, times: int = 40) -> None:
    for _ in range(times):
        control.learn(seq, draft(0, match), LENGTH, right)


@pytest.mark.parametrize("seqs", [1, 8, 64])
def test_drafts_are_computed_while_each_gives_more_than_it_takes(seqs: int) -> None:
    """Correct drafts are all computed if each costs a tenth of the time that it saves; at twice that time, none is."""
    worth = DECODE_S / seqs
    for cost, want in ((worth / 10, LENGTH), (2 * worth, 0)):
        control, (seq, *_) = controller(seqs, cost, right=want > 0), sequences(1)
        teach(control, seq, LENGTH)
        if not want:
            control.record(2 * DECODE_S, seqs, 1024, 0, 0.0)  # nothing is left for a probe
        assert control.choose([(seq, draft(0))], seqs, 100) == [want]


def test_the_drafts_of_the_better_sequence_come_first() -> None:
    control, (good, poor) = controller(2, DECODE_S / 2 / 4), sequences(2)
    teach(control, poor, 0)
    teach(control, good, LENGTH)
    counts = control.choose([(poor, draft(0)), (good, draft(1))], 2, 100)
    assert counts[1] == LENGTH
    assert counts[0] <= 1
    assert control.choose([(good, draft(0)), (good, draft(1))], 2, 5) in ([3, 2], [2, 3])


def test_a_request_is_judged_by_its_tenant_until_it_has_drafts_of_its_own() -> None:
    control, (first, second, third) = controller(1, DECODE_S / 4), sequences(3)
    control.record(2 * DECODE_S, 1, 1024, 0, 0.0)  # nothing is left for a probe
    teach(control, first, 0)
    assert control.choose([(second, draft(0))], 1, 100) == [0]
    teach(control, third, LENGTH, times=10)
    assert control.choose([(third, draft(0))], 1, 100)[0] > 0
    control.forget(third.request)
    other = Generate("x", "gw", [1], 9, Sampling(), 2**60, tenant="other")
    assert control.choose([(Sequence(other, 0, (9, 0), frozenset(), 9, [1]), draft(0))], 1, 100)[0] > 0


def test_where_drafts_do_not_pay_probes_take_a_small_part_of_the_time() -> None:
    control, (seq,) = controller(1, 4 * DECODE_S, right=False), sequences(1)
    teach(control, seq, 0)
    spent = steps = 0.0
    for _ in range(20_000):
        (count,) = control.choose([(seq, draft(0))], 1, 100)
        assert count <= PROBE_TOKENS
        steps += DECODE_S
        if count:
            spent += control.extra_s(1, count)
            control.record(DECODE_S + count * 4 * DECODE_S, 1, count, 0, 0.0)
    assert 0 < spent < 0.01 * steps


def test_probes_do_not_spend_what_earlier_drafts_have_saved() -> None:
    """A probe takes 3 % of a step, which PROBES covers after six steps; the full account would pay for 60 in a row."""
    share = PROBE_TOKENS / 128
    control, (seq,), probes = controller(64, share * DECODE_S / PROBE_TOKENS), sequences(1), 0
    teach(control, seq, 0)
    for _ in range(120):
        (count,) = control.choose([(seq, draft(0))], 64, 100)
        if count:
            control.record(DECODE_S * (1 + share), 64, count, 0, 0.0)
            probes += 1
        else:
            control._step_cost.record_step(DECODE_S, 64, 0)
    assert 0 < probes <= 1 + 120 * PROBES / share


def test_nothing_is_drafted_before_a_step_without_drafts_was_measured() -> None:
    control, (seq,) = DraftController(StepCostModel()), sequences(1)
    assert control.choose([(seq, draft(0))], 1, 0) == [0]
    assert sum(control.choose([(seq, draft(0))], 1, 100)) <= PROBE_TOKENS


def test_short_matches_are_not_looked_for_where_they_never_pay() -> None:
    control, (seq,) = controller(64, DECODE_S / 64 / 3), sequences(1)
    assert control.min_match(64) == 2
    teach(control, seq, 0, match=2)
    teach(control, seq, LENGTH, match=8)
    found = [control.min_match(64) for _ in range(2 * SEARCHES)]
    assert sorted(set(found)) == [2, 4]
    assert found.count(2) == 2
    assert set(found) < set(MATCHES)


def test_costs_between_and_beyond_the_measured_ones_grow_with_the_drafts() -> None:
    control = controller(4, 0.001, fixed_s=0.002)
    costs = [control.extra_s(4, tokens) for tokens in range(1, 100)]
    assert costs == sorted(costs)
    assert costs[23] == pytest.approx(0.002 + 24 * 0.001, rel=0.2)
    assert costs[98] == pytest.approx(0.002 + 99 * 0.001, rel=0.2)


def test_waiting_for_the_step_in_flight_must_pay_as_well() -> None:
    """The same drafts: they pay behind known tokens, but not for the idle device that a wait for a token costs."""
    control, (seq, *_) = controller(8, DECODE_S / 8 / 10), sequences(1)
    teach(control, seq, LENGTH)
    assert control.pays([(seq, draft(0))], 8, 100)
    for _ in range(60):
        control.record(DECODE_S, 8, 4, 4, idle_s=DECODE_S)
    control.record(2 * DECODE_S, 8, 1024, 0, idle_s=DECODE_S)  # half of what the account can hold
    assert control.choose([(seq, draft(0))], 8, 100) == [LENGTH]
    assert not control.pays([(seq, draft(0))], 8, 100)


def test_rows_are_free_only_while_a_step_waits_for_weights() -> None:
    """Measured to add nothing, drafts add what a prompt token does in a step that arithmetic fills."""
    costs = StepCostModel()
    costs.token_s = DECODE_S / 64
    for _ in range(40):
        for seqs in (1, 64):
            costs.record_step(DECODE_S, seqs, 0)
    control = DraftController(costs)
    for seqs in (1, 64):
        control.record(DECODE_S, seqs, 8, 0, 0.0)
    assert control.extra_s(64, 8) == pytest.approx(8 * DECODE_S / 64)
    assert control.extra_s(1, 8) < DECODE_S / 64


def test_a_probe_waits_for_the_step_in_flight_seldom() -> None:
    control, (seq, *_) = controller(8, DECODE_S, right=False), sequences(1)
    teach(control, seq, 0)
    waits = 0
    for _ in range(2000):
        if control.pays([(seq, draft(0))], 8, 100) and (count := control.choose([(seq, draft(0))], 8, 100)[0]):
            control.record(2 * DECODE_S, 8, count, 0, idle_s=DECODE_S / 2)
            waits += 1
    assert 0 < waits <= 2000 / 200 + 1


def test_a_first_reading_that_is_far_too_long_is_corrected_at_once() -> None:
    """As of a step that loaded kernels: the next drafts are computed all the same, and count in its place."""
    costs = StepCostModel()
    for _ in range(40):
        costs.record_step(DECODE_S, 4, 0)
    control, (seq, *_) = DraftController(costs), sequences(1)
    teach(control, seq, LENGTH)
    for seconds in (100 * DECODE_S, 1.1 * DECODE_S):
        counts = control.choose([(seq, draft(0))], 4, 100)
        assert any(counts)
        control.record(seconds, 4, sum(counts), sum(counts), 0.0)
    assert any(control.choose([(seq, draft(0))], 4, 100))


def test_wrong_drafts_lose_no_more_than_the_account_holds() -> None:
    """The rates say that drafts are right, and from one moment on none is: what that loses is bounded."""
    control, (seq,) = controller(1, DECODE_S / 4), sequences(1)
    lost, steps = 0.0, 400
    for _ in range(steps):
        teach(control, seq, LENGTH)
        (count,) = control.choose([(seq, draft(0))], 1, 100)
        if count:
            control.record(DECODE_S * (1 + count / 4), 1, count, 0, 0.0)
            lost += count / 4
    assert 0 < lost <= MAX_CREDIT + 2 * PROBES * steps


def test_a_step_that_only_drafts_can_pay_for_is_shortened() -> None:
    control, (seq,) = controller(1, DECODE_S / 4), sequences(1)
    teach(control, seq, LENGTH)
    control.record(2 * DECODE_S, 1, 1024, 0, 0.0)  # the account holds one step's time of two
    assert control.choose([(seq, draft(0))], 1, 100) == [4]
