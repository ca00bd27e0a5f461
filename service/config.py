"""GatewayConfig: every option of a gateway, with unit, default and reason."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quire.engine.wire.messages import PRIORITIES


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a gateway.  `quire.engine.common.settings.load` fills it from flags, environment and a file."""

    model: str = ""
    """Directory or hub name of the model. A gateway loads its tokenizer and chat template."""
    served_name: str = ""
    """Model names for clients, separated by commas. Answers carry the first. Empty: the directory's or hub's name."""
    lora: str = ""
    """LoRA adapters for clients, which name one as `model`: NAME=PATH, separated by commas. PATH is a folder as PEFT
    writes it, which gateways and engines can read. Give all gateways the same. Empty, the default: the base model
    alone."""
    lora_dir: str = ""
    """Directory of LoRA adapters. Clients name a folder directly in it as `model`: it is looked up at each use, so
    new, changed and removed folders count at once. POST /v1/load_lora_adapter takes folders in it, at any depth.
    Links that lead out of it are refused. Engines must read it under the same path. Empty, the default: only the
    adapters of --lora, and nothing can be loaded later."""
    generation_config: Literal["auto", "none"] = "auto"
    """Defaults of temperature, top_p, top_k, min_p and repetition_penalty. auto: those of the model's
    generation_config.json, if it has one. none: OpenAI's. Same for all gateways."""
    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0: every interface."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """TCP port of the API. Several gateway processes may share it. 0: any free port."""
    uds: str = ""
    """Path of a Unix socket to listen at instead of host and port. Empty: none. Gateways cannot share it: give each
    its own. `quire serve` does not take it."""
    root_path: Annotated[str, Meta(pattern=r"^(/[\w.~-]+)*/?$")] = ""
    """Path under which a proxy serves this API, such as /llm. Requests may begin with it or not. Empty: none."""
    web: bool = True
    """Serve the playground at /: a page to chat with the model and to watch the engines; and the API reference at
    /docs. The pages need no key; what they call does. Off: both are 404."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """TCP port of this process alone for /metrics and /health. 0: none. A gateway with API keys or tenants serves
    /metrics here only. Gateways that share an API port answer its /metrics in turn: scrape this port instead. `quire
    serve` counts up from it: the engine first, then each gateway."""
    vllm_metrics: bool = False
    """Repeat metrics under vLLM's names, for dashboards and autoscalers made for vLLM."""
    engine_metrics: str = ""
    """URLs of engines' metrics pages, separated by commas, such as http://10.0.0.7:9100/metrics. /metrics then shows
    their metrics under vLLM's names as well, unless there are API keys or tenants. For dashboards that read one
    page: do not scrape the engines too, sums would count twice. Empty: none; `quire serve --vllm-metrics` names its
    own engine's."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log on stderr. Either way a record is one line."""
    otlp_endpoint: str = ""
    """Base URL of an OpenTelemetry collector (OTLP over HTTP) for traces. Empty: the variable
    OTEL_EXPORTER_OTLP_ENDPOINT decides, and without it there are no traces."""
    trace_sample: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Fraction of requests to trace, of those without a trace context of their own."""
    trace_prompts: bool = False
    """Put prompts and answers into traces. All readers of the traces can then read them."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """redis://, rediss:// (TLS) or unix:// URL, password included."""
    namespace: str = "quire"
    """Prefix of every Redis key. Give each deployment its own."""
    gateway_id: str = ""
    """Unique name of this process. Empty: host name, process id and a random part."""
    api_keys: list[str] = []
    """Bearer keys for /v1, /tokenize and /detokenize. Without keys and tenants, every client may use them."""
    admin_keys: list[str] = []
    """Bearer keys like those of --api-keys, with the admin scope: they may watch the engines (GET /engine/state),
    empty their prefix caches (POST /reset_prefix_cache) and load LoRA adapters. A tenant's keys have it with `admin
    = true` in the tenants file."""
    cors_origins: list[str] = []
    """Origins of web pages that may use this API, such as https://example.com; '*': any. Empty: only pages of this
    server."""
    allowed_hosts: list[str] = []
    """Names in the Host header that are served besides those of this machine (localhost, 127.0.0.1, [::1]), such as
    llm.example.com; '*': any. Without keys and tenants, a gateway on a loopback address refuses other names, so that
    no web page reaches it under a name of its own. Set it behind a proxy that passes Host on. With keys or at
    another address, names are checked only if this is set."""
    tenants: str = ""
    """TOML file of tenants, with weights, key digests and quotas (see service/api/tenants.py). The queue is fair
    between tenants."""
    highest_priority: Annotated[int, Meta(ge=PRIORITIES[0], le=PRIORITIES[1])] = 0
    """The lowest number that `priority` of a request may have, if its key has no bound of its own (highest_priority
    in the tenants file). Lower numbers run first within a tenant. A request that asks for a lower one gets this one,
    and x-unknown-fields of its answer names the field. 0: normal and low ones only. Admin keys have no bound."""
    inference_headers: bool = False
    """Trust the headers x-gateway-inference-objective and x-gateway-inference-fairness-id of Kubernetes' inference
    gateways: see --objectives; a fairness id is a tenant where no key names one. Set it only where the gateway in
    front sets or removes them on every request. Off: they are ignored."""
    objectives: list[str] = []
    """Priorities of the objectives that x-gateway-inference-objective may name, such as critical=high,batch=50:
    high, normal, low, or a number from -100 (first) to 100. Other names are a 400. Only with --inference-headers."""
    literal_content: bool = True
    """Encode the content of chat messages as text, even if it reads like a special token. So no user can end a
    message and write another one. System and developer messages may contain special tokens. Off: every message may,
    as in vLLM."""
    strict_fields: bool = False
    """Refuse unknown fields of a request, and numbers and booleans that are strings. Off: such numbers are accepted
    as in vLLM, and a header of the answer names unknown fields, which are ignored."""
    return_tokens_as_token_ids: bool = False
    """Name tokens of log probabilities `token_id:N` where a request does not say `return_tokens_as_token_ids`, for
    clients that read token ids, such as evaluations. Off: by their text."""
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 4 * 1024 * 1024
    """Maximum request body, unzipped. A larger one gets 413, as soon as it is announced or arrives. The default
    holds a prompt of 400,000 tokens. Each MiB of text blocks the event loop for up to 7 ms."""
    max_bodies_mib: Annotated[int, Meta(ge=1)] = 256
    """MiB of request bodies in memory at once, from their arrival until the request is queued. The first 16 KiB of
    each do not count. Beyond the limit the answer is 503."""
    body_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds that a request body may take to arrive. Then the answer is 408. Raise it for large bodies over slow
    lines: the default allows 4 MiB at 70 KiB/s."""
    header_timeout_s: Annotated[float, Meta(gt=0)] = 15.0
    """Seconds that a request head may take to arrive, from the connection's start or from the first byte of the next
    request. Then the connection is closed."""
    keepalive_s: Annotated[float, Meta(gt=0)] = 630.0
    """Seconds that a connection may stay open without a request. Set it longer than in a proxy in front, or the
    proxy sends requests on closed connections."""
    max_connections: Annotated[int, Meta(ge=1)] = 20_000
    """Client connections at once, 15 KiB of memory each. The next one replaces the longest idle one. If none is
    idle, only probes are answered, and all else is 503. The limit of open files bounds it too."""
    max_messages: Annotated[int, Meta(ge=1)] = 4096
    """Messages in one chat request. The chat template takes 10 to 30 us for each."""
    max_prompt_tokens: Annotated[int, Meta(ge=1)] = 262_144
    """Tokens of all prompts of one request together, before truncation. It also bounds /tokenize and /detokenize.
    One prompt may always fill the model's whole context."""
    max_prompts: Annotated[int, Meta(ge=1)] = 1024
    """Prompts in one completions request."""
    max_n: Annotated[int, Meta(ge=1)] = 128
    """Choices of one prompt."""
    max_choices: Annotated[int, Meta(ge=1, le=65_536)] = 1024
    """Choices of all prompts of one request: prompts x n. Each takes memory of a gateway and 2 to 6 characters of
    every event id, which a client that resumes sends in a header."""
    max_beam_width: Annotated[int, Meta(ge=1)] = 128
    """Beams of one search, returned or not. Each takes a slot of an engine (`--max-seqs`) and the KV blocks of a
    sequence, less those that it shares. Lower it where one search should not fill an engine."""
    max_logprobs: Annotated[int, Meta(ge=0, le=100)] = 20
    """Alternatives reported per token."""
    max_logprob_entries: Annotated[int, Meta(ge=1)] = 131_072
    """Log probabilities in one answer: tokens (with echo also prompt tokens) x n x (alternatives + 1). An entry
    takes about 12 bytes in Redis. In a gateway it takes 200 to 600 if the answer is not streamed. The default (75
    MiB at most) scores 65,536 prompt tokens with one alternative each. Far more would block the event loop for over
    50 ms when they arrive."""
    max_stop_strings: Annotated[int, Meta(ge=0)] = 64
    """Stop strings of one request. All are searched together."""
    max_stop_chars: Annotated[int, Meta(ge=1)] = 256
    """Characters of one stop string. Up to this much text may be held back from the client."""
    max_token_list: Annotated[int, Meta(ge=0)] = 1024
    """Entries of logit_bias, stop_token_ids, allowed_token_ids and bad_words."""
    default_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Timeout in seconds, time in the queue included, of a request without `timeout`."""
    max_timeout_s: Annotated[float, Meta(gt=0)] = 3600.0
    """Maximum timeout, in seconds, that a request may set."""
    heartbeat_s: Annotated[float, Meta(gt=0)] = 10.0
    """Seconds of silence before a keep-alive: blank lines, or a comment for clients that ask for event ids. Proxies
    cut streams that are idle for 50 s."""
    drain_s: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds from SIGTERM to the exit. Running answers may use all but the last 6 s. Then resumable streams move to
    another gateway, and others end in an error."""
    fleet_s: Annotated[float, Meta(gt=0)] = 0.25
    """Seconds between two reads of the engines' leases and of the queue."""
    takeover_wait_s: Annotated[float, Meta(ge=0)] = 5.0
    """Seconds that a new request waits until an engine takes requests: a spare, a restarted or the first one. After
    that time, or at once with 0, it is refused with 503. The default fits a spare engine; if engines are scaled from
    zero, set it to the time that one takes to start. The request's timeout and X-Max-Queue-Wait shorten it."""
    ready_without_engine: bool = False
    """Whether /ready is 200 while no engine takes requests. If not, load balancers send requests to other gateways.
    Set it where engines are scaled to zero: the requests that wait are what starts one."""
    ttft_target_s: Annotated[float, Meta(gt=0)] = 2.0
    """Target for the time to first token, in seconds. A request whose estimated wait is at most 0.8 of it joins the
    on-time lane, which engines serve first, small requests before large ones. A request that has waited so long
    there moves to the late lane. Set it to what your users accept."""
    itl_target_s: Annotated[float, Meta(gt=0)] = 0.2
    """Target for the mean time between the tokens of a request, in seconds. With ttft_target_s it defines goodput, a
    metric: a request counts as met if it was answered within both. It has no other effect. Set it to what your users
    accept."""
    late_wait_s: Annotated[float, Meta(ge=0)] = 60.0
    """Longest estimated wait in the late lane, in seconds. Beyond it the answer is 429 with Retry-After. A request
    may lower it with X-Max-Queue-Wait. 0: a request that cannot start in time is refused."""
    max_queued: Annotated[int, Meta(ge=1)] = 65_536
    """Requests that may wait in Redis for an engine, of all gateways; a prompt each. Beyond it the answer is 503. A
    waiting request takes about 1.5 KiB of Redis memory plus its prompt."""
    max_queued_mib: Annotated[int, Meta(ge=1)] = 256
    """MiB of waiting requests in Redis, of all gateways. A prompt takes 1 to 5 bytes per token. Beyond it the answer
    is 503."""
    resume_s: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds that a request keeps running after its client has disconnected, so that it can resume. It applies
    after its gateway died, or if the client sent Idempotency-Key or X-Resumable."""
    backlog_mib: Annotated[int, Meta(ge=1)] = 64
    """MiB of tokens that may wait for slow readers in memory. The rest waits in Redis."""
    max_open: Annotated[int, Meta(ge=1)] = 16_384
    """Requests open at once, slow bodies and readers included. Beyond the limit the answer is 503."""
    retain_s: Annotated[float, Meta(ge=15)] = 60.0
    """Seconds that an answer's token log stays in Redis after its end: 4 bytes per token, plus logprobs if asked
    for. A request that never ends is removed a minute after its deadline."""
    responses_ttl_s: Annotated[float, Meta(ge=0)] = 3600.0
    """Seconds that a response of /v1/responses stays in Redis after its end, and after each request that continues
    it, for retrieval and previous_response_id. 0: none is stored, and background responses are refused. Same for all
    gateways."""
    responses_mib: Annotated[int, Meta(ge=1)] = 64
    """MiB of stored responses of each tenant, or of each API key without a tenant. The oldest make room for a new
    one. A response takes its input, its output, and at least 1 KiB."""

    @property
    def path_prefix(self) -> str:
        """Optional prefix of all paths: `root_path` without a slash at its end."""
        return self.root_path.rstrip("/")
