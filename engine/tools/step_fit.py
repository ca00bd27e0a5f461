"""Step times from a request log: seconds per step, per running sequence and per prompt token.

    line of the log:   queued ---- started --- first token ---------------- end: the engine's measured step times
                                      prompt            output_len - 1 steps

Each line has two measurements of the engine: the time of a decode-only step with a number of sequences, and the
additional time per prompt token.  A linear fit of the first and the median of the second give the model, up to a
factor.  The factor comes from the answers: between its first token and its end a sequence takes part in every step, so
the time between them is

    steps * fixed + (sum over the steps of running sequences) * row + (prompt tokens computed meanwhile) * prompt_token

and includes the time of the loop between two steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from statistics import fmean, linear_regression, median

import msgspec

from quire.engine.observers.request_log import RequestLine
from quire.engine.tools.step_time import StepTime

MIN_STEPS = 8  # minimum steps of an answer: for shorter answers rounding errors dominate
ROUNDING_S = 1e-5  # upper bound of the rounding error of sums of times in a log
MIN_LINES = 8  # minimum number of complete answers for a fit


class Integral:
    """The integral over time of a sum of rates, each of which lasts from one time to another."""

    def __init__(self, spans: Iterable[tuple[float, float, float]]) -> None:
        """`spans`: (from, to, rate), in seconds and units per second."""
        changes: dict[float, float] = {}
        for start, end, rate in spans:
            changes[start] = changes.get(start, 0.0) + rate
            changes[end] = changes.get(end, 0.0) - rate
        self._times = sorted(changes)
        self._rates = list(accumulate(changes[at] for at in self._times))
        parts = [(after - at) * rate for (at, after), rate in zip(pairwise(self._times), self._rates, strict=False)]
        self._sums = [0.0, *accumulate(parts)]

    def until(self, time: float) -> float:
        """Return the integral from the first time to `time`."""
        at = bisect_right(self._times, time) - 1
        return self._sums[at] + (time - self._times[at]) * self._rates[at] if at >= 0 else 0.0


def fit(lines: Sequence[RequestLine]) -> StepTime | None:
    """Return the step times fitted to a request log; None: it has too few complete answers."""
    ran = [line for line in lines if line.queue_s is not None and line.ttft_s is not None and line.output_len]
    # Pauses and preemptions are not steps.
    kept = [line for line in ran if line.output_len > MIN_STEPS and not line.preemptions and not line.pauses]
    if len(kept) < MIN_LINES or (shape := measured_by_engine(ran)) is None:
        return None
    rows = Integral(_rows(line) for line in ran)
    prompts = Integral(_prompt(line) for line in ran)
    took = modelled = 0.0
    for line in kept:
        first, end, steps = line.at_s + (line.ttft_s or 0.0), line.at_s + line.e2e_s, line.output_len - 1
        mean = (rows.until(end) - rows.until(first)) / (end - first)
        took += end - first
        modelled += steps * (shape.fixed + mean * shape.row)
        modelled += (prompts.until(end) - prompts.until(first)) * shape.prompt_token
    return StepTime(*(seconds * took / modelled for seconds in msgspec.structs.astuple(shape)))


def measured_by_engine(lines: Sequence[RequestLine]) -> StepTime | None:
    """Return the step times that the engine has measured itself, without the time between steps; None: none."""
    steps = [(line.running, line.step_s) for line in lines if line.running and line.step_s]
    tokens = [line.prompt_token_s for line in lines if line.prompt_token_s]
    if not steps or not tokens:
        return None
    running, seconds = zip(*steps, strict=True)
    if len(set(running)) < 2:
        return StepTime(fmean(seconds), 0.0, median(tokens))
    row, fixed = linear_regression(running, seconds)
    if fixed < 0 or row < 0:  # one of the two is nearly 0
        fixed, row = (0.0, fmean(seconds) / fmean(running)) if fixed < 0 else (fmean(seconds), 0.0)
    return StepTime(fixed, row, median(tokens))


def _rows(line: RequestLine) -> tuple[float, float, float]:
    """Return the interval in which a line's sequences decoded, and the mean number that ran: paused sequences wait for
    a block."""
    first, end = line.at_s + (line.ttft_s or 0.0), line.at_s + line.e2e_s
    return first, end, max(0.0, line.n - line.paused_s / (end - first)) if end > first else 0.0


def _prompt(line: RequestLine) -> tuple[float, float, float]:
    """Return the interval of a line's prefill, and its tokens per second.

    The log has the end of the step in which the prefill began, so a prefill of one step has an interval of length 0."""
    start, first = line.at_s + (line.queue_s or 0.0), line.at_s + (line.ttft_s or 0.0)
    start = min(start, first - ROUNDING_S)
    return start, first, (line.prompt_len - line.cached_tokens) / (first - start)
