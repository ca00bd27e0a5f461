"""The metrics table: parsed as Prometheus would, with bounded labels."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from engine.wire.bus import Fleet
from service.format import Piece
from service.telemetry import Meter, Telemetry
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
    telemetry.record_request("/v1/completions", 200)
    telemetry.record_request("/v1/completions", 200)
    telemetry.record_refusal("too_many")
    got = samples(telemetry)
    assert got["quire_requests_total", "/v1/completions 200"] == 2
    assert got["quire_refusals_total", "too_many"] == 1


def test_a_meter_records_one_request() -> None:
    telemetry = Telemetry("g")
    meter = Meter(telemetry, time.monotonic() - 2.0)
    meter.admit()
    meter.note(Piece(0, "", []))
    meter.note(Piece(0, "a", [1]))
    meter.note(Piece(0, "bcd", [2, 3, 4], finish="stop"))
    meter.close("/v1/completions", 200)
    got = samples(telemetry)
    assert got["quire_output_tokens_total", ""] == 4
    assert got["quire_time_to_first_token_seconds_count", ""] == 1
    assert 2.0 <= got["quire_time_to_first_token_seconds_sum", ""] < 3.0
    assert got["quire_inter_token_latency_seconds_count", ""] == 3
    assert 2.0 <= got["quire_request_latency_seconds_sum", ""] < 3.0
    Meter(telemetry, time.monotonic()).close("/v1/completions", 200)  # one that never got a token
    assert samples(telemetry)["quire_time_to_first_token_seconds_count", ""] == 1


def test_engines_come_and_go() -> None:
    telemetry = Telemetry("g")
    telemetry.record_fleet(Fleet([a_load("a", free_blocks=7), a_load("b")], queued=3, queued_tokens=30, time_ms=1))
    got = samples(telemetry)
    assert got["quire_engine_kv_blocks_free", "a tiny"] == 7
    assert got["quire_queue_tokens", ""] == 30
    telemetry.record_fleet(Fleet([a_load("b")], queued=0, queued_tokens=0, time_ms=1))
    got = samples(telemetry)
    assert ("quire_engine_kv_blocks_free", "a tiny") not in got
    assert ("quire_engine_kv_blocks_free", "b tiny") in got
