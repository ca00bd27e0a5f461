"""The engine's metrics: one table.  A new metric is one row of TABLE, and the number that the row reads.

    TurnRecord --Telemetry.observe--> plain numbers <--Row.read-- Telemetry.collect <-- a scrape

Nothing else in `engine` names a metric; labels have closed sets of values.  Observing a turn costs a few additions.
The rest happens when Prometheus scrapes, on the scraper's thread.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.engine.common import histograms, log_queue
from quire.engine.common.histograms import Tally
from quire.engine.common.tracing import Tracing
from quire.engine.config import EngineConfig
from quire.engine.core.limits import Totals
from quire.engine.executor.base import ModelInfo
from quire.engine.executor.grammar_store import GrammarCounts
from quire.engine.observers.adapter_use import LoraFigures
from quire.engine.observers.canary import CanaryCounts
from quire.engine.observers.iteration_tokens import IterationTokens
from quire.engine.observers.request_times import RequestTimes
from quire.engine.observers.turn_record import PHASES, TurnRecord
from quire.engine.wire.messages import EngineLoad

WASTE_S = 1.0  # shortest time between two counts of wasted slots, which look at every sequence
STALLED_S = 60.0  # a loop that has not turned for this long counts as dead; the longest step of a CPU takes seconds
NO_LOAD = EngineLoad("", "", "", 0, 0, 0, 1, 1, 0, 0, 0, 0, 0)  # load before the first turn


class WarmUp(NamedTuple):
    """What the prefix warm-up did."""

    prefixes: int = 0
    tokens: int = 0
    seconds: float = 0.0


class KVUse(NamedTuple):
    """How the KV cache is used."""

    shared_fraction: float
    held: dict[str, int]  # bytes by group of layers
    cached: dict[str, int]  # bytes by group of layers, held by no sequence


class StepTimes:
    """How long steps take, by whether they computed prompts."""

    def __init__(self) -> None:
        self._kinds: deque[str] = deque()  # kinds of the steps in flight
        self._last_result = 0.0  # monotonic seconds; 0: the next result does not follow it
        self.seconds = {"decode": Tally(histograms.STEP_S), "mixed": Tally(histograms.STEP_S)}
        self.tokens = Tally(histograms.TOKENS)
        self.failures = 0
        self.device_s = 0.0

    def observe(self, record: TurnRecord) -> None:
        if record.plan is not None:
            slices = record.plan.slices
            self._kinds.append("mixed" if slices else "decode")
            tokens = sum(len(piece.token_ids) for piece in slices)
            others = record.running - len(slices) - len(record.plan.forks)  # a fork samples from its leader's logits
            self.tokens.add(others + tokens)
        if record.failed:
            self._kinds.clear()
            self.failures += 1
            self._last_result = 0.0
        if record.result is not None:
            kind, now = self._kinds.popleft(), record.marks[PHASES.index("execute") + 1]
            if self._last_result:
                self.seconds[kind].add(now - self._last_result)
            self._last_result = now
            self.device_s += record.result.device_s
        if record.idle:
            self._last_result = 0.0


class Telemetry(Collector):
    """All metrics of one engine.  The loop's thread observes, the bus thread writes its own few, any thread scrapes."""

    def __init__(self, engine: str = "", *, vllm: bool = False, tracing: Tracing | None = None) -> None:
        """`vllm`: also serve what vLLM serves under vLLM's names, for dashboards and autoscalers made for it."""
        self.engine, self.model = engine, ""
        self.info: dict[str, str] = {}  # labels of the model
        self.requests = RequestTimes(engine, tracing or Tracing())
        self.steps = StepTimes()
        self.iterations = IterationTokens()
        self.gated = 0  # sequences that wait for a grammar or an adapter
        self.lora = LoraFigures()
        self.load = NO_LOAD
        self.totals = Totals()
        self.canary = CanaryCounts()
        self.grammars: Callable[[], GrammarCounts] = GrammarCounts
        self.wasted_slots, self._wasted_at = 0, 0.0
        self.kv_use = KVUse(0.0, {}, {})
        self.warming = False  # set from outside: the engine computes hot prefixes and serves no request yet
        self.warm = WarmUp()
        self.start_s: dict[str, float] = {}  # seconds of this start, by part
        self.takeover = False
        self.memory: dict[str, int] = {}  # bytes, by part
        self.phases_s = dict.fromkeys(PHASES, 0.0)
        self.exchange_s = Tally(histograms.ROUND_TRIP_S)
        self.queue_share = 0.0
        self.idle_pool_s, self._exchanged = 0.0, time.monotonic()
        self.resumes = 0
        self.claims = dict.fromkeys(("held", "waited", "none"), 0)  # claims by Claim.reason
        self.clock_skew_s = 0.0  # set by the bus thread
        self._turned = time.monotonic()
        self.dropped_lines: dict[str, Callable[[], int]] = {"stderr": log_queue.dropped_lines}  # counters by log
        self._tables = TABLE + (VLLM_TABLE if vllm else ())
        self.registry = CollectorRegistry()  # has this collector only
        self.registry.register(self)

    def describe_model(self, info: ModelInfo, config: EngineConfig) -> None:
        """Take over the labels of the loaded model.  From now on the loop is due to turn."""
        self._turned = time.monotonic()
        self.model, self.lora.slots = info.name, config.lora_slots if info.adapters else 0
        self.info = {
            "fingerprint": info.fingerprint[:16],
            "dtype": config.dtype,
            "kv_dtype": config.kv_dtype,
            "block_size": str(config.block_size),
            "max_model_len": str(info.max_model_len),
        }

    def warmed(self, prefixes: int, tokens: int, seconds: float) -> None:
        """Take over what the prefix warm-up did."""
        self.warm = WarmUp(prefixes, tokens, seconds)

    def started(self, parts: Mapping[str, float], *, takeover: bool, memory: Mapping[str, int]) -> None:
        """Take over the seconds of each part of the start, whether this engine was a spare, and its memory in bytes."""
        self._turned = time.monotonic()
        self.start_s, self.takeover, self.memory = dict(parts), takeover, dict(memory)

    def observe(self, record: TurnRecord) -> None:
        self.requests.observe(record)
        self.steps.observe(record)
        assert record.load is not None
        self.load, self.totals, self.canary = record.load, record.totals, record.canary
        self.iterations.observe(self.requests.prefilled_tokens, record.totals.generated_tokens)
        self.gated = record.gated
        self.lora.observe(record)
        self.grammars = record.grammar_counts
        marks, phases = record.marks, self.phases_s
        for i, phase in enumerate(PHASES):
            phases[phase] += marks[i + 1] - marks[i]
        self._turned = now = marks[-1]
        if now - self._wasted_at >= WASTE_S:
            self.wasted_slots, self._wasted_at = record.count_wasted_slots(), now
            self.kv_use = KVUse(record.measure_sharing(), *record.group_bytes())
        if record.resumed_s and self.takeover:
            self.start_s.setdefault("recompute", record.resumed_s)

    def exchanged(self, seconds: float, queue_share: float, resumed: int) -> None:
        """Record one sync with Redis, on the bus thread.

        `queue_share`: requests that wait in the queue, over the engines that share it.  `resumed`: claimed requests
        that an earlier engine began."""
        now = time.monotonic()
        if self.queue_share or self.load.waiting:  # since the last sync
            self.idle_pool_s += (now - self._exchanged) * self.load.free_blocks / self.load.total_blocks
        self._exchanged = now
        self.exchange_s.add(seconds)
        self.resumes += resumed
        self.queue_share = queue_share

    def claimed(self, reasons: Iterable[str]) -> None:
        """Count claimed requests, on the bus thread.  `reasons`: see Claim.reason."""
        for reason in reasons:
            self.claims[reason] += 1

    @property
    def alive(self) -> bool:
        """Whether the loop turns."""
        return time.monotonic() - self._turned < STALLED_S

    def expose(self) -> bytes:
        """Return the page in Prometheus text format 0.0.4."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        for row in self._tables if self.load is not NO_LOAD else TABLE[:1]:
            yield row.family(self)


Kind = Literal["gauge", "counter", "histogram", "info"]


class Row(NamedTuple):
    """One metric."""

    name: str  # a counter's has no _total
    kind: Kind
    help: str
    read: Callable[[Telemetry], Any]  # a number or Tally; a dict of them by value of `label`; info: labels and values
    label: str = ""  # label besides engine and model_name
    bounds: tuple[float, ...] = ()  # only of a histogram: the bounds shown, a subset of its own

    def family(self, telemetry: Telemetry) -> Metric:
        """Return the metric with its present values."""
        value = self.read(telemetry)
        if self.kind == "info":
            info = GaugeMetricFamily(self.name, self.help, labels=list(value))
            info.add_metric(list(value.values()), 1.0)
            return info
        labels, values = ["engine", "model_name"], [telemetry.engine, telemetry.model]
        if self.name.startswith("vllm:"):
            labels, values = labels[::-1], values[::-1]
        labels += [self.label] if self.label else []
        series = [([*values, key], one) for key, one in value.items()] if self.label else [(values, value)]
        if self.kind == "histogram":
            return histograms.histogram(self.name, self.help, labels, series, self.bounds)
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.name, self.help, labels=labels)
        for chosen, number in series:
            family.add_metric(chosen, number)
        return family


def used_blocks(t: Telemetry) -> int:
    return t.load.total_blocks - t.load.free_blocks


def forecast_outputs(t: Telemetry, column: int) -> dict[str, int]:
    """Return a column of the forecast accuracy by quantile: 1 outputs judged, 2 outputs within."""
    return {f"{row[0]:g}": int(row[column]) for row in t.load.length_calibration}


def ended_as_vllm(t: Telemetry) -> Counter[str]:
    """Return ended sequences by vLLM's reasons."""
    reasons = {"stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort", "error": "error"}
    found: Counter[str] = Counter(dict.fromkeys(reasons.values(), 0))
    for reason, count in dict(t.requests.ended).items():
        if reason in reasons:
            found[reasons[reason]] += count
    return found


