"""Failed steps: every token is computed again, one bad request ends, and its mates finish."""

from __future__ import annotations

import math
import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.core.swapping import Preempt
from quire.loadtest.studies.baselines import MODES
from tests.core.rig import BAD_SEED, Rig
from tests.matrix import examples


@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from([-1, 0, 2, 5]),
    st.sampled_from(MODES),
    st.sampled_from(get_args(Preempt)),
    st.sampled_from([18, 40, 200]),
    st.booleans(),
)
@settings(max_examples=examples(150), deadline=None)
def test_only_bad_requests_end_whatever_runs_with_them(
    seed: int, bad: int, position: int, admission: str, preempt: Preempt, blocks: int, caching: bool
) -> None:
    """Steps fail that compute a bad request's token at `position` or later; -1: from its prompt's end on."""
    rng = random.Random(seed)
    rig = Rig(
        blocks=blocks,
        max_seqs=8,
        step_tokens=24,
        chunk_tokens=rng.choice([5, 24]),
        depth=rng.choice([1, 2]),
        admission=admission,
        preempt=preempt,
        host_blocks=40,
        caching=caching,
        bad=position,
    )
    seeds = [BAD_SEED] * bad + [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
    rng.shuffle(seeds)
    for each in seeds:
        rig.add(
            [rng.randrange(1, 4)] * rng.randrange(1, 30),
            rng.randrange(1, 20),
            n=rng.choice([1, 1, 2, 3]),
            seed=each,
            prompt_logprobs=rng.choice([-1, -1, 0]),
            ignore_eos=True,
        )
        for _ in range(rng.randrange(3)):
            rig.submit()
            if len(rig.executor.plans) == rig.executor.depth:
                rig.commit()
    rig.run()
    assert rig.over == set(rig.requests)
    for (name, _), finish in rig.finishes.items():
        request = rig.requests[name]
        if request.sampling.seed == BAD_SEED and request.max_new_tokens > position:
            assert finish.reason == "error"
        else:
            assert finish.reason == "length"


@pytest.mark.parametrize("mates", [0, 1, 7, 31])
def test_a_bad_request_costs_few_failed_steps(mates: int) -> None:
    rig = Rig(blocks=400, max_seqs=32, step_tokens=512, chunk_tokens=512, bad=2)
    for i in range(mates + 1):
        rig.add([1 + i] * 9, 30, seed=BAD_SEED if i == mates // 2 else 0, ignore_eos=True)
    rig.run()
    assert sum(finish.reason == "error" for finish in rig.finishes.values()) == 1
    assert len(rig.failures) <= 4 + math.log2(mates + 1)
    print(f"{mates} mates: {len(rig.failures)} failed steps")


def test_steps_that_fail_now_and_then_end_nothing() -> None:
    """Each position is reached between two failures."""
    rig = Rig(blocks=100, depth=1)
    for i in range(6):
        rig.add([1 + i] * 9, 30, n=1 + i % 2, ignore_eos=True)
    for step in range(1000):
        if not rig.submit():
            break
        rig.fail() if step % 4 == 3 else rig.commit()
    assert rig.core.idle
    assert len(rig.failures) > 8
    assert {finish.reason for finish in rig.finishes.values()} == {"length"}


def test_what_finished_steps_wrote_stays_in_the_prefix_cache() -> None:
    """Only blocks of the step that failed are forgotten: their content may never have been written."""
    rig = Rig(blocks=64, size=4, depth=1)
    rig.add([3] * 20, 20, ignore_eos=True)
    for _ in range(5):
        rig.submit()
        rig.commit()
    rig.add([5] * 20, 4, ignore_eos=True)
    rig.submit()
    rig.fail()
    before = rig.executor.forward_tokens
    rig.submit()
    rig.commit()
    assert rig.executor.forward_tokens - before == (25 - 24) + 20
    rig.run()


def test_nothing_else_starts_or_is_claimed_while_suspects_run() -> None:
    rig = Rig(blocks=100, depth=1)
    names = [rig.add([1 + i] * 9, 30, ignore_eos=True) for i in range(4)]
    for _ in range(2):
        rig.submit()
        rig.fail()
    late = rig.add([8] * 9, 30, ignore_eos=True)
    assert rig.core.headroom.startable() == (0, 0)
    rig.submit()
    assert {seq.request.id for seq in rig.core.live() if seq.slot >= 0} == set(names[:2])
    rig.commit()
    rig.submit()
    assert {seq.request.id for seq in rig.core.live() if seq.slot >= 0} == set(names)
    rig.commit()
    assert rig.core.headroom.startable()[0] > 0
    rig.submit()
    assert late in {seq.request.id for seq in rig.core.live() if seq.slot >= 0}
    rig.run()


@pytest.mark.parametrize("how", ["abort", "drop"])
def test_what_a_request_leaves_behind_is_held_against_nobody_else(how: str) -> None:
    """The bad request ends while its step is in flight: the step that fails then seems to have its mate alone."""
    rig = Rig(blocks=100, depth=2, bad=0)
    bad = rig.add([1] * 9, 30, seed=BAD_SEED, ignore_eos=True)
    mate = rig.add([2] * 9, 30, ignore_eos=True, seed=1)
    for _ in range(2):
        rig.submit()
        rig.commit()
    rig.submit()
    getattr(rig.core, how)(bad)
    rig.collect_outputs()
    rig.submit()
    rig.commit()
    assert [list(inside) for inside in rig.failures[2:]] == [[(mate, 0)]]
    rig.run()
    assert rig.finishes[mate, 0].reason == "length"


def test_a_sibling_that_left_does_not_excuse_its_request() -> None:
    rig = Rig(blocks=100, depth=2, bad=1)
    bad = rig.add([1] * 9, 30, n=2, seed=BAD_SEED, ignore_eos=True)
    rig.submit()
    while len(rig.failures) < 1:
        rig.submit()
        rig.commit()
    rig.submit()
    rig.submit()
    rig.core.abort(bad, 1)
    rig.collect_outputs()
    while len(rig.failures) < 2:
        rig.submit()
        rig.commit()
    assert rig.finishes[bad, 0].reason == "error"


def test_a_suspect_that_leaves_clears_the_way() -> None:
    rig = Rig(blocks=100, depth=1, bad=0)
    bad = rig.add([1] * 9, 30, seed=BAD_SEED, ignore_eos=True)
    rig.add([2] * 9, 30, ignore_eos=True, seed=1)
    for _ in range(2):
        rig.submit()
        rig.commit()
    assert len(rig.failures) == 2
    rig.core.abort(bad)
    rig.collect_outputs()
    rig.run()
    assert [finish.reason for finish in rig.finishes.values()] == ["cancelled", "length"]
