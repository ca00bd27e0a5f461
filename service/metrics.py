"""The gateway's metrics: one table.  Nothing else in `service` names a metric; labels come from closed sets.

Gateways that share a port answer a scrape in turn, so every series carries a `gateway` label, and each of them
serves its page on a port of its own as well (`--metrics-port`): that is the one to scrape.

A `Meter` clocks one request and is the one place that knows all of it: its figures, its line in the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.common import histograms
from engine.common.histograms import Tally
from engine.common.tracing import Trace, Tracing, Value
from engine.wire.bus import Fleet, Usage
from engine.wire.clock import steady_ms
from engine.wire.messages import EngineLoad
from service.api import Refusal, ValidRequest
from service.format import Piece

log = logging.getLogger("quire.request")
usage_log = logging.getLogger("quire.usage")

# What a gateway sees of the engines, for those who scrape only gateways: metric -> (field of EngineLoad, help).
_ENGINE = {
    "quire_engine_kv_blocks": ("total_blocks", "KV blocks in the pool."),
    "quire_engine_kv_blocks_free": ("free_blocks", "KV blocks a new request can have, idle cached ones included."),
    "quire_engine_kv_blocks_cached": ("cached_blocks", "Free KV blocks that still hold a reusable prefix."),
    "quire_engine_kv_predicted_peak_blocks": (
        "predicted_peak_blocks",
        "Most KV blocks that what runs now is expected to hold at once, if nothing joins.",
    ),
    "quire_engine_requests_running": ("running", "Sequences in the batch."),
    "quire_engine_requests_waiting": ("waiting", "Sequences in the engine, not started or preempted."),
    "quire_engine_waiting_tokens": ("waiting_tokens", "Tokens the waiting sequences must compute."),
    "quire_engine_tokens_per_second": ("tokens_per_s", "Output tokens per second, moving average."),
    "quire_engine_blocks_drained_per_second": ("blocks_per_s", "KV blocks given back per second, moving average."),
    "quire_engine_mean_step_seconds": ("step_s", "From one step's results to the next one's, moving average."),
    "quire_engine_draining": ("draining", "1 while it takes no new work."),
    "quire_engine_preemptions": ("preemptions", "Preemptions since the engine started."),
    "quire_engine_yields": ("yields", "Preemptions for a tenant that held less than its share."),
    "quire_engine_prompt_tokens": ("prompt_tokens", "Prompt tokens since the engine started."),
    "quire_engine_cached_prompt_tokens": ("cached_prompt_tokens", "Prompt tokens found in the prefix cache."),
    "quire_engine_generated_tokens": ("generated_tokens", "Output tokens since the engine started."),
    "quire_engine_recomputed_tokens": ("recomputed_tokens", "Tokens computed again after a preemption."),
    "quire_engine_requests_swapped": ("swapped", "Waiting sequences whose KV blocks are in the host's memory."),
    "quire_engine_swap_preemptions": ("swap_preemptions", "Preemptions that copied KV blocks to the host's memory."),
    "quire_engine_swapped_out_bytes": ("swapped_out_bytes", "Bytes of KV blocks copied to the host's memory."),
    "quire_engine_swapped_in_bytes": ("swapped_in_bytes", "Bytes of KV blocks copied back from the host's memory."),
}
# No tenant has more than two dozen friends who look at its graph, and each costs five series.
TENANTS = 20
FINGERPRINTS = 8  # deploys whose latencies are kept apart
OTHER = "other"  # all tenants beyond the first TENANTS
NAMELESS = "default"  # whoever has no tenant of their own
ASKED = ("/v1/", "/tokenize", "/detokenize")  # endpoints that people ask, not probes
NO_ROOM = (429, 503)  # refusals for want of room, not for a fault in the request


class Telemetry(Collector):
    """Metric objects of one gateway, in a registry of their own (tests run several gateways in one process)."""

    def __init__(
        self,
        gateway: str,
        *,
        model: str = "",
        vllm: bool = False,
        tracing: Tracing | None = None,
        trace_prompts: bool = False,
    ) -> None:
        """`vllm`: also say under vLLM's names what vLLM says, for dashboards made for it.  `trace_prompts`: spans carry
        prompts and answers."""
        self.tracing = tracing or Tracing()
        self.trace_prompts = trace_prompts
        self.model = model
        self._gateway, self._vllm = gateway, vllm
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("gateway", *labels), registry=self._registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, ("gateway", *labels), registry=self._registry)

        build = histograms.build()
        gauge("quire_gateway_info", "Which program this is; 1.", *build).labels(gateway, *build.values()).set(1)
        # requests
        self._requests = counter("quire_requests", "Requests answered.", "endpoint", "status")
        self._refusals = counter("quire_refusals", "Requests refused or failed, by error code.", "code")
        self._decisions = counter(
            "quire_admission_decisions",
            "Requests let into the queue or refused for want of room.",
            "decision",
            "reason",
        )
        self.prompt_tokens = counter("quire_prompt_tokens", "Prompt tokens accepted.").labels(gateway)
        self.output_tokens = counter("quire_output_tokens", "Output tokens sent to clients.").labels(gateway)
        self._delivered_tokens = counter(
            "quire_delivered_tokens", "Output tokens sent to clients, each position once however often it was resumed."
        ).labels(gateway)
        self.comebacks = counter("quire_comebacks", "Answers that a client came back to.").labels(gateway)
        self._backlog = gauge("quire_backlog_bytes", "Tokens that wait here for slow readers.").labels(gateway)
        self._lost = counter("quire_tokens_lost", "Tokens that never came; each fails its request.").labels(gateway)
        self._repeated = counter(
            "quire_tokens_repeated", "Tokens that came again, and were dropped here: an engine died, or Redis did."
        ).labels(gateway)
        self.open_requests = gauge("quire_open_requests", "Prompts being answered or queued.").labels(gateway)
        # tenants
        self._tenant_tokens = counter("quire_tenant_tokens", "Tokens by who pays for them.", "tenant", "kind")
        self._tenant_requests = counter("quire_tenant_requests", "Requests by tenant and end.", "tenant", "outcome")
        self._tenant_queued = gauge("quire_tenant_queued_tokens", "Prompt tokens in the shared queue.", "tenant")
        self._tenant_service = gauge(
            "quire_tenant_service",
            "Virtual tokens served to those with something queued; the least goes first.",
            "tenant",
        )
        self._tenants: set[str] = set()
        # the shared queue and the engines
        self._queued = gauge("quire_queue_requests", "Requests in the shared queue.").labels(gateway)
        self._queued_tokens = gauge("quire_queue_tokens", "Prompt tokens in the shared queue.").labels(gateway)
        self._oldest = gauge(
            "quire_queue_oldest_seconds", "How long the oldest request in the shared queue has waited."
        ).labels(gateway)
        self._room = gauge("quire_queue_room_tokens", "Prompt tokens the engines would claim at once.").labels(gateway)
        self._quarantined = gauge(
            "quire_quarantined_requests", "Requests set aside because they killed their engines."
        ).labels(gateway)
        self.clock_skew = gauge(
            "quire_clock_skew_seconds", "How far this machine's clock is ahead of Redis', seconds."
        ).labels(gateway)
        self._alive = gauge("quire_engines", "Engines with a lease.").labels(gateway)
        self._leases_lost = counter("quire_engine_leases_lost", "Engines that went without draining.").labels(gateway)
        self._info = gauge(
            "quire_engine_info",
            "Engines with a lease; 1.  A new fingerprint is a deploy: other weights, dtype or configuration.",
            "engine",
            "model_name",
            "fingerprint",
        )
        self._engine = {field: gauge(name, text, "engine", "model_name") for name, (field, text) in _ENGINE.items()}
        self._age = gauge("quire_engine_age_seconds", "Since the engine was last heard of.", "engine", "model_name")
        self._engines: dict[str, EngineLoad] = {}
        # histograms
        self.fingerprint = ""  # of the model that answers now
        self._first: dict[str, Tally] = {}  # fingerprint -> time to first token
        self._gap = Tally(histograms.FINE_ITL_S)
        self._per_token = Tally(histograms.FINE_ITL_S)
        self._latency = Tally(histograms.FINE_REQUEST_S)
        self._retry_after = Tally(histograms.RETRY_S)
        self._prompt, self._output = Tally(histograms.TOKENS), Tally(histograms.TOKENS)
        self._asked = Tally(histograms.TOKENS)
        self._choices = Tally(histograms.TOKENS)
        self._stall, self._stall_busy = Tally(histograms.STALL_S), Tally(histograms.STALL_S)
        self._redis = {"submit": Tally(histograms.ROUND_TRIP_S), "fleet": Tally(histograms.ROUND_TRIP_S)}
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The table of histograms."""
        labels, values = ("gateway",), (self._gateway,)

        def tally(name: str, text: str, figure: Tally) -> Metric:
            return histograms.histogram(name, text, labels, [(values, figure)])

        yield histograms.histogram(
            "quire_time_to_first_token_seconds",
            "From a request's arrival to its first token here, by what the model was then.",
            (*labels, "fingerprint"),
            [((*values, fingerprint), figure) for fingerprint, figure in self._first.items()],
        )
        yield tally("quire_inter_token_latency_seconds", "Between two tokens of a choice.", self._gap)
        yield tally("quire_request_latency_seconds", "From a request's arrival to its last byte.", self._latency)
        yield tally("quire_retry_after_seconds", "Pauses asked of those who were refused.", self._retry_after)
        yield tally("quire_request_prompt_tokens", "Prompt tokens of a request.", self._prompt)
        yield tally("quire_request_output_tokens", "Output tokens of a request.", self._output)
        yield tally(
            "quire_gateway_loop_stall_seconds",
            "How late the event loop ran a timer, seconds; nothing moves meanwhile.  Measured every 10 ms.",
            self._stall,
        )
        yield tally(
            "quire_gateway_loop_busy_seconds",
            "The part of each such delay in which this process computed, seconds; other processes took the rest.",
            self._stall_busy,
        )
        yield histograms.histogram(
            "quire_redis_seconds",
            "Round trips to Redis: to queue a request, to read fleet and queue.",
            (*labels, "operation"),
            [((*values, operation), figure) for operation, figure in self._redis.items()],
        )
        if self._vllm:
            yield from self._as_vllm()

    def _as_vllm(self) -> Iterator[Metric]:
        """Names, labels and buckets of vLLM's own page, for what a gateway measures; engines' pages have the rest."""
        labels, values = ("model_name", "engine"), (self.model, self._gateway)

        def tally(name: str, text: str, figure: Tally, bounds: tuple[float, ...] = ()) -> Metric:
            return histograms.histogram(name, text, labels, [(values, figure)], bounds)

        first = Tally(histograms.TTFT_S)
        for figure in self._first.values():
            first.merge(figure)
        yield tally("vllm:time_to_first_token_seconds", "From arrival to the first token.", first)
        yield tally("vllm:inter_token_latency_seconds", "Between two tokens.", self._gap, histograms.ITL_S)
        yield tally(
            "vllm:request_time_per_output_token_seconds", "A request's mean.", self._per_token, histograms.ITL_S
        )
        yield tally("vllm:e2e_request_latency_seconds", "Of a request.", self._latency, histograms.REQUEST_S)
        yield tally("vllm:request_params_n", "Choices asked for.", self._choices)
        yield tally("vllm:request_params_max_tokens", "Output tokens allowed.", self._asked)

    def record_request(self, endpoint: str, status: int) -> None:
        self._requests.labels(self._gateway, endpoint, str(status)).inc()

    def record_refusal(self, code: str) -> None:
        self._refusals.labels(self._gateway, code).inc()

    def record_usage(self, usage: Usage) -> None:
        """A request (one prompt of a client's) is over here.  One that is read on elsewhere comes again from there, and
        of the log's lines on it the furthest counts."""
        self._delivered_tokens.inc(usage.new)
        line = {
            "id": usage.request_id,
            "tenant": usage.tenant or NAMELESS,
            "generated_tokens": usage.generated,
            "delivered_tokens": usage.delivered,
        }
        usage_log.info("usage", extra={"fields": line})

    def record_backlog(self, held: int) -> None:
        self._backlog.set(held)

    def record_stall(self, late_s: float, busy_s: float) -> None:
        """See StallWatch."""
        self._stall.add(late_s)
        self._stall_busy.add(busy_s)

    def record_decision(self, refusal: Refusal | None) -> None:
        """One request was let into the queue, or refused for want of room."""
        if refusal is None:
            self._decisions.labels(self._gateway, "admitted", "room").inc()
            return
        self._decisions.labels(self._gateway, "refused", refusal.code).inc()
        if refusal.retry_after_s is not None:
            self._retry_after.add(refusal.retry_after_s)

    def record_redis(self, operation: str, seconds: float) -> None:
        """`operation`: submit or fleet."""
        self._redis[operation].add(seconds)

    def record_stream(self, lost: int, repeated: int) -> None:
        """A request's mailboxes are closed: tokens missing in what they got, and tokens they got twice."""
        self._lost.inc(lost)
        self._repeated.inc(repeated)

    def record_first(self, seconds: float) -> None:
        tally = self._first.get(self.fingerprint)
        if tally is None:
            if len(self._first) == FINGERPRINTS:
                del self._first[next(iter(self._first))]  # the oldest deploy
            tally = self._first[self.fingerprint] = Tally(histograms.TTFT_S)
        tally.add(seconds)

    def record_answer(self, meter: Meter, seconds: float) -> None:
        """An admitted request is over, after so many seconds."""
        self.output_tokens.inc(meter.output_tokens)
        if meter.resumed:  # its first part stands under the request that it was then
            return
        self._latency.add(seconds)
        self._prompt.add(meter.prompt_tokens)
        self._output.add(meter.output_tokens)
        self._asked.add(meter.asked_tokens)
        self._choices.add(meter.choices)
        if (per_token := meter.seconds_per_token) is not None:
            self._per_token.add(per_token)

    def record_tenant(self, meter: Meter, outcome: str) -> None:
        tenant = self._tenant_label(meter.tenant)
        self._tenant_requests.labels(self._gateway, tenant, outcome).inc()
        if meter.admitted:
            self._tenant_tokens.labels(self._gateway, tenant, "prompt").inc(meter.prompt_tokens)
            self._tenant_tokens.labels(self._gateway, tenant, "output").inc(meter.output_tokens)

    def _tenant_label(self, tenant: str) -> str:
        """The first TENANTS keep their names, since a counter that changes its name runs backwards."""
        name = tenant or NAMELESS
        if name not in self._tenants:
            if len(self._tenants) >= TENANTS:
                return OTHER
            self._tenants.add(name)
        return name

    def record_gap(self, seconds: float, tokens: int) -> None:
        """So many tokens came together, so long after those before: each took its part."""
        self._gap.add(seconds / tokens, tokens)

    def record_fleet(self, fleet: Fleet) -> None:
        """Take over the engines' own numbers, and drop the series of engines that are gone."""
        self._queued.set(fleet.queued)
        self._queued_tokens.set(fleet.queued_tokens)
        self._oldest.set(fleet.oldest_ms / 1000)
        self._room.set(fleet.room_tokens)
        self._quarantined.set(fleet.quarantined)
        self._alive.set(len(fleet.engines))
        now_ms = steady_ms()
        seen = {load.engine: load for load in fleet.engines}
        for engine, old in self._engines.items():
            if engine not in seen and not old.draining:
                self._leases_lost.inc()
            if engine not in seen or _identity(seen[engine]) != _identity(old):
                self._info.remove(self._gateway, *_identity(old))
            if engine not in seen:
                for gauge in (*self._engine.values(), self._age):
                    gauge.remove(self._gateway, engine, old.model)
        for load in fleet.engines:
            for field, gauge in self._engine.items():
                gauge.labels(self._gateway, load.engine, load.model).set(getattr(load, field))
            heard_ms = fleet.heard_ms.get(load.engine, load.time_ms)
            self._age.labels(self._gateway, load.engine, load.model).set(max(0.0, now_ms - heard_ms) / 1000)
            self._info.labels(self._gateway, *_identity(load)).set(1)
            self.fingerprint = load.fingerprint[:16]
        self._engines = seen
        self._record_turns(fleet)

    def _record_turns(self, fleet: Fleet) -> None:
        """Who waits now.  Tenants with nothing queued have no series."""
        self._tenant_queued.clear()
        self._tenant_service.clear()
        longest = sorted(fleet.tenants.items(), key=lambda item: item[1].queued_tokens, reverse=True)
        for name, turn in longest[:TENANTS]:
            self._tenant_queued.labels(self._gateway, name or NAMELESS).set(turn.queued_tokens)
            self._tenant_service.labels(self._gateway, name or NAMELESS).set(turn.counter)
        if rest := longest[TENANTS:]:
            self._tenant_queued.labels(self._gateway, OTHER).set(sum(turn.queued_tokens for _, turn in rest))

    def expose(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return generate_latest(self._registry)


def _identity(load: EngineLoad) -> tuple[str, str, str]:
    return load.engine, load.model, load.fingerprint[:16]


def _operation(valid: ValidRequest) -> str:
    return "chat" if valid.chat else "text_completion"


def _messages(messages: list[dict[str, Any]]) -> str:
    """As the GenAI conventions write them.  A prompt of token ids is its ids."""
    return msgspec.json.encode(
        [{"role": message["role"], "parts": [{"type": "text", "content": message["content"]}]} for message in messages]
    ).decode()


class Meter:
    """Clocks one request.  Its figures are recorded once, at the end, so that a token costs an addition."""

    def __init__(self, telemetry: Telemetry, started: float, request_id: str = "") -> None:
        """`started`: when the request arrived, in `time.monotonic` seconds.  `request_id`: as its client knows it."""
        self._telemetry, self._started, self._request_id = telemetry, started, request_id
        self._id = ""  # of the answer
        self._first_s: float | None = None  # from its arrival to its first token
        self._last: dict[int, float] = {}  # choice -> when its last tokens came
        self._gaps_s, self._gaps = 0.0, 0
        self._code: str | None = None  # of the error it was answered with
        self._retry_after_s: float | None = None
        self._finishes: set[str] = set()
        self._cached_tokens = 0
        self._described = 0.0  # when it was understood
        self._valid: ValidRequest | None = None
        self._trace: Trace | None = None
        self._context = ""  # the traceparent of whatever it belongs to
        self._said: dict[int, str] = {}  # choice -> its text, where traces carry it
        self.tenant = ""
        self.admitted = self.resumed = False
        self.prompt_tokens = self.output_tokens = self.asked_tokens = self.choices = 0

    def describe(
        self,
        answer_id: str,
        valid: ValidRequest,
        tenant: str,
        prompt_tokens: int,
        asked_tokens: int,
        traceparent: str = "",
    ) -> str:
        """It was understood, and will be answered under `answer_id` if there is room.  Returns the trace context that
        what is done for it belongs to: its own span's, or the `traceparent` it brought where it is not traced."""
        self._id, self.tenant, self.prompt_tokens, self.choices = answer_id, tenant, prompt_tokens, valid.n
        self.asked_tokens, self._described = asked_tokens, time.monotonic()
        return self._begin(valid, _operation(valid), traceparent)

    def _begin(self, valid: ValidRequest, operation: str, traceparent: str, link: str = "") -> str:
        self._valid = valid
        name = f"{operation} {self._telemetry.model}"
        self._trace = self._telemetry.tracing.begin(name, traceparent, self._started, link)
        self._context = self._trace.traceparent if self._trace is not None else traceparent
        return self._context

    def admit(self) -> None:
        """It is in the queue."""
        self.admitted = True
        self._telemetry.record_decision(None)
        self._telemetry.prompt_tokens.inc(self.prompt_tokens)
        self._span_admission()

    def _span_admission(self, error: str = "") -> None:
        if self._trace is not None:
            now = time.monotonic()
            self._telemetry.tracing.add("admission", self._trace.traceparent, self._described, now, {}, error)

    def resume(
        self, answer_id: str, valid: ValidRequest, choices: int, tenant: str, begun: str = "", traceparent: str = ""
    ) -> None:
        """A client has come back to an answer that was admitted before, in the context `begun`: its trace goes on.
        `traceparent`: which it brought now."""
        self._id, self.choices, self.tenant = answer_id, choices, tenant
        self.prompt_tokens = 0  # accepted and counted then
        self.admitted = self.resumed = True
        self._telemetry.comebacks.inc()
        self._begin(valid, "resume", begun or traceparent, traceparent if begun else "")

    def note(self, piece: Piece) -> None:
        """A choice has something new."""
        if tokens := len(piece.token_ids):
            now = time.monotonic()
            if self._first_s is None:
                self._first_s = now - self._started
                if not self.resumed:
                    self._telemetry.record_first(self._first_s)
            if (last := self._last.get(piece.choice)) is not None:
                self._telemetry.record_gap(now - last, tokens)
                self._gaps_s += now - last
                self._gaps += tokens
            else:
                self._cached_tokens += piece.cached_tokens
            self._last[piece.choice] = now
            self.output_tokens += tokens
        if piece.finish is not None:
            self._finishes.add(piece.finish)
        if self._trace is not None and self._telemetry.trace_prompts:
            self._said[piece.choice] = self._said.get(piece.choice, "") + piece.text

    def fail(self, refusal: Refusal) -> None:
        """It is answered with an error: instead of an answer, or at the end of a broken one."""
        self._code, self._retry_after_s = refusal.code, refusal.retry_after_s
        self._telemetry.record_refusal(refusal.code)
        if not self.admitted and refusal.status in NO_ROOM:
            self._telemetry.record_decision(refusal)
            self._span_admission(refusal.code)

    @property
    def seconds_per_token(self) -> float | None:
        """Mean over all tokens but each choice's first."""
        return self._gaps_s / self._gaps if self._gaps else None

    def close(self, endpoint: str, status: int) -> None:
        """It is over, with this HTTP status (499: the client left)."""
        seconds = time.monotonic() - self._started
        self._telemetry.record_request(endpoint, status)
        if self.admitted:
            self._telemetry.record_answer(self, seconds)
        outcome = self._outcome(status)
        if self._id:
            self._telemetry.record_tenant(self, outcome)
        if self._trace is not None and self._valid is not None:
            failed = "" if outcome == "ok" else self._code or outcome
            self._trace.end(self._attributes(self._valid, status), failed)
        self._log(endpoint, status, outcome, seconds)

    def _log(self, endpoint: str, status: int, outcome: str, seconds: float) -> None:
        """One line.  Probes and scrapes, which come all the time, only at level DEBUG."""
        level = logging.INFO if endpoint.startswith(ASKED) else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        line: dict[str, object] = {
            "request_id": self._request_id,
            "endpoint": endpoint,
            "status": status,
            "outcome": outcome,
            "seconds": round(seconds, 4),
        }
        if self._id:
            line |= {"id": self._id, "tenant": self.tenant or NAMELESS, "output_tokens": self.output_tokens}
            if self.resumed:
                line["resumed"] = True
            else:
                line |= {"prompt_tokens": self.prompt_tokens, "cached_tokens": self._cached_tokens}
        if self._first_s is not None:
            line["first_token_s"] = round(self._first_s, 4)
        if self.seconds_per_token is not None:
            line["token_s"] = round(self.seconds_per_token, 5)
        if self._finishes:
            line["finish"] = ",".join(sorted(self._finishes))
        if self._code is not None:
            line["error"] = self._code
        if self._retry_after_s is not None:
            line["retry_after_s"] = self._retry_after_s
        if self._context:
            line["trace_id"] = self._context.split("-")[1]
        log.log(level, "request", extra={"fields": line})

    def _attributes(self, valid: ValidRequest, status: int) -> dict[str, Value]:
        """OpenTelemetry's GenAI conventions."""
        sampling = valid.sampling
        found: dict[str, Value] = {
            "gen_ai.operation.name": _operation(valid),
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": self._telemetry.model,
            "gen_ai.response.model": self._telemetry.model,
            "gen_ai.response.id": self._id,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.choice.count": valid.n,
            "gen_ai.request.stream": valid.stream,
            "gen_ai.usage.output_tokens": self.output_tokens,
            "gen_ai.response.finish_reasons": sorted(self._finishes),
            "http.response.status_code": status,
            "quire.request_id": self._request_id,
            "quire.tenant": self.tenant or NAMELESS,
        }
        if not self.resumed:  # what the first span of its trace says
            found["gen_ai.request.max_tokens"] = self.asked_tokens
            found["gen_ai.usage.input_tokens"] = self.prompt_tokens
            found["gen_ai.usage.cache_read.input_tokens"] = self._cached_tokens
        if valid.seeded:
            found["gen_ai.request.seed"] = sampling.seed
        if self._first_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = self._first_s
        if self._telemetry.trace_prompts:
            if not self.resumed:
                asked = valid.messages or [{"role": "user", "content": prompt} for prompt in valid.prompts]
                found["gen_ai.input.messages"] = _messages(asked)
            answered = [{"role": "assistant", "content": text} for _, text in sorted(self._said.items())]
            found["gen_ai.output.messages"] = _messages(answered)
        return found

    def _outcome(self, status: int) -> str:
        """ok, cancelled (its client left), refused (for want of room), invalid or failed."""
        if status == 499:
            return "cancelled"
        if self._code is None:
            return "ok"
        if self.admitted or status not in NO_ROOM:
            return "failed" if self.admitted or status >= 500 else "invalid"
        return "refused"