TABLE: tuple[Row, ...] = (
    Row(
        "quire_build_info",
        "info",
        "Version of Quire and Python in the labels; the value is 1.",
        lambda t: histograms.build(),
    ),
    Row(
        "quire_model_info",
        "info",
        "Model that this engine serves; the value is 1.  A new fingerprint is a deploy: other weights, dtype or "
        "configuration.",
        lambda t: {"engine": t.engine, "model_name": t.model, **t.info},
    ),
    # memory
    Row(
        "quire_kv_blocks",
        "gauge",
        "KV blocks by state: used by sequences, cached (idle, with a reusable prefix), or free.",
        lambda t: {
            "used": used_blocks(t),
            "cached": t.load.cached_blocks,
            "free": t.load.free_blocks - t.load.cached_blocks,
        },
        "state",
    ),
    Row("quire_kv_pool_blocks", "gauge", "KV blocks in the pool.", lambda t: t.load.total_blocks),
    Row("quire_kv_block_tokens", "gauge", "Tokens in a KV block.", lambda t: t.load.block_size),
    Row(
        "quire_kv_utilization", "gauge", "KV-cache utilisation, 0 to 1.", lambda t: used_blocks(t) / t.load.total_blocks
    ),
    Row(
        "quire_idle_pool_seconds",
        "counter",
        "Seconds during which requests waited in the shared queue or in this engine, each times the unused fraction of "
        "the KV cache.  An empty pool adds 1 per second.",
        lambda t: t.idle_pool_s,
    ),
    Row(
        "quire_kv_predicted_peak_blocks",
        "gauge",
        "Predicted peak of the KV blocks that the running sequences will hold together, if no other sequence starts.",
        lambda t: t.load.predicted_peak_blocks,
    ),
    Row(
        "quire_kv_wasted_slots", "gauge", "Token slots in used KV blocks that hold no token.", lambda t: t.wasted_slots
    ),
    Row(
        "quire_kv_static_blocks",
        "gauge",
        "KV blocks that static allocation would hold for the sequences that run or are paused: each one's for its "
        "prompt and max_tokens.  The blocks used, divided by these, are what paging needs of that.",
        lambda t: t.load.static_blocks,
    ),
    Row(
        "quire_kv_shared_fraction",
        "gauge",
        "Fraction of the entries of all block tables, 0 to 1, that need no KV block of their own: another entry names "
        "the same block.  Forks, beams and cached prefixes share blocks.",
        lambda t: t.kv_use.shared_fraction,
    ),
    Row(
        "quire_kv_held_bytes",
        "gauge",
        "Bytes of keys and values that sequences hold, by group of layers: full, and each sliding window.",
        lambda t: t.kv_use.held,
        "group",
    ),
    Row(
        "quire_kv_cached_bytes",
        "gauge",
        "Bytes of cached prefixes that no sequence holds, by group of layers: full, and each sliding window.",
        lambda t: t.kv_use.cached,
        "group",
    ),
    Row(
        "quire_kv_blocks_released",
        "counter",
        "KV blocks released by sequences that ended.",
        lambda t: t.totals.released_blocks,
    ),
    Row("quire_kv_blocks_copied", "counter", "KV blocks copied on write, for forks.", lambda t: t.totals.copied_blocks),
    # sequences
    Row(
        "quire_sequences",
        "gauge",
        "Sequences in this engine by state: running in the batch, paused in their slot, waiting (not started, or "
        "preempted), or swapped to host memory.",
        lambda t: {
            "running": t.load.running,
            "paused": t.load.paused,
            "waiting": t.load.waiting - t.load.swapped,
            "swapped": t.load.swapped,
        },
        "state",
    ),
    Row(
        "quire_waiting_tokens",
        "gauge",
        "Tokens that the waiting sequences must compute.",
        lambda t: t.load.waiting_tokens,
    ),
    Row(
        "quire_waiting_oldest_seconds",
        "gauge",
        "Seconds since the longest-waiting request of this engine was queued; 0 if none waits.",
        lambda t: t.requests.oldest_wait_s(time.monotonic()),
    ),
    Row("quire_draining", "gauge", "1 while this engine takes no new requests, else 0.", lambda t: t.load.draining),
    Row("quire_requests_claimed", "counter", "Requests claimed from the shared queue.", lambda t: t.requests.accepted),
    Row("quire_resumes", "counter", "Claimed requests that an earlier engine had begun.", lambda t: t.resumes),
    Row(
        "quire_claims",
        "counter",
        "Requests claimed, by prefix: held: this engine had cached its beginning; waited: it had not, and the request "
        "was passed over before; none: neither.",
        lambda t: t.claims,
        "prefix",
    ),
    Row(
        "quire_sequences_ended",
        "counter",
        "Sequences that ended, by reason.",
        lambda t: dict(t.requests.ended),
        "reason",
    ),
    # tokens
    Row("quire_prefix_query_tokens", "counter", "Prompt tokens of started requests.", lambda t: t.totals.prompt_tokens),
    Row(
        "quire_prefix_hit_tokens",
        "counter",
        "Prompt tokens of started requests that the prefix cache had.",
        lambda t: t.totals.cached_prompt_tokens,
    ),
    Row(
        "quire_prefix_cached_tokens",
        "counter",
        "Prompt tokens of started requests whose KV blocks were cached, by use: found: the request began behind them; "
        "no_state: they were computed again, because no checkpoint of the recurrent state stood there.",
        lambda t: {
            "found": t.totals.cached_prompt_tokens,
            "no_state": t.totals.blocks_cached_prompt_tokens - t.totals.cached_prompt_tokens,
        },
        "use",
    ),
    Row(
        "quire_state_checkpoints",
        "gauge",
        "Checkpoints of recurrent state that a prompt can begin with.",
        lambda t: t.totals.states.cached,
    ),
    Row(
        "quire_state_checkpoints_kept",
        "counter",
        "Checkpoints of recurrent state written since the start.",
        lambda t: t.totals.states.kept,
    ),
    Row(
        "quire_state_checkpoints_evicted",
        "counter",
        "Checkpoints of recurrent state overwritten because no place was free.",
        lambda t: t.totals.states.evicted,
    ),
    Row(
        "quire_warmed_prefixes",
        "gauge",
        "Hot prefixes computed at this engine's start, before it served requests.",
        lambda t: t.warm.prefixes,
    ),
    Row("quire_warmed_tokens", "gauge", "Tokens in the prefix cache after the warm-up.", lambda t: t.warm.tokens),
    Row("quire_warmed_seconds", "gauge", "Seconds that the prefix warm-up took.", lambda t: t.warm.seconds),
    Row(
        "quire_start_seconds",
        "gauge",
        "Seconds of each part of this engine's start; after a takeover also recompute, until every stream resumed.",
        lambda t: dict(t.start_s),
        "part",
    ),
    Row(
        "quire_memory_bytes",
        "gauge",
        "Bytes on the device by what takes them: weights, kv_cache, and on a GPU graphs_and_activations.",
        lambda t: t.memory,
        "part",
    ),
    Row(
        "quire_start_takeover", "gauge", "1 if this engine took over from one that died, else 0.", lambda t: t.takeover
    ),
    Row(
        "quire_log_lines_dropped",
        "counter",
        "Lines dropped from stderr and from the request log: their reader or disk was too slow, "
        "had stopped or was full.",
        lambda t: {log: count() for log, count in t.dropped_lines.items()},
        "log",
    ),
    Row("quire_generated_tokens", "counter", "Output tokens.", lambda t: t.totals.generated_tokens),
    Row(
        "quire_forced_tokens",
        "counter",
        "Output tokens that a grammar forced, so that they were known before they were sampled.",
        lambda t: t.totals.forced_tokens,
    ),
    Row(
        "quire_jumped_tokens",
        "counter",
        "Forced tokens that were computed together with the token before them: steps saved.",
        lambda t: t.totals.jumped_tokens,
    ),
    Row(
        "quire_drafted_tokens",
        "counter",
        "Drafts of speculative decoding that steps computed, by where they came from.",
        lambda t: t.totals.drafted_tokens,
        "source",
    ),
    Row(
        "quire_accepted_drafts",
        "counter",
        "Drafts that equalled what was sampled: steps saved, by where they came from.",
        lambda t: t.totals.accepted_drafts,
        "source",
    ),
    Row(
        "quire_refused_drafts",
        "counter",
        "Drafts found and not computed, because they would have taken longer than they were expected to save.",
        lambda t: t.totals.refused_drafts,
    ),
    Row(
        "quire_grammars",
        "gauge",
        "Compiled or waiting grammars, by whether a request holds them or they are kept for later ones.",
        lambda t: {"held": t.grammars().held, "kept": t.grammars().kept},
        "state",
    ),
    Row(
        "quire_grammar_kept_bytes",
        "gauge",
        "Estimated bytes of the compiled grammars that no request holds; --grammar-memory-mib limits them.",
        lambda t: t.grammars().kept_bytes,
    ),
    Row(
        "quire_grammar_compiles_waiting",
        "gauge",
        "Grammars that requests hold and whose compilation has not begun.",
        lambda t: t.grammars().waiting,
    ),
    Row(
        "quire_grammar_compiles",
        "counter",
        "Grammars compiled, by whether this model can follow them.",
        lambda t: {"compiled": t.grammars().compiled - t.grammars().faults, "fault": t.grammars().faults},
        "result",
    ),
    Row(
        "quire_grammar_evictions",
        "counter",
        "Compiled grammars evicted because the kept ones exceeded their memory.",
        lambda t: t.grammars().evicted,
    ),
    Row(
        "quire_lora_slots",
        "gauge",
        "Slots for LoRA adapters whose sequences run, by state: loaded or free.",
        lambda t: {"loaded": len(t.load.adapters), "free": t.lora.slots - len(t.load.adapters)},
        "state",
    ),
    Row(
        "quire_lora_adapters",
        "gauge",
        "LoRA adapters in host memory, by whether a request holds them or they are kept for later ones.",
        lambda t: {"held": t.lora.counts().held, "kept": t.lora.counts().kept},
        "state",
    ),
    Row(
        "quire_lora_host_bytes",
        "gauge",
        "Bytes of LoRA adapters in host memory, by the same states; --lora-memory-gib limits their sum.",
        lambda t: {"held": t.lora.counts().held_bytes, "kept": t.lora.counts().kept_bytes},
        "state",
    ),
    Row(
        "quire_lora_waiting",
        "gauge",
        "Sequences that wait until their LoRA adapter is in host memory.",
        lambda t: t.lora.waiting,
    ),
    Row(
        "quire_lora_loads",
        "counter",
        "LoRA adapters read into host memory, by whether they can be served.",
        lambda t: {"loaded": t.lora.counts().loads, "fault": t.lora.counts().faults},
        "result",
    ),
    Row(
        "quire_lora_load_seconds",
        "counter",
        "Seconds that the loads of LoRA adapters took.",
        lambda t: t.lora.counts().load_s,
    ),
    Row(
        "quire_lora_evictions",
        "counter",
        "LoRA adapters evicted from host memory for others.",
        lambda t: t.lora.counts().evicted,
    ),
    Row(
        "quire_lora_requests",
        "counter",
        "Requests with a LoRA adapter that ended, by its name; 32 names, the rest under other.",
        lambda t: dict(t.lora.use.requests),
        "adapter",
    ),
    Row(
        "quire_lora_tokens",
        "counter",
        "Output tokens of requests with a LoRA adapter, by its name as for quire_lora_requests.",
        lambda t: dict(t.lora.use.tokens),
        "adapter",
    ),
    Row(
        "quire_preemptions",
        "counter",
        "Preemptions: sequences that lost their slot and KV blocks to others.",
        lambda t: t.totals.preemptions,
    ),
    Row(
        "quire_yields", "counter", "Preemptions for a tenant that held less than its share.", lambda t: t.totals.yields
    ),
    Row(
        "quire_recomputed_tokens",
        "counter",
        "Tokens computed again after a preemption.",
        lambda t: t.totals.recomputed_tokens,
    ),
    Row(
        "quire_swap_preemptions",
        "counter",
        "Preemptions that copied KV blocks to host memory.",
        lambda t: t.totals.swap_preemptions,
    ),
    Row(
        "quire_swapped_bytes",
        "counter",
        "Bytes of KV blocks copied to host memory (out) and back (in).",
        lambda t: {"out": t.load.swapped_out_bytes, "in": t.load.swapped_in_bytes},
        "direction",
    ),
    # forecast
    Row(
        "quire_pauses",
        "counter",
        "Pauses: a sequence waited in its slot, because the pool was full.",
        lambda t: t.load.pauses,
    ),
    Row(
        "quire_forecast_outputs",
        "counter",
        "Outputs that ended and for which a quantile of their length had been predicted.",
        lambda t: forecast_outputs(t, 1),
        "quantile",
    ),
    Row(
        "quire_forecast_outputs_within",
        "counter",
        "Outputs no longer than the predicted quantile; over quire_forecast_outputs this should equal the quantile.",
        lambda t: forecast_outputs(t, 2),
        "quantile",
    ),
    Row(
        "quire_forecast_peaks",
        "counter",
        "Predicted KV-block peaks that were compared with the actual peak.",
        lambda t: t.load.peaks_judged,
    ),
    Row(
        "quire_forecast_peaks_passed",
        "counter",
        "Predicted KV-block peaks that the actual peak exceeded.",
        lambda t: t.load.peaks_passed,
    ),
    Row(
        "quire_forecast_bound_blocks",
        "counter",
        "Sum of the predicted peaks that were compared, KV blocks.",
        lambda t: t.load.peaks_bound_blocks,
    ),
    Row(
        "quire_forecast_peak_blocks",
        "counter",
        "Sum of the actual peaks that were compared, KV blocks.",
        lambda t: t.load.peaks_blocks,
    ),
    # steps
    Row(
        "quire_step_seconds",
        "histogram",
        "Seconds from one step's results to the next one's, by kind: decode only, or mixed with prompts.",
        lambda t: t.steps.seconds,
        "kind",
    ),
    Row("quire_step_tokens", "histogram", "Tokens computed in a step.", lambda t: t.steps.tokens),
    Row(
        "quire_loop_seconds",
        "counter",
        "Seconds of the loop's thread by phase; execute includes waiting for the device.",
        lambda t: dict(t.phases_s),
        "phase",
    ),
    Row(
        "quire_device_seconds",
        "counter",
        "Seconds in which the device ran kernels of steps.",
        lambda t: t.steps.device_s,
    ),
    Row(
        "quire_step_failures",
        "counter",
        "Steps that failed; every sequence in them was computed again.",
        lambda t: t.steps.failures,
    ),
    # block accounting
    Row("quire_audits", "counter", "Full checks of the block accounting.", lambda t: t.totals.audits),
    Row(
        "quire_audit_alarms",
        "counter",
        "Checks that found an error in the block accounting, by kind: always a bug.",
        lambda t: {"leak": t.totals.leaks, "double_free": t.totals.double_frees, "other": t.totals.other_alarms},
        "kind",
    ),
    # canary
    Row(
        "quire_canary_runs",
        "counter",
        "Runs of the canary on an idle engine, by outcome: equal to the first run, different, or failed.",
        lambda t: {"equal": t.canary.equal, "different": t.canary.different, "failed": t.canary.failed},
        "outcome",
    ),
    Row(
        "quire_canary_difference",
        "gauge",
        "Maximum difference of a log-probability between the canary's last run and its first, nats.",
        lambda t: t.canary.difference,
    ),
    Row("quire_canary_seconds", "counter", "Seconds that the canary's runs took.", lambda t: t.canary.seconds),
    # requests
    Row(
        "quire_queue_seconds",
        "histogram",
        "Seconds from queueing a request to its start in the batch.",
        lambda t: t.requests.queue_s,
    ),
    Row(
        "quire_prefill_seconds",
        "histogram",
        "Seconds from a request's start in the batch to its first token.",
        lambda t: t.requests.prefill_s,
    ),
    Row(
        "quire_decode_seconds",
        "histogram",
        "Seconds from a sequence's first token to its end.",
        lambda t: t.requests.decode_s,
    ),
    Row(
        "quire_inference_seconds",
        "histogram",
        "Seconds from a request's start in the batch to a sequence's end.",
        lambda t: t.requests.inference_s,
    ),
    Row(
        "quire_preempted_seconds",
        "histogram",
        "Seconds from a sequence's preemption to its next slot in the batch.",
        lambda t: t.requests.preempted_s,
    ),
    # Redis
    Row(
        "quire_exchange_seconds",
        "histogram",
        "Seconds of an exchange with Redis, one round trip.",
        lambda t: t.exchange_s,
    ),
    Row(
        "quire_clock_skew_seconds",
        "gauge",
        "Seconds by which this machine's clock is ahead of Redis' clock.",
        lambda t: t.clock_skew_s,
    ),
)

