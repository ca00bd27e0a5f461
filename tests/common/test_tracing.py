"""Spans through the real exporter to a collector in this process; a collector that fails or hangs delays no request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire.engine.common import tracing
from quire.engine.common.tracing import Tracing
from tests.otlp import Collector

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as found:
        yield found


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing from outside decides what is sampled, or sends it through a proxy."""
    for name in (*tracing.ENDPOINTS, tracing.SAMPLER, "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def start(endpoint: str, sample: float = 1.0, environ: Mapping[str, str] | None = None) -> Tracing:
    return Tracing.start("quire-test", "t0", endpoint, sample, environ or {})


def test_off_without_an_endpoint() -> None:
    off = start("")
    assert not off.on
    assert off.begin("chat m", PARENT, time.monotonic()) is None
    off.add("queue", PARENT, 0.0, 1.0, {})
    off.close()


def test_a_request_and_what_was_done_for_it_are_one_trace(collector: Collector) -> None:
    tracer, now = start(collector.url + "/"), time.monotonic()
    before_ns = time.time_ns()
    trace = tracer.begin("chat m", PARENT, now - 2.0, OTHER)
    assert trace is not None
    tracer.add("queue", trace.traceparent, now - 1.5, now - 1.0, {"gen_ai.request.id": "r"})
    tracer.add("decode", trace.traceparent, now - 1.0, now, {"gen_ai.response.finish_reasons": ["error"]}, "error")
    trace.end({"gen_ai.request.model": "m"})
    tracer.close()
    (root,), (queue,), (decode,) = (collector.named(name) for name in ("chat m", "queue", "decode"))
    assert {span.trace_id for span in collector.spans} == {PARENT.split("-")[1]}
    assert root.parent_id == PARENT.split("-")[2]
    assert root.links == (OTHER.split("-")[1],)
    assert (root.kind, queue.kind) == ("SERVER", "INTERNAL")
    assert queue.parent_id == decode.parent_id == root.span_id
    assert root.attributes == {"gen_ai.request.model": "m"}
    assert decode.attributes == {"gen_ai.response.finish_reasons": ["error"], "error.type": "error"}
    assert (root.failed, queue.failed, decode.failed) == (False, False, True)
    assert (root.service, root.instance) == ("quire-test", "t0")
    assert queue.end_ns - queue.start_ns == pytest.approx(5e8, abs=1e6)
    assert root.start_ns == pytest.approx(before_ns - 2e9, abs=1e9)
    assert root.start_ns < queue.start_ns < queue.end_ns <= decode.start_ns < decode.end_ns <= root.end_ns + 1e6


def test_the_state_of_a_trace_goes_along_to_every_span() -> None:
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer, now = Tracing(provider), time.monotonic()
    trace = tracer.begin("chat m", PARENT, now, tracestate="rojo=1,congo=2")
    assert trace is not None
    assert trace.tracestate == "rojo=1,congo=2"
    tracer.add("queue", trace.traceparent, now, now, {}, tracestate=trace.tracestate)
    trace.end({})
    alone = tracer.begin("chat m", "", now, tracestate="rojo=1")  # without its parent it means nothing
    assert alone is not None
    assert alone.tracestate == ""
    states = [span.context.trace_state.to_header() for span in memory.get_finished_spans()]
    assert states == ["rojo=1,congo=2"] * 2
    provider.shutdown()


def test_sampling_is_of_traces_that_begin_here(collector: Collector) -> None:
    tracer, now = start(collector.url, 0.25), time.monotonic()
    begun = [tracer.begin("chat m", "", now) for _ in range(400)]
    assert 40 < sum(trace is not None for trace in begun) < 160
    never = start(collector.url, 0.0)
    assert never.begin("chat m", "", now) is None
    assert never.begin("chat m", PARENT[:-2] + "00", now) is None
    never.add("queue", "", now, now, {})
    never.add("queue", PARENT[:-2] + "00", now, now, {})
    kept = never.begin("chat m", PARENT, now)  # a client that sends a trace has decided
    assert kept is not None
    kept.end({})
    never.close()
    tracer.close()
    assert [span.name for span in collector.spans] == ["chat m"]


def test_the_standard_variables_count(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_TRACES_SAMPLER": "always_off",
        "OTEL_SERVICE_NAME": "mine",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert start("", environ=variables).begin("chat m", "", time.monotonic()) is None
    monkeypatch.delenv("OTEL_TRACES_SAMPLER")
    del variables["OTEL_TRACES_SAMPLER"]
    tracer = start("", environ=variables)
    tracer.add("queue", PARENT, 0.0, 1.0, {})
    tracer.close()
    assert [span.service for span in collector.spans] == ["mine"]


@pytest.mark.perf
def test_a_span_takes_less_than_a_millisecond_while_the_collector_hangs(collector: Collector) -> None:
    """On the thread's own clock, so that a busy machine matters less."""
    collector.answering.clear()
    tracer = start(collector.url)
    spent = time.thread_time()
    for _ in range(5000):  # more than wait in the exporter's queue
        tracer.add("queue", PARENT, 0.0, 1.0, {"gen_ai.request.id": "r"})
    each = (time.thread_time() - spent) / 5000
    print(f"a span: {each * 1e6:.0f} us")
    assert each < 1e-3
    collector.answering.set()
    tracer.close()


def test_a_collector_that_hangs_delays_nothing(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call waits for the collector while it hangs, or this test would not end: it answers only at the end."""
    monkeypatch.setattr(tracing, "CLOSE_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")  # s; the exporter itself does not give up
    collector.answering.clear()
    tracer = start(collector.url)
    for _ in range(5000):  # more than wait in the exporter's queue
        tracer.add("queue", PARENT, 0.0, 1.0, {"gen_ai.request.id": "r"})
    collector.wait_for(lambda: collector.asked > 0)
    tracer.close()
    assert not collector.spans
    collector.answering.set()  # so that its thread ends before the collector does
    collector.wait_for(lambda: "last spans" not in {thread.name for thread in threading.enumerate()})


def test_a_collector_that_fails_is_a_line_in_the_log(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    collector.status = 400
    tracer = start(collector.url)
    with caplog.at_level(logging.WARNING):
        tracer.add("queue", PARENT, 0.0, 1.0, {})
        tracer.close()
    assert collector.asked == 1
    assert any("400" in record.getMessage() for record in caplog.records)
