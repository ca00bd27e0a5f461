"""The engine's metrics: one table, `Telemetry.collect`.  Nothing else in `engine` names a metric; labels come from
closed sets.

The core returns numbers (`EngineLoad`, `Totals`, `Event`), the loop says when; here they become figures.  What the
loop calls costs additions, a few a step; all else happens when somebody scrapes, on the scraper's thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from wsgiref.simple_server import WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

import msgspec
from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.common import histograms
from engine.common.histograms import Tally
from engine.common.tracing import Tracing, Value
from engine.core.limits import Event, Outputs, Totals
from engine.core.plan import StepPlan, StepResult
from engine.wire.messages import EngineLoad, Generate

WASTE_S = 1.0  # how often the loop is asked to count wasted slots, which looks at every sequence
STALLED_S = 60.0  # a loop that has not turned for so long is taken for dead; the longest step of a CPU takes seconds
PHASES = ("accept", "plan", "execute", "commit", "publish")  # of a turn of the loop


class Clock:
    """When the milestones of one request came, `time.monotonic` seconds; 0: not yet."""

    __slots__ = ("claimed", "first", "preempted", "queued", "request", "resumed", "started", "step", "traced")

    def __init__(self, request: Generate, queued: float, claimed: float, *, traced: bool) -> None:
        self.request = request
        self.queued = queued  # in Redis
        self.claimed = claimed  # from there
        self.started = 0.0  # in the batch
        self.first: dict[int, float] = {}  # continuation -> its first token
        self.preempted: dict[int, float] = {}  # those that wait to come back
        self.resumed: dict[int, float] = {}  # those that another engine began, since they go on here
        self.step = 0  # the first of its present phase
        self.traced = traced


class Telemetry(Collector):
    """All figures of one engine.  The loop's thread writes, the bus thread its own few, any thread may scrape."""

    def __init__(self, engine: str = "", *, vllm: bool = False, tracing: Tracing | None = None) -> None:
        """`vllm`: also say under vLLM's names what vLLM says, for dashboards and autoscalers made for it."""
        self._labels = (engine, "")
        self._vllm = vllm
        self._tracing = tracing or Tracing()
        self._info: dict[str, str] = {}
        self._clocks: dict[str, Clock] = {}
        self._load: EngineLoad | None = None
        self._totals = Totals()
        self._wasted, self._wasted_at = 0, 0.0
        self._turned = time.monotonic()
        self.warming = False  # set from outside: the engine computes hot prefixes ahead, and serves nobody yet
        self._warmed = (0, 0, 0.0)  # prefixes, tokens, seconds
        self._start: dict[str, float] = {}  # seconds of this start, by part
        self._takeover = False
        self._phases = [0.0] * len(PHASES)
        self._kinds: deque[str] = deque()  # of the steps in flight
        self._last_result = 0.0  # 0: what comes next does not follow it
        self._step = {"decode": Tally(histograms.STEP_S), "mixed": Tally(histograms.STEP_S)}
        self._step_tokens = Tally(histograms.TOKENS)
        self._step_failures = 0
        self._device_s = 0.0
        self._accepted = 0
        self._finished: Counter[str] = Counter()
        self._queue_s = Tally(histograms.FINE_REQUEST_S)
        self._prefill_s = Tally(histograms.FINE_REQUEST_S)
        self._decode_s = Tally(histograms.FINE_REQUEST_S)
        self._inference_s = Tally(histograms.FINE_REQUEST_S)
        self._away_s = Tally(histograms.FINE_REQUEST_S)
        self._prompt = Tally(histograms.TOKENS)
        self._output = Tally(histograms.TOKENS)
        self._exchange_s = Tally(histograms.ROUND_TRIP_S)
        self._queue_share = 0.0
        self._resumes = 0
        self.clock_skew_s = 0.0  # set by the bus thread
        self.registry = CollectorRegistry()  # its one collector is this
        self.registry.register(self)

    def serving(self, model: str, **info: str) -> None:
        """Once, when the model is loaded: what `quire_model_info` says."""
        self._labels = (self._labels[0], model)
        self._info = info

    def warmed(self, prefixes: int, tokens: int, seconds: float) -> None:
        """Once, where any were computed ahead."""
        self._warmed = prefixes, tokens, seconds

    def started(self, parts: Mapping[str, float], *, takeover: bool) -> None:
        """Once, when the engine is up: the seconds of each part of its start, and whether it took over as a spare."""
        self._start = dict(parts)
        self._takeover = takeover

    def resumed(self, seconds: float) -> None:
        """What earlier engines began is computed again, `seconds` after the first of it was here."""
        if self._takeover:
            self._start.setdefault("recompute", seconds)

    # -- what the loop says, as it happens

    def accept(self, request: Generate, now: float, unix_ms: int) -> None:
        """A request came from the queue.  Times on two clocks: it says when it was queued in unix time, on this
        process's clock, which reads `unix_ms` now."""
        waited = max(0, unix_ms - request.queued_ms) / 1000 if request.queued_ms else 0.0
        traced = self._tracing.on and bool(request.traceparent)
        self._clocks[request.id] = Clock(request, now - waited, now, traced=traced)
        self._accepted += 1

    def planned(self, plan: StepPlan, running: int) -> None:
        """A step was planned for `running` sequences."""
        slices = plan.slices
        self._kinds.append("mixed" if slices else "decode")
        tokens = sum(len(piece.token_ids) for piece in slices)
        self._step_tokens.add(running - len(slices) + tokens if slices else running)

    def collected(self, result: StepResult, now: float) -> None:
        """Its result is in."""
        kind = self._kinds.popleft()
        if self._last_result:
            self._step[kind].add(now - self._last_result)
        self._last_result = now
        self._device_s += result.device_s

    def failed(self) -> None:
        """The executor lost every step in flight."""
        self._kinds.clear()
        self._step_failures += 1
        self._last_result = 0.0

    def turn(self, marks: list[float], idle: bool) -> None:
        """A turn is over; `marks` are its beginning and the end of each of PHASES."""
        phases = self._phases
        for i in range(len(phases)):
            phases[i] += marks[i + 1] - marks[i]
        self._turned = marks[-1]
        if idle:
            self._last_result = 0.0

    def publish(
        self,
        load: EngineLoad,
        totals: Totals,
        outputs: Outputs,
        steps: tuple[int, int],
        now: float,
        waste: Callable[[], int],
    ) -> None:
        """What the core said in this turn.  `steps`: the last one planned, the last one committed.  `waste` counts the
        wasted slots; it is not asked every time."""
        self._load, self._totals = load, totals
        if now - self._wasted_at >= WASTE_S:
            self._wasted, self._wasted_at = waste(), now
        for event in outputs.events:
            self._milestone(event, *steps, now)
        for request_id in outputs.finished:
            self._clocks.pop(request_id, None)

    def _milestone(self, event: Event, planned: int, committed: int, now: float) -> None:
        if event.kind == "ended":
            self._finished[event.reason or "moved"] += 1
            if event.reason is None:  # no Finish of ours: it will not be among those finished
                self._clocks.pop(event.request.id, None)
        if (clock := self._clocks.get(event.request.id)) is None:
            return
        index = event.index
        if event.kind == "started":
            clock.started, clock.step = now, planned
            self._queue_s.add(now - clock.queued)
            self._prompt.add(len(event.request.token_ids))
            self._span("queue", clock, event, clock.queued, now)
        elif event.kind == "first":
            if not clock.first:  # the others forked from its prefill
                self._span("prefill", clock, event, clock.started, now, committed)
                clock.step = committed + 1
            clock.first[index] = now
            self._prefill_s.add(now - clock.started)
        elif event.kind in ("preempted", "requeued"):
            clock.preempted[index] = now
        elif event.kind == "resumed":
            if (since := clock.preempted.pop(index, None)) is not None:
                self._away_s.add(now - since)
            else:
                since = clock.claimed
                clock.resumed[index], clock.step = now, planned
            self._span("resume", clock, event, since, now)
        elif event.kind == "ended":
            self._ended(clock, event, committed, now)

    def _ended(self, clock: Clock, event: Event, step: int, now: float) -> None:
        if event.reason is None:
            return
        first = clock.first.get(event.index)
        if clock.started:
            self._inference_s.add(now - clock.started)
            self._output.add(event.tokens)
            if first is not None:
                self._decode_s.add(now - first)
        if (since := first or clock.resumed.get(event.index)) is not None:
            self._span("decode", clock, event, since, now, step)
        elif clock.started:
            self._span("prefill", clock, event, clock.started, now, step)
        else:
            self._span("queue", clock, event, clock.queued, now)

    def _span(self, name: str, clock: Clock, event: Event, since: float, now: float, step: int | None = None) -> None:
        """What a request has behind it with this event; `step`: the last in which something of it was computed."""
        if not clock.traced:
            return
        request = event.request
        attributes: dict[str, Value] = {
            "gen_ai.request.id": request.id,
            "quire.engine": self._labels[0],
            "quire.continuation": event.index,
        }
        if step is not None:
            attributes |= {"quire.first_step": min(clock.step, step), "quire.last_step": step}
        error = ""
        if event.kind == "started":
            attributes["gen_ai.usage.cache_read.input_tokens"] = event.tokens
        elif event.kind == "first":
            attributes["gen_ai.usage.input_tokens"] = len(request.token_ids)
        elif event.kind == "resumed":
            attributes["quire.tokens_to_compute"] = event.tokens
        elif event.reason is not None:
            attributes["gen_ai.usage.output_tokens"] = event.tokens
            attributes["gen_ai.response.finish_reasons"] = [event.reason]
            error = event.reason if event.reason in ("error", "deadline") else ""
        self._tracing.add(name, request.traceparent, since, now, attributes, error)

    # -- what the bus thread says

    def exchanged(self, seconds: float, queue_share: float, resumed: int) -> None:
        """One exchange with Redis; requests that wait there, over the engines that share them, and how many of those it
        brought go on from an earlier engine's tokens."""
        self._exchange_s.add(seconds)
        self._resumes += resumed
        self._queue_share = queue_share

    # -- the page

    @property
    def alive(self) -> bool:
        """The loop turns."""
        return time.monotonic() - self._turned < STALLED_S

    def expose(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The table of metrics."""
        yield _series(GaugeMetricFamily, "quire_build_info", "Which program this is; 1.", histograms.build())
        if self._load is not None:
            yield from self._own(self._load)
            if self._vllm:
                yield from self._as_vllm(self._load)

    def _own(self, load: EngineLoad) -> Iterator[Metric]:
        labels, values = ("engine", "model_name"), self._labels
        totals = self._totals

        def gauge(name: str, text: str, value: float) -> Metric:
            return _family(GaugeMetricFamily(name, text, labels=labels), {values: value})

        def gauges(name: str, text: str, label: str, by: dict[str, float]) -> Metric:
            family = GaugeMetricFamily(name, text, labels=(*labels, label))
            return _family(family, {(*values, key): value for key, value in by.items()})

        def counter(name: str, text: str, value: float) -> Metric:
            return _family(CounterMetricFamily(name, text, labels=labels), {values: value})

        def counters(name: str, text: str, label: str, by: dict[str, float]) -> Metric:
            family = CounterMetricFamily(name, text, labels=(*labels, label))
            return _family(family, {(*values, key): value for key, value in by.items()})

        def tally(name: str, text: str, figure: Tally) -> Metric:
            return histograms.histogram(name, text, labels, [(values, figure)])

        used = load.total_blocks - load.free_blocks
        yield _series(
            GaugeMetricFamily,
            "quire_model_info",
            "What this engine serves; 1.  A new fingerprint is a deploy: other weights, dtype or configuration.",
            {"engine": values[0], "model_name": values[1], **self._info},
        )
        # memory
        yield gauges(
            "quire_kv_blocks",
            "KV blocks by what they hold: used by sequences, an idle cached prefix, or nothing.",
            "state",
            {"used": used, "cached": load.cached_blocks, "free": load.free_blocks - load.cached_blocks},
        )
        yield gauge("quire_kv_pool_blocks", "KV blocks in the pool.", load.total_blocks)
        yield gauge("quire_kv_block_tokens", "Tokens in a KV block.", load.block_size)
        yield gauge("quire_kv_utilization", "Used KV blocks as a fraction of the pool.", used / load.total_blocks)
        yield gauge(
            "quire_kv_predicted_peak_blocks",
            "Most KV blocks that what runs now is expected to hold at once, if nothing joins.",
            load.predicted_peak_blocks,
        )
        yield gauge("quire_kv_wasted_slots", "Token slots in used blocks that hold no token.", self._wasted)
        yield counter(
            "quire_kv_blocks_released", "KV blocks given back by sequences that ended.", totals.released_blocks
        )
        yield counter("quire_kv_blocks_copied", "KV blocks copied on write, for forks.", totals.copied_blocks)
        # sequences
        yield gauges(
            "quire_sequences",
            "Sequences in this engine: in the batch, paused in their place, not started or preempted, or in the host's "
            "memory.",
            "state",
            {
                "running": load.running,
                "paused": load.paused,
                "waiting": load.waiting - load.swapped,
                "swapped": load.swapped,
            },
        )
        yield gauge("quire_waiting_tokens", "Tokens the waiting sequences must compute.", load.waiting_tokens)
        yield gauge(
            "quire_waiting_oldest_seconds", "Since the longest waiting request here was queued.", self._oldest()
        )
        yield gauge("quire_draining", "1 while this engine takes no new work.", load.draining)
        yield counter("quire_requests_claimed", "Requests taken from the shared queue.", self._accepted)
        yield counter("quire_resumes", "Requests that went on from an earlier engine's tokens.", self._resumes)
        yield counters("quire_sequences_ended", "Sequences that ended, by reason.", "reason", dict(self._finished))
        # tokens
        yield counter("quire_prefix_query_tokens", "Prompt tokens of started requests.", totals.prompt_tokens)
        yield counter(
            "quire_prefix_hit_tokens", "Prompt tokens found in the prefix cache.", totals.cached_prompt_tokens
        )
        prefixes, tokens, seconds = self._warmed
        yield gauge("quire_warmed_prefixes", "Hot prefixes computed before this engine served anybody.", prefixes)
        yield gauge("quire_warmed_tokens", "Tokens in the prefix cache after that.", tokens)
        yield gauge("quire_warmed_seconds", "What that took at this engine's start.", seconds)
        yield gauges(
            "quire_start_seconds",
            "Seconds that each part of this engine's start took; after a takeover also recompute, until every stream "
            "resumed.",
            "part",
            dict(self._start),
        )
        yield gauge("quire_start_takeover", "1 if this engine took over from one that died.", self._takeover)
        yield counter("quire_generated_tokens", "Output tokens.", totals.generated_tokens)
        yield counter("quire_preemptions", "Sequences that lost their blocks to older ones.", totals.preemptions)
        yield counter("quire_yields", "Preemptions for a tenant that held less than its share.", totals.yields)
        yield counter("quire_recomputed_tokens", "Tokens computed again after a preemption.", totals.recomputed_tokens)
        yield counter(
            "quire_swap_preemptions",
            "Preemptions that copied KV blocks to the host's memory.",
            totals.swap_preemptions,
        )
        yield counters(
            "quire_swapped_bytes",
            "Bytes of KV blocks copied to the host's memory and back.",
            "direction",
            {"out": load.swapped_out_bytes, "in": load.swapped_in_bytes},
        )
        # forecast
        yield counter("quire_pauses", "Times that a sequence waited in its place for a full pool.", load.pauses)
        foretold = {f"{q:g}": (judged, within) for q, judged, within in load.length_calibration}
        yield counters(
            "quire_forecast_outputs",
            "Outputs that ended, for which a quantile of their length had been foretold.",
            "quantile",
            {q: judged for q, (judged, _) in foretold.items()},
        )
        yield counters(
            "quire_forecast_outputs_within",
            "Those that were no longer: where the forecast is right, a share as large as the quantile.",
            "quantile",
            {q: within for q, (_, within) in foretold.items()},
        )
        yield counter("quire_forecast_peaks", "Predicted peaks that have been judged.", load.peaks_judged)
        yield counter("quire_forecast_peaks_passed", "Those that were passed.", load.peaks_passed)
        yield counter("quire_forecast_bound_blocks", "Sum of the predicted peaks.", load.peaks_bound_blocks)
        yield counter("quire_forecast_peak_blocks", "Sum of what was held at the most.", load.peaks_blocks)
        # steps
        yield histograms.histogram(
            "quire_step_seconds",
            "From one step's results to the next one's, by whether prompts were computed beside the decodes.",
            (*labels, "kind"),
            [((*values, kind), figure) for kind, figure in self._step.items()],
        )
        yield tally("quire_step_tokens", "Tokens computed in a step.", self._step_tokens)
        yield counters(
            "quire_loop_seconds",
            "Time of the loop's thread, by what it did; execute contains waiting for the device.",
            "phase",
            dict(zip(PHASES, self._phases, strict=True)),
        )
        yield counter("quire_device_seconds", "Time in which the device ran kernels of steps.", self._device_s)
        yield counter(
            "quire_step_failures", "Steps that failed; every sequence in them was computed again.", self._step_failures
        )
        # books
        yield counter("quire_audits", "Audits of the books of the KV blocks, whole or sampled.", totals.audits)
        yield counters(
            "quire_audit_alarms",
            "Audits that found the books out of balance: always a bug.",
            "kind",
            {"leak": totals.leaks, "double_free": totals.double_frees, "other": totals.other_alarms},
        )
        # requests
        yield tally("quire_queue_seconds", "From a request's queueing to its start in the batch.", self._queue_s)
        yield tally("quire_prefill_seconds", "From a request's start to its first token.", self._prefill_s)
        yield tally("quire_decode_seconds", "From a sequence's first token to its end.", self._decode_s)
        yield tally("quire_inference_seconds", "From a request's start to a sequence's end.", self._inference_s)
        yield tally("quire_preempted_seconds", "From a preemption to the sequence's return.", self._away_s)
        # Redis
        yield tally("quire_exchange_seconds", "Round trip of an exchange with Redis.", self._exchange_s)
        yield gauge(
            "quire_clock_skew_seconds", "How far this machine's clock is ahead of Redis', seconds.", self.clock_skew_s
        )

    def _oldest(self) -> float:
        """Seconds since the oldest request that has not started was queued."""
        waiting = [clock.queued for clock in list(self._clocks.values()) if not clock.started]
        return max(0.0, time.monotonic() - min(waiting)) if waiting else 0.0

    def _as_vllm(self, load: EngineLoad) -> Iterator[Metric]:
        """Names, labels and buckets of vLLM's own page, for what exists here."""
        labels, values = ("model_name", "engine"), self._labels[::-1]
        totals = self._totals

        def gauge(name: str, text: str, value: float) -> Metric:
            return _family(GaugeMetricFamily(name, text, labels=labels), {values: value})

        def counter(name: str, text: str, value: float) -> Metric:
            return _family(CounterMetricFamily(name, text, labels=labels), {values: value})

        def tally(name: str, text: str, figure: Tally, bounds: tuple[float, ...] = ()) -> Metric:
            return histograms.histogram(name, text, labels, [(values, figure)], bounds)

        yield gauge("vllm:num_requests_running", "Sequences in the batch.", load.running)
        # Sums over engines to everything that waits anywhere, which is what autoscalers take it for.
        yield gauge(
            "vllm:num_requests_waiting",
            "Sequences that wait here, and this engine's share of the queue before all of them.",
            load.waiting + self._queue_share,
        )
        used = load.total_blocks - load.free_blocks
        yield gauge("vllm:kv_cache_usage_perc", "Used KV blocks, 0 to 1.", used / load.total_blocks)
        config = {"block_size": str(load.block_size), "num_gpu_blocks": str(load.total_blocks)}
        described = dict(zip(labels, values, strict=True)) | config
        yield _series(GaugeMetricFamily, "vllm:cache_config_info", "Of the KV cache; 1.", described)
        yield counter("vllm:prompt_tokens", "Prompt tokens of started requests.", totals.prompt_tokens)
        yield counter("vllm:generation_tokens", "Output tokens.", totals.generated_tokens)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", totals.prompt_tokens)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found.", totals.cached_prompt_tokens)
        yield counter("vllm:num_preemptions", "Preemptions.", totals.preemptions)
        reasons = {"stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort", "error": "error"}
        ended: Counter[str] = Counter()
        for reason, count in dict(self._finished).items():
            if reason in reasons:
                ended[reasons[reason]] += count
        family = CounterMetricFamily("vllm:request_success", "Sequences ended.", labels=(*labels, "finished_reason"))
        yield _family(family, {(*values, reason): float(count) for reason, count in ended.items()})
        whole = histograms.REQUEST_S
        yield tally("vllm:request_queue_time_seconds", "Waiting.", self._queue_s, whole)
        yield tally("vllm:request_prefill_time_seconds", "Until the first token.", self._prefill_s, whole)
        yield tally("vllm:request_decode_time_seconds", "After the first token.", self._decode_s, whole)
        yield tally("vllm:request_inference_time_seconds", "In the batch.", self._inference_s, whole)
        yield tally("vllm:request_prompt_tokens", "Of a request.", self._prompt)
        yield tally("vllm:request_generation_tokens", "Of a sequence.", self._output)
        yield tally("vllm:iteration_tokens_total", "Tokens of a step.", self._step_tokens)


