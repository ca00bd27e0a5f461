"""A row of the tables of metrics: name, kind, help, and the measurement that it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from quire.engine.common import histograms
from quire.engine.observers.measurements import Measurements

Kind = Literal["gauge", "counter", "histogram", "info"]


class Row(NamedTuple):
    """One metric."""

    name: str  # a counter's has no _total
    kind: Kind
    help: str
    read: Callable[[Measurements], Any]  # a number or Tally; by value of `label` a dict of them; info: all labels
    label: str = ""  # label besides engine and model_name
    bounds: tuple[float, ...] = ()  # only of a histogram: the bounds shown, a subset of its own

    def family(self, measured: Measurements) -> Metric:
        """Return the metric with its present values."""
        value = self.read(measured)
        if self.kind == "info":
            info = GaugeMetricFamily(self.name, self.help, labels=list(value))
            info.add_metric(list(value.values()), 1.0)
            return info
        labels, values = ["engine", "model_name"], [measured.engine, measured.model]
        if self.name.startswith("vllm:"):
            labels, values = labels[::-1], values[::-1]
        labels += [self.label] if self.label else []
        series = [([*values, key], one) for key, one in value.items()] if self.label else [(values, value)]
        if self.kind == "histogram":
            return histograms.histogram(self.name, self.help, labels, series, self.bounds)
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.name, self.help, labels=labels)
        for chosen, number in series:
            family.add_metric(chosen, number)
        return family
