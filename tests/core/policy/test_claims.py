"""Number of prompt tokens that an engine claims at once."""

from __future__ import annotations

import msgspec

from quire.engine.core.blocks import BlockPool
from quire.engine.core.policy.step_cost import FIRST
from quire.engine.core.scheduler import Scheduler
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.tools.simulate import FAR, engine_limits
from quire.engine.tools.step_time import StepTime
from quire.engine.wire.messages import Generate, Sampling

SLOW = StepTime(fixed=0.01, row=0.0017, prompt_token=0.0008)  # the 42M model on two cores
FAST = StepTime(fixed=0.0047, row=0.000025, prompt_token=0.000025)  # the 8B shape on an H200


class Engine:
    """A scheduler whose steps take as long as `step` says."""

    def __init__(self, step: StepTime, blocks: int = 10_000) -> None:
        limits = msgspec.structs.replace(
            engine_limits("forecast", step_tokens=8192), itl_stretch=2.0, step_target_s=2.0
        )
        self.core, self.step = Scheduler(BlockPool(blocks, 16), limits), step
        self.executor = ScriptedExecutor(ModelInfo("m", "m", 100, FAR, [], 0), blocks)
        self.asked = 0

    def ask(self, prompt: int, output: int = 500) -> None:
        self.asked += 1
        tokens = [2 + (self.asked * 31 + at) % 97 for at in range(prompt)]
        self.core.accept(Generate(f"r{self.asked}", "", tokens, output, Sampling(ignore_eos=True), FAR))

    def run(self, steps: int = 1) -> int:
        """Run steps; return the prompt tokens of the last one."""
        prompt = 0
        for _ in range(steps):
            plan = self.core.plan(0)
            assert plan is not None
            self.executor.submit(plan)
            result = self.executor.collect()
            prompt = sum(len(piece.token_ids) for piece in plan.slices)
            self.core.commit(msgspec.structs.replace(result, step_s=self.step(len(result.slots), prompt)))
        return prompt

    def decode(self, rows: int) -> None:
        """Let so many sequences decode, and the step times be known."""
        for _ in range(rows):
            self.ask(4)
        self.run(60)
        for _ in range(20):
            self.ask(40, output=1)
            self.run(3)


def test_a_slow_engine_claims_the_prompt_tokens_of_its_next_two_steps() -> None:
    engine = Engine(SLOW)
    engine.decode(50)
    core = engine.core
    claimable, room = core.headroom.claimable(), core.headroom.startable()[0]
    for _ in range(10):
        engine.ask(1000)
    assert core.headroom.claimable() == 0  # there is enough to compute
    computed = engine.run() + engine.run()
    assert 0.5 * computed <= claimable <= 2 * computed
    assert claimable < room / 100, "its KV cache alone would have let it claim so much"


def test_a_fast_engine_claims_a_fifth_of_a_second() -> None:
    engine = Engine(FAST)
    engine.decode(50)
    steps = engine.core.headroom.claimable() / engine.core.headroom.prompt_budget()
    step_s = FAST(50, engine.core.headroom.prompt_budget())
    assert 0.8 < steps * step_s / 0.2 < 1.25
    assert steps > 10


def test_what_is_claimed_and_not_computed_counts() -> None:
    engine = Engine(SLOW)
    engine.decode(50)
    before = engine.core.headroom.claimable()
    engine.ask(30)
    assert engine.core.headroom.claimable() == before - 30
    engine.run()
    assert engine.core.headroom.claimable() >= before - 30


def test_nothing_is_known_at_first() -> None:
    """An idle engine claims for two steps of the size that its first ones have."""
    engine = Engine(SLOW)
    assert engine.core.headroom.claimable() == 2 * FIRST
    engine.ask(FIRST)
    engine.run()
    assert engine.core.headroom.claimable() == 0  # the next step shows how long one without prompts takes
    engine.run()
    assert engine.core.headroom.claimable() > 0


def test_a_flood_that_waits_in_the_queue_gets_as_many_prompt_tokens_as_one_that_was_claimed() -> None:
    """Many waiting prompts may stretch a step (step_cost.CROWD), wherever they wait."""
    claimed, queued = Engine(FAST), Engine(FAST)
    for engine in (claimed, queued):
        engine.decode(20)
    for _ in range(400):
        claimed.ask(100)
    for _ in range(40):
        queued.ask(100)
    queued.core.claims.queued = 360
    alone = Engine(FAST)
    alone.decode(20)
    for _ in range(40):
        alone.ask(100)
    whole, rest, few = (engine.core.headroom.prompt_budget() for engine in (claimed, queued, alone))
    assert whole == rest > few
    # Those that would not fit into the pool do not count: they wait for blocks, not for their computing.
    full = Engine(FAST, blocks=20 * 32 + 40 * 7)
    full.decode(20)
    for _ in range(40):
        full.ask(100)
    full.core.claims.queued = 360
    assert full.core.headroom.prompt_budget() < 1.5 * few