def _family(family: GaugeMetricFamily | CounterMetricFamily, series: dict[tuple[str, ...], float]) -> Metric:
    for values, value in series.items():
        family.add_metric(values, value)
    return family


def _series(kind: type[GaugeMetricFamily], name: str, text: str, labels: dict[str, str]) -> Metric:
    """An info metric: everything is in its labels."""
    return _family(kind(name, text, labels=list(labels)), {tuple(labels.values()): 1.0})


class PageError(Exception):
    """The metrics cannot be served; one line."""


class Page:
    """The engine's own small HTTP port, on threads of its own: `/metrics`, and `/health` for probes.

    The port opens when the model is loaded, so a probe that finds it closed knows that the engine is starting; so does
    one that finds it warming."""

    def __init__(self, telemetry: Telemetry, host: str, port: int) -> None:
        """Raises PageError when the port is taken."""
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, host, telemetry.registry)
        except OSError as error:
            reason = error.strerror or str(error)
            raise PageError(f"cannot serve metrics on {host}:{port}: {reason}; see --metrics-port") from None
        metrics = make_wsgi_app(telemetry.registry)

        def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
            path = environ["PATH_INFO"]
            if path == "/metrics":
                page: Iterable[bytes] = metrics(environ, start)
                return page
            if path == "/health":
                ill = "warming" if telemetry.warming else "" if telemetry.alive else "the step loop does not turn"
                start("503 Service Unavailable" if ill else "200 OK", [("Content-Type", "application/json")])
                return [msgspec.json.encode({"status": ill or "ok"})]
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"/metrics and /health are here\n"]

        self._server.set_app(answer)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
