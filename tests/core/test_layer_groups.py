"""Layers with sliding windows: what they hold, what they release, which prefix is found, and that no plan differs
without them."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from msgspec.structs import replace

from quire.engine.core.blocks import AccountingError, Leak
from quire.engine.core.plan import WindowGroup
from quire.engine.core.sequence import State
from quire.engine.core.swapping import Preempt
from quire.engine.wire.messages import Beams
from tests.core.machine import SchedulerMachine
from tests.core.oracle import VOCAB
from tests.core.rig import BAD_SEED, Rig
from tests.matrix import examples

SIZE = 4


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=count)


def group(
    window: int, sequences: int, *, step_tokens: int = 64, slots: int = 8, full: int = 256, cached: int = 0
) -> WindowGroup:
    """A group that holds so many sequences, and `cached` blocks more."""
    one = WindowGroup(window, 0)
    each = one.reserved_blocks(SIZE, 10_000)
    return WindowGroup(
        window, sequences * each + one.blocks_per_plan(SIZE, step_tokens, full) + cached, 2 * slots * each
    )


def rig(*windows: int, sequences: int = 8, cached: int = 0, **options: Any) -> Rig:
    shape: dict[str, Any] = {"blocks": 256, "size": SIZE, "depth": 1, "step_tokens": 64, "chunk_tokens": 64} | options
    step_tokens, slots = shape["step_tokens"], shape.get("max_seqs", 8)
    sizes = {"step_tokens": step_tokens, "slots": slots, "full": shape["blocks"], "cached": cached}
    groups = [group(window, sequences, **sizes) for window in windows]
    return Rig(windows=groups, **shape)


def cached(rig: Rig, prompt: list[int], *, new: int = 1, anchors: list[int] | None = None, **sampling: Any) -> int:
    """Run a request alone.  Returns the prompt tokens that it found."""
    before = rig.core.report.totals.cached_prompt_tokens
    rig.add(prompt, new, anchors=anchors, ignore_eos=True, **sampling)
    rig.run()
    return rig.core.report.totals.cached_prompt_tokens - before


class WindowMachine(SchedulerMachine):
    """Window groups that hold fewer long sequences than there are slots, exactly as many, or more.

    The oracle compares what every query sees through every table.  `auditor` compares blocks with the arithmetic."""

    @initialize(
        windows=st.sampled_from([(1,), (5,), (6, 16), (17, 3)]),
        sequences=st.sampled_from([2, 5, 12]),
        admission=st.sampled_from(["threshold", "forecast"]),
        preempt=st.sampled_from(get_args(Preempt)),
        caching=st.booleans(),
    )
    def choose(self, windows: tuple[int, ...], sequences: int, admission: str, preempt: Preempt, caching: bool) -> None:
        sizes: dict[str, Any] = {"max_seqs": 5, "step_tokens": 16, "chunk_tokens": 7}
        pool: dict[str, Any] = {"blocks": 18, "preempt": preempt, "host_blocks": 40, "bad": 2, "depth": 2}
        self.rig = rig(*windows, sequences=sequences, admission=admission, caching=caching, **sizes, **pool)
        self.equip()

    @invariant()
    def a_sequence_holds_its_windows_and_what_a_plan_computes(self) -> None:
        core = self.rig.core
        for seq in core.live():
            if seq.request.beams is None:
                for pool, table in zip(core.builder.layers.pools, seq.windows, strict=False):
                    most = -(-(pool.window - 1) // SIZE) + 1
                    assert len(table.blocks) <= most + -(-core.limits.chunk_tokens // SIZE)
                    if seq.state is State.PAUSED:
                        assert len(table.blocks) <= most

    def teardown(self) -> None:
        self.rig.run()
        pools = self.rig.core.builder.layers.pools
        assert all(pool.available == pool.total for pool in pools)
        for request in self.rig.requests.values():
            for index in range(request.n):
                finish = self.rig.finishes[request.id, index]
                refused = "this engine " in finish.message  # too many beams or choices for the window blocks
                assert finish.reason != "error" or self.faults or request.sampling.seed == BAD_SEED or refused


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=examples(25), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("window", "size", "blocks"), [(128, 16, 9), (1024, 16, 65), (512, 16, 33), (1, 16, 1), (18, 16, 3)]
)
def test_a_sequence_holds_its_window_and_the_block_it_writes(window: int, size: int, blocks: int) -> None:
    assert WindowGroup(window, 0).blocks_per_sequence(size, 100_000) == blocks
    assert WindowGroup(window, 0).blocks_per_sequence(size, 2 * size) == min(2, blocks)


@pytest.mark.parametrize("window", [5, 16, 17])
def test_a_long_answer_holds_no_more_than_its_window(window: int) -> None:
    """After every step: the blocks from the first one that the next query reads, to the last one."""
    one = rig(window, max_model_len=400)
    one.add(tokens(30, 0), 300, ignore_eos=True)
    longest = 0
    while one.submit():
        one.commit()
        for seq in one.core.live():
            (table,) = seq.windows
            position = seq.computed_before(one.core.batch.step + 1)
            if position > 31:  # the plan behind the prompt's has trimmed it
                last_look = (len(seq.table) - 1) * SIZE
                assert table.first in {max(0, at + 1 - window) // SIZE for at in (last_look, last_look + 1, position)}
                longest = max(longest, len(table.blocks))
    assert longest == WindowGroup(window, 0).blocks_per_sequence(SIZE, 400)
    one.verify()


def test_plans_differ_by_window_blocks_only() -> None:
    """A model with windows and one without get the same plans, but for blocks of the window groups."""

    def plans(one: Rig) -> list[object]:
        for i in range(9):
            one.add(tokens(9 + 5 * i, i), 20 + i, n=1 + i % 3, seed=i, ignore_eos=True)
        one.run()
        total = one.pool.total
        return [
            replace(
                plan,
                edits=[edit for edit in plan.edits if edit[2] < total],
                copies=[copy for copy in plan.copies if copy[0] < total],
                poison=[block for block in plan.poison if block < total],
            )
            for plan in one.plans
        ]

    sizes: dict[str, Any] = {"blocks": 300, "depth": 2, "chunk_tokens": 16}
    plain, windowed = Rig(**sizes), rig(6, 21, **sizes)
    assert plans(plain) == plans(windowed)
    assert all(edit[2] < 300 for plan in plain.plans for edit in plan.edits)
    assert any(edit[2] >= 300 for plan in windowed.plans for edit in plan.edits)
    assert any(copy[0] >= 300 for plan in windowed.plans for copy in plan.copies)


@pytest.mark.parametrize("window", [5, 12, 40])
@pytest.mark.parametrize("offset", [-13, -12, -5, -4, -1, 0, 1, 3, 4, 5, 12, 13])
def test_a_prompt_that_leaves_a_cached_one_begins_where_every_window_is_cached(window: int, offset: int) -> None:
    """Nothing else has used the pool: the last full block before the prompts part, whatever the window."""
    one = rig(window, 3, cached=64, chunk_tokens=7)
    base = tokens(100, 0)
    cached(one, base, anchors=[60])
    found = cached(one, base[: 60 + offset] + tokens(20, offset + 50), new=9)
    assert found == (60 + offset) // SIZE * SIZE


@pytest.mark.parametrize(("leaves", "found"), [(60, 60), (63, 60), (56, 56), (52, 0), (40, 0), (100, 100)])
def test_under_pressure_windows_at_anchors_are_what_stays(leaves: int, found: int) -> None:
    """Others overwrite passed blocks: those before the turn's end and the prompt's end are the last to go."""
    one = rig(12, sequences=8, chunk_tokens=64)
    (pool,) = one.core.builder.layers.pools
    base = tokens(101, 0)
    cached(one, base, anchors=[60])
    anchored = 4 + 3  # blocks before the turn's end, from one token earlier on, and before the prompt's
    held = pool.allocate(pool.total - anchored)
    pool.release(held)
    assert cached(one, base[:leaves] + tokens(20, leaves)) == found


def test_a_junction_is_kept_once_a_prompt_has_left_there() -> None:
    """The second prompt finds the blocks of full layers only.  The third one finds its window, too."""
    one = rig(12, sequences=8)
    (pool,) = one.core.builder.layers.pools
    shared = tokens(43, 0)
    for seed, found in ((1, 0), (2, 0), (3, 40)):
        assert cached(one, shared + tokens(30, seed)) == found
        pool.release(pool.allocate(pool.total - (3 if seed == 1 else 7)))  # all but the windows at anchors


def test_windows_and_full_layers_come_back_from_the_host() -> None:
    one = rig(6, 21, blocks=24, preempt="swap", host_blocks=64, admission="threshold", depth=2)
    for seed in range(6):
        one.add(tokens(11 + seed, seed), 40, seed=seed, ignore_eos=True)
    one.run()
    totals = one.core.report.totals
    assert totals.swap_preemptions > 0
    assert totals.recomputed_tokens == 0
    assert any(block >= 24 for plan in one.plans for block, _ in plan.swap_out)
    assert all(pool.host.available == pool.host.total for pool in one.core.builder.layers.pools)


def test_beams_keep_their_windows_and_reserve_them() -> None:
    one = rig(6, sequences=20)
    one.add(tokens(20, 0), 20, n=2, beams=Beams(3), stop_token_ids=[1, 2])
    one.run()
    few = rig(6, sequences=3)
    name = few.add(tokens(20, 0), 20, n=2, beams=Beams(3), stop_token_ids=[1, 2])
    few.run()
    assert "3 beams of 40 tokens, prompt included, reserve " in few.finishes[name, 0].message
    assert few.finishes[name, 0].message.endswith(" blocks in layers with a sliding window; this engine has 12")


def test_a_leader_reserves_windows_for_its_siblings() -> None:
    one = rig(5, sequences=8, max_seqs=4)
    layers = one.core.builder.layers
    each = WindowGroup(5, 0).reserved_blocks(SIZE, 10_000)
    assert layers.reservations.capacity == (8 * each,)
    for seed in range(4):
        one.add(tokens(9, seed), 30, seed=seed, n=2 if seed == 3 else 1, ignore_eos=True)
    one.submit()
    live = sorted(one.core.live(), key=lambda seq: seq.order)
    reserved = [seq.window_reserved for seq in live]
    assert reserved == [(each,), (each,), (each,), (), ()]  # the last two wait for a second slot
    assert layers.reservations.may_hold(live[3])
    one.run()


def test_short_requests_reserve_the_blocks_of_their_tokens() -> None:
    """Not those of a complete window, so more of them run at once."""
    one = rig(64, sequences=2, max_seqs=8)
    assert one.core.headroom.startable()[1] == 2  # sequences of any length
    for seed in range(8):
        one.add(tokens(9, seed), 7, seed=seed, ignore_eos=True)  # 16 tokens
    one.submit()
    assert one.core.running == 7
    assert [seq.window_reserved for seq in one.core.live()].count((16 // SIZE + 1,)) == 7
    one.run()
    one.verify()


def test_long_requests_run_as_many_at_once_as_windows_fit() -> None:
    one = rig(64, sequences=2, max_seqs=8)
    for seed in range(4):
        one.add(tokens(70, seed), 7, seed=seed, ignore_eos=True)
    most = 0
    while one.submit():
        most = max(most, one.core.running)
        one.commit()
    assert most == 2
    one.verify()


def test_choices_that_never_fit_the_window_blocks_are_refused() -> None:
    one = rig(6, sequences=3, max_seqs=8)
    name = one.add(tokens(20, 0), 20, n=4)
    fits = one.add(tokens(20, 0), 20, n=3)
    one.run()
    assert one.finishes[name, 0].message == (
        "4 choices of 40 tokens, prompt included, reserve 16 blocks in layers with a sliding window; this engine has 12"
    )
    assert one.finishes[fits, 2].reason != "error"


def test_the_auditor_finds_what_is_held_or_released_wrongly() -> None:
    def running() -> Rig:
        one = rig(6)
        one.add(tokens(30, 0), 30, ignore_eos=True)
        for _ in range(8):
            one.submit()
            one.commit()
        return one

    one = running()
    (seq,) = one.core.live()
    one.core.builder.layers.pools[0].acquire(seq.windows[0].blocks[:1])
    with pytest.raises(Leak):
        one.core.auditor.whole()
    one = running()
    (seq,) = one.core.live()
    one.core.builder.layers.advance(seq, seq.computed + 12)
    with pytest.raises(AccountingError, match=r"block \d+ of window 6 was released too early"):
        one.core.auditor.whole()
    one = running()
    (seq,) = one.core.live()
    (held,) = seq.window_reserved
    seq.window_reserved = (held + 1,)
    with pytest.raises(
        AccountingError, match=rf"{held}\] blocks of \[\d+\] are reserved, sequences have \[{held + 1}\]"
    ):
        one.core.auditor.whole()
