"""Types of the fields of tokenizer_config.json, to name the field on which transformers fails."""

from __future__ import annotations

from typing import Any

import msgspec

NAMED_TOKEN = str | dict[str, Any] | None  # a text, or an added token written as an object
# The fields that decide which token ids a text has.  Others are not checked.
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
    """Return which field of tokenizer_config.json has another type than transformers reads, and why; "" for none."""
    for name in TYPES.keys() & described.keys():
        try:
            msgspec.convert(described[name], TYPES[name])
        except msgspec.ValidationError as error:
            return f"{name}: {error}"
    return ""
