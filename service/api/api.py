"""Parses and checks bodies in OpenAI's format: returns a ValidRequest, or raises a `Refusal` (field, limit, value).

    body --parse_completion, parse_chat--> ValidRequest --fit, with the encoded prompt--> maximum output tokens

After these two steps nothing is checked again.  (`format.py` writes answers.)  Error messages contain only names,
limits and numbers, never prompt text.
"""

from __future__ import annotations

import math
import re
from typing import Any, TypeVar

import msgspec

from quire.engine.wire.messages import PRIORITIES, Sampling
from quire.service.api import best_of
from quire.service.api.adapters import ServedAdapter
from quire.service.api.beams import beams_of, refuse_calls, searched, unserved
from quire.service.api.bodies import ChatBody, CommonBody, CompletionBody, StreamOptions, TokenizeBody
from quire.service.api.client_tools import allowed_tools, chat_choice, chat_tools, custom_names
from quire.service.api.decoding import decode_all
from quire.service.api.echo import last_answer
from quire.service.api.history import plain_messages
from quire.service.api.prediction import predicted_text
from quire.service.api.skipped import Skipped
from quire.service.api.tools import OPENAI, ChatOptions, ToolRules, chat_options
from quire.service.api.valid_request import Prompt, ValidRequest
from quire.service.common.limits import LIMITS, shown
from quire.service.common.refusal import Refusal, check
from quire.service.common.refusal import bad_request as _bad
from quire.service.config import GatewayConfig
from quire.service.grammar.grammar import Constraint, asked
from quire.service.grammar.grammar_errors import NotServed

N = TypeVar("N", int, float)

BAD_KEYS = 8  # maximum number of invalid keys of `logit_bias` that a refusal names
CLASSES = {"high": -1, "normal": 0, "low": 1}  # names of priorities; within a tenant, lower numbers are served first


