"""The gateway's metrics: one table.  No other module of `service` writes a metric's name.

    OUTPUT_TOKENS = _counter(name, help, labels)     declares a metric and adds it to TABLE
    telemetry.count(OUTPUT_TOKENS, 17)               records a value, called in the module that knows it

A gauge of the fleet also declares the function that reads it: `of_fleet` or `of_engine`.  So a new metric is one line
here, and one line in the module that records it.  Label values come from closed or bounded sets (tenants,
fingerprints).

Only the number of engines is unbounded: 1,000 engines have 15,000 series. So a snapshot of the fleet is only stored. A
thread makes its series while it writes the page, in 140 to 200 ms for 1,000 engines.

If gateways share a port, a scrape of it reaches any one of them.  So every series has a `gateway` label, and each
gateway also serves its page on a port of its own (`--metrics-port`), which is the port to scrape.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from quire.engine.common import histograms, log_queue
from quire.engine.common.histograms import Tally
from quire.engine.common.tracing import Tracing
from quire.engine.wire.clock import steady_ms
from quire.engine.wire.messages import EngineLoad
from quire.engine.wire.records import Fleet

TENANTS = 20  # maximum tenants with series of their own (five each); a graph of more tenants is unreadable
FINGERPRINTS = 8  # maximum model fingerprints (deploys) with latency series of their own
OTHER = "other"  # label of all tenants beyond the first TENANTS
NAMELESS = "default"  # label for requests of keys that belong to no tenant

Labels = tuple[str, ...]
# Returns a gauge's value in an engine's report; for a gauge with one more label, its values by that label.
OfEngine = Callable[[EngineLoad], float | dict[str, float]]


class Vllm(NamedTuple):
    """Name and help of a metric in vLLM (`--vllm-metrics`)."""

    names: tuple[str, ...]  # vLLM's present name, then names of earlier releases that dashboards still use
    text: str
    bounds: tuple[float, ...] = ()  # bounds of the buckets, a subset of the histogram's; empty: all


class Metric:
    """One row of the table."""

    __slots__ = ("bounds", "kind", "labels", "name", "of_engine", "of_fleet", "series", "text", "vllm")

    def __init__(
        self,
        kind: type[Counter] | type[Gauge] | type[Tally],
        name: str,
        text: str,
        labels: Labels,
        *,
        bounds: tuple[float, ...] = (),
        series: tuple[Labels, ...] = (),
        vllm: Vllm | None = None,
        of_fleet: Callable[[Fleet], float] | None = None,
        of_engine: OfEngine | None = None,
    ) -> None:
        """`name`: "" for a histogram that is shown only under vLLM's name.  `labels`: labels after `gateway`.

        `bounds`: bounds of a histogram's buckets.  `series`: label values that exist before anything is recorded."""
        self.kind, self.name, self.text, self.labels = kind, name, text, labels
        self.bounds, self.series, self.vllm = bounds, series if labels else ((),), vllm
        self.of_fleet, self.of_engine = of_fleet, of_engine


TABLE: list[Metric] = []


def _row(metric: Metric) -> Metric:
    TABLE.append(metric)
    return metric


def _counter(name: str, text: str, *labels: str, series: tuple[Labels, ...] = (), vllm: Vllm | None = None) -> Metric:
    return _row(Metric(Counter, name, text, labels, series=series, vllm=vllm))


def _gauge(name: str, text: str, *labels: str, of_fleet: Callable[[Fleet], float] | None = None) -> Metric:
    return _row(Metric(Gauge, name, text, labels, of_fleet=of_fleet))


def _engine_gauge(name: str, text: str, of_engine: OfEngine, *labels: str) -> Metric:
    return _row(Metric(Gauge, name, text, ("engine", "model_name", *labels), of_engine=of_engine))


def _histogram(
    name: str,
    text: str,
    bounds: tuple[float, ...],
    *labels: str,
    series: tuple[Labels, ...] = (),
    vllm: Vllm | None = None,
) -> Metric:
    return _row(Metric(Tally, name, text, labels, bounds=bounds, series=series, vllm=vllm))


