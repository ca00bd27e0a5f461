"""The checkpoint's draft head rests if it has saved less time than it took."""

from __future__ import annotations

import pytest

from quire.engine.core.policy.guesses import MEASURED, REST, GuessCosts
from quire.engine.core.policy.step_cost import StepCostModel

STEP_S = 0.02


def costs(seqs: int) -> GuessCosts:
    """Return costs that have measured steps of STEP_S; a draft adds a tenth of a step."""
    model = StepCostModel()
    for _ in range(64):
        model.record_step(STEP_S, seqs, 0)
    return GuessCosts(model, lambda _, drafts: STEP_S / 10 * drafts)


def ran(policy: GuessCosts, seqs: int, steps: int, seconds: float, accepted: float) -> int:
    """Return in how many of `steps` steps the head runs, if a share `accepted` of its guesses is accepted."""
    count, right = 0, 0.0
    for _ in range(steps):
        if policy.pay(seqs):
            count, right = count + 1, right + accepted * seqs
            policy.record(seconds, seqs, seqs, seqs, int(right))
            right -= int(right)
    return count


@pytest.mark.parametrize(
    ("accepted", "seconds", "runs"),
    [
        (0.8, 0.3 * STEP_S, True),  # 0.8 of a step saved, 0.4 spent
        (0.3, 0.3 * STEP_S, False),
        (0.0, 0.01 * STEP_S, False),
        (0.9, 0.9 * STEP_S, False),
    ],
)
def test_the_head_runs_while_it_saves_more_than_it_takes(accepted: float, seconds: float, runs: bool) -> None:
    steps = 3 * (MEASURED + REST)
    count = ran(costs(1), 1, steps, seconds, accepted)
    assert count == (steps if runs else 3 * MEASURED)


def test_loads_are_weighed_apart() -> None:
    policy = costs(1)
    assert ran(policy, 64, 2 * MEASURED, STEP_S, 0.0) == MEASURED
    assert ran(policy, 1, 2 * MEASURED, STEP_S / 10, 0.8) == 2 * MEASURED
    assert not policy.pay(64)


def test_guesses_that_no_step_computes_save_nothing() -> None:
    policy = costs(4)
    for _ in range(MEASURED):
        assert policy.pay(4)
        policy.record(STEP_S / 100, 4, 0, 0, 0)
    assert not policy.pay(4)
