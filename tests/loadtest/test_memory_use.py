"""What `memory-use` takes of a result; and that an engine's load says how full its slots are, and what paging saves."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.config import EngineConfig
from quire.engine.core.scheduler import Scheduler
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.llm import LLM
from quire.engine.observers.load_report import LoadReport
from quire.engine.wire.messages import Sampling
from quire.loadtest.clients import parse_shares
from quire.loadtest.studies.memory_use import RATES, figures_of, workload_name
from quire.loadtest.workloads import WORKLOADS, jobs


def test_figures_are_those_of_the_result() -> None:
    server: dict[str, Any] = {
        "slots_filled_mean": 0.98,
        "eta_mean": 0.6,
        "kv_mean": 0.5,
        "kv_max": 0.9,
        "preemptions": 0,
    }
    samples = {"t": [0.25], "filled": [0.98], "eta": [0.6], "kv": [0.5], "running": [3]}
    result = {
        "figures": {"server": server, "completed": 4, "prefix_hits": {"rate": 0.25}},
        "config": {"work": {"requests": 4, "prompt_tokens": 644, "output_tokens": 1352}},
        "series": {"samples": samples},
    }
    found = figures_of(result)
    assert (found["mean_prompt"], found["mean_output"], found["slots_filled"], found["eta"]) == (161, 338, 0.98, 0.6)
    assert found["hit_rate"] == 0.25
    assert found["samples"].keys() == {"t", "filled", "eta", "kv"}
    server["eta_mean"] = None
    with pytest.raises(SystemExit, match="did no sequence run, or is it another server"):
        figures_of(result)


def test_it_runs_known_workloads_and_shares_no_prompt_between_them() -> None:
    assert parse_shares(RATES, workload_name).keys() <= set(WORKLOADS)
    with pytest.raises(ValueError, match="chatter is no workload; there are sharegpt, alpaca"):
        parse_shares("chatter=1", workload_name)


@pytest.mark.parametrize(
    ("workload", "least"), [("chat", 0.5), ("rag", 0.9), ("agents", 0.6), ("translation", 0.85), ("alpaca", 0.0)]
)
def test_published_hit_rates_hold_without_a_clock(workload: str, least: float) -> None:
    """One request after the other, in a pool that keeps all: what the cache has is what the prompts share."""
    config = EngineConfig(max_seqs=8, step_tokens=4096, max_model_len=4096)
    llm = LLM.over(config, ScriptedExecutor(ModelInfo("scripted", "f00d", 16_000, 4096, [0], 64), 8192))
    for number, job in enumerate(jobs(workload, 96, seed=7)):
        llm.generate([job.prompt(16_000)], Sampling(seed=number, ignore_eos=True), max_new_tokens=2)
    totals = llm.engine.core.report.totals
    rate = totals.cached_prompt_tokens / totals.prompt_tokens
    assert least <= rate < 1.0
    assert (rate > 0) == (workload != "alpaca")


# Lognormal lengths of mean 161 in and 338 out, 19 and 58; all of 50 and 50: bounds that break where a block is wasted.
@pytest.mark.parametrize(
    ("workload", "filled", "eta"), [("sharegpt", 0.97, 0.85), ("alpaca", 0.85, 0.9), ("uniform-50", 0.88, 0.9)]
)
def test_the_load_of_an_engine_tells_filled_slots_and_eta(workload: str, filled: float, eta: float) -> None:
    """Compared in each step with a count over all block tables, and over the maximum length of each sequence."""
    config = EngineConfig(max_seqs=16, step_tokens=512, admission="threshold", admit_threshold=1.0, prefix_cache=False)
    llm = LLM.over(config, ScriptedExecutor(ModelInfo("scripted", "f00d", 1000, 4096, [0], 64), 4096))
    core, now = llm.engine.core, 0.0
    report = LoadReport("e0", llm.executor.info)
    for number, job in enumerate(jobs(workload, 48, seed=3)):
        llm.submit([5] * job.prompt_len, Sampling(seed=number, ignore_eos=True), max_new_tokens=job.output_len)
    shares: list[float] = []
    etas: list[float] = []
    while llm.unfinished:
        llm.step()
        now += 1.0
        load = report.describe(core, now, draining=False, queued=False)
        used, slots = core.occupancy.used_positions()
        running = [seq for seq in core.live() if seq.slot >= 0]
        assert load.static_blocks == sum(-(-seq.limit // 16) for seq in running)
        if slots:
            assert load.slots_filled == pytest.approx(used / slots)
            shares.append(load.slots_filled)
            etas.append((load.total_blocks - load.free_blocks) / load.static_blocks)
    assert sum(shares) / len(shares) > filled
    assert 0.3 < sum(etas) / len(etas) < eta
    load = report.describe(core, now + 1.0, draining=False, queued=False)
    assert (load.slots_filled, load.static_blocks) == (0.0, 0)


def test_filled_slots_are_counted_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.over(EngineConfig(max_seqs=4), ScriptedExecutor(ModelInfo("scripted", "f00d", 1000, 4096, [0], 64), 64))
    counts = 0

    def count(core: Scheduler) -> float:
        nonlocal counts
        counts += 1
        return 0.5

    monkeypatch.setattr("quire.engine.observers.load_report.slots_filled", count)
    report = LoadReport("e0", llm.executor.info)
    for turn in range(1000):
        assert report.describe(llm.engine.core, turn / 128, draining=False, queued=False).slots_filled == 0.5
    assert counts == 8
