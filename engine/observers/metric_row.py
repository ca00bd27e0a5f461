"""A row of the tables of metrics: name, kind, help, and the measured value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from quire.engine.common import histograms
from quire.engine.observers.measurements import Measurements

Kind = Literal["gauge", "counter", "histogram", "info"]
# Returns a number or a Tally; with a label a dict from label value to them; for kind "info" a dict of all labels.
Read = Callable[[Measurements], Any]


class Row(NamedTuple):
    """One metric."""

    name: str  # without the suffix _total of counters
    kind: Kind
    help: str
    read: Read
    label: str = ""  # further label, in addition to engine and model_name
    bounds: tuple[float, ...] = ()  # histograms: the exported bucket bounds, a subset of the Tally's bounds

    def family(self, measured: Measurements) -> Metric:
        """Return the metric with its current values."""
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


def gauge(name: str, text: str, read: Read, label: str = "") -> Row:
    return Row(name, "gauge", text, read, label)


def counter(name: str, text: str, read: Read, label: str = "") -> Row:
    return Row(name, "counter", text, read, label)


def histogram(name: str, text: str, read: Read, label: str = "", *, bounds: tuple[float, ...] = ()) -> Row:
    return Row(name, "histogram", text, read, label, bounds)


def info(name: str, text: str, read: Read) -> Row:
    return Row(name, "info", text, read)
