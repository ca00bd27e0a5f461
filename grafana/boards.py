"""The dashboards: the queries and drawing of each panel.  `python -m grafana` writes dashboards/*.json from them.

Queries sum the gateways' own metrics.  Every gateway also reports the shared queue and the engines, so queries take the
maximum of these metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["stat", "lines", "stack", "heatmap"]
WINDOW = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """A panel: one question, and the queries that answer it."""

    title: str
    queries: dict[str, str]  # legend -> PromQL; a heatmap has one
    unit: str = "short"  # Grafana's id of the unit
    kind: Kind = "lines"
    text: str = ""  # description: how to read the panel


@dataclass(frozen=True)
class Board:
    uid: str  # also the file's name
    title: str
    rows: dict[str, list[Panel]]  # heading -> panels
    deploys: bool = False  # marks a new fingerprint on every graph


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Return PromQL for events per second, summed over all labels except `by`."""
    grouped = f" by ({by})" if by else ""
    return (
        f"sum{grouped} (rate({metric}{{{where}}}[{WINDOW}]))" if where else f"sum{grouped} (rate({metric}[{WINDOW}]))"
    )


def quantile(q: float, histogram: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({histogram}_bucket[{WINDOW}])))"


def quantiles(histogram: str) -> dict[str, str]:
    return {f"p{q * 100:g}": quantile(q, histogram) for q in (0.5, 0.95, 0.99)}


def heat(histogram: str) -> dict[str, str]:
    return {"{{le}}": f"sum by (le) (increase({histogram}_bucket[{WINDOW}]))"}


def part(of: str, whole: str) -> str:
    """Return PromQL for a fraction; 0 of 0 is 0."""
    return f"({of}) / clamp_min({whole}, 1e-9)"


TTFT, ITL = "quire_time_to_first_token_seconds", "quire_inter_token_latency_seconds"
REFUSED = rate("quire_admission_decisions_total", where='decision="refused"')
IN_TIME = rate("quire_request_starts_total", where='start="in_time"')
GOODPUT = part(rate("quire_goodput_requests_total", where='targets="met"'), rate("quire_goodput_requests_total"))
HIT_RATE = part(rate("quire_prefix_hit_tokens_total"), rate("quire_prefix_query_tokens_total"))
# Adds the label of the model's fingerprint to series that only name the engine.
OF_MODEL = (
    "* on (engine, model_name) group_left (fingerprint) max by (engine, model_name, fingerprint) (quire_model_info)"
)

kv_blocks = Panel(
    "KV blocks by what they hold",
    {"{{state}}": "sum by (state) (quire_kv_blocks)"},
    kind="stack",
    text="Cached blocks can be reused at any time. A pool without free blocks is normal; it is full if it"
    " has no cached blocks either.",
)
latency = Panel("Time to first token", quantiles(TTFT), "s")
gaps = Panel("Time between tokens", quantiles(ITL), "s")
refused_why = Panel(
    "Refused, by reason",
    {"{{reason}}": rate("quire_admission_decisions_total", "reason", 'decision="refused"')},
    "reqps",
    text="rate_limit_exceeded: the late lane is as long as --late-wait-s allows. deadline_unreachable: the client's "
    "own deadline is shorter than the queue. no_engine: no engine is alive. queue_unavailable: Redis does not answer.",
)
preemptions = Panel(
    "Preemptions and what they cost",
    {
        "preemptions": rate("quire_preemptions_total"),
        "of them, to the host's memory": rate("quire_swap_preemptions_total"),
        "of them, for a tenant below its share": rate("quire_yields_total"),
        "recomputed tokens": rate("quire_recomputed_tokens_total"),
    },
    "cps",
    text="Should be near 0: admission queues or refuses requests before the pool thrashes. When tenants compete, the "
    "newest sequences of the tenant with most blocks are preempted for a tenant below its share.",
)
sequences = Panel("Sequences in the engines", {"{{state}}": "sum by (state) (quire_sequences)"}, kind="stack")

