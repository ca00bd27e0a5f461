"""The metrics table: parsed as Prometheus would, with bounded labels; the span and the line in the log of a request."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import Gauge
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.common import logs
from quire.engine.common.tracing import Tracing
from quire.engine.wire.clock import steady_ms
from quire.engine.wire.records import Fleet, Lane, LaneQueue, Usage
from quire.service.api import api
from quire.service.api.tenants import OverQuota
from quire.service.api.valid_request import ValidRequest
from quire.service.common.metrics import REFUSALS, REQUESTS, Telemetry
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery.queue_updates import Waiting
from quire.service.delivery.usage_ledger import record_usage
from quire.service.http.meter import Meter
from quire.service.output.choice_delta import ChoiceDelta
from tests.service.fakes import a_load


def samples(telemetry: Telemetry) -> dict[tuple[str, str], float]:
    """(name, value of the label that is not `gateway` or a bucket) -> value."""
    found = {}
    for family in text_string_to_metric_families(telemetry.expose().decode()):
        for sample in family.samples:
            assert sample.labels["gateway"] == "g"
            rest = [value for name, value in sorted(sample.labels.items()) if name not in ("gateway", "le")]
            found[sample.name, " ".join(rest)] = sample.value
    return found


def test_requests_and_refusals_are_counted() -> None:
    telemetry = Telemetry("g")
    telemetry.count(REQUESTS, 1, "/v1/completions", "200")
    telemetry.count(REQUESTS, 1, "/v1/completions", "200")
    telemetry.count(REFUSALS, 1, "too_many")
    got = samples(telemetry)
    assert got["quire_requests_total", "/v1/completions 200"] == 2
    assert got["quire_refusals_total", "too_many"] == 1


def test_refusals_for_want_of_room_have_vllms_name() -> None:
    telemetry = Telemetry("g", model="tiny", vllm=True)
    for refusal in (
        Refusal(429, "rate_limit_exceeded", "full", retry_after_s=1.0),
        Refusal(429, "rate_limit_exceeded", "full", retry_after_s=1.0),
        Refusal(503, "no_engine", "none"),
        Refusal(400, "invalid_value", "no"),  # not for lack of capacity
    ):
        Meter(telemetry, time.monotonic()).fail(refusal)
    families = {one.name: one for one in text_string_to_metric_families(telemetry.expose().decode())}
    found = families["vllm:admission_rejections"].samples
    assert {one.name for one in found} == {"vllm:admission_rejections_total"}
    assert {(one.labels["engine"], one.labels["model_name"]) for one in found} == {("g", "tiny")}
    assert {one.labels["reason"]: one.value for one in found} == {"rate_limit_exceeded": 2, "no_engine": 1}


def test_a_meter_records_one_request() -> None:
    telemetry = Telemetry("g")
    sent = time.monotonic() - 2.0
    meter = Meter(telemetry, sent)
    meter.admit()
    meter.record_delta(ChoiceDelta(0, "", []))
    meter.record_delta(ChoiceDelta(0, "a", [1]))
    meter.record_delta(ChoiceDelta(0, "bcd", [2, 3, 4], finish="stop"))
    meter.close("/v1/completions", 200)
    most = time.monotonic() - sent
    got = samples(telemetry)
    assert got["quire_output_tokens_total", ""] == 4
    assert got["quire_time_to_first_token_seconds_count", ""] == 1
    assert 2.0 <= got["quire_time_to_first_token_seconds_sum", ""] <= most
    assert got["quire_inter_token_latency_seconds_count", ""] == 3
    assert 2.0 <= got["quire_request_latency_seconds_sum", ""] <= most
    Meter(telemetry, time.monotonic()).close("/v1/completions", 200)  # one that never got a token
    assert samples(telemetry)["quire_time_to_first_token_seconds_count", ""] == 1


def test_every_token_but_the_first_has_a_gap_however_they_arrive() -> None:
    counts = set()
    for cuts in ([1, 1, 1, 1, 1], [5], [3, 2], [1, 4], [2, 1, 2]):
        telemetry = Telemetry("g", model="tiny")
        meter = Meter(telemetry, 0.0)
        for cut in cuts:
            meter.record_delta(ChoiceDelta(0, "", [7] * cut))
        counts.add(samples(telemetry)["quire_inter_token_latency_seconds_count", ""])
        assert meter.seconds_per_token is not None
    assert counts == {4.0}


async def test_starts_are_counted_by_lane_and_by_whether_they_met_the_target() -> None:
    telemetry = Telemetry("g", target_s=2.0)
    cases: list[tuple[Lane, float, bool]] = [
        ("on_time", 1.0, True),
        ("on_time", 3.0, True),
        ("late", 9.0, True),
        ("late", 9.0, False),
    ]
    for lane, arrived_s, starts in cases:
        meter = Meter(telemetry, time.monotonic() - arrived_s)
        meter.admit(Waiting(lane, 0, None))
        if starts:
            meter.record_delta(ChoiceDelta(0, "a", [1]))
        meter.close("/v1/completions", 200)
    got = samples(telemetry)
    counts = {
        labels: got["quire_request_starts_total", labels]
        for name, labels in got
        if name == "quire_request_starts_total"
    }
    assert counts == {"on_time in_time": 1, "on_time late": 1, "late late": 1, "late never": 1}
    assert got["quire_admission_decisions_total", "admitted late"] == 2


@pytest.mark.parametrize(
    ("first_s", "gap_s", "status", "code", "expected"),
    [
        (1.0, 0.1, 200, "", (1, 0)),
        (3.0, 0.1, 200, "", (0, 1)),  # the first token is late
        (1.0, 0.3, 200, "", (0, 1)),  # the others are slow
        (1.0, 0.1, 200, "engine_error", (0, 1)),  # it broke off
        (1.0, 0.1, 499, "", (0, 0)),  # its client left
    ],
)
def test_goodput_is_what_was_answered_within_both_targets(
    first_s: float, gap_s: float, status: int, code: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    telemetry, now = Telemetry("g", target_s=2.0, itl_target_s=0.2), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    meter = Meter(telemetry, now)
    meter.admit()
    now += first_s
    meter.record_delta(ChoiceDelta(0, "a", [1]))
    for _ in range(5):
        now += gap_s
        meter.record_delta(ChoiceDelta(0, "b", [2]))
    if code:
        meter.fail(Refusal(500, code, "the engine failed"))
    meter.close("/v1/completions", status)
    got = samples(telemetry)
    assert (got["quire_goodput_requests_total", "met"], got["quire_goodput_requests_total", "missed"]) == expected


def test_what_has_no_room_misses_its_targets_and_what_is_invalid_has_none() -> None:
    telemetry = Telemetry("g")
    for refusal in (
        Refusal(429, "rate_limit_exceeded", "the queue is full"),
        Refusal(400, "invalid_value", "n is -1"),
        OverQuota(429, "rate_limit_exceeded", "60 requests a minute"),
    ):
        meter = Meter(telemetry, time.monotonic())
        meter.fail(refusal)
        meter.close("/v1/completions", refusal.status)
    Meter(telemetry, time.monotonic()).close("/health", 200)
    resumed = Meter(telemetry, time.monotonic())
    resumed.resume("cmpl-1", asked(), 1, "acme")  # counted where it began, as its client left
    resumed.close("/v1/completions", 200)
    got = samples(telemetry)
    assert (got["quire_goodput_requests_total", "met"], got["quire_goodput_requests_total", "missed"]) == (0, 1)


def test_engines_come_and_go() -> None:
    telemetry = Telemetry("g")
    on_time, late = LaneQueue(1, 10, 500), LaneQueue(2, 20, 9000)
    drafting = a_load("a", free_blocks=7, drafts={"own": (8, 5), "tenant": (3, 0)}, refused_drafts=2)
    telemetry.record_fleet(Fleet([drafting, a_load("b")], 3, 30, 1, on_time=on_time, late=late))
    got = samples(telemetry)
    counted = {name: value for name, value in got.items() if "draft" in name[0] and "created" not in name[0]}
    assert counted == {
        ("quire_engine_drafted_tokens", "a tiny own"): 8,
        ("quire_engine_drafted_tokens", "a tiny tenant"): 3,
        ("quire_engine_accepted_drafts", "a tiny own"): 5,
        ("quire_engine_accepted_drafts", "a tiny tenant"): 0,
        ("quire_engine_refused_drafts", "a tiny"): 2,
        ("quire_engine_refused_drafts", "b tiny"): 0,
    }
    assert got["quire_engine_kv_blocks_free", "a tiny"] == 7
    assert (got["quire_queue_requests", "on_time"], got["quire_queue_requests", "late"]) == (1, 2)
    assert (got["quire_queue_tokens", "on_time"], got["quire_queue_tokens", "late"]) == (10, 20)
    assert (got["quire_queue_oldest_seconds", "on_time"], got["quire_queue_oldest_seconds", "late"]) == (0.5, 9.0)
    telemetry.record_fleet(Fleet([a_load("b")], queued=0, queued_tokens=0, time_ms=1))
    got = samples(telemetry)
    assert not [name for name, labels in got if labels.startswith("a ")]
    assert ("quire_engine_kv_blocks_free", "b tiny") in got


def test_a_reading_of_many_engines_makes_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four readings a second, of 1,000 engines each: their series are made when the page is asked for."""
    telemetry, made = Telemetry("g"), 0
    labels = Gauge.labels

    def count(gauge: Gauge, *values: str) -> Gauge:
        nonlocal made
        made += 1
        return labels(gauge, *values)

    monkeypatch.setattr(Gauge, "labels", count)
    counts = set()
    for engines in (1, 50):
        made = 0
        telemetry.record_fleet(Fleet([a_load(f"e{at}") for at in range(engines)], 3, 30, 1))
        counts.add(made)
    assert len(counts) == 1
    assert ("quire_engine_info", f"e49 {'f' * 16} tiny") in samples(telemetry)


