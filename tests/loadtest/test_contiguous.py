"""The study of loads without benefit from paging: pairs, and properties that need no clock."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.llm import LLM
from quire.engine.wire.messages import Sampling
from quire.loadtest.studies.baselines import BaselineConfig
from quire.loadtest.studies.contiguous import ALONE, MODES, UNIFORM, pairs


def test_pairs_take_turns_and_their_ratios_forgive_a_machine_that_slows_down() -> None:
    order: list[str] = []

    def measure(mode: str, seed: int) -> tuple[float, float]:
        order.append(mode)
        slowness = 1 + seed // 1000  # each pair is on a slower machine
        return (10.0 if mode == "static" else 10.5) * slowness, 4.0

    found = pairs(measure, ("clock_ms", "engine_cpu_ms"), 4)
    assert order == ["static", "paged", "paged", "static"] * 2
    clock = found["clock_ms"]
    assert clock["ratio_median"] == clock["ratio_least"] == clock["ratio_most"] == 1.05
    assert clock["static"] == [10.0, 20.0, 30.0, 40.0]
    assert found["engine_cpu_ms"]["ratio_median"] == 1.0


@pytest.mark.parametrize(("load", "count"), [(ALONE, 1), (UNIFORM, 48)])
def test_paging_takes_no_step_more_than_contiguous_allocation(load: tuple[int, int], count: int) -> None:
    """Batch 1, and uniform short jobs in a pool that holds all of them: the same steps give the same tokens."""
    steps, texts, copied = {}, {}, {}
    for mode in MODES:
        config = msgspec.convert(
            {"admission": MODES[mode], "prefix_cache": False, "max_seqs": 64, "step_tokens": 1024, "itl_stretch": 0.0},
            BaselineConfig,
        )
        llm = LLM.over(config, ScriptedExecutor(ModelInfo("scripted", "f00d", 1000, 4096, [0], 64), 2048))
        prompts = [[5 + number] * load[0] for number in range(count)]
        samplings = [Sampling(seed=number, ignore_eos=True) for number in range(count)]
        done = llm.generate(prompts, samplings, max_new_tokens=load[1])
        steps[mode], texts[mode] = llm.engine.core.step, [one.outputs[0].token_ids for one in done]
        totals = llm.engine.core.report.totals
        copied[mode] = totals.copied_blocks + totals.preemptions + totals.pauses
    assert texts["paged"] == texts["static"]
    assert steps["paged"] <= steps["static"]
    assert copied == {"static": 0, "paged": 0}
