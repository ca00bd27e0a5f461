"""EngineConfig: all an operator may set on an engine.  Values derived at start (number of blocks) live elsewhere."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Frozen after start.  `engine.common.settings.load` fills it from flags, environment and a file."""

    model: Annotated[str, Meta(description="Directory or hub name of a checkpoint; empty: the small built-in one.")] = (
        ""
    )
    served_name: Annotated[str, Meta(description="Name clients use; empty: the model's own.")] = ""
    redis_url: Annotated[str, Meta(description="redis://, rediss:// (TLS) or unix:// URL, password included.")] = (
        "redis://127.0.0.1:6379/0"
    )
    namespace: Annotated[str, Meta(description="Prefix of every Redis key: one deployment, one namespace.")] = "quire"
    engine_id: Annotated[
        str, Meta(description="Stable name of this engine; empty: host name, process id and a random part.")
    ] = ""
    executor: Annotated[
        Literal["local", "scripted"],
        Meta(
            description="local: the model in this process; scripted: no model, a known text, for tests and load tests."
        ),
    ] = "local"
    scripted_step_ms: Annotated[float, Meta(ge=0, description="How long a step of the scripted executor takes.")] = 0.0
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Of weights, activations and KV cache; auto: the checkpoint's own."),
    ] = "auto"
    deterministic: Annotated[
        bool,
        Meta(
            description="A request's tokens are the same bit for bit whoever is computed beside it, greedy or sampled, "
            "and after a preemption or an engine's death. On a CPU; refused where that can't be promised."
        ),
    ] = False
    load: Annotated[
        Literal["safetensors", "random"],
        Meta(description="random: weights made up on the device; the model's directory needs a config.json only."),
    ] = "safetensors"
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="auto: cuda where there is one.")] = "auto"
    kernels: Annotated[
        str, Meta(description="A libquire.so compiled ahead, taken as it is; empty: compile on first use.")
    ] = ""
    threads: Annotated[
        int,
        Meta(
            ge=0,
            description="CPU threads for arithmetic; 0: all cores but one, which gateway and Redis need. They wait for "
            "each other actively: one that has to share its core slows a step down tenfold.",
        ),
    ] = 0
    block_size: Annotated[
        Literal[8, 16, 32, 64],
        Meta(description="Tokens in a KV block: smaller wastes less of the last block, larger reads better."),
    ] = 16
    kv_blocks: Annotated[int, Meta(ge=0, description="Blocks in the pool; 0: as many as kv_memory holds.")] = 0
    kv_memory_gib: Annotated[
        float,
        Meta(ge=0, description="GiB for the KV cache; 0: what steps leave of a GPU's memory, 1 GiB on a CPU."),
    ] = 0.0
    kv_dtype: Annotated[
        Literal["auto", "e4m3"],
        Meta(
            description="Of the KV cache. auto: as the weights; e4m3: 8 bits a number, so twice the tokens in the same "
            "memory as bfloat16 and half the bytes to read, at a coarser rounding of keys and values."
        ),
    ] = "auto"
    max_model_len: Annotated[
        int, Meta(ge=0, description="Tokens, prompt and output together; 0: what the model was made for.")
    ] = 0
    max_seqs: Annotated[
        int, Meta(ge=0, le=4096, description="Sequences that may run at once; 0: 256 on a CPU, 1024 on a GPU.")
    ] = 0
    step_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Token budget of a step, decodes included; bounds how long a prompt may stall a stream. "
            "0: 1024 on a CPU, 8192 on a GPU.",
        ),
    ] = 0
    chunk_tokens: Annotated[
        int, Meta(ge=0, description="Most prompt tokens of one sequence in a step; 0: bounded by step_tokens alone.")
    ] = 0
    prefix_cache: Annotated[bool, Meta(description="Reuse KV blocks of equal prefixes.")] = True
    warm_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Most time to spend at start, before the engine joins the fleet, on computing beginnings of "
            "prompts that were found in the prefix cache most of late; none while requests wait. For it engines keep "
            "those beginnings in Redis for some hours. 0: neither.",
        ),
    ] = 5.0
    warm_share: Annotated[
        float, Meta(ge=0, le=1, description="Most of the KV cache that they may fill, a fraction.")
    ] = 0.5
    allocation: Annotated[
        Literal["paged", "static"],
        Meta(
            description="paged: a sequence takes KV blocks as it grows. static: it takes, from its start, one "
            "contiguous run for prompt and max_tokens, shares nothing and is never preempted; admission and "
            "prefix_cache then have no say. The baseline that paging is measured against."
        ),
    ] = "paged"
    admission: Annotated[
        Literal["forecast", "threshold", "watermark", "reserve", "none"],
        Meta(
            description="When a waiting sequence may start beside others. forecast: the peak of the KV cache, "
            "predicted from lengths of outputs seen so far, fits; threshold: KV utilisation stays in admit_threshold; "
            "watermark: 5 % of the KV cache stays free; reserve: everything fits at its greatest length; none: its "
            "prompt fits."
        ),
    ] = "forecast"
    admit_threshold: Annotated[
        float,
        Meta(gt=0, le=1, description="Mode threshold: highest KV utilisation, a fraction, that a start may lead to."),
    ] = 0.90
    preempt: Annotated[
        Literal["recompute", "swap", "auto"],
        Meta(
            description="What becomes of the KV blocks of a sequence that has to yield. recompute: dropped, and "
            "computed again; swap: copied to the host's memory and back, while there is room in swap_memory_gib; "
            "auto: what takes less time, by the rates measured so far."
        ),
    ] = "auto"
    swap_memory_gib: Annotated[
        float,
        Meta(
            ge=0,
            description="GiB of the host's memory, pinned for a GPU, for the KV blocks of sequences that had to yield; "
            "at most twice what the KV cache has. 0: none, everything is computed again.",
        ),
    ] = 1.0
    itl_stretch: Annotated[
        float,
        Meta(
            ge=0,
            description="A prompt beside sequences that decode may make a step so many times as long as it would be "
            "without, by the times measured so far, and more where many wait; 0: step_tokens alone bounds it.",
        ),
    ] = 2.0
    step_target_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that a step with prompts should take at most, by the times measured so far. A slower "
            "machine computes fewer prompt tokens a step, so that new requests, cancellations and deadlines take "
            "effect that soon; GPUs and small models never reach it. Lower it for quicker starts among long prompts; "
            "raise it for throughput. 0: only step_tokens bounds a step.",
        ),
    ] = 2.0
    graph_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Most time to spend at start on CUDA graphs of decode steps; 0: none, and slow steps.",
        ),
    ] = 20.0
    lease_ms: Annotated[
        int, Meta(ge=100, description="After this long without a sign of life another engine takes over.")
    ] = 5000
    step_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a step that has not returned counts as hung: the engine ends with status "
            "1, its requests are computed again elsewhere or after its restart, and one that does it twice is "
            "quarantined. It must exceed the longest step. The default is half of a request's default timeout, so that "
            "another engine still has time to answer. Raise it for large models on slow CPUs. 0: never.",
        ),
    ] = 300.0
    flight_log: Annotated[
        str,
        Meta(
            description="File that arrivals (lengths, no text), decisions and step times are recorded in, for "
            "python -m engine.tools simulate --replay; a new one at each start. Empty: none."
        ),
    ] = ""
    flight_log_mib: Annotated[
        int, Meta(ge=1, description="MiB that the flight log and the one before it (.1) may have together.")
    ] = 64
    request_log: Annotated[
        str,
        Meta(
            description="File for one line of JSON a finished request: arrival, lengths, cached tokens, outcome, times "
            "in queue and to first and last token, priority, and a digest of the tenant; no text. `python -m "
            "engine.tools simulate --trace` reads it. A file that exists becomes FILE.1. Empty, the default: none."
        ),
    ] = ""
    request_log_mib: Annotated[
        int, Meta(ge=1, description="MiB that the request log and the one before it (.1) may have together.")
    ] = 64
    grace_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that what runs may go on after SIGTERM while no other engine can take it over; then "
            "it waits in the queue for one that starts.",
        ),
    ] = 30.0
    standby: Annotated[
        bool,
        Meta(
            description="Import and prepare everything, then wait for a line on standard input before the model is "
            "loaded: a spare that a supervisor keeps for an engine that may die. Ends when standard input does."
        ),
    ] = False
    spare_on_gpu: Annotated[
        bool,
        Meta(
            description="A waiting spare holds a CUDA context, about 0.5 GB of GPU memory, and `swap_memory_gib` of "
            "pinned host memory: a takeover then starts about a second sooner. Turn it off on a GPU without that room."
        ),
    ] = True
    metrics_host: Annotated[str, Meta(description="Address of metrics_port.")] = "127.0.0.1"
    metrics_port: Annotated[
        int,
        Meta(ge=0, le=65535, description="TCP port of this engine's /metrics and /health; 0: none."),
    ] = 0
    vllm_metrics: Annotated[
        bool, Meta(description="Repeat figures under vLLM's names, for dashboards and autoscalers made for it.")
    ] = False
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Of the log on stderr: one line a record either way.")
    ] = "text"
    otlp_endpoint: Annotated[
        str,
        Meta(
            description="Base URL of an OpenTelemetry collector (OTLP over HTTP) for traces; empty: as "
            "OTEL_EXPORTER_OTLP_ENDPOINT says, and no traces without it."
        ),
    ] = ""
    trace_sample: Annotated[
        float, Meta(ge=0, le=1, description="Fraction of requests to trace, of those that bring no trace themselves.")
    ] = 1.0
    poison_free_blocks: Annotated[
        bool, Meta(description="Fill freed KV blocks with NaN: finds use after free (tests).")
    ] = False
    bad_books: Annotated[
        Literal["stop", "log"],
        Meta(
            description="What an engine does whose audit finds that the books of its KV blocks don't balance, which "
            "would be our bug and could mix two answers. stop: says so and exits; its requests go on elsewhere, or "
            "here once it is started again. log: says so, counts it and goes on."
        ),
    ] = "stop"
    check_books: Annotated[bool, Meta(description="Audit the block pool after every step (tests).")] = False
