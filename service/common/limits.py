"""The limits of every input, in one table: checks read it, and `.ci/options.py` makes pages from it.

    LIMITS["top_p"] --broken("top_p", 1.5, config)--> Broken: status, code, message, limit, given --> a Refusal
                    --rows(config)------------------> docs/api.md, docs/options.md

To add a limit, add a row here and call `refusal.check` with the input's value.  A check that needs more than one number
raises `refusal.limit_refusal`, which takes status and code from the row.  Operators can change limits with an `option`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from quire.engine.wire.messages import LENGTH_PENALTIES, PRIORITIES
from quire.service.config import GatewayConfig

WHOLE = 2**31 - 1  # maximum of token counts: more than any context, and safe in every encoding
WORD_CHARS = 256  # characters per entry of bad_words
WORD_TOKENS = 4096  # tokens of all bad_words together; an engine needs 3 ms for this many when an answer starts
NAMED_TOKENS = 128  # entries of logprob_token_ids; vLLM's limit
SALT_CHARS = 256  # characters of cache_salt; engines get only its digest
KEY_CHARS = 255  # characters of Idempotency-Key
DIGITS = 10  # digits of a token id as a key of logit_bias
CONTENT_PARTS = 16_384  # content parts per request, all messages together
TOOL_CALLS = 4096  # tool calls per request, all messages together
ROLE_CHARS = 32  # characters of a message's role
TOOLS = 128  # tools per request; OpenAI's limit
TOOL_NAME_CHARS = 64  # characters of a tool's name; OpenAI's limit
MESSAGE_TOOL_NAME_CHARS = 128  # characters of a tool's name in /v1/messages; Anthropic's limit
TOOLS_BYTES = 2**20  # bytes of all tools as JSON; rendering them takes up to 20 ms, on a thread
TEMPLATE_BYTES = 16 * 1024  # bytes of chat_template_kwargs as JSON
DOCUMENTS = 1024  # documents per request
METADATA_ENTRIES, METADATA_NAME_CHARS, METADATA_CHARS = 16, 64, 512  # metadata of a response; OpenAI's limits
# Strings (keys included), objects and lists of one body.  4,096 messages with one content part each have 57,000, and
# msgspec decodes 65,536 in 10 ms.
STRUCTURES = 65_536
VALUES = 65_536  # other JSON values (numbers, true, false, null) of a body without a list of token ids
WATCHERS = 16  # maximum streams of GET /engine/state per gateway
# JSON bytes of a schema, regex, list of choices or grammar.  64 KiB take up to 0.3 s to compile, on a thread.
GRAMMAR_BYTES = 65_536
GRAMMAR_DEPTH = 64  # nesting depth of schemas
# Compiling a regex takes time up to the square of its length: 2,000 optional letters take 65 ms.
REGEX_CHARS = 4096
PREDICTED_TOKENS = 16_384  # tokens of `prediction`; engines search for drafts in at most as many tokens of a sequence
CHOICES = 1_900  # texts of `choice`; llguidance can follow 2,000 alternatives, and reasoning before them needs some
LARK_CHARS = 16_384  # characters of a Lark grammar
LONGEST_GIVEN = 64  # characters of a refused value that the error repeats


class Limit(msgspec.Struct, frozen=True):
    """The bounds of one input.  `low` or `high` None: unbounded on that side."""

    field: str  # name of the field in the request; `param` of the refusal
    counts: str  # meaning of the limited number, with its unit
    low: float | None = None
    high: float | None = None
    above_low: bool = False  # `low` itself is refused
    option: str = ""  # name of the GatewayConfig option whose value is `high`
    entries: bool = False  # the number is a count or length, so the error message says "at most"
    set_by: str = ""  # origin of the limit, if it is neither in this table nor a gateway option
    code: str = "invalid_value"
    status: int = 400

    def bounds(self, config: GatewayConfig) -> tuple[float, float]:
        """Return the minimum and the maximum value; infinite if a side is open."""
        high = getattr(config, self.option) if self.option else self.high
        return -math.inf if self.low is None else self.low, math.inf if high is None else high

    def text(self, config: GatewayConfig) -> str:
        """Return the bounds as text for error messages and pages, such as ">= 0 and <= 2"."""
        low, high = self.bounds(config)
        least = "" if math.isinf(low) else f"{'>' if self.above_low else '>='} {number(low)}"
        most = "" if math.isinf(high) else f"<= {number(high)}"
        return " and ".join(filter(None, (least, most)))


class Broken(NamedTuple):
    """The fields of the Refusal for a value beyond its limit."""

    status: int
    code: str
    message: str
    param: str
    limit: float | str
    given: float | str


def _count(
    field: str,
    counts: str,
    low: float | None = None,
    high: float | None = None,
    *,
    option: str = "",
    code: str = "too_many",
    status: int = 400,
) -> Limit:
    """Return the limit of a count or length."""
    return Limit(field, counts, low, high, option=option, entries=True, code=code, status=status)


LIMITS: dict[str, Limit] = {
    "body": _count("body", "bytes", option="max_body_bytes", code="body_too_large", status=413),
    "body structures": _count("body", "strings (keys included), objects and lists", high=STRUCTURES),
    "body values": _count("body", "other values where no token ids are expected", high=VALUES + STRUCTURES),
    "body time": Limit(
        "body", "seconds until all of it has arrived", option="body_timeout_s", code="body_timeout", status=408
    ),
    "bodies": _count(
        "body",
        "MiB of all bodies that one gateway holds at a time",
        option="max_bodies_mib",
        code="too_many_bodies",
        status=503,
    ),
    "messages": _count("messages", "messages", option="max_messages"),
    "content parts": _count("messages[].content", "content parts of all messages", high=CONTENT_PARTS),
    "tool calls": _count("messages[].tool_calls", "tool calls of all messages", high=TOOL_CALLS),
    "tools": _count("tools", "tools; no bound in `/v1/messages`", high=TOOLS),
    "tool name": Limit("tools[].function.name", "characters: letters, digits, _ and -", 1, TOOL_NAME_CHARS),
    "joined tool name": Limit(
        "tools[].tools[].name", "characters: those of the namespace, `__` and the name", 1, 2 * TOOL_NAME_CHARS + 2
    ),
    "message tool name": Limit(
        "tools[].name", "characters in `/v1/messages`: letters, digits, _ and -", 1, MESSAGE_TOOL_NAME_CHARS
    ),
    "tools bytes": _count("tools", "bytes of all tools as JSON", high=TOOLS_BYTES, code="too_long"),
    "documents": _count("documents", "documents", high=DOCUMENTS),
    "template arguments": _count("chat_template_kwargs", "bytes as JSON", high=TEMPLATE_BYTES, code="too_long"),
    "metadata entries": _count("metadata", "entries of a response", high=METADATA_ENTRIES),
    "metadata name": _count(
        "metadata", "characters of each name of a response", high=METADATA_NAME_CHARS, code="too_long"
    ),
    "metadata": _count("metadata", "characters of each value of a response", high=METADATA_CHARS, code="too_long"),
    "tokens": _count(
        "prompt, messages, tokens",
        "tokens of one request, before truncation; one prompt may have the model's whole context",
        option="max_prompt_tokens",
        code="too_many_tokens",
    ),
    "prompt": _count("prompt", "prompts", option="max_prompts"),
    "context": Limit(
        "prompt",
        "tokens of one prompt and of its answer; for chat, of all messages",
        set_by="`--max-model-len` of the engine",
        code="context_length_exceeded",
    ),
    "pool": Limit(
        "prompt", "tokens of one prompt and of its answer", set_by="the engine's KV cache", code="kv_cache_exceeded"
    ),
    "token_id": Limit(
        "prompt, stop_token_ids, allowed_token_ids, logit_bias, logprob_token_ids, tokens",
        "each token id",
        set_by="the model's vocabulary",
        code="invalid_token_id",
    ),
    "n": Limit("n", "choices of each prompt", 1, option="max_n"),
    "choices": _count("n", "choices of all prompts together", option="max_choices"),
    "beam_width": Limit("beam_width, num_beams, best_of", "beams of one search", 1, option="max_beam_width"),
    "length_penalty": Limit("length_penalty", "exponent of an answer's length", *LENGTH_PENALTIES),
    "max_tokens": Limit("max_tokens", "tokens of each choice; -1: what fits; 0 with `echo`", 1, WHOLE),
    "max_completion_tokens": Limit("max_completion_tokens", "tokens of each choice; -1: what fits", 1, WHOLE),
    "thinking_token_budget": Limit("thinking_token_budget", "tokens between the markers of reasoning", 0, WHOLE),
    "min_tokens": Limit("min_tokens", "tokens, at most max_tokens", 0, WHOLE),
    "truncate_prompt_tokens": Limit("truncate_prompt_tokens", "tokens; -1: what fits", 1, WHOLE),
    "temperature": Limit("temperature", "number", 0, 2),
    "top_p": Limit("top_p", "probability", 0, 1, above_low=True),
    "top_k": Limit("top_k", "tokens; 0 and -1 keep all", 0, WHOLE),
    "min_p": Limit("min_p", "fraction of the maximum probability", 0, 1),
    "seed": Limit("seed", "whole number of 64 bits; -1: any", -(2**63), 2**63 - 1),
    "presence_penalty": Limit("presence_penalty", "number", -2, 2),
    "frequency_penalty": Limit("frequency_penalty", "number", -2, 2),
    # Any logit multiplied or divided by a value in these bounds stays finite in float32.
    "repetition_penalty": Limit("repetition_penalty", "number", 0.01, 100),
    "logit_bias": Limit("logit_bias", "each value", -100, 100),
    "logit_bias keys": _count("logit_bias", "digits 0 to 9 of each key", 1, DIGITS, code="invalid_value"),
    "logit_bias entries": _count("logit_bias", "entries", option="max_token_list"),
    "stop_token_ids": _count("stop_token_ids", "entries", option="max_token_list"),
    "allowed_token_ids": _count("allowed_token_ids", "entries", option="max_token_list"),
    "bad_words": _count("bad_words", "entries", option="max_token_list"),
    "bad_words chars": _count("bad_words", "characters of each word", 1, high=WORD_CHARS, code="too_long"),
    "bad_words tokens": _count(
        "bad_words",
        "tokens of all words, each with and without a leading space; one-token words do not count",
        high=WORD_TOKENS,
        code="too_long",
    ),
    "grammar": _count(
        "response_format, structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar",
        "bytes of JSON of the schema, regex, choices or grammar",
        high=GRAMMAR_BYTES,
        code="grammar_too_large",
    ),
    "choice": _count("structured_outputs.choice, guided_choice", "texts", high=CHOICES, code="grammar_too_large"),
    "regex": _count(
        "structured_outputs, guided_regex, pattern, patternProperties",
        "characters of each regular expression",
        high=REGEX_CHARS,
        code="grammar_too_large",
    ),
    "lark": _count(
        "structured_outputs, guided_grammar", "characters of a Lark grammar", high=LARK_CHARS, code="grammar_too_large"
    ),
    "grammar depth": _count(
        "response_format, structured_outputs, guided_json",
        "schemas within schemas",
        high=GRAMMAR_DEPTH,
        code="grammar_too_large",
    ),
    "prediction": _count("prediction", "tokens", high=PREDICTED_TOKENS, code="too_long"),
    "stop": _count("stop", "strings", option="max_stop_strings"),
    "stop chars": Limit("stop", "characters of each string", 1, option="max_stop_chars"),
    "cache_salt": _count("cache_salt", "characters", 1, SALT_CHARS, code="too_long"),
    "logprobs": Limit("logprobs", "alternatives of each token", 0, option="max_logprobs"),
    "top_logprobs": Limit("top_logprobs", "alternatives of each token", 0, option="max_logprobs"),
    "logprob_token_ids": _count("logprob_token_ids", "entries", high=NAMED_TOKENS),
    "prompt_logprobs": Limit("prompt_logprobs", "alternatives of each prompt token", 0, option="max_logprobs"),
    "logprob entries": _count(
        "logprobs",
        "entries of the answer: tokens x n x (alternatives + 1); the same for scored prompt tokens",
        option="max_logprob_entries",
        code="too_many_logprobs",
    ),
    "priority": Limit("priority", "whole number; high, normal and low stand for -1, 0 and 1", *PRIORITIES),
    "timeout": Limit("timeout", "seconds", 0, option="max_timeout_s", above_low=True),
    "x-request-timeout": Limit("X-Request-Timeout", "seconds", 0, option="max_timeout_s", above_low=True),
    "x-max-queue-wait": Limit("X-Max-Queue-Wait", "seconds; 0: not longer than the on-time lane", 0, WHOLE),
    "idempotency-key": Limit("Idempotency-Key", "printable ASCII characters", 1, KEY_CHARS),
    "head time": Limit(
        "connection",
        "seconds until a request's head has arrived; then the connection is closed",
        option="header_timeout_s",
        code="",
    ),
    "connections": _count(
        "connection",
        "connections of one gateway; beyond them only probes are answered",
        option="max_connections",
        code="too_many_connections",
        status=503,
    ),
    "open": _count(
        "connection", "requests that one gateway answers at a time", option="max_open", code="too_many_open", status=503
    ),
    "watchers": _count(
        "connection",
        "clients of one gateway that watch the engines",
        high=WATCHERS,
        code="too_many_watchers",
        status=429,
    ),
    "queued": _count(
        "queue", "prompts that wait in Redis, of all gateways", option="max_queued", code="queue_full", status=503
    ),
    "queued bytes": _count(
        "queue",
        "MiB of prompts that wait in Redis, of all gateways",
        option="max_queued_mib",
        code="queue_full",
        status=503,
    ),
}


def number(value: float) -> str:
    """Return a whole number as an integer, any other number in short form."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else f"{value:g}"


