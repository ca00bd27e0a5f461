"""Request JSON in OpenAI's shape -> a typed request, or a `Refusal` that names field, limit and value.

    body --parse_completion, parse_chat--> ValidRequest --fit, with the encoded prompt--> max_new_tokens of each prompt

After these two steps nothing is checked again.  (`format.py` writes answers.)  No message that is built here quotes
prompt text: only names, limits and numbers.
"""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any, TypeVar, cast

import msgspec

from quire.engine.wire.messages import PRIORITIES, Beams, Sampling
from quire.service.api import best_of
from quire.service.api.adapters import ServedAdapter
from quire.service.api.beams import BeamFields, beams_of, fit_beams, refuse_calls, searched, unserved
from quire.service.api.client_tools import Called, allowed_tools, chat_tools
from quire.service.api.echo import last_answer
from quire.service.api.fields import Endpoint, undeclared
from quire.service.api.history import Message
from quire.service.api.history import plain_messages as plain_messages
from quire.service.api.prediction import Prediction, predicted_text
from quire.service.api.scoring import Scoring
from quire.service.api.skipped import Skipped
from quire.service.api.tools import OPENAI, ChatOptions, ToolRules, chat_options
from quire.service.common.limits import LIMITS, shown
from quire.service.common.refusal import Refusal as Refusal
from quire.service.common.refusal import bad_request as _bad
from quire.service.common.refusal import check as check
from quire.service.common.refusal import limit_refusal as limit_refusal
from quire.service.common.surrogates import repaired
from quire.service.config import GatewayConfig
from quire.service.grammar.grammar import Constraint, asked
from quire.service.grammar.grammar_errors import NotServed
from quire.service.output.regions import Reading

B = TypeVar("B", bound=msgspec.Struct)

BAD_KEYS = 8  # keys of `logit_bias` that are no token ids, which a refusal names
NON_FINITE_BYTES = 256 * 1024  # an invalid body up to this size is parsed again, to name the field at fault


CLASSES = {"high": -1, "normal": 0, "low": 1}  # named priorities; within a tenant lower numbers are served first

# ----------------------------------------------------------------------------------------------- in: what clients send


class StreamOptions(msgspec.Struct):
    """`stream_options` of a request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_ids: bool | None = None


_INNER = {"stream_options": frozenset(StreamOptions.__struct_fields__)}


class _Common(BeamFields, kw_only=True):
    """Fields of both endpoints.  Null means absent but for `max_tokens`.  `fields.py` has what is not declared here."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET  # null is not absent: it means what fits
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
    bad_words: list[str] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    timeout: float | None = None
    priority: int | str | None = None
    # At most one of these; `grammar.py` reads them.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None


