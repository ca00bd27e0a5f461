"""The dashboards, described: what each panel asks and draws.  `python -m grafana` writes dashboards/*.json from it.

Gateways' figures are summed; what every gateway says of the same thing (the queue, the engines) is taken once, by max.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["stat", "lines", "stack", "heatmap"]
WINDOW = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """One question, and the queries that answer it."""

    title: str
    queries: dict[str, str]  # legend -> PromQL; a heatmap has one
    unit: str = "short"  # Grafana's id of it
    kind: Kind = "lines"
    text: str = ""  # how to read it


@dataclass(frozen=True)
class Board:
    uid: str  # also the file's name
    title: str
    rows: dict[str, list[Panel]]  # heading -> panels
    deploys: bool = False  # marks a new fingerprint on every graph


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Events a second, summed; `by` keeps labels apart."""
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
    """A fraction; nothing of nothing is 0."""
    return f"({of}) / clamp_min({whole}, 1e-9)"


TTFT, ITL = "quire_time_to_first_token_seconds", "quire_inter_token_latency_seconds"
REFUSED = rate("quire_admission_decisions_total", where='decision="refused"')
HIT_RATE = part(rate("quire_prefix_hit_tokens_total"), rate("quire_prefix_query_tokens_total"))
# Labels of an engine's model, on series that only name the engine.
OF_MODEL = (
    "* on (engine, model_name) group_left (fingerprint) max by (engine, model_name, fingerprint) (quire_model_info)"
)

