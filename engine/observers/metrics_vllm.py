"""Metrics under vLLM's names, for dashboards and autoscalers made for vLLM."""

from __future__ import annotations

from collections import Counter

from quire.engine.common import histograms
from quire.engine.observers.measurements import Measurements
from quire.engine.observers.metric_row import Row, counter, gauge, histogram, info


def ended_as_vllm(t: Measurements) -> Counter[str]:
    """Return the counts of ended sequences by vLLM's finish reasons."""
    reasons = {"stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort", "error": "error"}
    found: Counter[str] = Counter(dict.fromkeys(reasons.values(), 0))
    for reason, count in dict(t.requests.ended).items():
        if reason in reasons:
            found[reasons[reason]] += count
    return found


VLLM_TABLE: tuple[Row, ...] = (
    gauge("vllm:num_requests_running", "Sequences in the batch.", lambda t: t.load.running),
    gauge(
        "vllm:num_requests_waiting",
        # Autoscalers sum this metric over engines, and expect the total of all waiting requests.
        "Sequences that wait in this engine, plus its share of the requests in the shared queue.",
        lambda t: t.load.waiting + t.queue_share,
    ),
    gauge(
        "vllm:num_requests_waiting_by_reason",
        "Waiting sequences by reason: capacity, or deferred while a grammar is compiled.",
        lambda t: {"capacity": max(0.0, t.load.waiting - t.gated + t.queue_share), "deferred": t.gated},
        "reason",
    ),
    gauge("vllm:kv_cache_usage_perc", "KV-cache utilisation, 0 to 1.", lambda t: t.used_blocks / t.load.total_blocks),
    gauge(
        "vllm:gpu_cache_usage_perc",  # name of vllm:kv_cache_usage_perc until vLLM 0.9
        "KV-cache utilisation, 0 to 1.",
        lambda t: t.used_blocks / t.load.total_blocks,
    ),
    gauge("vllm:num_requests_swapped", "Waiting sequences in host memory.", lambda t: t.load.swapped),
    info(
        "vllm:cache_config_info",
        "Size of the KV cache in the labels; the value is 1.",
        lambda t: {
            "model_name": t.model,
            "engine": t.engine,
            "block_size": str(t.load.block_size),
            "num_gpu_blocks": str(t.load.total_blocks),
        },
    ),
    counter("vllm:prompt_tokens", "Prompt tokens of started requests.", lambda t: t.totals.prompt_tokens),
    counter(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens of started requests, by where their KV cache came from.",
        lambda t: {
            "local_compute": t.totals.prompt_tokens - t.totals.cached_prompt_tokens,
            "local_cache_hit": t.totals.cached_prompt_tokens,
            "external_kv_transfer": 0,
        },
        "source",
    ),
    counter(
        "vllm:prompt_tokens_cached",
        "Prompt tokens of started requests that the prefix cache had.",
        lambda t: t.totals.cached_prompt_tokens,
    ),
    counter("vllm:generation_tokens", "Output tokens.", lambda t: t.totals.generated_tokens),
    counter("vllm:prefix_cache_queries", "Prompt tokens of started requests.", lambda t: t.totals.prompt_tokens),
    counter(
        "vllm:prefix_cache_hits",
        "Prompt tokens of started requests that the prefix cache had.",
        lambda t: t.totals.cached_prompt_tokens,
    ),
    counter("vllm:num_preemptions", "Preemptions of sequences.", lambda t: t.totals.preemptions),
    counter("vllm:request_success", "Sequences that ended, by reason.", ended_as_vllm, "finished_reason"),
    histogram(
        "vllm:request_queue_time_seconds",
        "Seconds from queueing a request to its start in the batch.",
        lambda t: t.requests.queue_s,
        bounds=histograms.REQUEST_S,
    ),
    histogram(
        "vllm:request_prefill_time_seconds",
        "Seconds from a request's start in the batch to its first token.",
        lambda t: t.requests.prefill_s,
        bounds=histograms.REQUEST_S,
    ),
    histogram(
        "vllm:request_decode_time_seconds",
        "Seconds from a sequence's first token to its end.",
        lambda t: t.requests.decode_s,
        bounds=histograms.REQUEST_S,
    ),
    histogram(
        "vllm:request_inference_time_seconds",
        "Seconds from a request's start in the batch to a sequence's end.",
        lambda t: t.requests.inference_s,
        bounds=histograms.REQUEST_S,
    ),
    histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", lambda t: t.requests.prompt_tokens),
    histogram("vllm:request_generation_tokens", "Output tokens of a sequence.", lambda t: t.requests.output_tokens),
    histogram(
        "vllm:request_max_num_generation_tokens",
        "Output tokens of a request's longest sequence.",
        lambda t: t.requests.longest_tokens,
    ),
    histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that the prefix cache did not have.",
        lambda t: t.requests.computed_tokens,
    ),
    counter(
        "vllm:spec_decode_num_draft_tokens",
        "Drafts that steps computed.",
        lambda t: sum(t.totals.drafted_tokens.values()),
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Drafts that equalled what was sampled.",
        lambda t: sum(t.totals.accepted_drafts.values()),
    ),
    histogram(
        "vllm:request_num_preemptions", "Preemptions of a request's sequences.", lambda t: t.requests.preemptions
    ),
    histogram(
        "vllm:iteration_tokens_total",
        "Output tokens of a step, and prompt tokens, cached ones included, of requests whose first token it gave.",
        lambda t: t.iterations.tokens,
    ),
)
