"""Figures of an overload, from recorded answers and samples."""

from __future__ import annotations

import pytest

from quire.loadtest.overload import figures, step_time, waiting
from quire.loadtest.stats import Attempt, Record, Sample, Slo

WINDOWS = {"base": (0.0, 10.0), "burst": (10.0, 20.0)}


def answered(due: float, times: list[float], lane: str = "", statuses: tuple[int, ...] = (200,)) -> Record:
    attempts = [Attempt(due + i, status) for i, status in enumerate(statuses)]
    outcome = "ok" if times else "refused"
    end = times[-1] if times else due
    return Record(due, "x", 8, len(times), 0.0, attempts, times, end, len(times), outcome, lane=lane)


def test_shares_lanes_and_the_last_first_token() -> None:
    records = [
        answered(1.0, [1.5, 1.6]),
        answered(11.0, [12.0, 12.1], "on_time"),
        answered(12.0, [30.0, 30.1, 30.7], "late", (429, 429, 200)),
        answered(13.0, [13.1, 13.9], "on_time"),  # on time, but 0.8 s per token
        answered(14.0, [], statuses=(429,)),
    ]
    found = figures(records, [], Slo(), WINDOWS)
    assert found["on_time"] == {"base": 1.0, "burst": 0.25, "all": 0.4}
    assert (found["answered"], found["unanswered"], found["refusals_429"]) == (4, 1, 3)
    assert (found["last_first_token_s"], found["last_end_s"]) == (30.0, 30.7)
    assert found["longest_gap_s"] == 0.8
    burst = found["lanes"]["burst"]
    assert {lane: each["requests"] for lane, each in burst.items()} == {"late": 1, "none": 1, "on_time": 2}
    assert burst["late"]["ttft_s"]["p50"] == 18.0
    assert burst["none"]["ttft_s"] is None


def test_idle_memory_counts_only_while_requests_wait() -> None:
    samples = [
        Sample(0.0, kv=0.1, waiting=0),
        Sample(1.0, kv=0.9, waiting=3),
        Sample(3.0, kv=0.5, waiting=1),
        Sample(4.0, kv=0.2, waiting=0),
        Sample(9.0, kv=0.2, waiting=0),
    ]
    assert waiting(samples) == {"waiting_s": 3.0, "kv_while_waiting": round(1 - 0.7 / 3, 4), "idle_pool_s": 0.7}
    assert waiting(samples[:1]) == {"waiting_s": 0.0, "kv_while_waiting": None, "idle_pool_s": 0.0}


def test_preemptions_per_thousand_and_the_pool_before_the_burst() -> None:
    samples = [Sample(float(at), kv=0.1 * at, waiting=0, preemptions=7.0 + (at > 4)) for at in range(10)]
    found = figures([answered(1.0, [1.5])] * 50, samples, Slo(), WINDOWS)
    assert (found["preemptions"], found["preemptions_per_1000"]) == (1.0, 20.0)
    assert found["kv_before_burst"] == pytest.approx(0.7)  # 5 to 9 s
    nothing = figures([], [], Slo(), WINDOWS)
    assert (nothing["preemptions"], nothing["last_first_token_s"], nothing["step_time"]) == (None, None, None)


def test_the_step_time_is_found_again() -> None:
    """Steps of 10 ms and 1 ms per sequence: 5, 10, 15, ... sequences per second each; prompts of 100 tokens cost 20
    ms."""
    records, samples, now = [], [], 0.0
    for window in range(16):
        rows = 5 * (window % 5 + 1)
        prompts = window % 3  # prompts of 100 tokens in this second
        samples += [Sample(window + 0.01 + i / 4, running=float(rows)) for i in range(4)]
        steps = (1.0 - prompts * 100 * 0.0002) / (0.010 + 0.001 * rows)
        tokens = round(steps * rows)
        now = float(window)
        for i in range(prompts):
            records.append(answered(now, [now + 0.1 + 0.1 * i]))
            records[-1].prompt_len = 100
        times = [now + (i + 0.5) / tokens for i in range(tokens - prompts)]
        records.append(answered(-1.0, [-0.5, *times]))
    found = step_time(records, samples)
    assert found is not None
    assert found["fixed"] == pytest.approx(0.010, rel=0.1)
    assert found["row"] == pytest.approx(0.001, rel=0.1)
    assert found["prompt_token"] == pytest.approx(0.0002, rel=0.15)
    assert step_time(records, samples[:20]) is None  # too few windows


def test_no_part_of_a_step_time_is_negative() -> None:
    """Steps that get shorter the more sequences run."""
    records, samples = [], []
    for window in range(12):
        rows = 1 + window
        samples += [Sample(window + 0.01 + i / 4, running=float(rows)) for i in range(4)]
        count = rows * (20 + window)
        records.append(answered(-1.0, [-0.5, *(window + (i + 0.5) / count for i in range(count))]))
    found = step_time(records, samples)
    assert found is not None
    assert min(found.values()) == 0.0
    assert found["fixed"] > 0.02
