"""The calibration of a base rate: how many clients fill a part of the pool, and what they get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.loadtest.calibrate import blocks_held, calibrate, clients_for, closed_loop, tokens_between
from quire.loadtest.replay import Options
from quire.loadtest.stats import Record
from quire.loadtest.trace import Job
from tests.system.stack import Stack


def test_a_job_counts_as_often_as_it_runs() -> None:
    long, short = Job(16, 160, 1), Job(32, 16, 2)
    assert blocks_held([long], 16) == pytest.approx(1 + 5 + 0.5)
    assert blocks_held([short], 16) == pytest.approx(2 + 0.5 + 0.5)
    assert blocks_held([long, short], 16) == pytest.approx((160 * 6.5 + 16 * 3.0) / 176)
    assert clients_for([long], 100, 16, 0.65) == 10
    assert clients_for([long], 1, 16, 0.1) == 1


def test_tokens_of_a_window_count_events_by_their_tokens() -> None:
    record = Record(0.0, "x", 8, 8, times=[0.5, 1.5, 2.5, 3.5], tokens=8)
    assert tokens_between([record], 1.0, 3.0) == 4.0


@pytest.mark.system
async def test_the_pool_is_used_as_asked(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal requests on a server with steps of a fixed time: use and rate follow.

    The steps are long, so that what the machine needs between two requests of a client counts for little."""
    jobs = [Job(24, 64, seed) for seed in range(400)]
    with Stack(
        redis_server.url,
        namespace,
        checkpoint("llama"),
        executor="scripted",
        scripted_step_ms=40.0,
        max_model_len=1000,
        kv_blocks=100,
        check_accounting=False,
    ) as stack:
        options = Options(url=stack.url, model="tiny", metrics_url=f"{stack.url}/metrics")
        clients = clients_for(jobs, 100, 16, 0.6)
        assert clients == 15
        tokens_per_s, kv = await closed_loop(options, jobs, clients, 3.0, 5.0)
    assert kv == pytest.approx(0.6, abs=0.12)
    assert 0 < tokens_per_s < 1.1 * 15 / 0.040  # 15 tokens a step at most


def test_the_rate_is_corrected_by_the_measured_use(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(*_: object) -> tuple[float, float | None]:
        return 640.0, 0.6

    monkeypatch.setattr("quire.loadtest.calibrate.closed_loop", measured)
    options = Options(url="", model="", metrics_url="")
    found = calibrate(options, [Job(24, 64, 1)], 100, 16, 0.9)
    assert found.rate == pytest.approx(640 / 64 * 0.9 / 0.6)
