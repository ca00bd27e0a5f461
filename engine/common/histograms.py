"""Histograms cheap enough for a hot path, vLLM's bucket bounds, and build info, for gateway and engine metrics.

Metric names are in `service/common/metrics.py` and `engine/observers/metrics.py`.
"""

from __future__ import annotations

import importlib.metadata
import platform
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

# Bucket bounds of the same histograms in vLLM, seconds, so that vLLM's dashboards can show Quire's histograms.
TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
# Quire's own bounds, seconds: a decode step on a GPU may take 1 ms, which is below vLLM's first bound.
STEP_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
FINE_ITL_S = (0.001, 0.0025, 0.005, *ITL_S)
FINE_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *REQUEST_S)
ROUND_TRIP_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
STALL_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
RETRY_S = (1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0)


class Tally:
    """A histogram as plain counts.  An observation takes 0.3 us; add() takes many equal observations at once.

    One thread adds, any thread may read.  A reader may see an observation in the counts before it is in the sum.
    """

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: ascending.  A value equal to a bound counts in this bound's bucket, as with Prometheus' `le`."""
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def merge(self, other: Tally) -> None:
        """Add the observations of another histogram with the same bounds."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self.sum += other.sum

    def buckets(self, bounds: Sequence[float] = ()) -> list[tuple[str, float]]:
        """Return (le, cumulative count) for each bound and for +Inf.

        `bounds`: a subset of the histogram's bounds to return; empty: all."""
        below = list(accumulate(self._counts))
        chosen = [(bound, count) for bound, count in zip(self.bounds, below, strict=False)]
        if bounds:
            wanted = set(bounds)
            chosen = [(bound, count) for bound, count in chosen if bound in wanted]
        return [*((str(bound), float(count)) for bound, count in chosen), ("+Inf", float(below[-1]))]


def histogram(
    name: str,
    text: str,
    labels: Sequence[str],
    tallies: Iterable[tuple[Sequence[str], Tally]],
    bounds: Sequence[float] = (),
) -> Metric:
    """Return a Prometheus histogram with one series per (label values, tally)."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, tally in tallies:
        family.add_metric(values, tally.buckets(bounds), tally.sum)
    return family


def build() -> dict[str, str]:
    """Return the versions of Quire and of Python, as labels."""
    try:
        version = importlib.metadata.version("quire")
    except importlib.metadata.PackageNotFoundError:  # a source checkout that is not installed
        version = "0+checkout"
    return {"version": version, "python": platform.python_version()}