# Requests
GATEWAY_INFO = _gauge("quire_gateway_info", "Version of Quire and of Python; always 1.", "version", "python")
REQUESTS = _counter("quire_requests", "Requests answered, by endpoint and HTTP status.", "endpoint", "status")
REFUSALS = _counter("quire_refusals", "Requests refused or failed, by error code.", "code")
UNKNOWN_FIELDS = _counter(
    "quire_unknown_fields", "Fields of accepted requests that have no effect, by endpoint.", "endpoint"
)
DECISIONS = _counter(
    "quire_admission_decisions",
    "Requests admitted to the queue, by lane, or refused for lack of capacity, by error code.",
    "decision",
    "reason",
    vllm=Vllm(("vllm:admission_rejections",), "Requests refused for lack of capacity, by error code."),
)
STARTS = _counter(
    "quire_request_starts",
    "Requests by the lane they joined and when their first token arrived: in_time (within --ttft-target-s of their "
    "arrival), late or never.",
    "lane",
    "start",
)
GOODPUT = _counter(
    "quire_goodput_requests",
    "Requests by whether they met their targets: met (answered, the first token within --ttft-target-s of arrival and "
    "the mean time between tokens within --itl-target-s) or missed (slower, failed, or refused for lack of capacity).  "
    "Requests whose client left, invalid ones and those over a quota are in neither.",
    "targets",
    series=(("met",), ("missed",)),
)
PROMPT_TOKENS = _counter("quire_prompt_tokens", "Prompt tokens of admitted requests.")
OUTPUT_TOKENS = _counter("quire_output_tokens", "Output tokens sent to clients.")
DELIVERED_TOKENS = _counter(
    "quire_delivered_tokens",
    "Output tokens sent to clients; a position counts once, however often the answer was resumed.",
)
RESUMED_ANSWERS = _counter("quire_comebacks", "Answers that a client resumed.")
BACKLOG = _gauge("quire_backlog_bytes", "Bytes of tokens that wait in memory for slow readers.")
TOKENS_LOST = _counter("quire_tokens_lost", "Tokens that never arrived; each fails its request.")
TOKENS_REPEATED = _counter(
    "quire_tokens_repeated", "Tokens that arrived twice and were dropped, after an engine or Redis died."
)
OPEN_REQUESTS = _gauge("quire_open_requests", "Prompts that are queued or being answered.")

# Tenants
TENANT_TOKENS = _counter("quire_tenant_tokens", "Prompt and output tokens, by tenant.", "tenant", "kind")
TENANT_REQUESTS = _counter("quire_tenant_requests", "Requests, by tenant and outcome.", "tenant", "outcome")
QUOTA_REFUSALS = _counter(
    "quire_quota_refusals", "Requests refused because a quota of their tenant was used up.", "tenant", "quota"
)
TENANT_QUEUED = _gauge("quire_tenant_queued_tokens", "Prompt tokens in the shared queue, by tenant.", "tenant")
TENANT_SERVICE = _gauge(
    "quire_tenant_service",
    "Virtual tokens served to each tenant with queued requests; the tenant with the fewest is next.",
    "tenant",
)

# The shared queue
NO_ENGINE = "no_engine"  # label in place of a lane: requests that wait for the first engine
QUEUE_REQUESTS = _gauge(
    "quire_queue_requests",
    "Requests in the shared queue, by lane; no_engine: of this gateway, waiting until an engine takes requests.",
    "lane",
)
QUEUE_TOKENS = _gauge("quire_queue_tokens", "Prompt tokens in the shared queue, by lane.", "lane")
QUEUE_OLDEST = _gauge(
    "quire_queue_oldest_seconds",
    "How long the oldest request of each lane, and of those that wait for an engine (no_engine), has waited, seconds.",
    "lane",
)
_gauge(
    "quire_queue_room_tokens",
    "Prompt tokens that the engines could claim immediately.",
    of_fleet=lambda fleet: fleet.free_tokens,
)
QUARANTINED = _gauge(
    "quire_quarantined_requests",
    "Requests in quarantine, because they killed their engines.",
    of_fleet=lambda fleet: fleet.quarantined,
)
CLOCK_SKEW = _gauge("quire_clock_skew_seconds", "How far this machine's clock is ahead of Redis' clock, seconds.")

