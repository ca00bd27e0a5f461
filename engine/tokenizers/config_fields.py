"""Types of the fields of tokenizer_config.json, to find the field that makes transformers fail."""

from __future__ import annotations

from typing import Any

import msgspec

NAMED_TOKEN = str | dict[str, Any] | None  # the token's text, or an added token as a JSON object
# Types of the fields that affect token ids.  Other fields are not checked.
TYPES: dict[str, Any] = {
    "added_tokens_decoder": dict[str, dict[str, Any]],
    "additional_special_tokens": list[str | dict[str, Any]] | dict[str, str] | None,
    "extra_special_tokens": list[str] | dict[str, str] | None,
    **dict.fromkeys((f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")), NAMED_TOKEN),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space"), bool | None),
    "tokenizer_class": str | None,
    "chat_template": str | list[dict[str, str]] | dict[str, str] | None,
    "model_max_length": float | None,
}


def odd_field(described: dict[str, Any]) -> str:
    """Return an error for the first field of tokenizer_config.json with a type that transformers cannot read, or ""."""
    for name in TYPES.keys() & described.keys():
        try:
            msgspec.convert(described[name], TYPES[name])
        except msgspec.ValidationError as error:
            return f"{name}: {error}"
    return ""
