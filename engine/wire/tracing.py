"""Traces: one from the HTTP request through the queue to the engine's steps, in OpenTelemetry's terms.

A gateway begins the span of a request and sends its W3C `traceparent` along in `Generate`; the engine that computes it
adds spans of its own under it, after the fact, from the times it has measured anyway.  So nothing is carried around
while tokens are made, and an untraced request costs a look at an empty string.

Off unless an endpoint is given, by `--otlp-endpoint` or by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, and with them those for headers, timeout, sampler, batch and resource).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # loaded where traces are on: they cost 0.3 s of a start
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

Value = str | int | float | bool | list[str]
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SAMPLER = "OTEL_TRACES_SAMPLER"


class Trace:
    """The span of one request, where it began."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Span, traceparent: str) -> None:
        self._span = span
        self.traceparent = traceparent  # what its children hang on

    def end(self, attributes: Mapping[str, Value], error: str = "") -> None:
        """It is over; `error` is a code that says why it failed."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(attributes)
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


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
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        exporter = OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces") if endpoint else OTLPSpanExporter()
        provider = TracerProvider(
            sampler=None if environ.get(SAMPLER) else ParentBased(TraceIdRatioBased(sample)),
            resource=Resource.create({"service.name": service, "service.instance.id": instance}),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    @property
    def on(self) -> bool:
        return self._tracer is not None

    def begin(self, name: str, traceparent: str, started: float, attributes: Mapping[str, Value]) -> Trace | None:
        """The span of a request that came with this `traceparent` ("": with none).  None where it is not traced."""
        if self._tracer is None:
            return None
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        span = self._tracer.start_span(
            name,
            propagator.extract({"traceparent": traceparent}),
            SpanKind.SERVER,
            attributes,
            start_time=self._unix_ns(started),
        )
        if not span.is_recording():
            return None
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        propagator.inject(carrier, set_span_in_context(span))
        return Trace(span, carrier["traceparent"])

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
        from opentelemetry.trace import StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=self._unix_ns(started))
        if error:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
        span.end(self._unix_ns(ended))

    def _unix_ns(self, at: float) -> int:
        return int((self._epoch + at) * 1e9)

    def close(self) -> None:
        """Send what is left; waits a few seconds for an endpoint that does not answer."""
        if self._provider is not None:
            self._provider.force_flush(3000)
            self._provider.shutdown()