# Metrics of engines, read from their reports in Redis.  The engines' own metrics pages show more.
_gauge("quire_engines", "Engines with a live lease.", of_fleet=lambda fleet: len(fleet.engines))
LEASES_LOST = _counter("quire_engine_leases_lost", "Engines whose lease lapsed while they were not draining.")
_engine_gauge(
    "quire_engine_info",
    "Engines with a live lease; always 1.  A new fingerprint is a deploy: other weights, dtype or configuration.",
    lambda load: {load.fingerprint[:16]: 1},
    "fingerprint",
)
ENGINE_AGE = _engine_gauge(
    "quire_engine_age_seconds",
    "Seconds since the engine's last sync.",
    lambda load: max(0.0, steady_ms() - load.time_ms) / 1000,
)
ENGINE_BLOCKS = _engine_gauge("quire_engine_kv_blocks", "KV blocks in the pool.", lambda load: load.total_blocks)
ENGINE_FREE = _engine_gauge(
    "quire_engine_kv_blocks_free",
    "KV blocks available to a new request: free ones, and cached ones that no sequence uses.",
    lambda load: load.free_blocks,
)
ENGINE_CACHED = _engine_gauge(
    "quire_engine_kv_blocks_cached",
    "Cached KV blocks with a reusable prefix that no sequence uses; the free ones include them.",
    lambda load: load.cached_blocks,
)
_engine_gauge(
    "quire_engine_kv_static_blocks",
    "KV blocks that static allocation would hold for the sequences in the batch.",
    lambda load: load.static_blocks,
)
_engine_gauge(
    "quire_engine_kv_slots_filled",
    "Token slots with a token, of those in KV blocks that sequences hold, 0 to 1; 0 if none is held.",
    lambda load: load.slots_filled,
)
ENGINE_RUNNING = _engine_gauge("quire_engine_requests_running", "Sequences in the batch.", lambda load: load.running)
ENGINE_WAITING = _engine_gauge(
    "quire_engine_requests_waiting", "Sequences that have not started or were preempted.", lambda load: load.waiting
)
ENGINE_GENERATED = _engine_gauge(
    "quire_engine_generated_tokens", "Output tokens since the engine started.", lambda load: load.generated_tokens
)
ENGINE_PROMPT = _engine_gauge(
    "quire_engine_prefix_query_tokens",
    "Prompt tokens of requests started since the engine started.",
    lambda load: load.prompt_tokens,
)
ENGINE_HITS = _engine_gauge(
    "quire_engine_prefix_hit_tokens",
    "Prompt tokens of these requests that were found in the prefix cache.",
    lambda load: load.cached_prompt_tokens,
)
ENGINE_PREEMPTIONS = _engine_gauge(
    "quire_engine_preemptions", "Preemptions since the engine started.", lambda load: load.preemptions
)
_engine_gauge(
    "quire_engine_recomputed_tokens",
    "Tokens computed again after a preemption, since the engine started.",
    lambda load: load.recomputed_tokens,
)
ENGINE_JUMPED = _engine_gauge(
    "quire_engine_jumped_tokens",
    "Output tokens forced by a grammar, without a decode step of their own, since the engine started.",
    lambda load: load.jumped_tokens,
)
ENGINE_DRAFTED = _engine_gauge(
    "quire_engine_drafted_tokens",
    "Draft tokens of speculative decoding computed since the engine started, by source.",
    lambda load: {source: computed for source, (computed, _) in load.drafts.items()},
    "source",
)
ENGINE_ACCEPTED = _engine_gauge(
    "quire_engine_accepted_drafts",
    "Draft tokens accepted since the engine started, by source; each saves a step.",
    lambda load: {source: accepted for source, (_, accepted) in load.drafts.items()},
    "source",
)
ENGINE_REFUSED_DRAFTS = _engine_gauge(
    "quire_engine_refused_drafts",
    "Draft tokens found since the engine started and not computed, because they would not have saved time.",
    lambda load: load.refused_drafts,
)

