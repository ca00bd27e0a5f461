"""Fields of request bodies that no endpoint implements: each is accepted without effect, refused by name, or unknown.

    a field of a body --in the struct of its endpoint (`bodies.py`)--> implemented, or checked there
                      --in HARMLESS--> accepted without effect: no answer would depend on it
                      --in UNSERVED--> 400 `unsupported`, unless its value is neutral
                      --otherwise----> named in `x-unknown-fields`; 400 `unknown_field` with `strict_fields`

To implement a field, add it to the struct, which takes precedence over HARMLESS and UNSERVED.  `tests/docs/test_api.py`
compares the tables with docs/api.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

Endpoint = Literal["completions", "chat", "tokenize", "detokenize", "messages", "responses", "scoring", "adapters"]
ANSWERS: tuple[Endpoint, ...] = ("completions", "chat")
SHOWN = 16  # maximum unknown fields that the header names; further ones are only counted


class Harmless(NamedTuple):
    """A field that is accepted without effect.  `why`: why it needs no effect."""

    why: str
    endpoints: tuple[Endpoint, ...] = ANSWERS


class Unserved(NamedTuple):
    """A field of an unsupported feature.  `neutral`: accepted values besides null; they have no effect."""

    feature: str
    neutral: tuple[object, ...] = ()
    endpoints: tuple[Endpoint, ...] = ANSWERS


HARMLESS: dict[str, Harmless] = {
    "user": Harmless("names an end user; requests are counted by tenant"),
    "safety_identifier": Harmless("names an end user"),
    "metadata": Harmless("labels for a store of answers, which there is not"),
    "store": Harmless("asks to keep the answer for later reading; it is not kept beyond `--retain-s`"),
    "service_tier": Harmless("`priority` orders requests"),
    "prompt_cache_key": Harmless("prefixes are shared without it; `cache_salt` separates them"),
    "prompt_cache_retention": Harmless("a prefix stays cached until its blocks are needed"),
    "request_id": Harmless("`X-Request-Id` names a request"),
    "mm_processor_kwargs": Harmless("for images, which are refused themselves"),
    "media_io_kwargs": Harmless("for images, which are refused themselves", ("chat",)),
    "spaces_between_special_tokens": Harmless("only slow tokenizers know it"),
}

EMPTY: tuple[object, ...] = (False, [], {}, "")

UNSERVED: dict[str, Unserved] = {
    "tools": Unserved("a call of tools outside /v1/chat/completions", EMPTY, ("completions",)),
    "tool_choice": Unserved("a call of tools outside /v1/chat/completions", ("none", "auto"), ("completions",)),
    "functions": Unserved("the older form of tools", EMPTY),
    "function_call": Unserved("a choice among the older form of tools", ("none", "auto")),
    "audio": Unserved("audio", EMPTY),
    "logits_processors": Unserved("code of clients", EMPTY),
    "add_special_tokens": Unserved("a chat with special tokens beyond the template's", (False,), ("chat",)),
    "chat_template": Unserved("a chat template of the client", EMPTY, ("chat", "tokenize")),
    "num_beam_groups": Unserved("diverse beam search", (1,)),
    "diversity_penalty": Unserved("diverse beam search", (0,)),
    "typical_p": Unserved("typical sampling", (1,)),
    "top_a": Unserved("top-a sampling", (0,)),
    "xtc_probability": Unserved("XTC sampling", (0,)),
    "dry_multiplier": Unserved("DRY sampling", (0,)),
    "mirostat": Unserved("Mirostat sampling", (0,)),
    "mirostat_mode": Unserved("Mirostat sampling", (0,)),
    "dynatemp_range": Unserved("dynamic temperature", (0,)),
    "repetition_detection": Unserved("ending an answer that repeats itself"),
    "prompt_embeds": Unserved("a prompt of embeddings"),
    "kv_transfer_params": Unserved("KV cache of another server", ({},)),
    "vllm_xargs": Unserved("arguments of vLLM's plugins", ({},)),
    "lora_path": Unserved("a choice of adapters"),
    "return_hidden_states": Unserved("hidden states", (False,)),
    "regex": Unserved("structured output"),
    "ebnf": Unserved("structured output"),
    "grammar": Unserved("structured output", ("",)),
    "json_schema": Unserved("structured output", ({},)),
    "modalities": Unserved("an answer that is not text", (["text"], []), ("chat",)),
}

INNER: dict[str, frozenset[str]] = {  # field with an object -> harmless fields of that object
    "stream_options": frozenset(["include_obfuscation"]),
}

_names = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PRINTABLE = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)


class Undeclared(NamedTuple):
    """Fields of a body that are not in the struct of its endpoint."""

    refused: tuple[str, str] | None = None  # (field, feature) of the first field that must be refused
    unknown: tuple[str, ...] = ()  # names of unknown fields


def undeclared(
    body: bytes, declared: frozenset[str], endpoint: Endpoint, inner: Mapping[str, frozenset[str]]
) -> Undeclared:
    """Classify the fields of a JSON object that are not `declared`.

    `inner`: field with an object -> declared fields of that object.  `body` is known to be a JSON object."""
    unknown = []
    for name, value in _names.decode(body).items():
        if name in declared:
            unknown += [
                f"{name}.{one}" for one in _unknown_inside(value, inner.get(name), INNER.get(name, frozenset()))
            ]
        elif name in UNSERVED and endpoint in UNSERVED[name].endpoints:
            if not _is_neutral(value, UNSERVED[name].neutral):
                return Undeclared((name, UNSERVED[name].feature))
        elif name not in HARMLESS or endpoint not in HARMLESS[name].endpoints:
            unknown.append(name)
    return Undeclared(None, tuple(unknown))


def _is_neutral(value: msgspec.Raw, neutral: tuple[object, ...]) -> bool:
    try:
        return msgspec.json.decode(value) in (None, *neutral)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _unknown_inside(value: msgspec.Raw, declared: frozenset[str] | None, harmless: frozenset[str]) -> list[str]:
    """Return the unknown fields of an object within a body; [] if `declared` is None or `value` is no object."""
    if declared is None or bytes(value)[:1] != b"{":
        return []
    return [name for name in _names.decode(value) if name not in declared and name not in harmless]


def header(unknown: tuple[str, ...]) -> str:
    """Return the value of the header `x-unknown-fields`."""
    names = [name if _PRINTABLE.fullmatch(name) else "?" for name in unknown[:SHOWN]]
    return ", ".join([*names, f"and {len(unknown) - SHOWN} more"] if len(unknown) > SHOWN else names)