overview = Board(
    "quire-overview",
    "Quire: overview",
    {
        "Is it healthy?": [
            Panel("Engines", {"": "max(quire_engines)"}, kind="stat"),
            Panel("Open requests", {"": "sum(quire_open_requests)"}, kind="stat"),
            Panel("Output tokens", {"": rate("quire_output_tokens_total")}, "cps", "stat"),
            Panel("TTFT p95", {"": quantile(0.95, TTFT)}, "s", "stat"),
            Panel("KV used", {"": "max(quire_kv_utilization)"}, "percentunit", "stat"),
            Panel("Refused", {"": part(REFUSED, rate("quire_admission_decisions_total"))}, "percentunit", "stat"),
            Panel("Oldest in the queue", {"": "max(quire_queue_oldest_seconds)"}, "s", "stat"),
            Panel(
                "Goodput", {"": GOODPUT}, "percentunit", "stat", "Answered within --ttft-target-s and --itl-target-s."
            ),
            Panel("In time", {"": part(IN_TIME, rate("quire_request_starts_total"))}, "percentunit", "stat"),
            Panel("Tokens lost", {"": "sum(quire_tokens_lost_total)"}, "short", "stat", "Must stay 0."),
        ],
        "What do clients get?": [
            Panel(
                "Requests by status",
                {"{{status}}": rate("quire_requests_total", "status", 'endpoint=~"/v1/.*"')},
                "reqps",
                "stack",
            ),
            latency,
            gaps,
            Panel("From arrival to the last byte", quantiles("quire_request_latency_seconds"), "s"),
            Panel(
                "Requests by whether they met their targets",
                {"{{targets}}": rate("quire_goodput_requests_total", "targets")},
                "reqps",
                "stack",
                "met: answered, the first token within --ttft-target-s and the mean time between tokens within "
                "--itl-target-s. missed: slower, failed, or refused for lack of capacity.",
            ),
        ],
        "Who is refused, and why?": [
            refused_why,
            Panel(
                "Requests by tenant and outcome",
                {"{{tenant}} {{outcome}}": rate("quire_tenant_requests_total", "tenant, outcome")},
                "reqps",
                text="The first 20 tenants have their own series; all further tenants are counted as other.",
            ),
            Panel(
                "Tokens by tenant",
                {"{{tenant}} {{kind}}": rate("quire_tenant_tokens_total", "tenant, kind")},
                "cps",
            ),
            Panel(
                "Queued prompt tokens by tenant",
                {"{{tenant}}": "max by (tenant) (quire_tenant_queued_tokens)"},
                text="Only tenants that wait have a series.",
            ),
            Panel(
                "Virtual tokens served to the tenants that wait",
                {"{{tenant}}": "max by (tenant) (quire_tenant_service)"},
                text="Tokens divided by the tenant's weight. The tenant with the fewest is served next.",
            ),
            Panel(
                "Announced Retry-After",
                {
                    "p50": quantile(0.5, "quire_retry_after_seconds"),
                    "p95": quantile(0.95, "quire_retry_after_seconds"),
                },
                "s",
            ),
        ],
        "Where do requests wait?": [
            Panel(
                "The shared queue",
                {
                    "requests, {{lane}}": "max by (lane) (quire_queue_requests)",
                    "oldest, s, {{lane}}": "max by (lane) (quire_queue_oldest_seconds)",
                },
            ),
            Panel(
                "Prompt tokens: queued, and room for them",
                {"queued, {{lane}}": "max by (lane) (quire_queue_tokens)", "room": "max(quire_queue_room_tokens)"},
            ),
            sequences,
            kv_blocks,
            preemptions,
            Panel(
                "Prompt and output tokens",
                {"prompt": rate("quire_prompt_tokens_total"), "output": rate("quire_output_tokens_total")},
                "cps",
            ),
        ],
    },
)