def test_the_age_of_an_engine_is_that_of_its_last_exchange() -> None:
    telemetry, now_ms = Telemetry("g"), steady_ms()
    loads = [a_load("a", time_ms=now_ms - 3_600_000), a_load("b", time_ms=now_ms - 3_600_000)]
    telemetry.record_fleet(Fleet(loads, 0, 0, now_ms, exchanged_ms={"a": now_ms, "gone": now_ms}))
    got = samples(telemetry)
    assert got["quire_engine_age_seconds", "a tiny"] < 3600 <= got["quire_engine_age_seconds", "b tiny"]
    telemetry.record_fleet(Fleet([], 0, 0, now_ms))
    assert samples(telemetry)["quire_engine_leases_lost_total", ""] == 2


async def test_the_page_is_made_on_a_thread() -> None:
    """It takes 200 ms at 1,000 engines."""
    telemetry, threads = Telemetry("g"), set[int]()
    collect = telemetry.collect

    def noted() -> Iterator[Any]:
        threads.add(threading.get_ident())
        return collect()

    telemetry.collect = noted  # type: ignore[method-assign]
    telemetry.record_fleet(Fleet([a_load("a")], 0, 0, 1))
    assert b"quire_engine_info" in await telemetry.page()
    assert threads
    assert threading.get_ident() not in threads


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def asked(**fields: Any) -> ValidRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hush"}], "max_tokens": 7, "seed": 3, **fields}
    return api.parse_chat(json.dumps(body).encode(), GatewayConfig(), "m", 60.0)


