"""Metrics pages of the supported servers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.loadtest.scrape import sample
from quire.loadtest.stats import Sample

FILLED = """quire_engine_kv_blocks{engine="e0",gateway="g"} 100.0
quire_engine_kv_blocks{engine="e1",gateway="g"} 100.0
quire_engine_kv_blocks_free{engine="e0",gateway="g"} 50.0
quire_engine_kv_blocks_free{engine="e1",gateway="g"} 100.0
quire_engine_kv_static_blocks{engine="e0",gateway="g"} 125.0
quire_engine_kv_static_blocks{engine="e1",gateway="g"} 0.0
quire_engine_kv_slots_filled{engine="e0",gateway="g"} 0.98
quire_engine_kv_slots_filled{engine="e1",gateway="g"} 0.0
"""
QUIRE = """# HELP quire_engine_kv_blocks KV blocks in the pool.
# TYPE quire_engine_kv_blocks gauge
quire_engine_kv_blocks{engine="e0",gateway="g",model_name="a b } c"} 100.0
quire_engine_kv_blocks{engine="e1",gateway="g",model_name="m"} 300.0
quire_engine_kv_blocks_free{engine="e0",gateway="g",model_name="m"} 50.0
quire_engine_kv_blocks_free{engine="e1",gateway="g",model_name="m"} 50.0
quire_engine_kv_blocks_cached{engine="e1",gateway="g",model_name="m"} 7.0
quire_engine_requests_running{engine="e0",gateway="g",model_name="m"} 3.0
quire_engine_requests_running{engine="e1",gateway="g",model_name="m"} 4.0
quire_engine_requests_waiting{engine="e0",gateway="g",model_name="m"} 2.0
quire_queue_requests{gateway="g"} 5.0
quire_engine_preemptions{engine="e0",gateway="g",model_name="m"} 1.0
quire_engine_recomputed_tokens{engine="e0",gateway="g",model_name="m"} 1.5e+03
"""
VLLM = """vllm:num_requests_running{engine="0",model_name="m"} 11.0
vllm:num_requests_waiting{engine="0",model_name="m"} 6.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 6.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.75
vllm:num_preemptions_total{engine="0",model_name="m"} 582.0 1700000000000
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
"""
SGLANG = 'sglang:num_running_reqs{m="x"} 2\nsglang:num_queue_reqs 3\nsglang:token_usage{m="x"} 0.5\n'


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (QUIRE, Sample(1.0, 0.75, 7.0, 7.0, 1.0, 1500.0)),
        (FILLED, Sample(1.0, 0.25, filled=0.98, eta=0.4)),  # an engine that holds no block has no filled slots
        (VLLM, Sample(1.0, 0.75, 11.0, 6.0, 582.0)),
        (SGLANG, Sample(1.0, 0.5, 2.0, 3.0)),
        ("", Sample(1.0)),
        ("quire_queue_requests 5\n", Sample(1.0)),  # a gateway before any engine has reported to it
    ],
)
def test_pages(page: str, expected: Sample) -> None:
    assert sample(page, 1.0) == expected


@given(st.text() | st.sampled_from(["vllm:kv_cache_usage_perc{", "quire_engine_kv_blocks", "sglang:token_usage x"]))
def test_a_line_that_cannot_be_read_is_left_out(line: str) -> None:
    assert sample(f"{line}\n{VLLM}", 0.0).running == 11.0
