"""The values that `quire top` shows, computed from two samples of the gateways' metrics.  Pure: no clock, no network.

    page --read--> Reading of one gateway --merge--> Reading of all --figures(now, before)--> Figures

Every gateway reports the same gauges of engines and lanes, so the maximum of all gateways is shown.  Counters and
histograms are each gateway's own, so their growth since the earlier reading is summed.  A gateway that is not in the
earlier reading adds nothing, because the period of its counts is not known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from quire.service.common import metrics
from quire.service.common.metrics import Metric
from quire.service.terminal.server import printable

Labels = tuple[tuple[str, str], ...]  # (name, value) pairs, sorted


class NotQuire(ValueError):
    """The page is not from a Quire gateway; the message says what it is instead."""


class Reading(NamedTuple):
    """The values on the metrics pages of one or more gateways at one moment."""

    at_s: float
    samples: Mapping[str, Mapping[Labels, float]]  # values by the sample's name, then by its labels

    def of(self, metric: Metric, end: str = "") -> Mapping[Labels, float]:
        """Return the series of a metric.  `end`: suffix of the sample's name, such as _total."""
        return self.samples.get(metric.name + end, {})

    def gateways(self) -> set[str]:
        """Return the names of the gateways in this reading."""
        return {dict(labels)["gateway"] for labels in self.of(metrics.GATEWAY_INFO)}


def read(page: str, at_s: float) -> Reading:
    """Parse a page in Prometheus' text format.  Raises NotQuire."""
    samples: dict[str, dict[Labels, float]] = defaultdict(dict)
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                samples[sample.name][tuple(sorted(sample.labels.items()))] = float(sample.value)
    except (ValueError, KeyError, IndexError):  # the parser has no exception of its own
        raise NotQuire("this is no page of metrics of a Quire gateway") from None
    found = Reading(at_s, samples)
    if not found.of(metrics.GATEWAY_INFO):
        if any(name.startswith("quire_") for name in samples):
            raise NotQuire("this is the page of an engine; give a gateway's page, which shows all engines")
        raise NotQuire("this page has no metrics of a Quire gateway")
    return found


def merge(readings: Sequence[Reading]) -> Reading:
    """Return the readings of several gateways as one.  Their series differ in the label `gateway`."""
    samples: dict[str, dict[Labels, float]] = defaultdict(dict)
    for one in readings:
        for name, series in one.samples.items():
            samples[name].update(series)
    return Reading(readings[-1].at_s, samples)


class Latency(NamedTuple):
    """A percentile of a histogram."""

    seconds: float
    beyond: bool  # the value is in the last bucket, which has no upper bound: it is at least `seconds`


def quantile(buckets: Mapping[float, float], q: float) -> Latency | None:
    """Return the `q` quantile of a histogram, interpolated linearly within its bucket as Prometheus does.

    `buckets`: upper bound (the last is +inf) -> number of observations up to it.  Returns None without observations."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if not total > 0:
        return None
    rank, below, low = q * total, 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank and buckets[bound] > below:
            if bound == math.inf:
                break
            inside = low + (bound - low) * (rank - below) / (buckets[bound] - below)
            return Latency(min(inside, bound), False)  # `inside` may exceed the bound by a rounding error
        below, low = buckets[bound], bound if bound < math.inf else low
    return Latency(low, True)


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of a latency; None: nothing was observed."""

    p50: Latency | None = None
    p90: Latency | None = None
    p99: Latency | None = None
    recent: bool = True  # False: nothing was observed in the window, so these count from the gateways' start


class EngineRow(msgspec.Struct, frozen=True):
    """One engine."""

    name: str
    model: str
    running: float
    waiting: float
    blocks: float
    used: float  # fraction of the pool that sequences hold
    cached: float  # fraction of the pool that only the prefix cache holds
    tokens_per_s: float | None
    tokens_per_step: float | None  # mean output tokens of one sequence per step that computed it
    hit_rate: float | None
    preemptions: float  # preemptions since the engine started
    silent_s: float  # seconds since the engine's last sync


class TenantRow(msgspec.Struct, frozen=True):
    """One tenant."""

    name: str
    queued_tokens: float
    service: float | None  # virtual tokens; None while nothing of the tenant is queued
    requests_per_s: float | None
    tokens_per_s: float | None  # prompt and output tokens of ended requests, per second
    refused: float  # requests refused since the gateways started, for lack of capacity or quota