def _checked(key: str, value: N | None, default: N, config: GatewayConfig) -> N:
    """Return the value of a field after checking its limit `key`, or `default` if it is None.  Raises Refusal."""
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
    """Return the value of a header in seconds.  Raises Refusal."""
    # float() alone also accepts "nan", "1_0" and the digits of other scripts.
    if not re.fullmatch(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", header):
        limit, given = LIMITS[name].text(config), shown(header)
        raise _bad("invalid_value", f"{name}: must be a number of seconds {limit}, got '{given}'", name, limit, given)
    return _checked(name, float(header), 0.0, config)


def _priority(given: int | str, config: GatewayConfig) -> int:
    """Return a priority as a number; lower is served earlier.  Raises Refusal."""
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


def _refuse_combinations(body: CommonBody) -> None:
    """Raise Refusal for fields that cannot be combined."""
    if body.prompt_logprobs is not None and body.stream:
        raise _bad("invalid_value", "prompt_logprobs: only without stream", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise _bad("invalid_value", "stream_options: only with stream=true", "stream_options")


def _bias(given: dict[str, float], config: GatewayConfig) -> list[tuple[int, float]]:
    """Return `logit_bias` as (token id, bias) pairs.  Raises Refusal."""
    check("logit_bias entries", len(given), config)
    if wrong := [key for key in given if not re.fullmatch("[0-9]+", key)]:  # isdecimal() would allow non-ASCII digits
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
    """Names and sampling defaults of the served model, and its LoRA adapters."""

    aliases: tuple[str, ...] = ()  # further names of the model
    defaults: Sampling = Sampling()  # values for sampling parameters that a request omits
    adapters: dict[str, ServedAdapter] = {}  # value of `model` -> LoRA adapter


NO_DEFAULTS = Served()


class UnknownModel(Refusal):
    """A request names a model that is not served."""

    name = ""  # name in the request


def unknown_model(name: str, served_name: str) -> UnknownModel:
    """Return the 404 for a name that neither the model nor an adapter has."""
    message = f"model: this server serves '{served_name}', not the one asked for"
    refusal = UnknownModel(404, "model_not_found", message, param="model")
    refusal.name = name
    return refusal


def check_model(given: str | None, served_name: str, served: Served) -> None:
    """Raise UnknownModel unless a request names the model, one of its aliases, an adapter, or nothing."""
    if given and given != served_name and given not in served.aliases and given not in served.adapters:
        raise unknown_model(given, served_name)


def _sampling(body: CommonBody, config: GatewayConfig, default: Sampling) -> Sampling:
    """Return the checked sampling parameters.  Raises Refusal."""
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        check(name, len(getattr(body, name) or ()), config)
    return Sampling(
        temperature=_checked("temperature", body.temperature, default.temperature, config),
        top_p=_checked("top_p", body.top_p, default.top_p, config),
        top_k=0
        if body.top_k == -1
        else _checked("top_k", body.top_k, default.top_k, config),  # -1 means "all" in other servers
        min_p=_checked("min_p", body.min_p, default.min_p, config),
        seed=_checked("seed", body.seed, 0, config) & (2**63 - 1),
        min_tokens=_checked("min_tokens", body.min_tokens, 0, config),
        presence_penalty=_checked("presence_penalty", body.presence_penalty, 0.0, config),
        frequency_penalty=_checked("frequency_penalty", body.frequency_penalty, 0.0, config),
        repetition_penalty=_checked("repetition_penalty", body.repetition_penalty, default.repetition_penalty, config),
        logit_bias=_bias(body.logit_bias or {}, config),
        allowed_token_ids=body.allowed_token_ids or [],
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
        prompt_logprobs=_checked("prompt_logprobs", body.prompt_logprobs, -1, config),
        logprob_token_ids=list(dict.fromkeys(body.logprob_token_ids or ())),
    )


def _require_logprobs(sampling: Sampling, needed: str) -> None:
    """Raise Refusal for `logprob_token_ids` without the field `needed`, since the answer would not show them."""
    if sampling.logprob_token_ids and sampling.logprobs < 0:
        limit, given = "absent without it", len(sampling.logprob_token_ids)
        raise _bad("invalid_value", f"logprob_token_ids: only with {needed}", "logprob_token_ids", limit, given)


def not_served(error: NotServed) -> Refusal:
    """Return the 400 for structured output that is not supported."""
    return _bad(error.code, str(error), error.param, error.limit, error.given)


def _constraint(body: CommonBody) -> Constraint | None:
    """Return the constraint on the answer from a body's fields; None without one.  Raises Refusal."""
    try:
        constraint = asked(msgspec.structs.asdict(body))
    except NotServed as error:
        raise not_served(error) from None
    if constraint is not None and body.ignore_eos:
        message = f"ignore_eos: with {constraint.param} an answer ends where its grammar does"
        raise _bad("unsupported", message, "ignore_eos", "false")
    return constraint


def _common(
    body: CommonBody, config: GatewayConfig, served_name: str, timeout_s: float, served: Served
) -> dict[str, Any]:
    """Check the fields that completions and chats share; return fields of ValidRequest.

    `timeout_s`: timeout of a body without `timeout`.  Raises Refusal."""
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
    sampling, n, constraint = (
        _sampling(body, config, served.defaults),
        _checked("n", body.n, 1, config),
        _constraint(body),
    )
    if (beams := beams_of(body, n, config)) is not None:
        sampling = searched(sampling, constraint.param if constraint is not None else "")
    made = n if beams is not None else best_of.computed(body.best_of, n, stream=bool(body.stream), config=config)
    return {
        "sampling": sampling,
        "n": made,
        "best": n if made > n else 0,
        "beams": beams,
        "seeded": body.seed not in (None, -1),  # clients of llama.cpp and vLLM send -1 for a random seed
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
        "timeout_s": _checked("timeout", body.timeout, timeout_s, config),
        "priority": _priority(_or(body.priority, "normal"), config),
        "constraint": constraint,
        "adapter": served.adapters.get(body.model or ""),
    }


def _prompts(given: str | list[Any], config: GatewayConfig) -> list[Prompt]:
    """Return `prompt` (a text, token ids, or a list of either) as a list of texts or token-id lists.  Raises Refusal.

    An empty text is accepted here, since the tokenizer may add a BOS token; if it does not, `fit` refuses it."""
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
    """Return the maximum tokens of a choice; None (for null and -1): the rest of the context.

    `scores`: the request only scores its prompt (`echo`), so 0 is allowed.  Raises Refusal."""
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
    """Check a decoded completion.  `unknown`: names of unknown fields of its body.  Raises Refusal."""
    fields = _common(asked, config, served_name, timeout_s, served)
    given = 16 if asked.max_tokens is msgspec.UNSET else asked.max_tokens  # OpenAI's default
    prompts = _prompts(asked.prompt, config)
    check("choices", len(prompts) * fields["n"], config)
    if asked.suffix and (asked.echo or asked.truncate_prompt_tokens is not None):
        name = "echo" if asked.echo else "truncate_prompt_tokens"
        raise _bad("unsupported", f"{name}: not together with suffix", name, "absent")
    if asked.logprobs is not None:
        logprobs = _checked("logprobs", asked.logprobs, 0, config)
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


def tokenized_chat(
    asked: TokenizeBody, config: GatewayConfig
) -> tuple[list[dict[str, Any]], ChatOptions, tuple[str, ...]]:
    """Return the messages in a body of POST /tokenize, its chat options, and the names of ignored fields.

    Raises Refusal."""
    skipped = Skipped(config)
    messages = plain_messages(asked.messages or [], config, skipped)
    rules = _with_functions(asked, skipped)
    return messages, chat_options(asked, messages, config, rules), skipped.names()


def _with_functions(asked: ChatBody | TokenizeBody, skipped: Skipped) -> ToolRules:
    """Replace a body's tools by functions, only those that the answer may call; return their rules.  Raises Refusal."""
    tools, rules = chat_tools(asked.tools, skipped)
    choice, asked.tools, rules = allowed_tools(asked.tool_choice, tools, rules)
    asked.tool_choice = chat_choice(choice)
    return rules


def parse_chat(
    body: bytes, config: GatewayConfig, served_name: str, timeout_s: float, served: Served = NO_DEFAULTS
) -> ValidRequest:
    """Parse the body of POST /v1/chat/completions.  Raises Refusal."""
    asked, unknown = decode_all(body, ChatBody, "chat", config)
    skipped, custom = Skipped(config), custom_names(asked.tools)
    rules = _with_functions(asked, skipped)
    valid = chat_request(asked, config, served_name, timeout_s, served, (*unknown, *skipped.names()), rules)
    return msgspec.structs.replace(valid, custom=custom) if custom else valid


def chat_request(
    asked: ChatBody,
    config: GatewayConfig,
    served_name: str,
    timeout_s: float,
    served: Served = NO_DEFAULTS,
    unknown: tuple[str, ...] = (),
    rules: ToolRules = OPENAI,
) -> ValidRequest:
    """Check a decoded chat.  `unknown`: names of ignored parts of its body.  Raises Refusal."""
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
    skipped = Skipped(config)
    messages = plain_messages(asked.messages, config, skipped)
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
        unknown=(*unknown, *skipped.names()),
        **best_of.with_scores(fields),
    )