# Latencies and sizes
TIME_TO_FIRST_TOKEN = _histogram(
    "quire_time_to_first_token_seconds",
    "Seconds from a request's arrival to its first token here, by the model's fingerprint at that time.",
    histograms.TTFT_S,
    "fingerprint",
    vllm=Vllm(("vllm:time_to_first_token_seconds",), "Seconds from arrival to the first token."),
)
INTER_TOKEN = _histogram(
    "quire_inter_token_latency_seconds",
    "Seconds between two tokens of a choice.",
    histograms.FINE_ITL_S,
    vllm=Vllm(
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "Seconds between two tokens.",
        histograms.ITL_S,
    ),
)
PER_TOKEN = _histogram(
    "",
    "",
    histograms.FINE_ITL_S,
    vllm=Vllm(
        ("vllm:request_time_per_output_token_seconds",), "Mean seconds per output token of a request.", histograms.ITL_S
    ),
)
REQUEST_LATENCY = _histogram(
    "quire_request_latency_seconds",
    "Seconds from a request's arrival to its last byte.",
    histograms.FINE_REQUEST_S,
    vllm=Vllm(("vllm:e2e_request_latency_seconds",), "Seconds from arrival to the last byte.", histograms.REQUEST_S),
)
RETRY_AFTER = _histogram("quire_retry_after_seconds", "Retry-After of refused requests, seconds.", histograms.RETRY_S)
REQUEST_PROMPT = _histogram("quire_request_prompt_tokens", "Prompt tokens of a request.", histograms.TOKENS)
REQUEST_OUTPUT = _histogram("quire_request_output_tokens", "Output tokens of a request.", histograms.TOKENS)
CHOICES = _histogram("", "", histograms.TOKENS, vllm=Vllm(("vllm:request_params_n",), "Choices of a request."))
MAX_TOKENS = _histogram(
    "", "", histograms.TOKENS, vllm=Vllm(("vllm:request_params_max_tokens",), "Output tokens that a request allows.")
)
LOOP_STALL = _histogram(
    "quire_gateway_loop_stall_seconds",
    "Delay of a timer of the event loop, seconds; no stream gets tokens meanwhile.  Measured every 10 ms.",
    histograms.STALL_S,
)
LOOP_BUSY = _histogram(
    "quire_gateway_loop_busy_seconds",
    "CPU time of this process within each delay, seconds; other processes took the rest.",
    histograms.STALL_S,
)
LOG_LINES_DROPPED = _counter(
    "quire_gateway_log_lines_dropped",
    "Lines of the log that were dropped: the reader of stderr was too slow, had stopped, or its disk was full.",
)
REDIS_SECONDS = _histogram(
    "quire_redis_seconds",
    "Seconds of a round trip to Redis: to submit a request, or to read fleet and queue.",
    histograms.ROUND_TRIP_S,
    "operation",
    series=(("submit",), ("fleet",)),
)


