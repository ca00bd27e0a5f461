"""Sequences that an earlier engine began: all of them paused when it died, and the last one should resume soon."""

from __future__ import annotations

import msgspec

from quire.engine.core.blocks import BlockPool
from quire.engine.core.limits import Limits
from quire.engine.core.scheduler import Scheduler
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.wire.messages import Generate, Sampling

STEP_TOKENS = 1024
COUNT, PROMPT, OUTPUT = 32, 120, 200  # sequences, and tokens of each
INFO = ModelInfo("virtual", "virtual", 1000, 8192, [0], 0)


class Virtual:
    """A scheduler over an executor whose steps take 10 ms, and 0.3 ms for each prompt token."""

    def __init__(self) -> None:
        limits = Limits(64, STEP_TOKENS, STEP_TOKENS, 8192, 1000, 1.0, frozenset([0]), "virtual", "none", itl_stretch=2)
        self.core, self.executor = Scheduler(BlockPool(4096, 16), limits), ScriptedExecutor(INFO, 4096)
        self.said: set[str] = set()
        self.budgets: list[int] = []  # prompt tokens of each step

    def step(self) -> None:
        plan = self.core.plan(0)
        assert plan is not None
        tokens = sum(len(piece.token_ids) for piece in plan.slices)
        self.executor.submit(plan)
        self.core.commit(msgspec.structs.replace(self.executor.collect(), step_s=0.010 + tokens * 3e-4))
        self.budgets.append(tokens)
        self.said |= {delta.id for deltas in self.core.outputs().deltas.values() for delta in deltas}

    def take_over(self) -> None:
        for i in range(COUNT):
            self.core.accept(request(str(i)), [[7 + i % 9] * OUTPUT])

    def steps_until_all_resumed(self) -> int:
        before = len(self.budgets)
        while not {str(i) for i in range(COUNT)} <= self.said:
            self.step()
        return len(self.budgets) - before


def request(name: str) -> Generate:
    seed = sum(name.encode())
    return Generate(name, "", [2 + seed] * PROMPT, 2000, Sampling(seed=seed, ignore_eos=True), 1 << 60)


def test_what_paused_together_is_recomputed_at_full_speed() -> None:
    virtual = Virtual()
    virtual.take_over()
    whole_steps = -(-COUNT * (PROMPT + OUTPUT) // STEP_TOKENS)
    assert virtual.steps_until_all_resumed() <= whole_steps + 3
    virtual.core.auditor.whole()


def test_streams_of_the_surviving_engine_keep_their_pace() -> None:
    """An engine that serves 32 streams of its own adopts 32 more: the bound protects the first 32."""
    virtual = Virtual()
    for i in range(COUNT):
        virtual.core.accept(request(f"own {i}"))
    for _ in range(40):
        virtual.step()
    virtual.budgets.clear()
    virtual.take_over()
    virtual.steps_until_all_resumed()
    assert max(virtual.budgets[2:]) < STEP_TOKENS / 4


def test_the_bound_holds_again_after_all_have_resumed() -> None:
    virtual = Virtual()
    virtual.take_over()
    virtual.steps_until_all_resumed()
    for _ in range(20):
        virtual.step()
    virtual.budgets.clear()
    virtual.core.accept(Generate("long", "", [5] * 6000, 1, Sampling(ignore_eos=True), 1 << 60))
    while "long" not in virtual.said:
        virtual.step()
    assert max(virtual.budgets) < 100