class Lane(msgspec.Struct, frozen=True):
    """One lane of the queue."""

    requests: float = 0.0
    tokens: float = 0.0
    oldest_s: float = 0.0


class Drafts(msgspec.Struct, frozen=True):
    """Drafts of all engines in the window; without an earlier reading, since the engines started."""

    sources: dict[str, tuple[float, float]]  # source -> draft tokens (computed, accepted)
    refused: float  # draft tokens that engines found but did not verify, since that would not have saved time


class Figures(msgspec.Struct, frozen=True):
    """All values of one screen.  Without an earlier reading, rates are None, and so are shares without any events."""

    gateways: int
    engines: list[EngineRow]
    tenants: list[TenantRow]
    lanes: dict[str, Lane]
    open_requests: float
    seconds: float | None  # seconds between the two readings
    tokens_per_s: float | None
    requests_per_s: float | None
    tokens_per_step: float | None  # mean output tokens of one sequence per step that computed it
    drafts: Drafts | None  # None: no engine uses speculative decoding
    hit_rate: float | None
    preemptions: float  # preemptions since the engines started
    preempted: float | None  # preemptions in the window
    first_token: Percentiles
    inter_token: Percentiles
    refusals: dict[str, float]  # error code -> refusals in the window; without an earlier reading, since the start
    lost_tokens: float
    quarantined: float


class _Window:
    """The growth of counters between two readings."""

    def __init__(self, now: Reading, before: Reading | None) -> None:
        self._now, self._before = now, before
        self._known = before.gateways() if before is not None else set()
        elapsed = now.at_s - before.at_s if before is not None else 0.0
        self.seconds = elapsed if elapsed > 0 and self._known & now.gateways() else None

    def growth(self, metric: Metric, end: str = "_total") -> dict[Labels, float]:
        """Return the growth of each series; a counter that fell was reset and counts from 0.

        Omits gateways that the earlier reading lacks."""
        old = self._before.of(metric, end) if self._before is not None else {}
        found = {}
        for labels, value in self._now.of(metric, end).items():
            if dict(labels).get("gateway") in self._known:
                before = old.get(labels, 0.0)
                found[labels] = value - before if value >= before else value
        return found

    def rate(self, growth: Iterable[float]) -> float | None:
        return None if self.seconds is None else sum(growth) / self.seconds

    def percentiles(self, metric: Metric) -> Percentiles:
        """Return the percentiles of the observations in the window; of all since the start if the window has none."""
        found = _percentiles(self.growth(metric, "_bucket"))
        if found.p50 is not None:
            return found
        return msgspec.structs.replace(_percentiles(self._now.of(metric, "_bucket")), recent=False)


def _percentiles(series: Mapping[Labels, float]) -> Percentiles:
    buckets: dict[float, float] = defaultdict(float)
    for labels, count in series.items():
        buckets[float(dict(labels)["le"])] += count
    return Percentiles(quantile(buckets, 0.5), quantile(buckets, 0.9), quantile(buckets, 0.99))


def figures(now: Reading, before: Reading | None) -> Figures:
    """Return the values for a screen at `now`, with rates since `before`."""
    window = _Window(now, before)
    engines = _engines(now, before, window)
    refusals = window.growth(metrics.REFUSALS) if window.seconds else now.of(metrics.REFUSALS, "_total")
    counts: dict[str, float] = defaultdict(float)
    for labels, count in refusals.items():
        if count:
            counts[printable(dict(labels)["code"])] += count
    grown = {name: _growths(now, before, metric) for name, metric in PER_ENGINE.items()}
    queried = sum(grown["queried"].values())
    answered = [
        count for labels, count in window.growth(metrics.REQUESTS).items() if "/v1/" in dict(labels)["endpoint"]
    ]
    return Figures(
        gateways=len(now.gateways()),
        engines=engines,
        tenants=_tenants(now, window),
        lanes=_lanes(now),
        open_requests=sum(now.of(metrics.OPEN_REQUESTS).values()),
        seconds=window.seconds,
        tokens_per_s=window.rate(grown["tokens"].values()),
        requests_per_s=window.rate(answered),
        tokens_per_step=_per_step(*(sum(grown[name].values()) for name in ("tokens", "jumped", "accepted"))),
        drafts=_drafts(now, before),
        hit_rate=sum(grown["hits"].values()) / queried if queried else None,
        preemptions=sum(row.preemptions for row in engines),
        preempted=sum(grown["preemptions"].values()) if window.seconds else None,
        first_token=window.percentiles(metrics.TIME_TO_FIRST_TOKEN),
        inter_token=window.percentiles(metrics.INTER_TOKEN),
        refusals=dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
        lost_tokens=sum(now.of(metrics.TOKENS_LOST, "_total").values()),
        quarantined=max(now.of(metrics.QUARANTINED).values(), default=0.0),
    )


