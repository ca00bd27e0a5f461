"""Trace a request from HTTP through the queue to the engine's steps, in OpenTelemetry's terms.

A gateway begins the span of a request and sends its W3C `traceparent` and `tracestate` in `Generate`.  The engine that
computes the request adds its own spans under it afterwards, from times that it has measured anyway.  So no step carries
a span along, and an untraced request costs a look at an empty string.

    chat MODEL                    gateway: from the request's arrival to its last byte
      admission                   gateway: from the encoded prompt to its place in the queue, or the refusal
      queue · prefill · decode    engine: in Redis and in its own queue; until the first token; until the last
      resume                      engine: until it resumes a sequence that was preempted, or that another engine began
      resume MODEL                gateway, any: a client that reconnected to its answer

Off unless an endpoint is given, by `--otlp-endpoint` or by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT; those for headers, timeout, sampler, batches and resource always apply).  A thread
of its own sends spans in batches.  What a collector does not accept in time is dropped; no request waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:  # the rest of OpenTelemetry is imported only if traces are on
    from opentelemetry.sdk.trace import TracerProvider

Value = str | int | float | bool | list[str]
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SAMPLER = "OTEL_TRACES_SAMPLER"
CLOSE_S = 3.0  # how long a process that ends waits for its last spans to be sent

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
        self.traceparent = carrier["traceparent"]  # the parent of further spans
        self.tracestate = carrier.get("tracestate", "")  # trace state of the upstream systems

    def end(self, attributes: Mapping[str, Value], error: str = "") -> None:
        """End the span; `error`: the code of the request's failure, or ''."""
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
        """`provider` makes and exports the spans; None: traces are off."""
        self._provider = provider
        self._tracer: Tracer | None = provider.get_tracer("quire") if provider is not None else None
        self._epoch = time.time() - time.monotonic()

    @classmethod
    def start(cls, service: str, instance: str, endpoint: str, sample: float, environ: Mapping[str, str]) -> Tracing:
        """Return the tracing of a process of this kind and name; off without an endpoint.

        `sample`: the fraction of traces begun here that are kept.  For a trace that a client began, the client has
        decided."""
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
        """Begin the span of a request under this `traceparent` ("": as a new trace); None if it is not traced.

        `link`: the `traceparent` of a related span, or ''.  `tracestate`: the header that came with `traceparent`."""
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
        """Record a span that has ended, under the one of `traceparent`; nothing without a `traceparent`."""
        if self._tracer is None or not traceparent:
            return
        context = _context(traceparent, tracestate)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=self._unix_ns(started))
        _end(span, error, self._unix_ns(ended))

    def _unix_ns(self, at: float) -> int:
        return int((self._epoch + at) * 1e9)

    def close(self) -> None:
        """Send the remaining spans; wait at most CLOSE_S for a collector that does not answer."""
        if self._provider is not None:
            # The provider's own time limit ends neither a request under way nor the next ones.
            leaving = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
            leaving.start()
            leaving.join(CLOSE_S)
