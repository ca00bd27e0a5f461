"""The engine's metrics in one table.  A new metric is one row of TABLE, and a measurement that the row reads.

    TurnRecord --Measurements.observe--> plain values <--Row.read-- Telemetry.collect <-- a scrape

Only this module and metrics_vllm.py name metrics of `engine`; labels have closed sets of values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.engine.common import histograms
from quire.engine.common.tracing import Tracing
from quire.engine.observers.measurements import NO_LOAD, Measurements
from quire.engine.observers.metric_row import Row, counter, gauge, histogram, info
from quire.engine.observers.metrics_vllm import VLLM_TABLE


def forecast_outputs(t: Measurements, column: int) -> dict[str, int]:
    """Return a count of the forecast accuracy by quantile; `column` 1: outputs compared, 2: outputs within."""
    return {f"{row[0]:g}": int(row[column]) for row in t.load.length_calibration}


TABLE: tuple[Row, ...] = (
    info(
        "quire_build_info", "Version of Quire and Python in the labels; the value is 1.", lambda t: histograms.build()
    ),
    info(
        "quire_model_info",
        "Model that this engine serves; the value is 1.  A new fingerprint is a deploy: other weights, dtype or "
        "configuration.",
        lambda t: {"engine": t.engine, "model_name": t.model, **t.info},
    ),
    # memory
    gauge(
        "quire_kv_blocks",
        "KV blocks by state: used by sequences, cached (idle, with a reusable prefix), or free.",
        lambda t: {
            "used": t.used_blocks,
            "cached": t.load.cached_blocks,
            "free": t.load.free_blocks - t.load.cached_blocks,
        },
        "state",
    ),
    gauge("quire_kv_pool_blocks", "KV blocks in the pool.", lambda t: t.load.total_blocks),
    gauge("quire_kv_block_tokens", "Tokens in a KV block.", lambda t: t.load.block_size),
    gauge("quire_kv_utilization", "KV-cache utilisation, 0 to 1.", lambda t: t.used_blocks / t.load.total_blocks),
    counter(
        "quire_idle_pool_seconds",
        "Seconds during which requests waited in the shared queue or in this engine, weighted by the unused fraction "
        "of the KV cache.  An empty pool adds 1 per second.",
        lambda t: t.idle_pool_s,
    ),
    gauge(
        "quire_kv_predicted_peak_blocks",
        "Predicted peak of the KV blocks that the running sequences will hold together, if no other sequence starts.",
        lambda t: t.load.predicted_peak_blocks,
    ),
    gauge("quire_kv_wasted_slots", "Token slots in used KV blocks that hold no token.", lambda t: t.wasted_slots),
    gauge(
        "quire_kv_static_blocks",
        "KV blocks that static allocation would reserve for the running and paused sequences: for the prompt and "
        "max_tokens of each.  Used blocks divided by these: the fraction that paging needs.",
        lambda t: t.load.static_blocks,
    ),
    gauge(
        "quire_kv_shared_fraction",
        "Fraction of the entries of all block tables, 0 to 1, that need no KV block of their own: another entry names "
        "the same block.  Forks, beams and cached prefixes share blocks.",
        lambda t: t.kv_use.shared_fraction,
    ),
    gauge(
        "quire_kv_held_bytes",
        "Bytes of keys and values that sequences hold, by group of layers: full, and each sliding window.",
        lambda t: t.kv_use.held,
        "group",
    ),
    gauge(
        "quire_kv_cached_bytes",
        "Bytes of cached prefixes that no sequence holds, by group of layers: full, and each sliding window.",
        lambda t: t.kv_use.cached,
        "group",
    ),
    counter(
        "quire_kv_blocks_released", "KV blocks released by sequences that ended.", lambda t: t.totals.released_blocks
    ),
    counter("quire_kv_blocks_copied", "KV blocks copied on write, for forks.", lambda t: t.totals.copied_blocks),
    # sequences
    gauge(
        "quire_sequences",
        "Sequences in this engine by state: running in the batch, paused (with KV blocks, without a slot), waiting "
        "(not started, or preempted), or swapped to host memory.",
        lambda t: {
            "running": t.load.running,
            "paused": t.load.paused,
            "waiting": t.load.waiting - t.load.swapped,
            "swapped": t.load.swapped,
        },
        "state",
    ),
    gauge("quire_waiting_tokens", "Tokens that the waiting sequences must compute.", lambda t: t.load.waiting_tokens),
    gauge(
        "quire_waiting_oldest_seconds",
        "Seconds since the longest-waiting request of this engine was queued; 0 if none waits.",
        lambda t: t.requests.oldest_wait_s(time.monotonic()),
    ),
    gauge("quire_draining", "1 while this engine takes no new requests, else 0.", lambda t: t.load.draining),
    counter("quire_requests_claimed", "Requests claimed from the shared queue.", lambda t: t.requests.accepted),
    counter("quire_resumes", "Claimed requests that an earlier engine had begun.", lambda t: t.resumes),
    counter(
        "quire_claims",
        "Requests claimed, by prefix: held: this engine had cached its beginning; waited: it had not, and the request "
        "was passed over before; none: neither.",
        lambda t: t.claims,
        "prefix",
    ),
    counter("quire_sequences_ended", "Sequences that ended, by reason.", lambda t: dict(t.requests.ended), "reason"),
    # tokens
    counter("quire_prefix_query_tokens", "Prompt tokens of started requests.", lambda t: t.totals.prompt_tokens),
    counter(
        "quire_prefix_hit_tokens",
        "Prompt tokens of started requests that the prefix cache had.",
        lambda t: t.totals.cached_prompt_tokens,
    ),
    counter(
        "quire_prefix_cached_tokens",
        "Prompt tokens of started requests whose KV blocks were cached, by use: found: used by the request; no_state: "
        "computed again, because no checkpoint of the recurrent state existed at that position.",
        lambda t: {
            "found": t.totals.cached_prompt_tokens,
            "no_state": t.totals.blocks_cached_prompt_tokens - t.totals.cached_prompt_tokens,
        },
        "use",
    ),
    gauge(
        "quire_state_checkpoints",
        "Checkpoints of recurrent state that a prompt can begin with.",
        lambda t: t.totals.states.cached,
    ),
    counter(
        "quire_state_checkpoints_kept",
        "Checkpoints of recurrent state written since the start.",
        lambda t: t.totals.states.kept,
    ),
    counter(
        "quire_state_checkpoints_evicted",
        "Checkpoints of recurrent state overwritten because no state slot was free.",
        lambda t: t.totals.states.evicted,
    ),
    gauge(
        "quire_warmed_prefixes",
        "Hot prefixes computed at this engine's start, before it served requests.",
        lambda t: t.warm.prefixes,
    ),
    gauge("quire_warmed_tokens", "Tokens in the prefix cache after the warm-up.", lambda t: t.warm.tokens),
    gauge("quire_warmed_seconds", "Seconds that the prefix warm-up took.", lambda t: t.warm.seconds),
    gauge(
        "quire_start_seconds",
        "Seconds of each part of this engine's start; after a takeover also recompute, until every stream resumed.",
        lambda t: dict(t.start_s),
        "part",
    ),
    gauge(
        "quire_memory_bytes",
        "Bytes of device memory by use: weights, kv_cache, and on a GPU graphs_and_activations.",
        lambda t: t.memory,
        "part",
    ),
    gauge(
        "quire_start_takeover",
        "1 if this engine was a spare, activated after the death of another engine, else 0.",
        lambda t: t.takeover,
    ),
    counter(
        "quire_log_lines_dropped",
        "Lines dropped from stderr and from the request log: their reader or disk was too slow, "
        "had stopped or was full.",
        lambda t: {log: count() for log, count in t.dropped_lines.items()},
        "log",
    ),
    counter("quire_generated_tokens", "Output tokens.", lambda t: t.totals.generated_tokens),
    counter(
        "quire_forced_tokens",
        "Output tokens that a grammar forced, so that they were known before they were sampled.",
        lambda t: t.totals.forced_tokens,
    ),
    counter(
        "quire_jumped_tokens",
        "Forced tokens that were computed together with the token before them: steps saved.",
        lambda t: t.totals.jumped_tokens,
    ),
    counter(
        "quire_drafted_tokens",
        "Draft tokens of speculative decoding that steps verified, by source.",
        lambda t: t.totals.drafted_tokens,
        "source",
    ),
    counter(
        "quire_accepted_drafts",
        "Accepted draft tokens, which equalled the sampled tokens: steps saved, by source.",
        lambda t: t.totals.accepted_drafts,
        "source",
    ),
    counter(
        "quire_refused_drafts",
        "Draft tokens found and not verified, because their predicted speed-up was too small.",
        lambda t: t.totals.refused_drafts,
    ),
    gauge(
        "quire_grammars",
        "Compiled or waiting grammars, by whether a request holds them or they are kept for later ones.",
        lambda t: {"held": t.grammars().held, "kept": t.grammars().kept},
        "state",
    ),
    gauge(
        "quire_grammar_kept_bytes",
        "Estimated bytes of the compiled grammars that no request holds; --grammar-memory-mib limits them.",
        lambda t: t.grammars().kept_bytes,
    ),
    gauge(
        "quire_grammar_compiles_waiting",
        "Grammars that requests hold and whose compilation has not begun.",
        lambda t: t.grammars().waiting,
    ),
    counter(
        "quire_grammar_compiles",
        "Grammars compiled, by whether this model can follow them.",
        lambda t: {"compiled": t.grammars().compiled - t.grammars().faults, "fault": t.grammars().faults},
        "result",
    ),
    counter(
        "quire_grammar_evictions",
        "Compiled grammars evicted because the kept ones exceeded their memory.",
        lambda t: t.grammars().evicted,
    ),
    gauge(
        "quire_lora_slots",
        "Slots for LoRA adapters whose sequences run, by state: loaded or free.",
        lambda t: {"loaded": len(t.load.adapters), "free": t.lora.slots - len(t.load.adapters)},
        "state",
    ),
    gauge(
        "quire_lora_adapters",
        "LoRA adapters in host memory, by whether a request holds them or they are kept for later ones.",
        lambda t: {"held": t.lora.counts().held, "kept": t.lora.counts().kept},
        "state",
    ),
    gauge(
        "quire_lora_host_bytes",
        "Bytes of LoRA adapters in host memory, by the same states; --lora-memory-gib limits their sum.",
        lambda t: {"held": t.lora.counts().held_bytes, "kept": t.lora.counts().kept_bytes},
        "state",
    ),
    gauge(
        "quire_lora_waiting",
        "Sequences that wait until their LoRA adapter is in host memory.",
        lambda t: t.lora.waiting,
    ),
    counter(
        "quire_lora_loads",
        "LoRA adapters read into host memory, by whether they can be served.",
        lambda t: {"loaded": t.lora.counts().loads, "fault": t.lora.counts().faults},
        "result",
    ),
    counter(
        "quire_lora_load_seconds", "Seconds that the loads of LoRA adapters took.", lambda t: t.lora.counts().load_s
    ),
    counter(
        "quire_lora_evictions", "LoRA adapters evicted from host memory for others.", lambda t: t.lora.counts().evicted
    ),
    counter(
        "quire_lora_requests",
        'Requests with a LoRA adapter that ended, by its name; at most 32 names, all others as "(other)".',
        lambda t: dict(t.lora.use.requests),
        "adapter",
    ),
    counter(
        "quire_lora_tokens",
        "Output tokens of requests with a LoRA adapter, by its name as for quire_lora_requests.",
        lambda t: dict(t.lora.use.tokens),
        "adapter",
    ),
    counter(
        "quire_preemptions",
        "Preemptions: sequences whose slot and KV blocks were freed for others.",
        lambda t: t.totals.preemptions,
    ),
    counter("quire_yields", "Preemptions for a tenant that held less than its share.", lambda t: t.totals.yields),
    counter(
        "quire_recomputed_tokens", "Tokens computed again after a preemption.", lambda t: t.totals.recomputed_tokens
    ),
    counter(
        "quire_swap_preemptions",
        "Preemptions that copied KV blocks to host memory.",
        lambda t: t.totals.swap_preemptions,
    ),
    counter(
        "quire_swapped_bytes",
        "Bytes of KV blocks copied to host memory (out) and back (in).",
        lambda t: {"out": t.load.swapped_out_bytes, "in": t.load.swapped_in_bytes},
        "direction",
    ),
    # forecast
    counter(
        "quire_pauses",
        "Pauses: a sequence waited with its KV blocks, because the pool was full.",
        lambda t: t.load.pauses,
    ),
    counter(
        "quire_forecast_outputs",
        "Outputs that ended and for which a quantile of their length had been predicted.",
        lambda t: forecast_outputs(t, 1),
        "quantile",
    ),
    counter(
        "quire_forecast_outputs_within",
        "Outputs no longer than the predicted quantile; over quire_forecast_outputs this should equal the quantile.",
        lambda t: forecast_outputs(t, 2),
        "quantile",
    ),
    counter(
        "quire_forecast_peaks",
        "Predicted KV-block peaks that were compared with the actual peak.",
        lambda t: t.load.peaks_judged,
    ),
    counter(
        "quire_forecast_peaks_passed",
        "Predicted KV-block peaks that the actual peak exceeded.",
        lambda t: t.load.peaks_passed,
    ),
    counter(
        "quire_forecast_bound_blocks",
        "Sum of the predicted peaks that were compared, KV blocks.",
        lambda t: t.load.peaks_bound_blocks,
    ),
    counter(
        "quire_forecast_peak_blocks",
        "Sum of the actual peaks that were compared, KV blocks.",
        lambda t: t.load.peaks_blocks,
    ),
    # steps
    histogram(
        "quire_step_seconds",
        "Seconds from one step's results to the next one's, by kind: decode only, or mixed with prompts.",
        lambda t: t.steps.seconds,
        "kind",
    ),
    histogram("quire_step_tokens", "Tokens computed in a step.", lambda t: t.steps.tokens),
    counter(
        "quire_loop_seconds",
        "Seconds of the loop's thread by phase; execute includes waiting for the device.",
        lambda t: dict(t.phases_s),
        "phase",
    ),
    counter("quire_device_seconds", "Seconds in which the device ran kernels of steps.", lambda t: t.steps.device_s),
    counter(
        "quire_step_failures",
        "Steps that failed; every sequence in them was computed again.",
        lambda t: t.steps.failures,
    ),
    # block accounting
    counter("quire_audits", "Full checks of the block accounting.", lambda t: t.totals.audits),
    counter(
        "quire_audit_alarms",
        "Checks that found an error in the block accounting, by kind: always a bug.",
        lambda t: {"leak": t.totals.leaks, "double_free": t.totals.double_frees, "other": t.totals.other_alarms},
        "kind",
    ),
    # canary
    counter(
        "quire_canary_runs",
        "Runs of the canary, by outcome: equal to the first run, different, or failed.",
        lambda t: {"equal": t.canary.equal, "different": t.canary.different, "failed": t.canary.failed},
        "outcome",
    ),
    gauge(
        "quire_canary_difference",
        "Maximum difference of a log-probability between the canary's last run and its first, nats.",
        lambda t: t.canary.difference,
    ),
    counter("quire_canary_seconds", "Seconds that the canary's runs took.", lambda t: t.canary.seconds),
    # requests
    histogram(
        "quire_queue_seconds",
        "Seconds from queueing a request to its start in the batch.",
        lambda t: t.requests.queue_s,
    ),
    histogram(
        "quire_prefill_seconds",
        "Seconds from a request's start in the batch to its first token.",
        lambda t: t.requests.prefill_s,
    ),
    histogram(
        "quire_decode_seconds", "Seconds from a sequence's first token to its end.", lambda t: t.requests.decode_s
    ),
    histogram(
        "quire_inference_seconds",
        "Seconds from a request's start in the batch to a sequence's end.",
        lambda t: t.requests.inference_s,
    ),
    histogram(
        "quire_preempted_seconds",
        "Seconds from a sequence's preemption to its next slot in the batch.",
        lambda t: t.requests.preempted_s,
    ),
    # Redis
    histogram("quire_exchange_seconds", "Seconds of a sync with Redis, one round trip.", lambda t: t.sync_s),
    gauge(
        "quire_clock_skew_seconds",
        "Seconds by which this machine's clock is ahead of Redis' clock.",
        lambda t: t.clock_skew_s,
    ),
)


class Telemetry(Measurements, Collector):
    """All metrics of one engine."""

    def __init__(self, engine: str = "", *, vllm: bool = False, tracing: Tracing | None = None) -> None:
        """`vllm`: serve metrics under vLLM's names, too, for dashboards and autoscalers made for vLLM."""
        super().__init__(engine, tracing or Tracing())
        self._tables = TABLE + (VLLM_TABLE if vllm else ())
        self.registry = CollectorRegistry()  # contains only this collector
        self.registry.register(self)

    def expose(self) -> bytes:
        """Return all metrics in Prometheus text format 0.0.4."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        for row in self._tables if self.load is not NO_LOAD else TABLE[:1]:
            yield row.family(self)