engine = Board(
    "quire-engine",
    "Quire: engine",
    {
        "Blocks": [
            kv_blocks,
            Panel(
                "Used, predicted peak, pool",
                {
                    "{{engine}} used": 'sum by (engine) (quire_kv_blocks{state="used"})',
                    "{{engine}} predicted peak": "sum by (engine) (quire_kv_predicted_peak_blocks)",
                    "{{engine}} pool": "sum by (engine) (quire_kv_pool_blocks)",
                },
                text="Forecast admission keeps the predicted peak below the pool. Wrong forecasts cause preemptions.",
            ),
            Panel(
                "Unused pool while requests wait",
                {"{{engine}}": rate("quire_idle_pool_seconds_total", "engine")},
                "percentunit",
                text="The mean unused fraction of the KV cache; 0 while no request waits.",
            ),
            Panel(
                "Wasted slots, of those in used blocks",
                {
                    "{{engine}}": part(
                        "sum by (engine) (quire_kv_wasted_slots)",
                        'sum by (engine) (quire_kv_blocks{state="used"} * on (engine) group_left '
                        "max by (engine) (quire_kv_block_tokens))",
                    )
                },
                "percentunit",
                text="Paging wastes half a block per sequence on average: 4 % at 190 tokens per sequence.",
            ),
            Panel(
                "Blocks used, of those that static allocation would hold",
                {
                    "{{engine}}": part(
                        'sum by (engine) (quire_kv_blocks{state="used"})', "sum by (engine) (quire_kv_static_blocks)"
                    )
                },
                "percentunit",
                text="Static allocation holds blocks for each running sequence's prompt and max_tokens from its start. "
                "The lower, the more sequences fit at once because of paging.",
            ),
            Panel(
                "Shared blocks, of all entries of block tables",
                {"{{engine}}": "max by (engine) (quire_kv_shared_fraction)"},
                "percentunit",
                text="What forks, beams and cached prefixes save: 1 - blocks held / entries of all tables.",
            ),
            Panel(
                "Bytes of keys and values, by group of layers",
                {
                    "{{group}}, held": "sum by (group) (quire_kv_held_bytes)",
                    "{{group}}, cached": "sum by (group) (quire_kv_cached_bytes)",
                },
                "bytes",
                text="Layers with a sliding window release blocks that the window has passed, so they hold more with "
                "more sequences, not with longer ones. Other models only have the group full.",
            ),
            Panel(
                "Blocks released and copied",
                {
                    "released": rate("quire_kv_blocks_released_total"),
                    "copied on write": rate("quire_kv_blocks_copied_total"),
                },
                "cps",
            ),
        ],
        "Prefix cache": [
            Panel("Prompt tokens found in the cache", {"": HIT_RATE}, "percentunit"),
            Panel(
                "Prompt tokens",
                {
                    "looked up": rate("quire_prefix_query_tokens_total"),
                    "found": rate("quire_prefix_hit_tokens_total"),
                    "in cached blocks, computed again": rate(
                        "quire_prefix_cached_tokens_total", where='use="no_state"'
                    ),
                },
                "cps",
            ),
            Panel(
                "Checkpoints of recurrent state",
                {
                    "that a prompt can begin with": "sum(quire_state_checkpoints)",
                    "written per second": rate("quire_state_checkpoints_kept_total"),
                    "overwritten per second": rate("quire_state_checkpoints_evicted_total"),
                },
                text="Only of models with recurrent layers. If cached tokens are computed again while checkpoints "
                "are overwritten, raise --state-memory-gib.",
            ),
            Panel(
                "Requests claimed, by what the engine held of their prefix",
                {
                    "its beginning": rate("quire_claims_total", where='prefix="held"'),
                    "nothing, after others had the chance": rate("quire_claims_total", where='prefix="waited"'),
                    "nothing": rate("quire_claims_total", where='prefix="none"'),
                },
                "reqps",
                text="With several engines, each prefers requests whose prefix it holds (--prefix-locality). A single "
                "engine only has the last series.",
            ),
            Panel(
                "Tokens computed by the prefix warm-up",
                {"{{engine}}": "sum by (engine) (quire_warmed_tokens)"},
                text="Computed before the engine was ready, for prefixes that were used often before its start. 0: "
                "there were none, or requests were already waiting.",
            ),
            Panel(
                "Hot prefixes computed by the prefix warm-up",
                {"{{engine}}": "sum by (engine) (quire_warmed_prefixes)"},
            ),
            Panel(
                "Duration of the prefix warm-up",
                {"{{engine}}": "sum by (engine) (quire_warmed_seconds)"},
                "s",
                text="The engine becomes ready after it. --warm-seconds limits it.",
            ),
        ],
        "Batch": [
            sequences,
            Panel("Tokens of a step", quantiles("quire_step_tokens")),
            Panel("Output tokens", {"{{engine}}": rate("quire_generated_tokens_total", "engine")}, "cps"),
            Panel(
                "Tokens that grammars forced",
                {
                    "known before they were sampled": rate("quire_forced_tokens_total"),
                    "computed without a step of their own": rate("quire_jumped_tokens_total"),
                },
                "cps",
            ),
            Panel(
                "Drafts of speculative decoding",
                {
                    "computed: {{source}}": rate("quire_drafted_tokens_total", "source"),
                    "accepted: {{source}}": rate("quire_accepted_drafts_total", "source"),
                    "refused: they would not have paid": rate("quire_refused_drafts_total"),
                },
                "cps",
                text="Each accepted draft saves a step. The text is the same without drafts.",
            ),
            Panel(
                "Share of drafts accepted",
                {
                    "{{source}}": part(
                        rate("quire_accepted_drafts_total", "source"), rate("quire_drafted_tokens_total", "source")
                    )
                },
                "percentunit",
                text="own: from the request's text. tenant: from the tenant's recent answers. prediction: from the "
                "client's text.",
            ),
            Panel(
                "Output tokens per step of a sequence",
                {
                    "{{engine}}": part(
                        rate("quire_generated_tokens_total", "engine"),
                        f"{rate('quire_generated_tokens_total', 'engine')} "
                        f"- {rate('quire_jumped_tokens_total', 'engine')} "
                        f"- {rate('quire_accepted_drafts_total', 'engine')}",
                    )
                },
                text="1 without drafts and forced tokens. The text is the same at any value.",
            ),
            Panel(
                "Grammars",
                {"{{state}}": "sum by (state) (quire_grammars)", "waiting": "sum(quire_grammar_compiles_waiting)"},
                text="waiting: requests need them; not compiled yet. --grammar-memory-mib limits the kept ones.",
            ),
            Panel("Memory of kept grammars", {"{{engine}}": "sum by (engine) (quire_grammar_kept_bytes)"}, "bytes"),
            Panel(
                "Grammars compiled and evicted",
                {
                    "{{result}}": rate("quire_grammar_compiles_total", "result"),
                    "evicted": rate("quire_grammar_evictions_total"),
                },
                "cps",
            ),
            Panel(
                "LoRA adapters",
                {
                    "in slots": 'sum(quire_lora_slots{state="loaded"})',
                    "in host memory, {{state}}": "sum by (state) (quire_lora_adapters)",
                    "sequences that wait for a load": "sum(quire_lora_waiting)",
                },
                text="Slots: --lora-slots per engine. Host memory: --lora-memory-gib per engine.",
            ),
            Panel("Memory of LoRA adapters", {"{{state}}": "sum by (state) (quire_lora_host_bytes)"}, "bytes"),
            Panel(
                "Loads of LoRA adapters",
                {
                    "{{result}}": rate("quire_lora_loads_total", "result"),
                    "evicted": rate("quire_lora_evictions_total"),
                },
                "cps",
                text="If adapters are evicted as fast as they are loaded, raise --lora-memory-gib.",
            ),
            Panel(
                "Time of a load of a LoRA adapter",
                {"mean": part(rate("quire_lora_load_seconds_total"), rate("quire_lora_loads_total"))},
                "s",
            ),
            Panel("Requests by LoRA adapter", {"{{adapter}}": rate("quire_lora_requests_total", "adapter")}, "reqps"),
            Panel("Output tokens by LoRA adapter", {"{{adapter}}": rate("quire_lora_tokens_total", "adapter")}, "cps"),
            Panel("Sequences ended", {"{{reason}}": rate("quire_sequences_ended_total", "reason")}, "cps"),
            Panel(
                "Waiting inside the engine",
                {
                    "tokens to compute": "sum(quire_waiting_tokens)",
                    "oldest, s": "max(quire_waiting_oldest_seconds)",
                },
            ),
            Panel("Requests claimed", {"{{engine}}": rate("quire_requests_claimed_total", "engine")}, "reqps"),
            Panel(
                "Engines that drain",
                {"{{engine}}": "sum by (engine) (quire_draining)"},
                text="1 while an engine takes no new requests because it was told to end.",
            ),
        ],
        "Preemption": [
            preemptions,
            Panel(
                "Time from preemption to resumption",
                {"mean": part(rate("quire_preempted_seconds_sum"), rate("quire_preempted_seconds_count"))},
                "s",
            ),
            Panel(
                "KV blocks to the host's memory and back",
                {"{{direction}}": rate("quire_swapped_bytes_total", "direction")},
                "Bps",
                text="Blocks are copied where that is faster than recomputing them (--preempt auto).",
            ),
        ],
        "Forecast": [
            Panel(
                "Outputs no longer than predicted",
                {
                    "{{quantile}}": part(
                        "sum by (quantile) (quire_forecast_outputs_within_total)",
                        "sum by (quantile) (quire_forecast_outputs_total)",
                    )
                },
                "percentunit",
                text="With a correct forecast, each line lies at its own quantile.",
            ),
            Panel(
                "Predicted peaks that were exceeded",
                {
                    "{{engine}}": part(
                        "sum by (engine) (quire_forecast_peaks_passed_total)",
                        "sum by (engine) (quire_forecast_peaks_total)",
                    )
                },
                "percentunit",
            ),
            Panel(
                "Predicted peak over actual peak",
                {
                    "{{engine}}": part(
                        "sum by (engine) (quire_forecast_bound_blocks_total)",
                        "sum by (engine) (quire_forecast_peak_blocks_total)",
                    )
                },
                text="1: exact. Above 1: room that admission left unused.",
            ),
            Panel("Paused sequences", {"{{engine}}": rate("quire_pauses_total", "engine")}, "cps"),
        ],
        "Block accounting": [
            Panel(
                "Audits, and accounting errors found",
                {"audits": rate("quire_audits_total"), "error: {{kind}}": rate("quire_audit_alarms_total", "kind")},
                "cps",
                text="An accounting error is a bug: a block leaked, or two sequences own it. Errors must stay 0.",
            ),
        ],
        "Canary": [
            Panel(
                "Canary runs, by outcome",
                {"{{outcome}}": rate("quire_canary_runs_total", "outcome")},
                "cps",
                text="An idle engine computes a fixed prompt and compares it with its first run. Only equal may grow. "
                "A busy engine does not run it.",
            ),
            Panel(
                "Difference of the canary's last run",
                {"{{engine}}": "max by (engine) (quire_canary_difference)"},
                text="Greatest difference of a log-probability from the first run, nats. More than 0.25 counts as "
                "different. On a CPU it is 0.",
            ),
            Panel(
                "Time of the canary",
                {"{{engine}}": rate("quire_canary_seconds_total", "engine")},
                "percentunit",
                text="Fraction of the loop thread's time; at most 0.5 %.",
            ),
        ],
        "Steps and kernels": [
            Panel("Step time", heat("quire_step_seconds"), "s", "heatmap"),
            Panel(
                "Step time by kind",
                {
                    "{{kind}} p50": quantile(0.5, "quire_step_seconds", "kind"),
                    "{{kind}} p95": quantile(0.95, "quire_step_seconds", "kind"),
                },
                "s",
                text="mixed: the step decodes and computes prompt chunks. --step-tokens limits its length.",
            ),
            Panel(
                "Time of the loop thread by phase",
                {"{{phase}}": rate("quire_loop_seconds_total", "phase")},
                "percentunit",
                "stack",
                "Fraction of one core. On a GPU, execute mostly waits for the device; the other phases are overhead.",
            ),
            Panel(
                "Device busy with steps",
                {"{{engine}}": rate("quire_device_seconds_total", "engine")},
                "percentunit",
            ),
            Panel(
                "Failed steps", {"{{engine}}": rate("quire_step_failures_total", "engine")}, "cps", text="Must stay 0."
            ),
            Panel("Exchange with Redis", quantiles("quire_exchange_seconds"), "s"),
            Panel(
                "Log lines dropped by engines",
                {"{{engine}} {{log}}": rate("quire_log_lines_dropped_total", "engine, log")},
                "cps",
                text="The reader of stderr, or the disk of a log file, is too slow or has stopped. Steps go on.",
            ),
        ],
        "A request's time": [
            Panel("In the queue", quantiles("quire_queue_seconds"), "s"),
            Panel("Prefill", quantiles("quire_prefill_seconds"), "s"),
            Panel("Decode", quantiles("quire_decode_seconds"), "s"),
            Panel("In the batch", quantiles("quire_inference_seconds"), "s"),
        ],
    },
    deploys=True,
)

