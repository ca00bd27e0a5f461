"""Traces: one from the HTTP request through the queue to the engine's steps, in OpenTelemetry's terms.

A gateway begins the span of a request and sends its W3C `traceparent` along in `Generate`; the engine that computes it
adds spans of its own under it, after the fact, from the times it has measured anyway.  So nothing is carried around
while tokens are made, and an untraced request costs a look at an empty string.

    chat MODEL                    gateway: from the request's arrival to its last byte
      admission                   gateway: from the encoded prompt to its place in the queue, or the refusal
      queue · prefill · decode    engine: in Redis and in its own queue; until the first token; until the last
      resume                      engine: until it goes on with a sequence that was preempted, or that another one began
      resume MODEL                gateway, any: a client that came back to its answer

Off unless an endpoint is given, by `--otlp-endpoint` or by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT; those for headers, timeout, sampler, batches and resource count in any case).  Spans
leave in batches, from a thread of their own; what a collector does not take in time is dropped: nobody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:  # the rest of OpenTelemetry is loaded where traces are on
    from opentelemetry.sdk.trace import TracerProvider

Value = str | int | float | bool | list[str]
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SAMPLER = "OTEL_TRACES_SAMPLER"
CLOSE_S = 3.0  # a process that ends waits so long for what it has not sent yet

_propagator = TraceContextTextMapPropagator()


def _context(traceparent: str) -> Context:
    return _propagator.extract({"traceparent": traceparent})


class Trace:
    """The span of one request, where it began."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Span) -> None:
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, set_span_in_context(span))
        self._span = span
        self.traceparent = carrier["traceparent"]  # what its children hang on

    def end(self, attributes: Mapping[str, Value], error: str = "") -> None:
        """It is over; `error` is a code that says why it failed."""
        self._span.set_attributes(attributes)
        _end(self._span, error, None)


def _end(span: Span, error: str, at_ns: int | None) -> None:
    if error:
        span.set_attribute("error.type", error)
        span.set_status(StatusCode.ERROR)
    span.end(at_ns)


class Tracing:
    """The spans of one process.  Times are `time.monotonic` seconds."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """None: off."""
        self._provider = provider
        self._tracer: Tracer | None = provider.get_tracer("quire") if provider is not None else None
        self._epoch = time.time() - time.monotonic()

    @classmethod
    def start(cls, service: str, instance: str, endpoint: str, sample: float, environ: Mapping[str, str]) -> Tracing:
        """For a process of this kind and name.  `sample` is the fraction of traces begun here that are kept; who
        brings a trace has decided that already."""
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

    def begin(self, name: str, traceparent: str, started: float, link: str = "") -> Trace | None:
        """The span of a request that belongs under this `traceparent` ("": it begins a trace), and has to do with that
        of `link`.  None where it is not traced."""
        if self._tracer is None:
            return None
        links = [Link(get_current_span(_context(link)).get_span_context())] if link else None
        context = _context(traceparent)
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
    ) -> None:
        """A span that is over, under the one of `traceparent`; nothing without one."""
        if self._tracer is None or not traceparent:
            return
        context = _context(traceparent)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=self._unix_ns(started))
        _end(span, error, self._unix_ns(ended))

    def _unix_ns(self, at: float) -> int:
        return int((self._epoch + at) * 1e9)

    def close(self) -> None:
        """Send what is left; waits CLOSE_S for a collector that does not answer, and no longer."""
        if self._provider is not None:
            # The provider's own time limit ends neither a request on its way nor what follows it.
            leaving = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
            leaving.start()
            leaving.join(CLOSE_S)