class Telemetry(Collector):
    """The metrics of one gateway, in a separate registry, since tests run several gateways in one process."""

    def __init__(
        self,
        gateway: str,
        *,
        model: str = "",
        vllm: bool = False,
        tracing: Tracing | None = None,
        trace_prompts: bool = False,
        target_s: float = 2.0,
        itl_target_s: float = 0.2,
    ) -> None:
        """`vllm`: repeat metrics under vLLM's names.  `trace_prompts`: put prompts and answers into spans.

        `target_s`: target for the time to first token.  `itl_target_s`: target for the mean time between tokens."""
        self.tracing = tracing or Tracing()
        self.trace_prompts = trace_prompts
        self.model, self._target_s, self._itl_target_s = model, target_s, itl_target_s
        self._gateway, self._vllm = gateway, vllm
        self._registry = CollectorRegistry()
        self._objects: dict[Metric, Counter | Gauge] = {}
        self._tallies: dict[Metric, dict[Labels, Tally]] = {}
        self._tenants: set[str] = set()  # tenants with series of their own
        # Engines in the last snapshot, by name.  `time_ms`: time of the last sync, on this process's clock.
        self._engines: dict[str, EngineLoad] = {}
        self._fingerprint = ""  # fingerprint of the model in the last snapshot
        self._dropped_lines = 0  # number of dropped log lines at the last scrape
        self._writing = threading.Lock()
        for metric in TABLE:
            self._create(metric)
        self.set(GATEWAY_INFO, 1, *histograms.build().values())
        self._registry.register(self)

    def _create(self, metric: Metric) -> None:
        if metric.kind is Tally:
            self._tallies[metric] = {labels: Tally(metric.bounds) for labels in metric.series}
            return
        if metric.of_engine is not None:  # its series are made from the last snapshot
            return
        kind = Counter if metric.kind is Counter else Gauge
        made = self._objects[metric] = kind(
            metric.name, metric.text, ("gateway", *metric.labels), registry=self._registry
        )
        for labels in metric.series:
            made.labels(self._gateway, *labels)

    # -- recording

    def count(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        """Add to a counter."""
        self._objects[metric].labels(self._gateway, *labels).inc(amount)

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge."""
        gauge = self._objects[metric]
        assert isinstance(gauge, Gauge)
        gauge.labels(self._gateway, *labels).set(value)

    def observe(self, metric: Metric, value: float, *labels: str, times: int = 1) -> None:
        """Add `times` equal observations to a histogram."""
        self._tallies[metric][labels].add(value, times)

    def record_stall(self, late_s: float, busy_s: float) -> None:
        """Record one delay of the event loop: see StallWatch."""
        self.observe(LOOP_STALL, late_s)
        self.observe(LOOP_BUSY, busy_s)

    def observe_first_token(self, seconds: float, lane: str = "on_time") -> None:
        """Record a time to first token under the model's current fingerprint; the last FINGERPRINTS are kept.

        `lane`: lane of the queue that the request joined."""
        self.count(STARTS, 1, lane, "in_time" if seconds <= self._target_s else "late")
        tallies = self._tallies[TIME_TO_FIRST_TOKEN]
        if (self._fingerprint,) not in tallies:
            if len(tallies) == FINGERPRINTS:
                del tallies[next(iter(tallies))]  # the oldest deploy
            tallies[self._fingerprint,] = Tally(TIME_TO_FIRST_TOKEN.bounds)
        self.observe(TIME_TO_FIRST_TOKEN, seconds, self._fingerprint)

    def count_goodput(self, first_s: float, token_s: float | None, *, answered: bool) -> None:
        """Count an ended request, by whether it met both latency targets.

        `first_s`: seconds from its arrival to the first token, or to the end of an answer without tokens.  `token_s`:
        mean seconds between tokens; None: fewer than two tokens.  `answered`: the answer is complete, without error."""
        met = answered and first_s <= self._target_s and (token_s or 0.0) <= self._itl_target_s
        self.count(GOODPUT, 1, "met" if met else "missed")

    def tenant_label(self, tenant: str) -> str:
        """Return the label of a tenant: its name for the first TENANTS tenants, OTHER for later ones.

        A tenant keeps its label for good, since a counter whose label changed would run backwards."""
        name = tenant or NAMELESS
        if name not in self._tenants:
            if len(self._tenants) >= TENANTS:
                return OTHER
            self._tenants.add(name)
        return name

    def record_fleet(self, fleet: Fleet) -> None:
        """Set the gauges of the queue, and store the engines' reports.  Takes 2 ms per 1,000 engines."""
        seen = {load.engine: load for load in fleet.engines}
        lost = sum(engine not in seen and not load.draining for engine, load in self._engines.items())
        if lost:
            self.count(LEASES_LOST, lost)
        for engine, exchanged_ms in fleet.exchanged_ms.items():
            if engine in seen:
                seen[engine] = msgspec.structs.replace(seen[engine], time_ms=exchanged_ms)
        for metric in TABLE:
            if metric.of_fleet is not None:
                self.set(metric, metric.of_fleet(fleet))
        if fleet.engines:
            self._fingerprint = fleet.engines[-1].fingerprint[:16]
        self._engines = seen
        for lane, queue in (("on_time", fleet.on_time), ("late", fleet.late)):
            self.set(QUEUE_REQUESTS, queue.requests, lane)
            self.set(QUEUE_TOKENS, queue.tokens, lane)
            self.set(QUEUE_OLDEST, queue.oldest_ms / 1000, lane)
        self._record_tenant_queues(fleet)

    def record_engine_wait(self, requests: int, oldest_s: float) -> None:
        """Set the gauges of requests at this gateway that wait because no engine takes requests."""
        self.set(QUEUE_REQUESTS, requests, NO_ENGINE)
        self.set(QUEUE_OLDEST, oldest_s, NO_ENGINE)

    def _record_tenant_queues(self, fleet: Fleet) -> None:
        """Set the gauges of tenants with queued requests.  Other tenants have no series."""
        for metric in (TENANT_QUEUED, TENANT_SERVICE):
            self._objects[metric].clear()
        longest = sorted(fleet.tenants.items(), key=lambda item: item[1].queued_tokens, reverse=True)
        for name, queue in longest[:TENANTS]:
            self.set(TENANT_QUEUED, queue.queued_tokens, name or NAMELESS)
            self.set(TENANT_SERVICE, queue.counter, name or NAMELESS)
        rest = sum(queue.queued_tokens for _, queue in longest[TENANTS:]) + sum(fleet.unnamed_tokens())
        if rest:
            self.set(TENANT_QUEUED, rest, OTHER)

    # -- the page

    async def page(self) -> bytes:
        """Return the page in Prometheus' text format 0.0.4, written on a thread."""
        return await asyncio.to_thread(self.expose)

    def expose(self) -> bytes:
        """Return the page, written on the calling thread.  Pages are written one after the other."""
        with self._writing:
            dropped = log_queue.dropped_lines()
            self.count(LOG_LINES_DROPPED, dropped - self._dropped_lines)
            self._dropped_lines = dropped
            return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        """Yield the engines' gauges, the histograms, and with `vllm` also the metrics under vLLM's names.

        Any thread may call it, since it copies each table that the event loop changes."""
        yield from self._engine_gauges()
        if self._vllm:
            yield self._rejections()
        for metric, live in self._tallies.items():
            tallies = dict(live)
            if metric.name:
                series = [((self._gateway, *labels), tally) for labels, tally in tallies.items()]
                yield histograms.histogram(metric.name, metric.text, ("gateway", *metric.labels), series)
            if self._vllm and metric.vllm is not None:
                whole = Tally(metric.bounds)
                for tally in tallies.values():
                    whole.merge(tally)
                labels, values = ("model_name", "engine"), (self.model, self._gateway)
                names, text, bounds = metric.vllm
                for name in names:
                    yield histograms.histogram(name, text, labels, [(values, whole)], bounds)

    def _engine_gauges(self) -> Iterator[Family]:
        engines = self._engines.values()
        for metric in TABLE:
            if metric.of_engine is not None:
                family = GaugeMetricFamily(metric.name, metric.text, labels=("gateway", *metric.labels))
                for load in engines:
                    for labels, value in _series(metric.of_engine, load):
                        family.add_metric((self._gateway, *labels), value)
                yield family

    def _rejections(self) -> Family:
        """Return the refusals for lack of capacity under vLLM's name."""
        assert DECISIONS.vllm is not None
        (name,), text, _ = DECISIONS.vllm
        family = CounterMetricFamily(name, text, labels=("model_name", "engine", "reason"))
        (decisions,) = self._objects[DECISIONS].collect()
        for sample in decisions.samples:
            if sample.name.endswith("_total") and sample.labels["decision"] == "refused":
                family.add_metric((self.model, self._gateway, sample.labels["reason"]), sample.value)
        return family


def _series(of_engine: OfEngine, load: EngineLoad) -> list[tuple[Labels, float]]:
    """Return (labels after `gateway`, value) of each series of an engine's gauge."""
    value = of_engine(load)
    if isinstance(value, dict):
        return [((load.engine, load.model, last), one) for last, one in value.items()]
    return [((load.engine, load.model), value)]
