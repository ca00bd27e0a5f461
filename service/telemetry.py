"""The gateway's metrics: one table.  Nothing else in `service` names a metric; labels come from closed sets.

Gateways that share a port answer a scrape in turn, so every series carries a `gateway` label: no counter ever seems to
run backwards.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.wire.bus import Fleet

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_E2E = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

# engine gauges, re-exported from EngineLoad for dashboards that scrape only gateways: metric -> (field, help)
_ENGINE = {
    "quire_engine_kv_blocks": ("total_blocks", "KV blocks in the pool."),
    "quire_engine_kv_blocks_free": ("free_blocks", "KV blocks a new request can have, idle cached ones included."),
    "quire_engine_kv_blocks_cached": ("cached_blocks", "Free KV blocks that still hold a reusable prefix."),
    "quire_engine_requests_running": ("running", "Sequences in the batch."),
    "quire_engine_requests_waiting": ("waiting", "Sequences in the engine, not started or preempted."),
    "quire_engine_waiting_tokens": ("waiting_tokens", "Tokens the waiting sequences must compute."),
    "quire_engine_tokens_per_second": ("tokens_per_s", "Output tokens per second, moving average."),
    "quire_engine_blocks_drained_per_second": ("blocks_per_s", "KV blocks given back per second, moving average."),
    "quire_engine_preemptions": ("preemptions", "Preemptions since the engine started."),
    "quire_engine_prompt_tokens": ("prompt_tokens", "Prompt tokens since the engine started."),
    "quire_engine_cached_prompt_tokens": ("cached_prompt_tokens", "Prompt tokens found in the prefix cache."),
    "quire_engine_generated_tokens": ("generated_tokens", "Output tokens since the engine started."),
    "quire_engine_recomputed_tokens": ("recomputed_tokens", "Tokens computed again after a preemption."),
    "quire_engine_requests_swapped": ("swapped", "Waiting sequences whose KV blocks are in the host's memory."),
    "quire_engine_swap_preemptions": ("swap_preemptions", "Preemptions that copied KV blocks to the host's memory."),
    "quire_engine_swapped_out_bytes": ("swapped_out_bytes", "Bytes of KV blocks copied to the host's memory."),
    "quire_engine_swapped_in_bytes": ("swapped_in_bytes", "Bytes of KV blocks copied back from the host's memory."),
}


class Telemetry:
    """Metric objects of one gateway, in a registry of their own (tests run several gateways in one process)."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("gateway", *labels), registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("gateway",), buckets=buckets, registry=self._registry).labels(gateway)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, ("gateway", *labels), registry=self._registry)

        self._requests = counter("quire_requests", "Requests answered.", "endpoint", "status")
        self._refusals = counter("quire_refusals", "Requests refused or failed, by error code.", "code")
        self.prompt_tokens = counter("quire_prompt_tokens", "Prompt tokens accepted.").labels(gateway)
        self.output_tokens = counter("quire_output_tokens", "Output tokens sent to clients.").labels(gateway)
        self.open_requests = gauge("quire_open_requests", "Prompts being answered or queued.").labels(gateway)
        self.time_to_first_token = histogram(
            "quire_time_to_first_token_seconds", "From a request's arrival to its first token here.", _TTFT
        )
        self.inter_token_latency = histogram(
            "quire_inter_token_latency_seconds", "Between a request's tokens, its mean over all but the first.", _ITL
        )
        self.latency = histogram("quire_request_latency_seconds", "From a request's arrival to its last byte.", _E2E)
        self._queued = gauge("quire_queue_requests", "Requests in the shared queue.").labels(gateway)
        self._queued_tokens = gauge("quire_queue_tokens", "Prompt tokens in the shared queue.").labels(gateway)
        self._engine = {field: gauge(name, text, "engine", "model_name") for name, (field, text) in _ENGINE.items()}
        self._engines: set[tuple[str, str]] = set()

    def record_request(self, endpoint: str, status: int) -> None:
        self._requests.labels(self._gateway, endpoint, str(status)).inc()

    def record_refusal(self, code: str) -> None:
        self._refusals.labels(self._gateway, code).inc()

    def record_fleet(self, fleet: Fleet) -> None:
        """Take over the engines' own numbers, and drop the series of engines that are gone."""
        self._queued.set(fleet.queued)
        self._queued_tokens.set(fleet.queued_tokens)
        seen = {(load.engine, load.model) for load in fleet.engines}
        for load in fleet.engines:
            for field, gauge in self._engine.items():
                gauge.labels(self._gateway, load.engine, load.model).set(getattr(load, field))
        for engine, model in self._engines - seen:
            for gauge in self._engine.values():
                gauge.remove(self._gateway, engine, model)
        self._engines = seen

    def expose(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return generate_latest(self._registry)


class Meter:
    """Clocks one request; its figures are recorded once, at the end, so that a token costs an addition."""

    def __init__(self, telemetry: Telemetry, started: float) -> None:
        """`started`: when the request arrived, in `time.monotonic` seconds."""
        self._telemetry, self._started = telemetry, started
        self._first = self._last = 0.0
        self._tokens = 0

    def note(self, tokens: int) -> None:
        """So many output tokens have just come."""
        if tokens:
            self._last = time.monotonic()
            if not self._tokens:
                self._first = self._last
                self._telemetry.time_to_first_token.observe(self._first - self._started)
            self._tokens += tokens

    def fail(self, code: str) -> None:
        """The answer broke off after its status line had gone out."""
        self._telemetry.record_refusal(code)

    def close(self) -> None:
        telemetry = self._telemetry
        telemetry.latency.observe(time.monotonic() - self._started)
        telemetry.output_tokens.inc(self._tokens)
        if self._tokens > 1:
            telemetry.inter_token_latency.observe((self._last - self._first) / (self._tokens - 1))