class CompletionBody(_Common, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatBody(_Common, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # What the chat template gets: see tools.py.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    documents: Any = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    prediction: Prediction | None = None


Prompt = str | list[int]


class ValidRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request.  Only what depends on the encoded prompt is still unchecked (see `fit`)."""

    prompts: list[Prompt]  # completions: one or more texts or token id lists; chat: empty
    messages: list[dict[str, Any]]  # chat: what the template renders; completions: empty
    sampling: Sampling
    n: int
    max_tokens: int | None  # of each choice; None: the rest of the context; 0: none, the prompt is echoed
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
    truncate_prompt_tokens: int | None  # -1: what fits into the context
    timeout_s: float
    priority: int  # lower is served earlier
    chat: bool  # it was sent to the chat endpoint
    # Fields below have defaults: an older gateway's record in Redis lacks them.
    include_ids: bool = False  # the client reads event ids and comments
    prompt_logprobs: bool = False  # the answer shows those of the prompt
    names_are_ids: bool = False  # tokens of log probabilities are named `token_id:N`
    at_most: bool = False  # where max_tokens does not fit into the context, the answer has what fits
    suffix: str = ""  # what follows the answer; "": nothing is known
    keep_first: bool = False  # truncate_prompt_tokens keeps the first tokens, not the last ones
    special: bool = True  # the tokenizer adds its special tokens to a text
    unknown: tuple[str, ...] = ()  # fields of the body that nothing reads
    adapter: ServedAdapter | None = None  # LoRA adapter that `model` names; None: the base model
    options: ChatOptions = msgspec.field(default_factory=ChatOptions)  # of the chat template
    reading: Reading | None = None  # how a chat answer is cut into regions; None: all of it is content
    constraint: Constraint | None = None  # what the answer must match, until `sampling.grammar` says it
    grammar_param: str = ""  # the field that `sampling.grammar` stands for
    bad_words: tuple[str, ...] = ()  # until `sampling` forbids them
    shown: dict[str, Any] = {}  # /v1/responses: fields of the request that the answer repeats
    items: list[dict[str, Any]] = []  # /v1/responses: its input
    seals: bool = False  # /v1/responses: reasoning items have `encrypted_content`
    raw_messages: bool = False  # /v1/responses: the response has the text and ids of all tokens
    called: dict[str, Called] = {}  # /v1/responses: tools that the chat names otherwise than the client
    beams: Beams | None = None  # the answers are searched, not sampled
    best: int = 0  # of the `n` choices of a prompt, the most probable that are returned; 0: all
    hide_logprobs: bool = False  # log probabilities only rank the choices
    hide_reasoning: bool = False  # reasoning is left out of the answer
    repeated: list[str] = []  # chats with `echo`: of each the text that its answers begin with
    conversations: list[list[dict[str, Any]]] = []  # further chats, each a prompt of its own; `messages` is the first
    scoring: Scoring | None = None  # each of `prompts` is an item whose score the answer is
    prediction: str | None = None  # text that the client expects in its answer; None: it names none
    sources: list[str] = []  # formats other than a chat's: the client's field from which each of `messages` comes

    @property
    def width(self) -> int:
        """Choices that are computed for each prompt: beams, of which `n` are returned, or `n`."""
        return self.beams.width if self.beams is not None else self.n

    def least_tokens(self, room: int) -> int:
        """Return the output tokens of a choice before it may end by itself; `room` is its max_new_tokens."""
        endless = self.sampling.ignore_eos and not self.stop and not self.sampling.stop_token_ids
        return room if endless else max(1, self.sampling.min_tokens)


def decode(body: bytes, kind: type[Any], config: GatewayConfig | None = None) -> Any:
    """Decode a body as `kind`.  Raises Refusal: not UTF-8, not JSON, a field of the wrong type or missing.

    Numbers and booleans may be strings, and 5.0 counts as 5, unless `config` has `strict_fields`.  It also holds the
    limits that the refusal of a number out of range names."""
    try:
        return msgspec.json.decode(body, type=kind, strict=config is not None and config.strict_fields)
    except msgspec.ValidationError as error:
        message = str(error)
        at = re.search(r"- at `\$\.?([^`]*)`$", message) or re.search(r"required field `([^`]*)`", message)
        param = at.group(1) if at else None
        if "out of range" in message and param is not None:
            raise _out_of_range(param, config) from None
        raise _bad("invalid_type", f"{param or 'body'}: {message.split(' - at ')[0]}", param) from None
    except UnicodeDecodeError as error:
        raise _bad("invalid_utf8", f"body is not UTF-8: bad byte at position {error.start}", None) from None
    except (msgspec.DecodeError, RecursionError) as error:
        if (whole := repaired(body)) != body:
            return decode(whole, kind, config)
        if (name := _non_finite(body)) is not None:
            raise _bad("invalid_value", f"{name}: must be a finite number", name, "finite", "NaN or Infinity") from None
        code = "invalid_utf8" if "utf-8" in str(error).lower() else "invalid_json"
        raise _bad(code, f"body is not valid JSON: {error}", None) from None


def decode_all(body: bytes, kind: type[B], endpoint: Endpoint, config: GatewayConfig) -> tuple[B, tuple[str, ...]]:
    """Decode a body as `kind`; also return its fields that nothing reads.  Raises Refusal as `decode` does.

    Raises it too for fields that would change the answer and are not served, and for unknown ones with
    `strict_fields`."""
    try:  # a body without undeclared fields takes one pass
        return msgspec.json.decode(body, type=_closed(kind), strict=config.strict_fields), ()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = repaired(body)
        return decode(body, kind, config), _unknown_fields(body, kind, endpoint, config)


@functools.cache
def _closed(kind: type[B]) -> type[B]:
    """Return a body's struct that takes declared fields only."""
    fields: list[tuple[str, Any, Any]] = []
    if "stream_options" in kind.__struct_fields__:
        fields.append(("stream_options", _closed(StreamOptions) | None, None))
    made = msgspec.defstruct(kind.__name__, fields, bases=(kind,), forbid_unknown_fields=True, kw_only=True)
    return cast(type[B], made)


def _unknown_fields(
    body: bytes, kind: type[msgspec.Struct], endpoint: Endpoint, config: GatewayConfig
) -> tuple[str, ...]:
    """Return the fields of a body, which `decode` has read as `kind`, that nothing reads.

    Raises Refusal for those that would change the answer and are not served, and for any with `strict_fields`."""
    try:
        refused, unknown = undeclared(body, frozenset(kind.__struct_fields__), endpoint, _INNER)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # in what the struct has skipped
        raise _bad("invalid_json", f"body is not valid JSON: {error}", None) from None
    if refused is not None:
        raise _bad("unsupported", f"{refused[0]}: {refused[1]} is not served", refused[0])
    if unknown and config.strict_fields:
        name = str(shown(unknown[0]))
        raise _bad("unknown_field", f"{name}: no such field (--strict-fields)", name)
    return unknown


def _out_of_range(param: str, config: GatewayConfig | None) -> Refusal:
    """Return the refusal of a number with too many digits for the JSON decoder."""
    name, *within = re.split(r"[.\[]", param)
    known = LIMITS.get(name) if len(within) < 2 else None  # the limit of a list counts its elements
    limit = (known.text(config or GatewayConfig()) if known is not None else "") or "a number of 64 bits"
    given = "a number out of range"
    return _bad("invalid_value", f"{param}: must be {limit}, got {given}", param, limit, given)


def _non_finite(body: bytes) -> str | None:
    """Return the top-level field with a bare NaN or Infinity: not JSON, but what many clients send for a bad float."""
    if len(body) > NON_FINITE_BYTES or not (b"NaN" in body or b"Infinity" in body):
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return next((k for k, v in fields.items() if isinstance(v, float) and not math.isfinite(v)), None)


def _float(key: str, value: float | None, default: float, config: GatewayConfig) -> float:
    """Return a checked field of a request, or its default.  Raises Refusal."""
    if value is None:
        return default
    check(key, value, config)
    return value


def _int(key: str, value: int | None, default: int, config: GatewayConfig) -> int:
    """The same for whole numbers."""
    if value is None:
        return default
    check(key, value, config)
    return value


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def header_timeout(header: str | None, config: GatewayConfig) -> float:
    """Return X-Request-Timeout in seconds, or the server's default without the header.  Raises Refusal."""
    return config.default_timeout_s if header is None else _header_seconds("x-request-timeout", header, config)


def header_queue_wait(header: str | None, config: GatewayConfig) -> float:
    """Return X-Max-Queue-Wait in seconds, >= 0; infinite without the header.  Raises Refusal."""
    return math.inf if header is None else _header_seconds("x-max-queue-wait", header, config)


def _header_seconds(name: str, header: str, config: GatewayConfig) -> float:
    """Return the value of a header that counts seconds.  Raises Refusal."""
    # float() alone also accepts "nan", "1_0" and the digits of other scripts.
    if not re.fullmatch(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", header):
        limit, given = LIMITS[name].text(config), shown(header)
        raise _bad("invalid_value", f"{name}: must be a number of seconds {limit}, got '{given}'", name, limit, given)
    return _float(name, float(header), 0.0, config)


def _priority(given: int | str, config: GatewayConfig) -> int:
    """Return a priority as a number.  "high", "normal" and "low" stand for -1, 0 and 1; lower is served earlier."""
    first, last = PRIORITIES
    if isinstance(given, str) and not config.strict_fields and re.fullmatch("-?[0-9]{1,9}", given):
        given = int(given)
    if isinstance(given, str):
        if given in CLASSES:
            return CLASSES[given]
    elif first <= given <= last:
        return given
    limit, value = f"{', '.join(CLASSES)}, or a whole number from {first} (first) to {last}", shown(given)
    raise _bad("invalid_value", f"priority: must be one of {limit}, got {value!r}", "priority", limit, value)


def _refuse_combinations(body: _Common) -> None:
    """Raise Refusal for fields that are not served together."""
    if body.prompt_logprobs is not None and body.stream:
        raise _bad("invalid_value", "prompt_logprobs: only without stream", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise _bad("invalid_value", "stream_options: only with stream=true", "stream_options")


def _bias(given: dict[str, float], config: GatewayConfig) -> list[tuple[int, float]]:
    """Return `logit_bias` as (token id, bias) pairs.  Raises Refusal."""
    check("logit_bias entries", len(given), config)
    if wrong := [key for key in given if not re.fullmatch("[0-9]+", key)]:  # isdecimal() takes digits of every script
        named = ", ".join(f"'{shown(key)}'" for key in wrong[:BAD_KEYS])
        more = f" and {len(wrong) - BAD_KEYS} more" if len(wrong) > BAD_KEYS else ""
        message = f"logit_bias: keys must be token ids, got {named}{more}"
        raise _bad("invalid_value", message, "logit_bias", "digits 0 to 9", shown(wrong[0]))
    pairs = []
    for key, value in given.items():
        check("logit_bias keys", len(key), config)
        check("logit_bias", value, config)
        pairs.append((int(key), value))
    return pairs


class Served(msgspec.Struct, frozen=True):
    """What requests need to know of the model, besides its name."""

    aliases: tuple[str, ...] = ()  # further names by which clients may ask for it
    defaults: Sampling = Sampling()  # of the parameters that a request does not name
    adapters: dict[str, ServedAdapter] = {}  # LoRA adapters by the name that clients give as `model`


NO_DEFAULTS = Served()


class UnknownModel(Refusal):
    """A request names a model that is not served."""

    name = ""  # the one that it names


def unknown_model(name: str, served_name: str) -> UnknownModel:
    """Return the refusal of a name that nothing has."""
    message = f"model: this server serves '{served_name}', not the one asked for"
    refusal = UnknownModel(404, "model_not_found", message, param="model")
    refusal.name = name
    return refusal


def check_model(given: str | None, served_name: str, served: Served) -> None:
    """Raise UnknownModel unless a request names the model, one of its aliases, an adapter, or nothing."""
    if given and given != served_name and given not in served.aliases and given not in served.adapters:
        raise unknown_model(given, served_name)


def _sampling(body: _Common, config: GatewayConfig, default: Sampling) -> Sampling:
    """Return the checked sampling parameters.  Raises Refusal."""
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        check(name, len(getattr(body, name) or ()), config)
    return Sampling(
        temperature=_float("temperature", body.temperature, default.temperature, config),
        top_p=_float("top_p", body.top_p, default.top_p, config),
        top_k=0
        if body.top_k == -1
        else _int("top_k", body.top_k, default.top_k, config),  # -1 means "all" in other servers
        min_p=_float("min_p", body.min_p, default.min_p, config),
        seed=_int("seed", body.seed, 0, config) & (2**63 - 1),
        min_tokens=_int("min_tokens", body.min_tokens, 0, config),
        presence_penalty=_float("presence_penalty", body.presence_penalty, 0.0, config),
        frequency_penalty=_float("frequency_penalty", body.frequency_penalty, 0.0, config),
        repetition_penalty=_float("repetition_penalty", body.repetition_penalty, default.repetition_penalty, config),
        logit_bias=_bias(body.logit_bias or {}, config),
        allowed_token_ids=body.allowed_token_ids or [],
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
        prompt_logprobs=_int("prompt_logprobs", body.prompt_logprobs, -1, config),
        logprob_token_ids=list(dict.fromkeys(body.logprob_token_ids or ())),
    )


def _require_logprobs(sampling: Sampling, needed: str) -> None:
    """Raise Refusal for tokens whose log probabilities the answer would not show without the field `needed`."""
    if sampling.logprob_token_ids and sampling.logprobs < 0:
        limit, given = "absent without it", len(sampling.logprob_token_ids)
        raise _bad("invalid_value", f"logprob_token_ids: only with {needed}", "logprob_token_ids", limit, given)


def not_served(error: NotServed) -> Refusal:
    """Return the refusal of a grammar."""
    return _bad(error.code, str(error), error.param, error.limit, error.given)


def _constraint(body: _Common) -> Constraint | None:
    """Return what the answer must match; None: anything.  Raises Refusal."""
    try:
        constraint = asked(msgspec.structs.asdict(body))
    except NotServed as error:
        raise not_served(error) from None
    if constraint is not None and body.ignore_eos:
        message = f"ignore_eos: with {constraint.param} an answer ends where its grammar does"
        raise _bad("unsupported", message, "ignore_eos", "false")
    return constraint


def _common(body: _Common, config: GatewayConfig, served_name: str, timeout_s: float, served: Served) -> dict[str, Any]:
    """Check and translate the fields that both endpoints share.  `timeout_s`: for a body without `timeout`."""
    check_model(body.model, served_name, served)
    _refuse_combinations(body)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    check("stop", len(stop), config)
    for text in stop:
        check("stop chars", len(text), config)
    check("bad_words", len(body.bad_words or ()), config)
    for word in body.bad_words or ():
        check("bad_words chars", len(word), config)
    if body.cache_salt is not None:
        check("cache_salt", len(body.cache_salt), config)
    side = _or(body.truncation_side, "left")
    if side not in ("left", "right"):
        allowed, given = "left, right", str(shown(side))
        message = f"truncation_side: must be one of {allowed}, got {given!r}"
        raise _bad("invalid_value", message, "truncation_side", allowed, given)
    if body.truncate_prompt_tokens not in (None, -1):
        check("truncate_prompt_tokens", body.truncate_prompt_tokens, config)
    options = body.stream_options or StreamOptions()
    sampling, n, constraint = _sampling(body, config, served.defaults), _int("n", body.n, 1, config), _constraint(body)
    if (beams := beams_of(body, n, config)) is not None:
        sampling = searched(sampling, constraint.param if constraint is not None else "")
    made = n if beams is not None else best_of.computed(body.best_of, n, stream=bool(body.stream), config=config)
    return {
        "sampling": sampling,
        "n": made,
        "best": n if made > n else 0,
        "beams": beams,
        "seeded": body.seed not in (None, -1),  # -1 is what clients of llama.cpp and vLLM send for any seed
        "stop": stop,
        "bad_words": tuple(body.bad_words or ()),
        "include_stop": bool(body.include_stop_str_in_output),
        "skip_special": _or(body.skip_special_tokens, True),
        "stream": bool(body.stream),
        "include_usage": bool(options.include_usage),
        "continuous_usage": bool(options.include_usage and options.continuous_usage_stats),
        "include_ids": bool(options.include_ids),
        "return_token_ids": bool(body.return_token_ids),
        "names_are_ids": _or(body.return_tokens_as_token_ids, config.return_tokens_as_token_ids),
        "keep_first": side == "right",
        "prompt_logprobs": body.prompt_logprobs is not None,
        "cache_salt": body.cache_salt or "",
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "timeout_s": _float("timeout", body.timeout, timeout_s, config),
        "priority": _priority(_or(body.priority, "normal"), config),
        "constraint": constraint,
        "adapter": served.adapters.get(body.model or ""),
    }


def _prompts(given: str | list[Any], config: GatewayConfig) -> list[Prompt]:
    """Return any of the four forms of `prompt` as a list of texts or token id lists.

    An empty text may still have a token: the one that the tokenizer puts first.  `fit` refuses it otherwise."""
    prompts: list[Any]
    kinds = set() if isinstance(given, str) else set(map(type, given))
    if isinstance(given, str) or kinds == {int}:
        prompts = [given]
    elif len(kinds) <= 1:
        prompts = list(given)
    else:
        raise _bad("invalid_type", "prompt: texts, token ids and lists of token ids cannot be mixed", "prompt")
    check("prompt", len(prompts), config)
    if not prompts or [] in prompts:
        raise _bad("empty_prompt", "prompt: must not be empty, at least 1 token", "prompt", ">= 1", 0)
    return prompts


def _answer_tokens(name: str, value: int | None, config: GatewayConfig, *, scores: bool = False) -> int | None:
    """Return how many tokens a choice may have; None: what fits, which null and -1 stand for.  Raises Refusal.

    `scores`: the answer repeats the prompt, so 0 is allowed."""
    if value is None or value == -1:
        return None
    if value or not scores:
        check(name, value, config)
    return value


def parse_completion(
    body: bytes, config: GatewayConfig, served_name: str, timeout_s: float, served: Served = NO_DEFAULTS
) -> ValidRequest:
    """Parse the body of POST /v1/completions.  Raises Refusal."""
    asked, unknown = decode_all(body, CompletionBody, "completions", config)
    return completion_request(asked, config, served_name, timeout_s, served, unknown)


def completion_request(
    asked: CompletionBody,
    config: GatewayConfig,
    served_name: str,
    timeout_s: float,
    served: Served,
    unknown: tuple[str, ...],
) -> ValidRequest:
    """Check a decoded completion.  `unknown`: fields of its body that nothing reads.  Raises Refusal."""
    fields = _common(asked, config, served_name, timeout_s, served)
    given = 16 if asked.max_tokens is msgspec.UNSET else asked.max_tokens  # OpenAI's default
    prompts = _prompts(asked.prompt, config)
    check("choices", len(prompts) * fields["n"], config)
    if asked.suffix and (asked.echo or asked.truncate_prompt_tokens is not None):
        name = "echo" if asked.echo else "truncate_prompt_tokens"
        raise _bad("unsupported", f"{name}: not together with suffix", name, "absent")
    if asked.logprobs is not None:
        logprobs = _int("logprobs", asked.logprobs, 0, config)
        prompt_logprobs = fields["sampling"].prompt_logprobs
        if asked.echo and prompt_logprobs < 0:
            if fields["beams"] is not None:
                raise unserved("echo", "log probabilities of the prompt are not reported")
            prompt_logprobs = logprobs
        fields["sampling"] = msgspec.structs.replace(
            fields["sampling"], logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )
    _require_logprobs(fields["sampling"], "logprobs")
    return ValidRequest(
        prompts=prompts,
        messages=[],
        max_tokens=_answer_tokens("max_tokens", given, config, scores=bool(asked.echo)),
        echo=bool(asked.echo),
        suffix=asked.suffix or "",
        special=_or(asked.add_special_tokens, True),
        chat=False,
        unknown=unknown,
        **best_of.with_scores(fields),
    )


class TokenizeBody(msgspec.Struct):
    """Body of POST /tokenize: a text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    # With messages, as in a chat.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    documents: Any = None
    continue_final_message: bool | None = None
    thinking_token_budget: int | None = None


class DetokenizeBody(msgspec.Struct):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


def tokenized_chat(asked: TokenizeBody, config: GatewayConfig) -> tuple[list[dict[str, Any]], ChatOptions]:
    """Return the messages of a body of POST /tokenize and the options of their chat template.  Raises Refusal."""
    messages = plain_messages(asked.messages or [], config)
    return messages, chat_options(asked, messages, config)


def parse_chat(
    body: bytes, config: GatewayConfig, served_name: str, timeout_s: float, served: Served = NO_DEFAULTS
) -> ValidRequest:
    """Parse the body of POST /v1/chat/completions.  Raises Refusal."""
    asked, unknown = decode_all(body, ChatBody, "chat", config)
    skipped = Skipped(config)
    tools, rules = chat_tools(asked.tools, skipped)
    asked.tool_choice, asked.tools, rules = allowed_tools(asked.tool_choice, tools, rules)
    return chat_request(asked, config, served_name, timeout_s, served, (*unknown, *skipped.names()), rules)


def chat_request(
    asked: ChatBody,
    config: GatewayConfig,
    served_name: str,
    timeout_s: float,
    served: Served = NO_DEFAULTS,
    unknown: tuple[str, ...] = (),
    rules: ToolRules = OPENAI,
) -> ValidRequest:
    """Check a decoded chat.  `unknown`: parts of its body that change nothing.  Raises Refusal."""
    fields = _common(asked, config, served_name, timeout_s, served)
    given = None if asked.max_tokens is msgspec.UNSET else asked.max_tokens
    max_tokens = _answer_tokens("max_tokens", given, config)
    if asked.max_completion_tokens is not None:
        max_tokens = _answer_tokens("max_completion_tokens", asked.max_completion_tokens, config)
    if asked.top_logprobs is not None:
        check("top_logprobs", asked.top_logprobs, config)
        if asked.top_logprobs and not asked.logprobs:
            raise _bad("invalid_value", "top_logprobs: only with logprobs=true", "top_logprobs")
    if asked.logprobs:
        fields["sampling"] = msgspec.structs.replace(fields["sampling"], logprobs=asked.top_logprobs or 0)
    _require_logprobs(fields["sampling"], "logprobs=true")
    messages = plain_messages(asked.messages, config)
    options = chat_options(asked, messages, config, rules)
    if fields["beams"] is not None:
        refuse_calls(options)
    return ValidRequest(
        prompts=[],
        messages=messages,
        options=options,
        max_tokens=max_tokens,
        echo=False,
        hide_reasoning=asked.include_reasoning is False,
        repeated=[last_answer(messages)] if asked.echo else [],
        prediction=predicted_text(asked.prediction, msgspec.structs.asdict(asked)),
        chat=True,
        unknown=unknown,
        **best_of.with_scores(fields),
    )


class EngineLimits(msgspec.Struct, frozen=True):
    """The smallest of each limit over the live engines: any of them may claim the request."""

    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    block_size: int  # tokens
    total_blocks: int
    eos_ids: frozenset[int] = frozenset()  # tokens that end an answer; empty: unknown


def too_long(param: str, longest: int, prompt: int, asked: int, *, least: bool = False) -> Refusal:
    """Return the refusal of a prompt of `prompt` tokens (`least`: or more) that exceeds the model's context.

    LiteLLM recognises it by the first words of its message, which are OpenAI's.  LangChain looks for the code in the
    text of the official client's exception, which newer versions make of the message alone."""
    more = "at least " if least else ""
    message = (
        f"this model's maximum context length is {longest} tokens, but {more}{prompt + asked} were asked for: "
        f"{more}{prompt} in the prompt and {asked} to generate (context_length_exceeded)"
    )
    return limit_refusal("context", f"{param}: {message}", longest, param=param, given=prompt + asked)


def too_many_tokens(param: str, limit: int, given: int, *, least: bool = False) -> Refusal:
    """Return the refusal of a request with more than `limit` tokens.  `least`: `given` is only a lower bound."""
    message = f"at most {limit} tokens in one request, got {'at least ' if least else ''}{given}"
    return limit_refusal("tokens", f"{param}: {message}", limit, param=param, given=given)


def no_token(param: str, vocab: int, given: int) -> Refusal:
    """Return the refusal of a token id outside a vocabulary of `vocab` tokens."""
    message = f"{param}: {shown(given)} is out of vocabulary: token ids are 0 to {vocab - 1}, there are {vocab} tokens"
    return limit_refusal("token_id", message, vocab - 1, param=param, given=given)


def fit(valid: ValidRequest, encoded: list[list[int]], limits: EngineLimits) -> list[int]:
    """Return max_new_tokens of each prompt.  Raises Refusal if the engines could never serve the request."""
    vocab, longest = limits.vocab_size, limits.max_model_len
    sampling = valid.sampling
    for name, ids in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("logprob_token_ids", sampling.logprob_token_ids),
        *(("bad_words", ids) for ids in sampling.bad_words),
        *(("prompt", ids) for ids in encoded),
    ):
        if ids and (min(ids) < 0 or max(ids) >= vocab):
            token = next(token for token in ids if not 0 <= token < vocab)
            raise no_token(name, vocab, token)
    _leave_a_token(sampling, limits)
    param = "messages" if valid.chat else "prompt"
    pool = limits.total_blocks * limits.block_size
    rooms = []
    for ids in encoded:
        if not ids:
            raise _bad("empty_prompt", f"{param}: must not be empty, at least 1 token", param, ">= 1", 0)
        asked = max(1, valid.max_tokens or 0)  # engines compute a token even to score a prompt
        if valid.at_most:
            asked = max(1, min(asked, longest - len(ids), pool - len(ids)))
        if len(ids) + asked > longest:
            raise too_long(param, longest, len(ids), asked)
        if len(ids) + asked > pool:
            message = f"{param}: the KV cache holds {pool} tokens in all, but {len(ids) + asked} were asked for"
            raise limit_refusal("pool", message, pool, param=param, given=len(ids) + asked)
        room = min(longest, pool) - len(ids) if valid.max_tokens is None else asked
        if sampling.min_tokens > room:
            message = f"min_tokens: at most max_tokens, {room}, got {sampling.min_tokens}"
            raise _bad("invalid_value", message, "min_tokens", room, sampling.min_tokens)
        rooms.append(room)
    if valid.beams is not None:
        blocks, size = limits.total_blocks, limits.block_size
        bounded = valid.max_tokens is not None
        return fit_beams(valid.beams, [*map(len, encoded)], rooms, blocks=blocks, size=size, bounded=bounded)
    return rooms


def _leave_a_token(sampling: Sampling, limits: EngineLimits) -> None:
    """Raise Refusal if no token is left for the first position: before `min_tokens` no token may end the answer.

    Every other filter keeps a token: a client's bias is finite, and top_k, top_p and min_p keep the most probable."""
    never = {token for token, bias in sampling.logit_bias if bias == -math.inf}
    if never and all(token in never for token in sampling.allowed_token_ids or range(limits.vocab_size)):
        message = "bad_words: a token must be left that they do not forbid"
        raise _bad("invalid_value", message, "bad_words", ">= 1 token that is not forbidden", 0)
    if not sampling.min_tokens:
        return
    ends = never | set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else limits.eos_ids)
    name = "allowed_token_ids" if sampling.allowed_token_ids else "stop_token_ids"
    if all(token in ends for token in sampling.allowed_token_ids or range(limits.vocab_size)):
        message = f"{name}: with min_tokens {sampling.min_tokens} a token must be left that does not end the answer"
        raise _bad("invalid_value", message, name, ">= 1 token that does not end the answer", 0)


def bound_logprobs(valid: ValidRequest, encoded: list[list[int]], rooms: list[int], config: GatewayConfig) -> list[int]:
    """Return `rooms`, bounded by the log probabilities that the answer may hold.  Raises Refusal.

    One entry is one token or one alternative.  It takes about 12 bytes in Redis.  In an answer that is not streamed, it
    takes 200 to 600 bytes of the gateway's memory.  Without max_tokens the answer ends where the limit is reached."""
    sampling, key = valid.sampling, "logprob entries"
    width = sampling.alternatives + 1
    if not width and sampling.prompt_logprobs < 0:
        return rooms
    fixed = sum(map(len, encoded)) * (sampling.prompt_logprobs + 1) * valid.n
    if width and valid.max_tokens is None:
        most = int(LIMITS[key].bounds(config)[1]) - fixed
        least = max(1, sampling.min_tokens)
        rooms = [max(least, min(room, most // (width * valid.n * len(rooms)))) for room in rooms]
    check(key, fixed + sum(rooms) * valid.n * width, config)
    return rooms