gateway = Board(
    "quire-gateway",
    "Quire: gateway",
    {
        "Latency": [
            Panel("Time to first token", heat(TTFT), "s", "heatmap"),
            Panel("Time between tokens", heat(ITL), "s", "heatmap"),
            latency,
            gaps,
        ],
        "Streams": [
            Panel("Open requests", {"{{gateway}}": "sum by (gateway) (quire_open_requests)"}),
            Panel("Output tokens", {"{{gateway}}": rate("quire_output_tokens_total", "gateway")}, "cps"),
            Panel("Prompt tokens of a request", quantiles("quire_request_prompt_tokens")),
            Panel("Output tokens of a request", quantiles("quire_request_output_tokens")),
            Panel(
                "Tokens lost, tokens repeated",
                {"lost": "sum(quire_tokens_lost_total)", "repeated": "sum(quire_tokens_repeated_total)"},
                text="Lost must stay 0. Repeated tokens follow the death of an engine; the gateway drops them, "
                "so clients receive each token once.",
            ),
            Panel(
                "Resumed answers",
                {"{{gateway}}": rate("quire_comebacks_total", "gateway")},
                "reqps",
                text="A client reconnected after it lost its connection or gateway, or repeated a known "
                "Idempotency-Key.",
            ),
            Panel(
                "Output tokens: sent, and delivered",
                {
                    "sent": rate("quire_output_tokens_total"),
                    "delivered": rate("quire_delivered_tokens_total"),
                },
                "cps",
                text="Sent counts a token again when a client resumes. Delivered counts each token once, at the "
                "request's end: bill by it.",
            ),
            Panel(
                "Backlog of slow readers",
                {"{{gateway}}": "sum by (gateway) (quire_backlog_bytes)"},
                "bytes",
                text="Tokens that clients have not read yet. --backlog-mib limits it; the rest stays in Redis.",
            ),
        ],
        "Event loop": [
            Panel(
                "Delays of the event loop, p99",
                {
                    "late": quantile(0.99, "quire_gateway_loop_stall_seconds"),
                    "of that, this process computed": quantile(0.99, "quire_gateway_loop_busy_seconds"),
                },
                "s",
                text="During a delay the gateway handles nothing. The part without computing went to other processes.",
            ),
            Panel(
                "Log lines dropped by gateways",
                {"{{gateway}}": rate("quire_gateway_log_lines_dropped_total", "gateway")},
                "cps",
                text="The reader of stderr is too slow or has stopped. Requests do not wait for it.",
            ),
        ],
        "Answers and refusals": [
            Panel(
                "Requests by endpoint and status",
                {"{{endpoint}} {{status}}": rate("quire_requests_total", "endpoint, status")},
                "reqps",
            ),
            Panel("Errors by code", {"{{code}}": rate("quire_refusals_total", "code")}, "reqps"),
            Panel(
                "Admission",
                {"{{decision}}": rate("quire_admission_decisions_total", "decision")},
                "reqps",
                "stack",
            ),
            refused_why,
            Panel("Announced Retry-After", heat("quire_retry_after_seconds"), "s", "heatmap"),
        ],
        "View of Redis and the engines": [
            Panel(
                "Round trips to Redis, p95",
                {"{{operation}}": quantile(0.95, "quire_redis_seconds", "operation")},
                "s",
            ),
            Panel(
                "Age of the engines' reports",
                {"{{engine}}": "max by (engine) (quire_engine_age_seconds)"},
                "s",
                text="An engine whose last report is 3 s old counts as full.",
            ),
            Panel(
                "Free blocks, as reported to the gateways",
                {"{{engine}}": "max by (engine) (quire_engine_kv_blocks_free)"},
            ),
            Panel(
                "Engines lost, and their requests",
                {
                    "engines lost without a drain": "max(quire_engine_leases_lost_total)",
                    "requests resumed on another engine": "sum(quire_resumes_total)",
                    "requests in quarantine": "max(quire_quarantined_requests)",
                },
                text="A request in quarantine ended its engine twice at the same token. It is not computed again.",
            ),
        ],
    },
)

