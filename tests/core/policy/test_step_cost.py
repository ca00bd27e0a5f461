"""The step cost model and its decisions: the faster kind of preemption, and prompts that do not stall streams."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.core.blocks import BlockPool
from quire.engine.core.limits import Limits
from quire.engine.core.policy.step_cost import FIRST, FLOOR, MIN_TOKENS, PACE_STEPS, PROBE, STALE, StepCostModel
from quire.engine.core.scheduler import Scheduler
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.wire.messages import Generate, Sampling


def test_nothing_is_decided_before_it_was_measured() -> None:
    costs = StepCostModel()
    assert not costs.swap_pays(1, 1_000_000)
    assert costs.prompt_tokens(4, 1, 2.0) is None
    costs.record_step(0.010, 0, 100)
    assert not costs.swap_pays(1, 1_000_000)
    assert costs.prompt_tokens(4, 1, 2.0) == 0  # see first how long four rows take by themselves
    costs.record_swap(1000, 0.001)
    assert costs.swap_pays(99, 1)


@pytest.mark.parametrize(
    ("bytes_per_s", "tokens_per_s", "block_bytes", "swaps"),
    [
        # 100 tokens in blocks of 16, there and back; what a token takes, for some machines.
        (25e9, 40_000, 16 * 131_072, True),  # 8B on a GPU: 1.2 ms of bus against 2.5 ms
        (25e9, 400_000, 16 * 114_688, False),  # 0.6B on the same: 1 ms against 0.25 ms
        (4e9, 3_000, 16 * 8_192, True),  # 42M on a CPU: memory copies against arithmetic
    ],
)
def test_the_cheaper_one(bytes_per_s: float, tokens_per_s: float, block_bytes: int, swaps: bool) -> None:
    costs = StepCostModel(bytes_per_s)
    costs.record_step(100 / tokens_per_s, 0, 100)
    assert costs.swap_pays(2 * 7 * block_bytes, 100) == swaps


@given(st.floats(1e3, 1e12), st.floats(1e-7, 1e-1), st.integers(1, 10**10), st.integers(1, 10**5))
def test_fewer_bytes_or_more_tokens_never_speak_against_a_swap(
    rate: float, token_s: float, size: int, tokens: int
) -> None:
    costs = StepCostModel(rate)
    costs.token_s = token_s
    if costs.swap_pays(size, tokens):
        assert costs.swap_pays(size // 2, tokens)
        assert costs.swap_pays(size, tokens * 2)


def test_a_step_that_computed_more_in_less_time_corrects_the_average() -> None:
    costs = StepCostModel()
    costs.record_bound(0.005, 20)
    assert costs.exact_decode_s(20) == 0  # nothing is known: a bound alone is no measurement
    costs.record_step(0.010, 20, 0)
    costs.record_bound(0.020, 20)
    assert (costs.exact_decode_s(20), costs.readings(20)) == (0.010, 1)
    for _ in range(40):
        costs.record_bound(0.005, 20)
    assert costs.exact_decode_s(20) == pytest.approx(0.005, rel=0.05)
    assert costs.readings(20) == 1


def test_averages_follow_and_a_hiccup_moves_them_little() -> None:
    costs = StepCostModel()
    for _ in range(40):
        costs.record_step(0.010, 20, 0)
        costs.record_step(0.010 + 200 * 5e-5, 20, 200)
    assert costs.decode_s(20) == pytest.approx(0.010)
    assert costs.token_s == pytest.approx(5e-5)
    assert costs.decode_s(5) == costs.decode_s(300) == costs.decode_s(20)  # all that is known
    costs.record_step(3.0, 20, 0)
    costs.record_step(3.0, 20, 200)
    assert costs.decode_s(20) < 0.013
    assert costs.token_s < 8e-5
    for _ in range(40):
        costs.record_step(0.020, 20, 0)
        costs.record_step(0.020 + 200 * 1e-4, 20, 200)
    assert costs.decode_s(20) == pytest.approx(0.020, rel=0.02)
    assert costs.token_s == pytest.approx(1e-4, rel=0.02)


def test_a_few_dear_tokens_are_believed_as_soon_as_many_cheap_ones() -> None:
    """Deep in a long prompt, three tokens may take as long as the step itself. That gives the time of a token there."""
    costs = StepCostModel()
    for _ in range(20):
        costs.record_step(0.020, 32, 0)
        costs.record_step(0.020 + 1000 * 5e-4, 32, 1000)
    before = costs.prompt_tokens(32, 1, 2.0)
    assert before == pytest.approx(28, abs=1)
    for _ in range(10):
        costs.record_step(0.020 + 3 * 6e-3, 32, 3)
    assert costs.prompt_tokens(32, 1, 2.0) == 2
    for _ in range(10):  # three that take next to nothing change little
        costs.record_step(0.0201, 32, 3)
    assert costs.prompt_tokens(32, 1, 2.0) in (1, 2, 3)


@given(st.lists(st.tuples(st.floats(1e-5, 10), st.integers(0, 300), st.integers(0, 9000)), max_size=100))
def test_a_prompt_always_goes_on(steps: list[tuple[float, int, int]]) -> None:
    """Whatever was measured: 0 only where the next step will change that."""
    costs = StepCostModel()
    for seconds, rows, tokens in steps:
        if rows + tokens:
            costs.record_step(seconds, rows, tokens)
        if costs.prompt_tokens(7, 1, 2.0) == 0:
            costs.record_step(seconds, 7, 0)
        assert (budget := costs.prompt_tokens(7, 1, 2.0)) is None or budget >= MIN_TOKENS


def test_a_crowd_of_prompts_gets_more() -> None:
    costs = StepCostModel()
    costs.record_step(0.010, 32, 0)
    costs.record_step(0.020, 32, 100)
    few, quarter, many, flood = (costs.prompt_tokens(32, pending, 2.0) for pending in (1, 8, 16, 960))
    assert few == quarter == pytest.approx(70, abs=1)
    assert many == pytest.approx(140, abs=1)
    assert flood == pytest.approx(8400, abs=1)


def itls(stretch: float, took: Callable[[int, int, int], float], depth: int, length: int = 32_768) -> list[list[float]]:
    """32 sequences decode on a virtual clock, then a long prompt joins: the time between their tokens before, and while
    it is computed.  `took(rows, prompt tokens, where they start)`: seconds of a step."""
    info = ModelInfo("virtual", "virtual", 1000, 1 << 17, [0], 0)
    limits = Limits(64, 8192, 8192, 1 << 17, 1000, 1.0, frozenset([0]), "virtual", "none", itl_stretch=stretch)
    core, executor = Scheduler(BlockPool(32_768, 16), limits), ScriptedExecutor(info, 32_768)
    shape: list[tuple[int, int, int]] = []
    phases: list[list[float]] = [[], []]
    long = Generate("long", "", [7] * length, 1, Sampling(ignore_eos=True), 1 << 60)

    def submit() -> None:
        plan = core.plan(0)
        assert plan is not None
        executor.submit(plan)
        tokens = sum(len(piece.token_ids) for piece in plan.slices)
        shape.append((core.batch.decoding, tokens, max((piece.start for piece in plan.slices), default=0)))

    for i in range(32):
        core.accept(Generate(str(i), "", [3 + i] * 100, 30_000, Sampling(seed=i, ignore_eos=True), 1 << 60))
    for _ in range(depth - 1):
        submit()
    for phase, steps in ((0, 300), (1, 20_000)):
        for _ in range(steps):
            submit()
            result = executor.collect()
            rows, tokens, start = shape.pop(0)
            seconds = took(rows, tokens, start)
            core.commit(msgspec.structs.replace(result, step_s=seconds))
            if rows >= 32:
                phases[phase].append(seconds)
            if any(delta.id == "long" for deltas in core.outputs().deltas.values() for delta in deltas):
                return phases
        core.accept(long)
    raise AssertionError("the long prompt did not come to its end")


def p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("decode_s", "token_s", "context"),
    [
        (0.007, 5e-5, 8192),  # a small model on a CPU; a model whose attention takes as long as all else
        (0.006, 2.5e-5, 32_768),  # 8B on a GPU
        (0.030, 5e-4, 8192),  # no matrix units: few tokens per step
    ],
)
def test_a_long_prompt_does_not_stall_streams(depth: int, decode_s: float, token_s: float, context: int) -> None:
    """32 decoders and a prompt of 32k.  ITL p99 while it is computed is at most twice the steady one, with steps that
    vary by 10 %.  Without the bound it is at least ten times that."""

    def machine() -> Callable[[int, int, int], float]:
        rng = random.Random(5)
        return lambda rows, tokens, start: (
            (decode_s * (0.5 + rows / 64) + tokens * token_s * (1 + start / context)) * rng.uniform(0.9, 1.1)
        )

    steady, during = itls(2.0, machine(), depth)
    assert p99(during) <= 2 * p99(steady)
    assert len(during) > 20
    steady, during = itls(0.0, machine(), depth)
    assert p99(during) >= 10 * p99(steady)


@pytest.mark.parametrize("depth", [1, 2])
def test_where_a_token_takes_half_a_step_prompts_go_on_token_by_token(depth: int) -> None:
    """42M parameters on two cores without matrix units, at the end of a prompt of 32k: attention is nearly all there is
    to it.  Here a quarter of that prompt, four times as steep."""

    def took(rows: int, tokens: int, start: int) -> float:
        return 0.012 * (0.5 + rows / 64) + tokens * 4e-4 * (1 + start / 500)

    steady, during = itls(2.0, took, depth, 8192)
    assert p99(during) <= 2 * p99(steady)


def test_steps_without_prompts_are_seen_now_and_then() -> None:
    costs = StepCostModel()
    costs.record_step(0.010, 8, 0)
    for _ in range(PROBE):
        assert costs.prompt_tokens(8, 1, 2.0) != 0
        costs.record_step(0.020, 8, 100)
    assert costs.prompt_tokens(8, 1, 2.0) == 0
    costs.record_step(0.010, 8, 0)
    assert costs.prompt_tokens(8, 1, 2.0) != 0


def test_a_step_takes_what_the_machine_can_do_in_the_time() -> None:
    costs = StepCostModel()
    assert costs.tokens_within(0, 1.0) is None
    costs.record_step(0.1, 1, 0)
    costs.record_step(0.1 + 500 * 2e-3, 0, 500)
    assert costs.tokens_within(0, 1.0) == pytest.approx(450, abs=1)  # the weights are read by any step
    assert costs.tokens_within(0, 0.15) == FLOOR
    slow = StepCostModel()
    slow.record_step(1.5, 1, 0)
    slow.record_step(1.5 + 1000 * 0.01, 1, 1000)
    assert slow.tokens_within(1, 2.0) == pytest.approx(150, abs=1)  # as long for prompts as for the weights


def prompt_steps(
    target_s: float, took: Callable[[int, int, int], float], *, step_tokens: int, prompts: int = 3, length: int = 4000
) -> list[tuple[int, float]]:
    """Prompts one after another on a virtual clock, four output tokens each: (prompt tokens, seconds) of the steps with
    prompts.  `took` as for itls()."""
    info = ModelInfo("virtual", "virtual", 1000, 1 << 17, [0], 0)
    limits = Limits(
        64, step_tokens, step_tokens, 1 << 17, 1000, 1.0, frozenset([0]), "v", "none", step_target_s=target_s
    )
    core, executor = Scheduler(BlockPool(32_768, 16), limits), ScriptedExecutor(info, 32_768)
    steps: list[tuple[int, float]] = []
    for i in range(prompts):
        core.accept(Generate(str(i), "", [3 + i] * length, 4, Sampling(ignore_eos=True), 1 << 60))
        while (plan := core.plan(0)) is not None:
            executor.submit(plan)
            tokens = sum(len(piece.token_ids) for piece in plan.slices)
            seconds = took(core.batch.decoding, tokens, max((piece.start for piece in plan.slices), default=0))
            core.commit(msgspec.structs.replace(executor.collect(), step_s=seconds))
            if tokens:
                steps.append((tokens, seconds))
        core.outputs()
    assert sum(tokens for tokens, _ in steps) == prompts * length
    return steps


@pytest.mark.parametrize(
    ("decode_s", "token_s", "longest_s"),
    [
        (0.7, 0.01, 2.5),  # 7B on a CPU with matrix units: 1,024 tokens took 11 s
        (0.7, 0.06, 5.0),  # without them: they took a minute, and FLOOR tokens take 4 s
        (3.0, 0.10, 11.0),  # a larger one: reading the weights alone takes longer than the aim
    ],
)
def test_a_slow_machine_takes_short_steps(decode_s: float, token_s: float, longest_s: float) -> None:
    def took(rows: int, tokens: int, start: int) -> float:
        return decode_s + tokens * token_s

    unbounded = prompt_steps(0.0, took, step_tokens=1024)
    steps = prompt_steps(2.0, took, step_tokens=1024)
    assert max(seconds for _, seconds in steps[1:]) <= longest_s < max(seconds for _, seconds in unbounded)
    assert steps[0][0] == FIRST
    assert sum(seconds for _, seconds in steps) <= 2 * sum(seconds for _, seconds in unbounded)


def test_deep_in_a_prompt_steps_get_shorter() -> None:
    """42M parameters on two cores: a token takes 0.3 ms at the start of a prompt and 18 ms at its end.  The average is
    some steps behind a cost that grows so fast."""

    def took(rows: int, tokens: int, start: int) -> float:
        return 0.006 + tokens * 3e-4 * (1 + start / 500)

    steps = prompt_steps(2.0, took, step_tokens=1024, length=30_000)
    assert max(seconds for _, seconds in steps) < 5.0
    assert max(seconds for _, seconds in prompt_steps(0.0, took, step_tokens=1024, length=30_000)) > 15.0
    assert steps[1][0] == 1024


@pytest.mark.parametrize(
    ("decode_s", "token_s", "step_tokens"),
    [(0.005, 3.3e-4, 1024), (0.006, 2.5e-5, 8192), (0.03, 1e-4, 8192)],  # 42M on a CPU; 8B and 70B on GPUs
)
def test_a_fast_machine_never_notices(decode_s: float, token_s: float, step_tokens: int) -> None:
    rng = random.Random(1)

    def took(rows: int, tokens: int, start: int) -> float:
        return (decode_s + tokens * token_s) * rng.uniform(0.7, 1.5)

    aimed = [tokens for tokens, _ in prompt_steps(2.0, took, step_tokens=step_tokens, prompts=9, length=10_000)]
    free = [tokens for tokens, _ in prompt_steps(0.0, took, step_tokens=step_tokens, prompts=9, length=10_000)]
    first = -(-10_000 // step_tokens) + 1  # the steps of the first prompt, one more as the first step was small
    assert aimed[first:] == free[first - 1 :]


@given(st.lists(st.tuples(st.floats(1e-5, 100), st.integers(0, 300), st.integers(0, 9000)), max_size=100))
def test_no_reading_takes_a_step_below_its_floor(steps: list[tuple[float, int, int]]) -> None:
    costs = StepCostModel()
    for seconds, rows, tokens in steps:
        if rows + tokens:
            costs.record_step(seconds, rows, tokens)
        assert (budget := costs.tokens_within(rows, 2.0)) is None or budget >= FLOOR


def test_the_time_of_a_plain_step_follows_the_load_within_a_power_of_two() -> None:
    costs = StepCostModel()
    for seqs in (64, 96, 127):
        for _ in range(4):
            costs.record_step(seqs / 1000, seqs, 0)
    for seqs, measured in ((65, 64), (100, 96), (120, 127)):
        assert costs.exact_decode_s(seqs) == pytest.approx(measured / 1000)
        assert costs.readings(seqs) == 4
    assert costs.exact_decode_s(80) == costs.decode_s(80)
    assert costs.readings(80) == 0


def test_the_first_step_counts_no_more_than_the_next_ones() -> None:
    costs = StepCostModel()
    for seconds in (0.03, 0.01, 0.01, 0.01):
        costs.record_step(seconds, 8, 0)
    assert costs.exact_decode_s(8) == pytest.approx(0.015)


def test_the_pace_is_that_of_the_latest_steps_and_soon_forgotten() -> None:
    costs = StepCostModel()
    assert costs.pace == 1
    for _ in range(40):
        costs.record_step(0.010, 8, 0)
    assert costs.pace == pytest.approx(1)
    for _ in range(3):
        costs.record_step(0.020, 8, 0)
    assert 1.4 < costs.pace < 2
    for _ in range(PACE_STEPS):
        costs.record_bound(0.030, 8)
    assert costs.pace == 1


def test_an_average_that_is_too_old_is_measured_anew() -> None:
    costs = StepCostModel()
    for _ in range(40):
        costs.record_step(0.010, 8, 0)
    for _ in range(STALE + 1):
        costs.record_step(0.050, 64, 0)
    assert costs.readings(8) == 0
    assert costs.exact_decode_s(8) == pytest.approx(0.010)
    costs.record_step(0.020, 8, 0)
    assert costs.readings(8) == 1
    assert costs.exact_decode_s(8) == pytest.approx(0.020)
