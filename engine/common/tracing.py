"""Tracing: OpenTelemetry spans of a request, from HTTP through the queue to the engine's steps.

A gateway begins the span of a request and sends its W3C `traceparent` and `tracestate` in `Generate`.  The engine that
computes the request adds child spans afterwards, from times that it measures anyway.  So steps handle no spans, and an
untraced request takes only one test for an empty string.

    chat MODEL                    gateway: from the request's arrival to its last byte
      admission                   gateway: from the encoded prompt to its place in the queue, or the refusal
      queue · prefill · decode    engine: in Redis and in its own queue; until the first token; until the last
      resume                      engine: until it resumes a sequence that was preempted, or that another engine began
      resume MODEL                any gateway: from a client's reconnect to the last byte

Tracing is off unless an endpoint is given, by `--otlp-endpoint` or by OpenTelemetry's variables
(OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT; its variables for headers, timeout, sampler, batches
and resource always apply).  A separate thread sends spans in batches.  Spans that the collector does not accept in time
are dropped; no request waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:  # the OpenTelemetry SDK is imported only if tracing is on
    from opentelemetry.sdk.trace import TracerProvider

Value = str | int | float | bool | list[str]
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SAMPLER = "OTEL_TRACES_SAMPLER"
CLOSE_S = 3.0  # maximum seconds that an ending process waits for its last spans to be sent

_propagator = TraceContextTextMapPropagator()


def _context(traceparent: str, tracestate: str = "") -> Context:
    return _propagator.extract({"traceparent": traceparent, "tracestate": tracestate})


class Trace:
    """The span of one request, in the process that began it."""

    __slots__ = ("_span", "traceparent", "tracestate")

    def __init__(self, span: Span) -> None:
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, set_span_in_context(span))
        self._span = span
        self.traceparent = carrier["traceparent"]  # W3C header that makes this span the parent of further spans
        self.tracestate = carrier.get("tracestate", "")  # W3C trace state of the upstream systems

    def end(self, attributes: Mapping[str, Value], error: str = "") -> None:
        """End the span.  `error`: error code of the request; '': no error."""
        self._span.set_attributes(attributes)
        _end(self._span, error, None)


def _end(span: Span, error: str, at_ns: int | None) -> None:
    if error:
        span.set_attribute("error.type", error)
        span.set_status(StatusCode.ERROR)
    span.end(at_ns)


class Tracing:
    """Records the spans of one process.  Times are `time.monotonic` seconds."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """`provider`: creates and exports the spans; None: tracing is off."""
        self._provider = provider
        self._tracer: Tracer | None = provider.get_tracer("quire") if provider is not None else None
        self._epoch = time.time() - time.monotonic()

    @classmethod
    def start(cls, service: str, instance: str, endpoint: str, sample: float, environ: Mapping[str, str]) -> Tracing:
        """Create the tracing of a process: `service` is its kind, `instance` its name.  Off without an endpoint.

        `sample`: the fraction of traces begun here that are kept.  For a trace that a client began, the client's
        decision applies."""
        if not endpoint and not any(environ.get(name) for name in ENDPOINTS):
            return cls()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        ours = Resource.create({"service.name": service, "service.instance.id": instance})
        provider = TracerProvider(
            sampler=None if environ.get(SAMPLER) else ParentBased(TraceIdRatioBased(sample)),
            resource=ours.merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces") if endpoint else OTLPSpanExporter()
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    @property
    def on(self) -> bool:
        return self._tracer is not None

    def begin(self, name: str, traceparent: str, started: float, link: str = "", tracestate: str = "") -> Trace | None:
        """Begin the span of a request as a child of `traceparent` ("": as a new trace); None: it is not sampled.

        `link`: the `traceparent` of a related span, or ''.  `tracestate`: the header sent with `traceparent`."""
        if self._tracer is None:
            return None
        links = [Link(get_current_span(_context(link)).get_span_context())] if link else None
        context = _context(traceparent, tracestate)
        span = self._tracer.start_span(name, context, SpanKind.SERVER, None, links, self._unix_ns(started))
        return Trace(span) if span.is_recording() else None

    def add(
        self,
        name: str,
        traceparent: str,
        started: float,
        ended: float,
        attributes: Mapping[str, Value],
        error: str = "",
        tracestate: str = "",
    ) -> None:
        """Record an ended span as a child of `traceparent`; does nothing if `traceparent` is empty."""
        if self._tracer is None or not traceparent:
            return
        context = _context(traceparent, tracestate)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=self._unix_ns(started))
        _end(span, error, self._unix_ns(ended))

    def _unix_ns(self, at: float) -> int:
        return int((self._epoch + at) * 1e9)

    def close(self) -> None:
        """Send the remaining spans, waiting at most CLOSE_S for the collector."""
        if self._provider is not None:
            # The provider's own timeout ends neither the running request nor the following ones.
            leaving = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
            leaving.start()
            leaving.join(CLOSE_S)