def shown(value: object) -> float | str:
    """Return a refused JSON value in a form that an error may repeat: short, finite, and safe for every JSON parser."""
    if isinstance(value, str):
        return value[:LONGEST_GIVEN]
    if not isinstance(value, int | float):
        return "null" if value is None else "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return f"a whole number of about {round(value.bit_length() * math.log10(2))} digits"
    return value if isinstance(value, int) or math.isfinite(value) else str(value)


def broken(key: str, value: float, config: GatewayConfig) -> Broken | None:
    """Return a Broken if `value` is beyond the limit `key`, else None.  Accepts ints of any size, and any float."""
    limit = LIMITS[key]
    low, high = limit.bounds(config)
    if low <= value <= high and not (limit.above_low and value == low):  # false for NaN
        return None
    given, field = shown(value), limit.field
    if limit.entries and value > high:
        unit = "entries" if limit.code == "too_many" else limit.counts.partition(":")[0]
        message = f"{field}: at most {number(high)} {unit}, got {given}"
        return Broken(limit.status, limit.code, message, field.lower(), int(high), given)
    text = limit.text(config)
    return Broken(limit.status, limit.code, f"{field}: must be {text}, got {given}", field.lower(), text, given)


def rows(config: GatewayConfig) -> list[tuple[str, str, str, str, str]]:
    """Return the table rows for pages: (input, meaning, limit, option that sets it, status and code of the error)."""
    return [
        (
            ", ".join(f"`{name}`" for name in limit.field.split(", ")),
            limit.counts,
            limit.text(config) or f"set by {limit.set_by}",
            f"`--{limit.option.replace('_', '-')}`" if limit.option else "",
            f"{limit.status} `{limit.code}`" if limit.code else "the connection is closed",
        )
        for limit in LIMITS.values()
    ]