deploy = Board(
    "quire-deploy",
    "Quire: after a deploy",
    {
        "What runs": [
            Panel(
                "Engines by fingerprint",
                {"{{fingerprint}}": "count by (fingerprint) (max by (engine, fingerprint) (quire_engine_info))"},
                kind="stack",
                text="A fingerprint is a digest of weights, dtype and configuration. Engines share cached "
                "prefixes only if they have the same fingerprint.",
            ),
            Panel(
                "Processes by version",
                {
                    "gateway {{version}}": "count by (version) (quire_gateway_info)",
                    "engine {{version}}": "count by (version) (quire_build_info)",
                },
                kind="stack",
            ),
        ],
        "Slow until the cache is warm?": [
            Panel(
                "Time to first token, p95",
                {"{{fingerprint}}": quantile(0.95, TTFT, "fingerprint")},
                "s",
                text="A fingerprint's series starts with its deploy.",
            ),
            Panel(
                "Time to first token, p95 of all since the deploy",
                {"{{fingerprint}}": f"histogram_quantile(0.95, sum by (le, fingerprint) ({TTFT}_bucket))"},
                "s",
            ),
            Panel(
                "Prompt tokens found in the cache",
                {
                    "{{fingerprint}}": part(
                        f"sum by (fingerprint) (rate(quire_prefix_hit_tokens_total[{WINDOW}]) {OF_MODEL})",
                        f"sum by (fingerprint) (rate(quire_prefix_query_tokens_total[{WINDOW}]) {OF_MODEL})",
                    )
                },
                "percentunit",
            ),
            Panel(
                "Prompt tokens found in the cache, of all since the deploy",
                {
                    "{{fingerprint}}": part(
                        f"sum by (fingerprint) (quire_prefix_hit_tokens_total {OF_MODEL})",
                        f"sum by (fingerprint) (quire_prefix_query_tokens_total {OF_MODEL})",
                    )
                },
                "percentunit",
            ),
        ],
        "Did anything break?": [
            gaps,
            refused_why,
            preemptions,
            Panel("In the queue", quantiles("quire_queue_seconds"), "s"),
        ],
    },
    deploys=True,
)

BOARDS = (overview, engine, gateway, deploy)
# Marks every graph when a fingerprint appears that did not exist a minute before.
DEPLOYS = "count by (fingerprint) (quire_engine_info) unless count by (fingerprint) (quire_engine_info offset 1m)"
