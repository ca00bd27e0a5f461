"""Measurements of an overload: on-time requests, idle memory while requests wait, and fitted step times.

Pure, like stats.py: functions depend on their arguments only.  All times are seconds since the run began.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from quire.loadtest.stats import Record, Sample, Slo, spread

FIT_WINDOW_S = 1.0  # length of a window of the fit in seconds: several steps, but short compared with a burst
BEFORE_BURST_S = 5.0  # the pool's use is averaged over this time before the burst


def figures(
    records: Sequence[Record], samples: Sequence[Sample], slo: Slo, windows: dict[str, tuple[float, float]]
) -> dict[str, Any]:
    """Return the measurements that compare systems under overload.

    on_time: the share of requests whose TTFT and mean gap are within `slo`, per phase and for the complete run.  A
    request without an answer counts as late."""
    firsts = [record.times[0] for record in records if record.times]
    preempted = _growth([sample.preemptions for sample in samples if sample.preemptions is not None])
    burst = windows.get("burst")
    return {
        "on_time": {
            **{name: _share(records, slo, window) for name, window in windows.items()},
            "all": _share(records, slo, (0.0, float("inf"))),
        },
        "answered": sum(record.outcome == "ok" for record in records),
        "unanswered": sum(record.outcome != "ok" for record in records),
        "refusals_429": sum(attempt.status == 429 for record in records for attempt in record.attempts),
        "last_first_token_s": round(max(firsts), 3) if firsts else None,
        "last_end_s": round(max((record.end_s for record in records), default=0.0), 3),
        "longest_gap_s": round(max((gap for record in records for gap in record.gaps_s), default=0.0), 4),
        "preemptions": preempted,
        "preemptions_per_1000": None if preempted is None or not records else 1000 * preempted / len(records),
        "kv_before_burst": _mean_kv(samples, (burst[0] - BEFORE_BURST_S, burst[0])) if burst else None,
        **waiting(samples),
        "lanes": lanes(records, windows),
        "step_time": step_time(records, samples),
    }


def _share(records: Sequence[Record], slo: Slo, window: tuple[float, float]) -> float | None:
    due = [record for record in records if window[0] <= record.due_s < window[1]]
    return round(sum(map(slo.met, due)) / len(due), 4) if due else None


def _growth(counter: list[float]) -> float | None:
    """Return the growth of a counter; a value that fell belongs to a server that restarted."""
    return sum(max(0.0, b - a) for a, b in itertools.pairwise(counter)) if counter else None


def _mean_kv(samples: Sequence[Sample], window: tuple[float, float]) -> float | None:
    seen = [sample.kv for sample in samples if sample.kv is not None and window[0] <= sample.at_s < window[1]]
    return round(sum(seen) / len(seen), 4) if seen else None


def waiting(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Return the seconds in which requests waited, the mean KV-cache utilisation in that time, and idle_pool_s.

    A sample stands for the time until the next sample.  idle_pool_s is the integral of the KV cache's unused fraction
    over that time: 10 s at 90 % utilisation give 1."""
    total = idle = 0.0
    for sample, after in itertools.pairwise(samples):
        if sample.kv is not None and sample.waiting:
            total += after.at_s - sample.at_s
            idle += (1 - sample.kv) * (after.at_s - sample.at_s)
    return {
        "waiting_s": round(total, 3),
        "kv_while_waiting": round(1 - idle / total, 4) if total else None,
        "idle_pool_s": round(idle, 3),
    }


def lanes(records: Sequence[Record], windows: dict[str, tuple[float, float]]) -> dict[str, dict[str, Any]]:
    """Return phase -> lane -> requests and the spread of their TTFT.

    The lane is the value of the server's header `x-queue-lane`; "none" if the server sends no such header."""
    found: dict[str, dict[str, Any]] = {}
    for phase, (begin, end) in windows.items():
        due = [record for record in records if begin <= record.due_s < end]
        counts = Counter(record.lane or "none" for record in due)
        found[phase] = {
            lane: {
                "requests": count,
                "ttft_s": spread(t for r in due if (r.lane or "none") == lane and (t := r.ttft_s) is not None),
            }
            for lane, count in sorted(counts.items())
        }
    return found


# ------------------------------------------------------------------------------------------------------- step times


def step_time(records: Sequence[Record], samples: Sequence[Sample]) -> dict[str, float] | None:
    """Fit seconds of a step = fixed + row * running sequences + prompt_token * prompt tokens in it.

    Each window of FIT_WINDOW_S in which sequences ran all the time is one observation.  Every running sequence gets a
    token in each step, so a step takes window * running / tokens.  Least squares without negative coefficients.
    Returns None with fewer than ten windows.

    row cannot be separated from fixed if the number of running sequences hardly changes; their sum is still right."""
    rows = list(_observations(records, samples))
    if len(rows) < 10:
        return None
    matrix = np.array([[1.0, running, prompt] for running, prompt, _ in rows])
    seconds = np.array([step for _, _, step in rows])
    columns = [0, 1, 2]
    while columns:
        solution = np.linalg.lstsq(matrix[:, columns], seconds, rcond=None)[0]
        if solution.min() >= 0:
            break
        del columns[int(solution.argmin())]
    found = dict.fromkeys(("fixed", "row", "prompt_token"), 0.0)
    names = list(found)
    return found | {names[column]: float(value) for column, value in zip(columns, solution, strict=True)}


def _observations(records: Sequence[Record], samples: Sequence[Sample]) -> Iterator[tuple[float, float, float]]:
    """Yield (running sequences, prompt tokens of a step, seconds of a step), one for each window."""
    if not samples:
        return
    count = int(samples[-1].at_s / FIT_WINDOW_S) + 1
    running: list[list[float]] = [[] for _ in range(count)]
    for sample in samples:
        if sample.at_s >= 0 and sample.running is not None:
            running[int(sample.at_s / FIT_WINDOW_S)].append(sample.running)
    tokens, prompts = [0.0] * (count + 1), [0.0] * (count + 1)
    for record in records:
        each = record.tokens / len(record.times) if record.times else 0.0  # several tokens may share an event
        for place, at in enumerate(record.times):
            window = min(count, max(0, int(at / FIT_WINDOW_S)))
            tokens[window] += each
            if place == 0:
                prompts[window] += record.prompt_len - (record.cached or 0)
    for window, seen in enumerate(running):
        if len(seen) > 1 and min(seen) >= 1 and tokens[window]:
            mean = sum(seen) / len(seen)
            step = FIT_WINDOW_S * mean / tokens[window]
            yield mean, prompts[window] * step / FIT_WINDOW_S, step