PER_ENGINE = {
    "tokens": metrics.ENGINE_GENERATED,
    "queried": metrics.ENGINE_PROMPT,
    "hits": metrics.ENGINE_HITS,
    "preemptions": metrics.ENGINE_PREEMPTIONS,
    "jumped": metrics.ENGINE_JUMPED,
    "accepted": metrics.ENGINE_ACCEPTED,
}


def _by(reading: Reading, metric: Metric, label: str) -> dict[str, float]:
    """Return, for each value of `label`, the maximum over the gateways: they report one state, but not at once."""
    found: dict[str, float] = {}
    for labels, value in reading.of(metric).items():
        name = dict(labels)[label]
        found[name] = max(value, found.get(name, value))
    return found


def _growths(now: Reading, before: Reading | None, metric: Metric) -> dict[str, float]:
    """Return engine -> growth of a counter that engines report.  Omits engines that `before` lacks."""
    found: dict[str, float] = defaultdict(float)
    for (engine, *_), growth in _series_growths(now, before, metric).items():
        found[engine] += growth
    return found


def _series_growths(now: Reading, before: Reading | None, metric: Metric) -> dict[tuple[str, ...], float]:
    """Return (engine, other labels) -> growth of each series of a counter that engines report."""
    names = ("engine", *metric.labels[2:])
    old = _by_all(before, metric, names) if before is not None else {}
    found = {}
    for labels, value in _by_all(now, metric, names).items():
        if labels in old:
            found[labels] = value - old[labels] if value >= old[labels] else value
    return found


def _by_all(reading: Reading, metric: Metric, names: Sequence[str]) -> dict[tuple[str, ...], float]:
    """Return, for each combination of values of the labels `names`, the maximum over the gateways."""
    found: dict[tuple[str, ...], float] = {}
    for labels, value in reading.of(metric).items():
        key = tuple(dict(labels)[name] for name in names)
        found[key] = max(value, found.get(key, value))
    return found


def _per_step(tokens: float, jumped: float, accepted: float) -> float | None:
    """Return the mean tokens of one sequence per step.  Jumped tokens and accepted drafts took no step of their own."""
    steps = tokens - jumped - accepted
    return tokens / steps if steps > 0 else None


def _drafts(now: Reading, before: Reading | None) -> Drafts | None:
    if not now.of(metrics.ENGINE_DRAFTED):
        return None
    counts: dict[Metric, dict[str, float]] = {}
    for metric in (metrics.ENGINE_DRAFTED, metrics.ENGINE_ACCEPTED, metrics.ENGINE_REFUSED_DRAFTS):
        names = ("engine", *metric.labels[2:])
        series = _by_all(now, metric, names) if before is None else _series_growths(now, before, metric)
        counts[metric] = defaultdict(float)
        for labels, value in series.items():
            counts[metric][labels[-1]] += value
    computed, accepted, refused = counts.values()
    return Drafts({source: (computed[source], accepted[source]) for source in computed}, sum(refused.values()))


