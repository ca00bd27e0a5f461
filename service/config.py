"""GatewayConfig: all an operator may set on a gateway.  The only reader of files and environment in `service`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Frozen after start.  `engine.common.settings.load` fills it from flags, environment and a file."""

    model: Annotated[str, Meta(description="Directory or hub name: its tokenizer and chat template are used.")] = ""
    served_name: Annotated[str, Meta(description="Name clients use; empty: the model's own.")] = ""
    host: Annotated[str, Meta(description="Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="TCP port; several gateway processes may share it; 0: any free one.")
    ] = 8000
    metrics_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="TCP port of this process alone for /metrics and /health; 0: none. A gateway with API keys or "
            "tenants serves /metrics here only. With several gateways on "
            "one port its /metrics answers for any one of them: scrape these. `quire serve` counts up from it: "
            "the engine first, then each gateway.",
        ),
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
    trace_prompts: Annotated[
        bool, Meta(description="Put prompts and answers into traces: whoever reads those reads them.")
    ] = False
    redis_url: Annotated[str, Meta(description="redis://, rediss:// (TLS) or unix:// URL, password included.")] = (
        "redis://127.0.0.1:6379/0"
    )
    namespace: Annotated[str, Meta(description="Prefix of every Redis key: one deployment, one namespace.")] = "quire"
    gateway_id: Annotated[
        str, Meta(description="Unique name of this process; empty: host name, process id and a random part.")
    ] = ""
    api_keys: Annotated[
        list[str],
        Meta(description="Bearer keys that may use /v1, /tokenize and /detokenize; without any key everybody may."),
    ] = []
    tenants: Annotated[
        str, Meta(description="TOML file of tenants: weight and key digests (service/tenants.py). Fair between them.")
    ] = ""
    literal_content: Annotated[
        bool,
        Meta(
            description="Encode the content of chat messages as text, also where it reads like a special token of the "
            "model, so that no user can end a message and write another one. System and developer messages may hold "
            "special tokens. Off: every message may, as in vLLM."
        ),
    ] = True
    max_body_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="Largest request body, unzipped; 413 as soon as more is announced or arrives. The default "
            "holds a prompt of 400,000 tokens. Each MiB of text holds the event loop for up to 7 ms.",
        ),
    ] = 4 * 1024 * 1024
    max_bodies_mib: Annotated[
        int,
        Meta(
            ge=1,
            description="MiB of request bodies in memory at once, each but for its first 16 KiB, from their arrival "
            "until the request is queued; beyond them the answer is 503.",
        ),
    ] = 256
    body_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds a request body may take to arrive; then the answer is 408. Raise it for large bodies "
            "over slow lines: the default allows 4 MiB at 70 KiB/s.",
        ),
    ] = 60.0
    header_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds a new connection may take to send a whole request head, and a kept one from the first "
            "byte of the next; then it is closed.",
        ),
    ] = 15.0
    keepalive_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds a connection may stay open without a request. Keep it longer than a proxy in front "
            "does, which otherwise meets closed connections.",
        ),
    ] = 630.0
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="Client connections at once, 15 KiB of memory each. The next one replaces the longest idle "
            "one. If none is idle, only probes are answered, others are 503. Open files limit it further.",
        ),
    ] = 20_000
    max_messages: Annotated[
        int, Meta(ge=1, description="Messages in one chat request: the chat template runs 10 to 30 us for each.")
    ] = 4096
    max_prompt_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Tokens of all prompts of one request together, before truncation, and of one /tokenize or "
            "/detokenize. One prompt may always have the model's whole context.",
        ),
    ] = 262_144
    max_prompts: Annotated[int, Meta(ge=1, description="Prompts in one completions request.")] = 64
    max_n: Annotated[int, Meta(ge=1, description="Continuations of one prompt.")] = 16
    max_logprobs: Annotated[int, Meta(ge=0, le=100, description="Alternatives reported per token.")] = 20
    max_logprob_entries: Annotated[
        int,
        Meta(
            ge=1,
            description="Log probabilities in one answer: tokens, with echo also prompt tokens, times n times "
            "(alternatives + 1). An entry takes about 12 bytes in Redis, and 200 to 600 in a gateway where the "
            "answer is not streamed. The default, 75 MiB at most, scores 65,536 prompt tokens with one alternative "
            "each; far more would hold the event loop for over 50 ms when they arrive.",
        ),
    ] = 131_072
    max_stop_strings: Annotated[int, Meta(ge=0, description="Each costs a search in every token's text.")] = 16
    max_stop_chars: Annotated[
        int, Meta(ge=1, description="Length of one stop string: that much text may be held back.")
    ] = 256
    max_token_list: Annotated[
        int, Meta(ge=0, description="Entries of logit_bias, stop_token_ids and allowed_token_ids.")
    ] = 1024
    default_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds a request may take, queue included, when it names no timeout itself.")
    ] = 600.0
    max_timeout_s: Annotated[float, Meta(gt=0, description="Longest timeout a request may ask for, seconds.")] = 3600.0
    heartbeat_s: Annotated[
        float, Meta(gt=0, description="Seconds of silence before a keep-alive comment; proxies cut idle streams at 50.")
    ] = 10.0
    drain_s: Annotated[
        float, Meta(ge=0, description="Seconds running streams may go on after SIGTERM; then they end in an error.")
    ] = 30.0
    debug_endpoints: Annotated[
        bool,
        Meta(description="Serve POST /debug/audit: every engine audits the books of its KV blocks, and says so."),
    ] = False
    fleet_s: Annotated[float, Meta(gt=0, description="Seconds between readings of the engines' leases.")] = 0.25
    queue_wait_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Longest estimated wait in the queue, seconds; beyond it the answer is 429 and a time to come "
            "again. A quarter of the time to the first token that is good enough: waits differ from their estimate.",
        ),
    ] = 0.5
    resume_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that a request whose client was lost goes on and waits for it to come back: after its "
            "gateway died, or where the client said that it would (Idempotency-Key, X-Resumable).",
        ),
    ] = 30.0
    backlog_mib: Annotated[
        int, Meta(ge=1, description="MiB of tokens that may wait for slow readers in memory; the rest waits in Redis.")
    ] = 64
    max_open: Annotated[
        int, Meta(ge=1, description="Requests open at once, slow bodies and readers included; beyond them: 503.")
    ] = 16_384
    retain_s: Annotated[
        float,
        Meta(
            ge=15,
            description="Seconds that an answer's token log stays in Redis after its end: 4 bytes a token, and what "
            "was asked for beside it (logprobs). A request that never ends leaves a minute after its deadline.",
        ),
    ] = 60.0
