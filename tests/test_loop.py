"""The step loop and offline mode over the scripted executor: no model, no Redis."""

from __future__ import annotations

import time

import pytest

from engine.config import EngineConfig
from engine.core.plan import StepResult
from engine.core.scheduler import Outputs
from engine.executor.base import ModelInfo, ScriptedExecutor, StepError, scripted_token
from engine.loop import ConfigError, Engine, LocalBox, Rate, Report, build_scheduler
from engine.offline import LLM
from engine.wire.messages import Generate, Sampling

INFO = ModelInfo("scripted", "f00d", 100, 256, [0], 64)
CONFIG = EngineConfig(max_seqs=8, step_tokens=64, check_books=True)


def test_offline_says_the_script_for_more_prompts_than_seats() -> None:
    llm = LLM.over(CONFIG, ScriptedExecutor(INFO, 64))
    prompts = [[5] * (1 + i % 7) for i in range(30)]
    samplings = [Sampling(seed=i) for i in range(30)]
    answers = llm.generate(prompts, samplings, max_new_tokens=list(range(1, 31)), n=2)
    for i, answer in enumerate(answers):
        for sibling, output in enumerate(answer.outputs):
            assert output.token_ids == [scripted_token(i, sibling, at, 100) for at in range(i + 1)]
            assert output.finish_reason == "length"
    assert llm.engine.core.idle
    assert llm.engine.core.pool.available == 64


class Breaks(ScriptedExecutor):
    """Loses one step, as a device out of memory would."""

    def collect(self) -> StepResult:
        if self._plans[0].step == 4:
            self._plans.clear()
            self._decoding.clear()
            raise StepError("out of memory in step 4")
        return super().collect()


def test_a_failed_step_fails_what_was_seated_and_serves_the_rest() -> None:
    llm = LLM.over(CONFIG, Breaks(INFO, 64))
    answers = llm.generate([[1]] * 12, max_new_tokens=10)
    reasons = [answer.outputs[0].finish_reason for answer in answers]
    assert reasons == ["error"] * 8 + ["length"] * 4
    assert answers[0].outputs[0].message == "out of memory in step 4"
    assert llm.engine.core.pool.available == 64


def test_a_step_budget_that_leaves_no_room_for_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="step_tokens is 8; it must exceed max_seqs, 8"):
        build_scheduler(EngineConfig(max_seqs=8, step_tokens=8), ScriptedExecutor(INFO, 64))


def test_rate_follows_a_steady_count() -> None:
    rate = Rate(seconds=1.0)
    for tick in range(200):
        rate.update(tick * 5, tick * 0.1)
    assert rate.value == pytest.approx(50.0, rel=0.01)


class Reports(LocalBox):
    """Keeps what the engine says of itself."""

    def __init__(self) -> None:
        super().__init__(lambda delta: None)
        self.said: list[Report] = []

    def put(self, outputs: Outputs, report: Report) -> None:
        self.said.append(report)


def test_the_time_of_a_step_is_known_at_once_after_idleness() -> None:
    """Output tokens per second are an average that idleness drags down: from them the first steps would look slow."""
    box = Reports()
    engine = Engine(CONFIG, ScriptedExecutor(INFO, 64, step_seconds=0.02), box, box)
    for _ in range(2):  # the second time from idleness
        box.orders.append(Generate("r", "g", [5], 8, Sampling(ignore_eos=True), 2**60))
        while not engine.core.idle or box.orders:
            engine.turn()
        load = box.said[-1].load
        assert 0.02 <= load.step_s < 0.04
        time.sleep(0.3)
        engine.turn()
    assert box.said[-1].load.step_s == load.step_s
