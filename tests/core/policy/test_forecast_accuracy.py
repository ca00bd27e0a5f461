"""Predictions against outcomes: the counts that show whether the forecast is right."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.engine.core.policy.forecast import Lengths
from quire.engine.core.policy.forecast_accuracy import LEVELS, ForecastAccuracy
from quire.engine.core.sequence import Sequence, State
from quire.engine.tools import simulate
from quire.engine.tools.trace import burst
from tests.core.rig import Rig
from tests.matrix import examples


def lognormal(rng: random.Random, mean: float) -> int:
    return max(1, int(rng.lognormvariate(math.log(mean) - 0.4, 0.89)))


@pytest.mark.parametrize("actual", [165, 600])
def test_shares_are_the_levels_when_the_table_is_right_and_not_when_it_is_wrong(actual: int) -> None:
    rng, lengths, counts = random.Random(6), Lengths(), ForecastAccuracy()
    for _ in range(3000):
        lengths.add(lognormal(rng, 165), ended=True)
    predicted = [lengths.quantile(level, 0, 400) for level in LEVELS]
    for _ in range(2000):
        counts.output(predicted, min(lognormal(rng, actual), 400), 400)
    assert counts.judged == [2000, 2000, 0]  # the 99 % quantile lies beyond the cap: nothing was predicted
    shares = [within / judged for _, judged, within in counts.table() if judged]
    off = max(abs(share - level) for share, level in zip(shares, LEVELS, strict=False))
    assert off < 0.05 if actual == 165 else off > 0.2


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 50), min_size=3, max_size=3), st.integers(1, 50), st.integers(1, 50)))
)
def test_every_output_is_judged_once_a_level_that_lies_below_its_cap(seen: list[tuple[list[int], int, int]]) -> None:
    counts = ForecastAccuracy()
    for predicted, produced, cap in seen:
        counts.output(sorted(predicted), min(produced, cap), cap)
    for level, (q, judged, within) in enumerate(counts.table()):
        told = [(sorted(f)[level], min(p, cap)) for f, p, cap in seen if sorted(f)[level] < cap]
        assert (q, judged) == (LEVELS[level], len(told))
        assert within == sum(produced <= length for length, produced in told)


class Noting(ForecastAccuracy):
    """Records the cohorts that are reported to it."""

    over: list[tuple[int, int]] = msgspec.field(default_factory=list)

    def peak(self, bound: int, held: int) -> None:
        super().peak(bound, held)
        self.over.append((bound, held))


@given(st.integers(0, 10**6))
@example(11775)  # prompts start together that need more than 64 tokens
@settings(max_examples=examples(30), deadline=None)
def test_what_a_cohort_came_to_is_what_its_tables_held(seed: int) -> None:
    """Follow a cohort with nothing left out: after every plan, all blocks that any of its members holds.

    Sequences that join later do not count.  Prompts have one chunk, even if all start in one step, rows are fewer than
    WATCH_ROWS and nothing is shared, so nothing is rounded."""
    rng = random.Random(seed)
    rig = Rig(blocks=60, size=4, max_seqs=12, step_tokens=12 * 30, admission="forecast", caching=False)
    outlook, counts, members = rig.core.admission.forecast, Noting(), list[Sequence]()
    outlook.calibration = counts
    held = followed = 0
    for _ in range(150):
        if rng.random() < 0.3:
            rig.add([rng.randrange(1, 50) for _ in range(rng.randrange(1, 30))], rng.randrange(1, 40), seed=seed)
        finished = counts.peaks
        submitted = rig.submit()
        if rig.core.report.totals.preemptions:
            return  # from here on a cohort counts what its members would hold
        if outlook._cohort is not None and not members:
            members += [seq for seq, _ in outlook._cohort._members]
            held = 0
        held = max(held, sum(len(seq.table) for seq in members if seq.state is not State.FINISHED))
        if counts.peaks > finished:
            if members:
                assert held == counts.over[-1][1]
                followed += 1
            members.clear()
        if submitted:
            rig.commit()
    assert followed > 0
    assert (counts.peaks, counts.peaks_passed) == (len(counts.over), sum(held > bound for bound, held in counts.over))
    assert (counts.bound_blocks, counts.peak_blocks) == tuple(map(sum, zip(*counts.over, strict=True)))


def test_the_burst_comes_out_as_predicted() -> None:
    report = simulate.simulate(burst(1), simulate.engine_limits("forecast"), 512)
    print(report.calibration, report.peaks_passed)
    for share, level, off in zip(report.calibration, LEVELS, (0.1, 0.06, 0.03), strict=True):
        assert share == pytest.approx(level, abs=off)
    assert report.peaks_passed < 0.2
