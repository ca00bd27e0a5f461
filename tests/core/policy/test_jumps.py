"""Whether jumps over forced tokens pay, by what steps with them have taken."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine.core.policy.jumps import GAIN, PATIENCE, READINGS, REST, JumpCosts
from quire.engine.core.policy.step_cost import StepCostModel
from tests.core import oracle
from tests.core.oracle import FORCED
from tests.core.rig import Rig

DECODE_S = 0.004  # duration of a step without prefill slices
PROMPT = list(range(3, 16))


def measured(extra_s: float, seqs: int) -> JumpCosts:
    """The costs after steps of `seqs` sequences without jumps, and as many with jumps as are measured in any case."""
    step_cost = StepCostModel()
    costs = JumpCosts(step_cost)
    for _ in range(READINGS):
        step_cost.record_step(DECODE_S, seqs, 0)
        assert costs.pay(3, seqs)
        costs.record(DECODE_S + extra_s, seqs)
    return costs


@pytest.mark.parametrize("seqs", [1, 5, 64, 256])
@pytest.mark.parametrize("extra_s", [0.0005, 0.004, 0.02])
def test_jumps_pay_from_the_number_of_tokens_on_whose_rows_take_as_long(extra_s: float, seqs: int) -> None:
    costs, even = measured(extra_s, seqs), GAIN * extra_s / DECODE_S * seqs
    assert costs.pay(int(even) + 1, seqs)
    assert not costs.pay(int(even * 0.99), seqs)


def test_sizes_of_batches_are_learnt_apart() -> None:
    costs = measured(0.02, 64)
    assert not costs.pay(8, 64)
    assert costs.pay(3, 4)


def plans(costs: JumpCosts, count: int, tokens: int, seqs: int, extra_s: float, *, prompts: bool = False) -> list[str]:
    """What so many plans do: "jump", "decode" where a jump is refused, "rest" where nothing is looked for."""
    found = []
    for _ in range(count):
        if not costs.look_ahead(seqs, prompts):
            found.append("rest")
        elif costs.pay(tokens, seqs):
            costs.record(DECODE_S + extra_s, seqs)
            found.append("jump")
        else:
            found.append("decode")
    return found


def test_after_some_refusals_the_search_rests_and_one_jump_is_measured_again() -> None:
    costs = measured(0.02, 64)
    once = [*["rest"] * REST, "jump"]
    assert plans(costs, PATIENCE, 4, 64, 0.02) == ["decode"] * PATIENCE
    assert plans(costs, REST + 1, 4, 64, 0.02) == once
    assert plans(costs, PATIENCE + REST + 1, 4, 64, 0.02) == [*["decode"] * PATIENCE, *once]


def test_jumps_that_have_become_fast_come_back() -> None:
    costs = measured(0.02, 64)
    assert plans(costs, 100 * REST, 4, 64, 0.0).count("jump") > 50 * REST


def test_a_rest_ends_where_prompts_are_computed_and_holds_for_one_size_only() -> None:
    costs = measured(0.02, 64)
    plans(costs, PATIENCE, 4, 64, 0.02)
    assert costs.look_ahead(64, prompts=True)
    assert not costs.look_ahead(64, prompts=False)
    assert costs.look_ahead(8, prompts=False)
    assert not costs.pay(4, 64)  # what was found with prompts: the rest has not ended
    assert plans(costs, REST, 4, 64, 0.02).count("jump") == 1


def test_one_slow_reading_among_fast_ones_refuses_nothing_for_long() -> None:
    costs = measured(0.0001, 64)
    costs.record(5.0, 64)
    for _ in range(2 * READINGS):
        costs.record(DECODE_S + 0.0001, 64)
    assert costs.pay(16, 64)


# ------------------------------------------------------------------------------------------------------ the scheduler


class Clock:
    """A rig whose steps take as long as on some device."""

    def __init__(self, slice_s: float, token_s: float = 1e-5, row_s: float = 1e-5) -> None:
        """`slice_s`: what any slice adds to a step."""
        self.rig = Rig(blocks=2000, depth=1, max_seqs=64, step_tokens=512, chunk_tokens=512, itl_stretch=2.0)
        self._slice_s, self._token_s, self._row_s = slice_s, token_s, row_s
        self.seconds = 0.0

    def step(self) -> bool:
        rig = self.rig
        before, jumps = rig.executor.forward_tokens, rig.executor.jumps
        if not rig.submit():
            return False
        result = rig.executor.collect()
        tokens = rig.executor.forward_tokens - before
        sliced = rig.executor.jumps > jumps or tokens > rig.core.batch.decoding
        seconds = DECODE_S + self._row_s * tokens + self._slice_s * sliced
        self.seconds += seconds
        rig.core.commit(msgspec.structs.replace(result, step_s=seconds))
        rig.collect_outputs()
        return True

    def run(self) -> None:
        while self.step():
            pass


def seconds(slice_s: float, *, grammar: str, seqs: int) -> tuple[float, int]:
    """(seconds until the answers of so many sequences are complete, jumps), after as many others."""
    clock = Clock(slice_s)
    for _ in range(2):
        before, jumps = clock.seconds, clock.rig.executor.jumps
        for seed in range(seqs):
            clock.rig.add(PROMPT, 90, seed=seed, ignore_eos=True, grammar=grammar)
        clock.run()
    return clock.seconds - before, clock.rig.executor.jumps - jumps


NIGHTLY = [pytest.param(slice_s, seqs, marks=pytest.mark.nightly) for slice_s, seqs in ((0.0, 64), (DECODE_S / 4, 64))]


@pytest.mark.parametrize(
    ("slice_s", "seqs"),
    [(DECODE_S, 64), *((slice_s, seqs) for slice_s in (0.0, DECODE_S / 4, DECODE_S) for seqs in (1, 8)), *NIGHTLY],
)
def test_jumps_never_cost_more_than_a_little(slice_s: float, seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without costs, 256 sequences of an 8B shape took 1.36 times as long on an H200: slices made steps longer."""
    monkeypatch.setattr(oracle, "foreseen", lambda context: 4 if context[-1] % 16 == 3 else 0)
    plain, _ = seconds(slice_s, grammar="", seqs=seqs)
    jumping, _ = seconds(slice_s, grammar=FORCED, seqs=seqs)
    assert jumping < 1.05 * plain


def test_without_costs_they_would_and_cheap_ones_are_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "foreseen", lambda context: 4 if context[-1] % 16 == 3 else 0)
    plain, _ = seconds(DECODE_S, grammar="", seqs=64)
    _, some = seconds(DECODE_S, grammar=FORCED, seqs=64)
    _, free = seconds(0.0, grammar=FORCED, seqs=64)
    monkeypatch.setattr(JumpCosts, "pay", lambda *_: True)
    always, every = seconds(DECODE_S, grammar=FORCED, seqs=64)
    assert always > 1.1 * plain
    assert some < every / 4
    assert free > 0.9 * every


def test_a_slow_slice_with_few_tokens_says_nothing_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise prompts that share steps with structured streams would get one token per step."""
    monkeypatch.setattr(oracle, "foreseen", lambda context: 4 if context[-1] % 16 == 3 else 0)
    clock = Clock(0.0)
    for seed in range(8):
        clock.rig.add(PROMPT, 300, seed=seed, ignore_eos=True, grammar=FORCED)
    clock.step()
    clock.step()
    before = clock.rig.core.step_cost.token_s
    clock._slice_s = DECODE_S
    for _ in range(150):
        clock.step()
    assert clock.rig.executor.jumps
    assert clock.rig.core.step_cost.token_s == before