class Spans:
    """A gateway's telemetry whose spans stay here."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))

    def telemetry(self, *, trace_prompts: bool = False) -> Telemetry:
        return Telemetry("g", model="m", tracing=Tracing(self.provider), trace_prompts=trace_prompts)

    def take(self) -> dict[str, dict[str, Any]]:
        """name -> attributes, in the order they ended."""
        found = {span.name: dict(span.attributes or {}) for span in self._kept.get_finished_spans()}
        self._kept.clear()
        return found


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    yield made
    made.provider.shutdown()


Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """What was logged so far."""
    with caplog.at_level(logging.INFO):
        yield lambda: [{"logger": one.name, **logs.fields(one)} for one in caplog.records]


def test_an_answer_is_one_span_and_one_line(spans: Spans, lines: Lines) -> None:
    meter = Meter(spans.telemetry(), time.monotonic() - 1.0, "mine-1")
    context, state = meter.describe("chatcmpl-1", asked(), "acme", 12, 7, PARENT, "rojo=1")
    assert context.split("-")[1] == PARENT.split("-")[1]
    assert context != PARENT
    assert state == "rojo=1"
    meter.admit()
    meter.record_delta(ChoiceDelta(0, "", [1], cached_tokens=8))
    meter.record_delta(ChoiceDelta(0, "an answer", [2, 3], finish="stop"))
    meter.close("/v1/chat/completions", 200)
    found = spans.take()
    assert list(found) == ["admission", "chat m"]
    said = found["chat m"]
    assert said.pop("gen_ai.response.time_to_first_chunk") >= 1.0
    assert said == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.stream": False,
        "gen_ai.request.seed": 3,
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "http.response.status_code": 200,
        "quire.request_id": "mine-1",
        "quire.tenant": "acme",
    }
    (line,) = lines()
    assert 1.0 <= line.pop("first_token_s") <= line.pop("seconds") < 60
    assert line.pop("token_s") >= 0
    assert line == {
        "logger": "quire.request",
        "request_id": "mine-1",
        "endpoint": "/v1/chat/completions",
        "status": 200,
        "outcome": "ok",
        "id": "chatcmpl-1",
        "tenant": "acme",
        "prompt_tokens": 12,
        "cached_tokens": 8,
        "output_tokens": 3,
        "finish": "stop",
        "trace_id": PARENT.split("-")[1],
        "tracestate": "rojo=1",
    }


def test_a_refusal_fails_both_of_its_spans(spans: Spans, lines: Lines) -> None:
    meter = Meter(spans.telemetry(), time.monotonic(), "mine-1")
    meter.describe("chatcmpl-1", asked(), "", 12, 7)
    meter.fail(Refusal(429, "rate_limit_exceeded", "overloaded", retry_after_s=1.5))
    meter.close("/v1/chat/completions", 429)
    found = spans.take()
    assert found["admission"] == {"error.type": "rate_limit_exceeded"}
    assert found["chat m"]["error.type"] == "rate_limit_exceeded"
    (line,) = lines()
    assert (line["outcome"], line["error"], line["retry_after_s"]) == ("refused", "rate_limit_exceeded", 1.5)
    assert line["tenant"] == "default"
    assert "first_token_s" not in line


def test_what_nobody_understood_has_a_line_and_probes_have_none(lines: Lines) -> None:
    telemetry = Telemetry("g")
    meter = Meter(telemetry, time.monotonic(), "mine-1")
    meter.fail(Refusal(400, "invalid_json", "no"))
    meter.close("/v1/completions", 400)
    Meter(telemetry, time.monotonic(), "probe").close("/health", 200)
    (line,) = lines()
    assert (line["request_id"], line["outcome"], line["error"]) == ("mine-1", "invalid", "invalid_json")
    assert "id" not in line
    record_usage(telemetry, Usage("cmpl-1.0", "acme", generated=9, delivered=7, new=7))
    usage = {"id": "cmpl-1.0", "tenant": "acme", "generated_tokens": 9, "delivered_tokens": 7}
    assert lines()[1:] == [{"logger": "quire.usage", **usage}]


@pytest.mark.parametrize("opted_in", [False, True])
def test_text_is_in_traces_only_where_somebody_wants_it(opted_in: bool, spans: Spans, lines: Lines) -> None:
    meter = Meter(spans.telemetry(trace_prompts=opted_in), time.monotonic())
    meter.describe("chatcmpl-1", asked(n=2), "", 12, 7)
    meter.admit()
    for piece in (ChoiceDelta(1, "b", [1]), ChoiceDelta(0, "a", [1]), ChoiceDelta(1, "bb", [2], finish="stop")):
        meter.record_delta(piece)
    meter.close("/v1/chat/completions", 200)
    said = spans.take()["chat m"]
    assert "hush" not in str(lines())
    if not opted_in:
        assert not {"gen_ai.input.messages", "gen_ai.output.messages"} & said.keys()
        assert "hush" not in str(said)
        return

    def message(role: str, content: str) -> dict[str, Any]:
        return {"role": role, "parts": [{"type": "text", "content": content}]}

    assert json.loads(said["gen_ai.input.messages"]) == [message("user", "hush")]
    assert json.loads(said["gen_ai.output.messages"]) == [message("assistant", "a"), message("assistant", "bbb")]


def test_a_client_that_comes_back_goes_on_in_its_first_trace(spans: Spans, lines: Lines) -> None:
    telemetry = spans.telemetry()
    meter = Meter(telemetry, time.monotonic(), "mine-2")
    meter.describe("chatcmpl-2", asked(), "acme", 12, 7)  # under an idempotency key that another one had before
    now = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    meter.resume("chatcmpl-1", asked(), 1, "acme", (PARENT, "rojo=1"), (now, ""))
    meter.record_delta(ChoiceDelta(0, "", [2, 3], finish="length"))
    meter.close("/v1/chat/completions", 200)
    found = spans.take()
    assert list(found) == ["resume m"]
    assert found["resume m"]["gen_ai.usage.output_tokens"] == 2
    assert not {"gen_ai.usage.input_tokens", "gen_ai.request.max_tokens"} & found["resume m"].keys()
    (line,) = lines()
    assert (line["id"], line["resumed"], line["trace_id"]) == ("chatcmpl-1", True, PARENT.split("-")[1])
    assert line["tracestate"] == "rojo=1"
    got = samples(telemetry)
    assert got["quire_comebacks_total", ""] == 1
    assert got["quire_tenant_tokens_total", "output acme"] == 2
    assert got["quire_tenant_tokens_total", "prompt acme"] == 0