def _engines(now: Reading, before: Reading | None, window: _Window) -> list[EngineRow]:
    models = {dict(labels)["engine"]: dict(labels)["model_name"] for labels in now.of(metrics.ENGINE_BLOCKS)}
    states = {
        name: _by(now, metric, "engine")
        for name, metric in {
            "running": metrics.ENGINE_RUNNING,
            "waiting": metrics.ENGINE_WAITING,
            "blocks": metrics.ENGINE_BLOCKS,
            "free": metrics.ENGINE_FREE,
            "cached": metrics.ENGINE_CACHED,
            "preemptions": metrics.ENGINE_PREEMPTIONS,
            "age": metrics.ENGINE_AGE,
        }.items()
    }
    grown = {name: _growths(now, before, metric) for name, metric in PER_ENGINE.items()}
    rows = []
    for engine, model in models.items():
        state = {name: values.get(engine, 0.0) for name, values in states.items()}
        blocks = max(state["blocks"], 1.0)
        tokens, queried = grown["tokens"].get(engine), grown["queried"].get(engine)
        rows.append(
            EngineRow(
                name=printable(engine),
                model=printable(model.rstrip("/").rpartition("/")[2]),
                running=state["running"],
                waiting=state["waiting"],
                blocks=state["blocks"],
                used=1 - state["free"] / blocks,
                cached=state["cached"] / blocks,
                tokens_per_s=tokens / window.seconds if tokens is not None and window.seconds else None,
                tokens_per_step=_per_step(*(grown[name].get(engine, 0.0) for name in ("tokens", "jumped", "accepted"))),
                hit_rate=grown["hits"].get(engine, 0.0) / queried if queried else None,
                preemptions=state["preemptions"],
                silent_s=state["age"],
            )
        )
    return rows


def _lanes(now: Reading) -> dict[str, Lane]:
    columns = [
        _by(now, metric, "lane") for metric in (metrics.QUEUE_REQUESTS, metrics.QUEUE_TOKENS, metrics.QUEUE_OLDEST)
    ]
    return {lane: Lane(*(column.get(lane, 0.0) for column in columns)) for lane in ("on_time", "late")}


def _tenants(now: Reading, window: _Window) -> list[TenantRow]:
    queued = _by(now, metrics.TENANT_QUEUED, "tenant")
    service = _by(now, metrics.TENANT_SERVICE, "tenant")
    requests = _summed(now.of(metrics.TENANT_REQUESTS, "_total"))
    refused = _summed(now.of(metrics.TENANT_REQUESTS, "_total"), lambda labels: labels["outcome"] == "refused")
    grown = _summed(window.growth(metrics.TENANT_REQUESTS))
    tokens = _summed(window.growth(metrics.TENANT_TOKENS))
    known = window.seconds is not None
    return [
        TenantRow(
            name=printable(name),
            queued_tokens=queued.get(name, 0.0),
            service=service.get(name),
            requests_per_s=window.rate([grown.get(name, 0.0)]) if known else None,
            tokens_per_s=window.rate([tokens.get(name, 0.0)]) if known else None,
            refused=refused.get(name, 0.0),
        )
        for name in sorted({*queued, *requests})
    ]


def _summed(
    series: Mapping[Labels, float], chosen: Callable[[dict[str, str]], bool] = lambda labels: True
) -> dict[str, float]:
    """Return tenant -> sum of those of its series whose labels `chosen` accepts."""
    found: dict[str, float] = defaultdict(float)
    for labels, value in series.items():
        if chosen(dict(labels)):
            found[dict(labels)["tenant"]] += value
    return found


# ----------------------------------------------------------------------------------------------------------- sorting

# keyboard key -> (name of the sort order, sort value of an engine, sort value of a tenant)
Sort = tuple[str, Callable[[EngineRow], Any], Callable[[TenantRow], Any]]
SORTS: dict[str, Sort] = {
    "n": ("name", lambda row: row.name, lambda row: row.name),
    "t": ("tokens/s", lambda row: row.tokens_per_s or 0.0, lambda row: row.tokens_per_s or 0.0),
    "w": ("waiting", lambda row: row.waiting, lambda row: row.queued_tokens),
    "r": ("running", lambda row: row.running, lambda row: row.requests_per_s or 0.0),
    "k": ("KV cache", lambda row: row.used, lambda row: row.service or 0.0),
    "p": ("preemptions, refusals", lambda row: row.preemptions, lambda row: row.refused),
}


def sort_rows(found: Figures, key: str, *, reverse: bool = False) -> Figures:
    """Return the values with sorted engines and tenants: names from A to Z, numbers from the largest, or reversed."""
    _, of_engine, of_tenant = SORTS[key]
    descending = (key != "n") != reverse
    by_name = sorted(found.engines, key=lambda row: row.name), sorted(found.tenants, key=lambda row: row.name)
    return msgspec.structs.replace(
        found,
        engines=sorted(by_name[0], key=of_engine, reverse=descending),
        tenants=sorted(by_name[1], key=of_tenant, reverse=descending),
    )