kv_blocks = Panel(
    "KV blocks by what they hold",
    {"{{state}}": "sum by (state) (quire_kv_blocks)"},
    kind="stack",
    text="Cached blocks are free to take: a pool without any free ones is normal, one without cached ones is full.",
)
latency = Panel("Time to first token", quantiles(TTFT), "s")
gaps = Panel("Time between tokens", quantiles(ITL), "s")
refused_why = Panel(
    "Refused, by reason",
    {"{{reason}}": rate("quire_admission_decisions_total", "reason", 'decision="refused"')},
    "reqps",
    text="rate_limit_exceeded: the queue is as long as --queue-wait-s allows. deadline_unreachable: the client's own "
    "deadline is nearer. no_engine, queue_unavailable: nobody computes, or Redis is away.",
)
preemptions = Panel(
    "Preemptions and what they cost",
    {
        "preemptions": rate("quire_preemptions_total"),
        "of them, to the host's memory": rate("quire_swap_preemptions_total"),
        "tokens computed again": rate("quire_recomputed_tokens_total"),
    },
    "cps",
    text="Should be near 0: admission refuses or queues before the pool thrashes.",
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
            Panel("Tokens lost", {"": "sum(quire_tokens_lost_total)"}, "short", "stat", "Stays 0."),
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
        ],
        "Who is refused, and why?": [
            refused_why,
            Panel(
                "Requests by tenant and end",
                {"{{tenant}} {{outcome}}": rate("quire_tenant_requests_total", "tenant, outcome")},
                "reqps",
                text="The first 20 tenants by name, the rest as other.",
            ),
            Panel(
                "Tokens by tenant",
                {"{{tenant}} {{kind}}": rate("quire_tenant_tokens_total", "tenant, kind")},
                "cps",
            ),
            Panel(
                "Retry-After asked for",
                {
                    "p50": quantile(0.5, "quire_retry_after_seconds"),
                    "p95": quantile(0.95, "quire_retry_after_seconds"),
                },
                "s",
            ),
        ],
        "Where does it wait?": [
            Panel(
                "The shared queue",
                {"requests": "max(quire_queue_requests)", "oldest, s": "max(quire_queue_oldest_seconds)"},
            ),
            Panel(
                "Prompt tokens: queued, and room for them",
                {"queued": "max(quire_queue_tokens)", "room": "max(quire_queue_room_tokens)"},
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
                text="Forecast admission keeps the peak below the pool; where it was wrong there are preemptions.",
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
                text="Half a block for each sequence is what paging costs: 4 % at 190 tokens a sequence.",
            ),
            Panel(
                "Blocks given back and copied",
                {
                    "given back": rate("quire_kv_blocks_released_total"),
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
                },
                "cps",
            ),
            Panel(
                "Tokens computed before it served anybody",
                {"{{engine}}": "sum by (engine) (quire_warmed_tokens)"},
                text="Of prefixes that were hot before its start; 0: none were, or requests waited.",
            ),
            Panel(
                "... and how long that took",
                {"{{engine}}": "sum by (engine) (quire_warmed_seconds)"},
                "s",
                text="An engine is not ready before it is done; --warm-seconds bounds it.",
            ),
        ],
        "Batch": [
            sequences,
            Panel("Tokens of a step", quantiles("quire_step_tokens")),
            Panel("Output tokens", {"{{engine}}": rate("quire_generated_tokens_total", "engine")}, "cps"),
            Panel("Sequences ended", {"{{reason}}": rate("quire_sequences_ended_total", "reason")}, "cps"),
            Panel(
                "Waiting inside the engine",
                {
                    "tokens to compute": "sum(quire_waiting_tokens)",
                    "oldest, s": "max(quire_waiting_oldest_seconds)",
                },
            ),
            Panel("Requests claimed", {"{{engine}}": rate("quire_requests_claimed_total", "engine")}, "reqps"),
        ],
        "Preemption": [
            preemptions,
            Panel(
                "How long a preempted sequence is away",
                {"mean": part(rate("quire_preempted_seconds_sum"), rate("quire_preempted_seconds_count"))},
                "s",
            ),
            Panel(
                "KV blocks to the host's memory and back",
                {"{{direction}}": rate("quire_swapped_bytes_total", "direction")},
                "Bps",
                text="Where a copy takes less time than to compute it again (--preempt auto).",
            ),
        ],
        "Forecast": [
            Panel(
                "Outputs no longer than foretold",
                {
                    "{{quantile}}": part(
                        "sum by (quantile) (quire_forecast_outputs_within_total)",
                        "sum by (quantile) (quire_forecast_outputs_total)",
                    )
                },
                "percentunit",
                text="Where the forecast is right, each line lies at its own quantile.",
            ),
            Panel(
                "Predicted peaks that were passed",
                {
                    "{{engine}}": part(
                        "sum by (engine) (quire_forecast_peaks_passed_total)",
                        "sum by (engine) (quire_forecast_peaks_total)",
                    )
                },
                "percentunit",
            ),
            Panel(
                "Predicted peak over what was held",
                {
                    "{{engine}}": part(
                        "sum by (engine) (quire_forecast_bound_blocks_total)",
                        "sum by (engine) (quire_forecast_peak_blocks_total)",
                    )
                },
                text="1: exact. What lies above is room that nobody was let into.",
            ),
            Panel("Pauses", {"{{engine}}": rate("quire_pauses_total", "engine")}, "cps"),
        ],
        "Books": [
            Panel(
                "Audits, and those that found something wrong",
                {"audits": rate("quire_audits_total"), "wrong: {{kind}}": rate("quire_audit_alarms_total", "kind")},
                "cps",
                text="Wrong books are a bug: blocks leak, or are given to two sequences. Stays 0.",
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
                text="mixed: prompts are computed beside the decodes; --step-tokens bounds how long.",
            ),
            Panel(
                "What the loop's thread does",
                {"{{phase}}": rate("quire_loop_seconds_total", "phase")},
                "percentunit",
                "stack",
                "Of one core. On a GPU execute is mostly waiting for it; all else is overhead.",
            ),
            Panel(
                "Device busy with steps",
                {"{{engine}}": rate("quire_device_seconds_total", "engine")},
                "percentunit",
            ),
            Panel("Steps lost", {"{{engine}}": rate("quire_step_failures_total", "engine")}, "cps", text="Stays 0."),
            Panel("Exchange with Redis", quantiles("quire_exchange_seconds"), "s"),
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
                text="Lost stays 0. Repeated ones were dropped, clients see each once; they come after a death.",
            ),
            Panel(
                "Answers that a client came back to",
                {"{{gateway}}": rate("quire_comebacks_total", "gateway")},
                "reqps",
                text="After a lost connection or gateway, or under an Idempotency-Key that was known.",
            ),
            Panel(
                "Output tokens: sent, and delivered",
                {
                    "sent": rate("quire_output_tokens_total"),
                    "delivered": rate("quire_delivered_tokens_total"),
                },
                "cps",
                text="Sent counts again what a client that came back had lost; delivered is what to bill, and comes at "
                "a request's end.",
            ),
            Panel(
                "Tokens that wait for slow readers",
                {"{{gateway}}": "sum by (gateway) (quire_backlog_bytes)"},
                "bytes",
                text="Bounded by --backlog-mib; the rest waits in Redis.",
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
            Panel("Retry-After asked for", heat("quire_retry_after_seconds"), "s", "heatmap"),
        ],
        "What it knows": [
            Panel(
                "Round trips to Redis, p95",
                {"{{operation}}": quantile(0.95, "quire_redis_seconds", "operation")},
                "s",
            ),
            Panel(
                "Age of the engines' news",
                {"{{engine}}": "max by (engine) (quire_engine_age_seconds)"},
                "s",
                text="From 3 s on an engine counts as full.",
            ),
            Panel(
                "Free blocks as seen here",
                {"{{engine}}": "max by (engine) (quire_engine_kv_blocks_free)"},
            ),
            Panel(
                "Deaths, and what came of them",
                {
                    "engines lost without a drain": "max(quire_engine_leases_lost_total)",
                    "requests that went on elsewhere": "sum(quire_resumes_total)",
                    "requests in quarantine": "max(quire_quarantined_requests)",
                },
                text="Who is in quarantine killed its engine twice at the same token; nobody computes it again.",
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
                text="A fingerprint is a digest of weights, dtype and configuration: nothing cached crosses it.",
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
# A dot on every graph when a fingerprint appears that was not there a minute before.
DEPLOYS = "count by (fingerprint) (quire_engine_info) unless count by (fingerprint) (quire_engine_info offset 1m)"
