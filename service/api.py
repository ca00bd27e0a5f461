"""OpenAI-shaped JSON, on its way in (`format.py` has the way out).

`parse_completion`, `parse_chat` turn bytes into a `ValidRequest` that cannot be wrong; `fit` checks what only the
encoded prompt and the engines' limits can tell.  After these two nobody re-checks.  All else is a `Refusal`.

No message built here quotes prompt text: names, limits and numbers only.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from typing import Any

import msgspec

from engine.wire.bus import PRIORITIES
from engine.wire.messages import Generate, Sampling
from service.config import GatewayConfig

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

NON_FINITE_BYTES = 256 * 1024  # a broken body up to this size is parsed again, to name the field that is no number

MAX_PARTS = 16_384  # content parts of all messages of a request
MAX_TOOL_CALLS = 4096  # tool calls of all messages of a request

CLASSES = {"high": -1, "normal": 0, "low": 1}  # the names of priorities; within a tenant the lower goes first

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "server_error",
}


class Refusal(Exception):
    """The answer is an error.  `limit` and `given` say what was allowed and what came, where there is a limit."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        limit: float | str | None = None,
        given: float | str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.limit, self.given, self.retry_after_s = limit, given, retry_after_s

    def body(self) -> bytes:
        error: dict[str, Any] = {
            "message": self.message,
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        if self.limit is not None:
            error["limit"] = self.limit
        if self.given is not None:
            error["given"] = self.given
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds (>= 1) and, finer, in milliseconds; a deadline that passed is not retried."""
        if self.retry_after_s is not None:
            seconds = max(1, math.ceil(self.retry_after_s))
            return {"Retry-After": str(seconds), "retry-after-ms": str(round(self.retry_after_s * 1000))}
        return {"x-should-retry": "false"} if self.status == 504 else {}


# ----------------------------------------------------------------------------------------------- in: what clients send


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    """Fields of both endpoints.  Null means absent; unknown fields are ignored, as OpenAI's clients expect."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    timeout: float | None = None
    priority: int | str | None = None
    user: str | None = None
    # Would change the answer, and are not served: refused rather than quietly left out.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    use_beam_search: Any = None
    bad_words: Any = None
    audio: Any = None


class CompletionBody(_Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    suffix: Any = None
    logprobs: int | None = None


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatBody(_Common, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


_UNSERVED = {
    "structured_outputs": "structured output",
    "guided_json": "structured output",
    "guided_regex": "structured output",
    "guided_choice": "structured output",
    "guided_grammar": "structured output",
    "tools": "tool calling",
    "functions": "tool calling",
    "use_beam_search": "beam search",
    "bad_words": "bad words",
    "audio": "audio",
    "suffix": "text insertion",
}

Prompt = str | list[int]


class ValidRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request nobody needs to check again, but for what depends on the encoded prompt (see `fit`)."""

    prompts: list[Prompt]  # completions: one or more texts or token id lists; chat: empty
    messages: list[dict[str, Any]]  # chat: what the template renders; completions: empty
    sampling: Sampling
    n: int
    max_tokens: int | None  # of each continuation; None: the rest of the context
    seeded: bool  # the client chose the seed
    stop: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    cache_salt: str
    truncate_prompt_tokens: int | None
    timeout_s: float
    priority: int  # lower goes earlier
    chat: bool  # which of the two endpoints asked

    def least_tokens(self, room: int) -> int:
        """Output tokens of a continuation before it may end by itself; `room` is its max_new_tokens."""
        endless = self.sampling.ignore_eos and not self.stop and not self.sampling.stop_token_ids
        return room if endless else max(1, self.sampling.min_tokens)


def _bad(code: str, message: str, param: str | None, limit: Any = None, given: Any = None) -> Refusal:
    return Refusal(400, code, message, param=param, limit=limit, given=given)


def decode(body: bytes, kind: type[Any]) -> Any:
    """Bytes -> `kind`.  Raises Refusal: not UTF-8, not JSON, a field of the wrong type or missing."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        at = re.search(r"- at `\$\.?([^`]*)`$", message) or re.search(r"required field `([^`]*)`", message)
        param = at.group(1) if at else None
        raise _bad("invalid_type", f"{param or 'body'}: {message.split(' - at ')[0]}", param) from None
    except UnicodeDecodeError as error:
        raise _bad("invalid_utf8", f"body is not UTF-8: bad byte at position {error.start}", None) from None
    except (msgspec.DecodeError, RecursionError) as error:
        if (name := _non_finite(body)) is not None:
            raise _bad("invalid_value", f"{name}: must be a finite number", name, "finite", "NaN or Infinity") from None
        code = "invalid_utf8" if "utf-8" in str(error).lower() else "invalid_json"
        raise _bad(code, f"body is not valid JSON: {error}", None) from None


def _non_finite(body: bytes) -> str | None:
    """The top-level field holding a bare NaN or Infinity: not JSON, but what many clients send for a bad float."""
    if len(body) > NON_FINITE_BYTES or not (b"NaN" in body or b"Infinity" in body):
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return next((k for k, v in fields.items() if isinstance(v, float) and not math.isfinite(v)), None)


def _within(name: str, value: float, low: float, high: float, *, above_low: bool = False) -> float:
    """`value` if low <= value <= high (low < value with above_low) and finite.  Raises Refusal naming all three."""
    if math.isfinite(value) and (low < value if above_low else low <= value) and value <= high:
        return value
    top = "" if math.isinf(high) else f" and <= {high:g}"
    limit = f"{'>' if above_low else '>='} {low:g}{top}"
    given = value if math.isfinite(value) else str(value)
    raise _bad("invalid_value", f"{name}: must be {limit}, got {given}", name, limit, given)


def _count(name: str, given: int, limit: int) -> None:
    if given > limit:
        raise _bad("too_many", f"{name}: at most {limit} entries, got {given}", name, limit, given)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def header_timeout(header: str | None, config: GatewayConfig) -> float:
    """X-Request-Timeout in seconds, or the server's default where there is none.  Raises Refusal."""
    if header is None:
        return config.default_timeout_s
    try:
        seconds = float(header)
    except ValueError:
        limit = f"> 0 and <= {config.max_timeout_s:g}"
        given = header[:32]
        message = f"x-request-timeout: must be a number of seconds {limit}, got '{given}'"
        raise _bad("invalid_value", message, "x-request-timeout", limit, given) from None
    return _within("x-request-timeout", seconds, 0, config.max_timeout_s, above_low=True)


def _priority(given: int | str) -> int:
    """A class's number: "high", "normal" and "low", or, as in vLLM, a whole number of which the lower goes earlier."""
    first, last = PRIORITIES
    if isinstance(given, str):
        if given in CLASSES:
            return CLASSES[given]
        given = given[:32]
    elif first <= given <= last:
        return given
    limit = f"{', '.join(CLASSES)}, or a whole number from {first} (first) to {last}"
    raise _bad("invalid_value", f"priority: must be one of {limit}, got {given!r}", "priority", limit, given)


def _common(body: _Common, config: GatewayConfig, served_name: str, timeout_s: float) -> dict[str, Any]:
    """Check and translate the fields both endpoints share.  `timeout_s` is for a body that names none."""
    if body.model != served_name:
        raise Refusal(
            404, "model_not_found", f"model: this server serves '{served_name}', not the one asked for", param="model"
        )
    for name, feature in _UNSERVED.items():
        if getattr(body, name, None) not in (None, False, [], {}):
            raise _bad("unsupported", f"{name}: {feature} is not served", name)
    form = body.response_format
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise _bad("unsupported", "response_format: only {'type': 'text'} is served", "response_format", "text")
    if body.tool_choice not in (None, "none", "auto"):
        raise _bad("unsupported", "tool_choice: tool calling is not served", "tool_choice", "none")
    if body.stream_options is not None and not body.stream:
        raise _bad("invalid_value", "stream_options: only with stream=true", "stream_options")

    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    _count("stop", len(stop), config.max_stop_strings)
    for text in stop:
        _within("stop", len(text), 1, config.max_stop_chars)
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _count(name, len(getattr(body, name) or ()), config.max_token_list)
    bias: list[tuple[int, float]] = []
    for key, value in (body.logit_bias or {}).items():
        if not key.isdecimal():
            raise _bad("invalid_value", "logit_bias: keys must be token ids", "logit_bias")
        bias.append((int(key), _within("logit_bias", value, -100, 100)))
    top_k = _or(body.top_k, 0)
    if body.max_tokens is not None:
        _within("max_tokens", body.max_tokens, 1, math.inf)
    if body.truncate_prompt_tokens is not None:
        _within("truncate_prompt_tokens", body.truncate_prompt_tokens, 1, math.inf)
    sampling = Sampling(
        temperature=_within("temperature", _or(body.temperature, 1.0), 0, 2),
        top_p=_within("top_p", _or(body.top_p, 1.0), 0, 1, above_low=True),
        top_k=0 if top_k == -1 else int(_within("top_k", top_k, 0, 2**31)),  # -1 is how other servers say "all"
        min_p=_within("min_p", _or(body.min_p, 0.0), 0, 1),
        seed=_or(body.seed, 0) & (2**63 - 1),
        min_tokens=int(_within("min_tokens", _or(body.min_tokens, 0), 0, math.inf)),
        presence_penalty=_within("presence_penalty", _or(body.presence_penalty, 0.0), -2, 2),
        frequency_penalty=_within("frequency_penalty", _or(body.frequency_penalty, 0.0), -2, 2),
        repetition_penalty=_within(
            "repetition_penalty", _or(body.repetition_penalty, 1.0), 0, math.inf, above_low=True
        ),
        logit_bias=bias,
        allowed_token_ids=body.allowed_token_ids or [],
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
    )
    options = body.stream_options or StreamOptions()
    return {
        "sampling": sampling,
        "n": int(_within("n", _or(body.n, 1), 1, config.max_n)),
        "seeded": body.seed is not None,
        "stop": stop,
        "include_stop": bool(body.include_stop_str_in_output),
        "skip_special": _or(body.skip_special_tokens, True),
        "stream": bool(body.stream),
        "include_usage": bool(options.include_usage),
        "continuous_usage": bool(options.continuous_usage_stats),
        "return_token_ids": bool(body.return_token_ids),
        "cache_salt": body.cache_salt or "",
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "timeout_s": _within("timeout", _or(body.timeout, timeout_s), 0, config.max_timeout_s, above_low=True),
        "priority": _priority(_or(body.priority, "normal")),
    }


def _prompts(given: str | list[Any], config: GatewayConfig) -> list[Prompt]:
    """The four forms of `prompt` as a list of texts or token id lists, none of them empty."""
    prompts: list[Any]
    kinds = set() if isinstance(given, str) else set(map(type, given))
    if isinstance(given, str) or kinds == {int}:
        prompts = [given]
    elif len(kinds) <= 1:
        prompts = list(given)
    else:
        raise _bad("invalid_type", "prompt: texts, token ids and lists of token ids cannot be mixed", "prompt")
    _count("prompt", len(prompts), config.max_prompts)
    if not prompts or not all(prompts):
        raise _bad("empty_prompt", "prompt: must not be empty, at least 1 token", "prompt", ">= 1", 0)
    return prompts


def parse_completion(body: bytes, config: GatewayConfig, served_name: str, timeout_s: float) -> ValidRequest:
    """POST /v1/completions.  Raises Refusal."""
    asked: CompletionBody = decode(body, CompletionBody)
    fields = _common(asked, config, served_name, timeout_s)
    if asked.best_of is not None and asked.best_of != fields["n"]:
        raise _bad("unsupported", "best_of: only a value equal to n is served", "best_of", fields["n"], asked.best_of)
    if asked.logprobs is not None:
        logprobs = int(_within("logprobs", asked.logprobs, 0, config.max_logprobs))
        prompt_logprobs = logprobs if asked.echo else -1
        fields["sampling"] = msgspec.structs.replace(
            fields["sampling"], logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )
    return ValidRequest(
        prompts=_prompts(asked.prompt, config),
        messages=[],
        max_tokens=_or(asked.max_tokens, 16),  # OpenAI's default
        echo=bool(asked.echo),
        chat=False,
        **fields,
    )


def plain_messages(messages: list[Message], config: GatewayConfig) -> list[dict[str, Any]]:
    """Messages as chat templates want them: content a string, absent fields absent.  Raises Refusal."""
    if not messages:
        raise _bad("empty_prompt", "messages: must not be empty, at least 1 message", "messages", ">= 1", 0)
    _count("messages", len(messages), config.max_messages)
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    _count("messages[].content", parts, MAX_PARTS)
    _count("messages[].tool_calls", sum(len(message.tool_calls or ()) for message in messages), MAX_TOOL_CALLS)
    plain = []
    for at, message in enumerate(messages):
        name = f"messages[{at}]"
        if message.role not in ROLES:
            allowed = ", ".join(ROLES)
            # The role is echoed cut short: it is the client's own word, not prompt text.
            given = message.role[:32]
            raise _bad(
                "invalid_value", f"{name}.role: '{given}' is not one of {allowed}", f"{name}.role", allowed, given
            )
        if isinstance(message.content, list):
            for part in message.content:
                if part.type != "text" or part.text is None:
                    raise _bad(
                        "unsupported", f"{name}.content: only parts of type 'text' are served", f"{name}.content"
                    )
            content = "\n".join(part.text or "" for part in message.content)
        else:
            content = message.content or ""
        entry: dict[str, Any] = {"role": message.role, "content": content}
        for field in ("name", "tool_calls", "tool_call_id"):
            if (value := getattr(message, field)) is not None:
                entry[field] = value
        plain.append(entry)
    return plain


class TokenizeBody(msgspec.Struct):
    """POST /tokenize: a text, or messages to run through the chat template."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]


def parse_chat(body: bytes, config: GatewayConfig, served_name: str, timeout_s: float) -> ValidRequest:
    """POST /v1/chat/completions.  Raises Refusal."""
    asked: ChatBody = decode(body, ChatBody)
    fields = _common(asked, config, served_name, timeout_s)
    if asked.max_completion_tokens is not None:
        _within("max_completion_tokens", asked.max_completion_tokens, 1, math.inf)
    if asked.top_logprobs is not None:
        _within("top_logprobs", asked.top_logprobs, 0, config.max_logprobs)
        if not asked.logprobs:
            raise _bad("invalid_value", "top_logprobs: only with logprobs=true", "top_logprobs")
    if asked.logprobs:
        fields["sampling"] = msgspec.structs.replace(fields["sampling"], logprobs=asked.top_logprobs or 0)
    return ValidRequest(
        prompts=[],
        messages=plain_messages(asked.messages, config),
        max_tokens=_or(asked.max_completion_tokens, asked.max_tokens),
        echo=False,
        chat=True,
        **fields,
    )


class EngineLimits(msgspec.Struct, frozen=True):
    """What every live engine can take: the smallest of each, for nobody knows which one will claim the request."""

    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    block_size: int  # tokens
    total_blocks: int


def too_long(param: str, longest: int, prompt: int, asked: int, *, least: bool = False) -> Refusal:
    """A prompt of `prompt` tokens (`least`: or more) does not fit into the model's context."""
    more = "at least " if least else ""
    message = (
        f"{param}: the model's context is {longest} tokens, but {more}{prompt + asked} were asked for: "
        f"{more}{prompt} in the prompt and {asked} to generate"
    )
    return _bad("context_length_exceeded", message, param, longest, prompt + asked)


def too_many_tokens(param: str, limit: int, given: int, *, least: bool = False) -> Refusal:
    """The texts or token ids of one request are more than a gateway takes at once."""
    message = f"{param}: at most {limit} tokens in one request, got {'at least ' if least else ''}{given}"
    return _bad("too_many_tokens", message, param, limit, given)


def fit(valid: ValidRequest, encoded: list[list[int]], limits: EngineLimits) -> list[int]:
    """max_new_tokens of each prompt.  Raises Refusal where the engines could never serve the request."""
    vocab, longest = limits.vocab_size, limits.max_model_len
    sampling = valid.sampling
    for name, ids in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        *(("prompt", ids) for ids in encoded),
    ):
        if ids and (min(ids) < 0 or max(ids) >= vocab):
            token = next(token for token in ids if not 0 <= token < vocab)
            message = f"{name}: token ids are 0 to {vocab - 1}, got {token}"
            raise _bad("invalid_token_id", message, name, vocab - 1, token)
    param = "messages" if valid.chat else "prompt"
    pool = limits.total_blocks * limits.block_size
    rooms = []
    for ids in encoded:
        if not ids:
            raise _bad("empty_prompt", f"{param}: must not be empty, at least 1 token", param, ">= 1", 0)
        asked = 1 if valid.max_tokens is None else valid.max_tokens
        if len(ids) + asked > longest:
            raise too_long(param, longest, len(ids), asked)
        if len(ids) + asked > pool:
            message = f"{param}: the KV cache holds {pool} tokens in all, but {len(ids) + asked} were asked for"
            raise _bad("kv_cache_exceeded", message, param, pool, len(ids) + asked)
        room = min(longest, pool) - len(ids) if valid.max_tokens is None else valid.max_tokens
        if sampling.min_tokens > room:
            message = f"min_tokens: at most max_tokens, {room}, got {sampling.min_tokens}"
            raise _bad("invalid_value", message, "min_tokens", room, sampling.min_tokens)
        rooms.append(room)
    return rooms


def traceparent(header: str) -> str:
    """A W3C trace context header as it stands, or "" for one that is not well-formed: it is then as if none came.

    https://www.w3.org/TR/trace-context/: version, trace id, parent id, flags; all-zero ids and version ff are void."""
    form = r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    return header if re.fullmatch(form, header) else ""


def generates(
    valid: ValidRequest,
    request_id: str,
    gateway: str,
    encoded: list[list[int]],
    rooms: list[int],
    deadline_ms: int,
    trace: str = "",
    tenant: str = "",
    weight: float = 1.0,
    queued_ms: int = 0,
) -> list[Generate]:
    """One order per prompt; choice number = prompt number * n + continuation.  Every seed is settled here, so that a
    replay on another engine samples the same tokens."""
    return [
        Generate(
            id=f"{request_id}.{at}",
            gateway=gateway,
            token_ids=ids,
            max_new_tokens=room,
            sampling=valid.sampling
            if valid.seeded
            else msgspec.structs.replace(valid.sampling, seed=secrets.randbits(63)),
            deadline_ms=deadline_ms,
            cache_salt=valid.cache_salt,
            traceparent=trace,
            n=valid.n,
            priority=valid.priority,
            tenant=tenant,
            weight=weight,
            queued_ms=queued_ms,
        )
        for at, (ids, room) in enumerate(zip(encoded, rooms, strict=True))
    ]