# Names, labels and buckets of vLLM's own page, for what exists here.
VLLM_TABLE: tuple[Row, ...] = (
    Row("vllm:num_requests_running", "gauge", "Sequences in the batch.", lambda t: t.load.running),
    Row(
        "vllm:num_requests_waiting",
        "gauge",
        # Autoscalers sum it over engines and expect everything that waits anywhere.
        "Sequences that wait in this engine, plus its share of the requests in the shared queue.",
        lambda t: t.load.waiting + t.queue_share,
    ),
    Row(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "The same by reason: capacity, or deferred while a grammar is compiled.",
        lambda t: {"capacity": max(0.0, t.load.waiting - t.gated + t.queue_share), "deferred": t.gated},
        "reason",
    ),
    Row(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "KV-cache utilisation, 0 to 1.",
        lambda t: used_blocks(t) / t.load.total_blocks,
    ),
    Row(
        "vllm:gpu_cache_usage_perc",  # its name until vLLM 0.9
        "gauge",
        "KV-cache utilisation, 0 to 1.",
        lambda t: used_blocks(t) / t.load.total_blocks,
    ),
    Row("vllm:num_requests_swapped", "gauge", "Waiting sequences in host memory.", lambda t: t.load.swapped),
    Row(
        "vllm:cache_config_info",
        "info",
        "Size of the KV cache in the labels; the value is 1.",
        lambda t: {
            "model_name": t.model,
            "engine": t.engine,
            "block_size": str(t.load.block_size),
            "num_gpu_blocks": str(t.load.total_blocks),
        },
    ),
    Row("vllm:prompt_tokens", "counter", "Prompt tokens of started requests.", lambda t: t.totals.prompt_tokens),
    Row(
        "vllm:prompt_tokens_by_source",
        "counter",
        "Prompt tokens of started requests, by where their KV cache came from.",
        lambda t: {
            "local_compute": t.totals.prompt_tokens - t.totals.cached_prompt_tokens,
            "local_cache_hit": t.totals.cached_prompt_tokens,
            "external_kv_transfer": 0,
        },
        "source",
    ),
    Row(
        "vllm:prompt_tokens_cached",
        "counter",
        "Prompt tokens of started requests that the prefix cache had.",
        lambda t: t.totals.cached_prompt_tokens,
    ),
    Row("vllm:generation_tokens", "counter", "Output tokens.", lambda t: t.totals.generated_tokens),
    Row("vllm:prefix_cache_queries", "counter", "Prompt tokens of started requests.", lambda t: t.totals.prompt_tokens),
    Row(
        "vllm:prefix_cache_hits",
        "counter",
        "Prompt tokens of started requests that the prefix cache had.",
        lambda t: t.totals.cached_prompt_tokens,
    ),
    Row("vllm:num_preemptions", "counter", "Preemptions of sequences.", lambda t: t.totals.preemptions),
    Row("vllm:request_success", "counter", "Sequences that ended, by reason.", ended_as_vllm, "finished_reason"),
    Row(
        "vllm:request_queue_time_seconds",
        "histogram",
        "Seconds from queueing a request to its start in the batch.",
        lambda t: t.requests.queue_s,
        bounds=histograms.REQUEST_S,
    ),
    Row(
        "vllm:request_prefill_time_seconds",
        "histogram",
        "Seconds from a request's start in the batch to its first token.",
        lambda t: t.requests.prefill_s,
        bounds=histograms.REQUEST_S,
    ),
    Row(
        "vllm:request_decode_time_seconds",
        "histogram",
        "Seconds from a sequence's first token to its end.",
        lambda t: t.requests.decode_s,
        bounds=histograms.REQUEST_S,
    ),
    Row(
        "vllm:request_inference_time_seconds",
        "histogram",
        "Seconds from a request's start in the batch to a sequence's end.",
        lambda t: t.requests.inference_s,
        bounds=histograms.REQUEST_S,
    ),
    Row("vllm:request_prompt_tokens", "histogram", "Prompt tokens of a request.", lambda t: t.requests.prompt_tokens),
    Row(
        "vllm:request_generation_tokens",
        "histogram",
        "Output tokens of a sequence.",
        lambda t: t.requests.output_tokens,
    ),
    Row(
        "vllm:request_max_num_generation_tokens",
        "histogram",
        "Output tokens of a request's longest sequence.",
        lambda t: t.requests.longest_tokens,
    ),
    Row(
        "vllm:request_prefill_kv_computed_tokens",
        "histogram",
        "Prompt tokens of a request that the prefix cache did not have.",
        lambda t: t.requests.computed_tokens,
    ),
    Row(
        "vllm:spec_decode_num_draft_tokens",
        "counter",
        "Drafts that steps computed.",
        lambda t: sum(t.totals.drafted_tokens.values()),
    ),
    Row(
        "vllm:spec_decode_num_accepted_tokens",
        "counter",
        "Drafts that equalled what was sampled.",
        lambda t: sum(t.totals.accepted_drafts.values()),
    ),
    Row(
        "vllm:request_num_preemptions",
        "histogram",
        "Preemptions of a request's sequences.",
        lambda t: t.requests.preemptions,
    ),
    Row(
        "vllm:iteration_tokens_total",
        "histogram",
        "Output tokens of a step, and prompt tokens, cached ones included, of requests whose first token it gave.",
        lambda t: t.iterations.tokens,
    ),
)
