"""PEFT's adapter_config.json: the supported fields, and the fields that are refused by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from quire.engine.adapters.errors import AdapterError

MAX_RANK = 128
MAX_VALUES = 100_000  # maximum JSON values of a file, since decoding more would hold the GIL for too long
ALL_LINEAR = "all-linear"
# Fields that change the adapter's computation -> harmless values, in addition to false ones.
OTHER_METHODS: dict[str, tuple[object, ...]] = {
    "use_dora": (),
    "use_qalora": (),
    "use_bdlora": (),
    "lora_bias": (),
    "modules_to_save": (),
    "trainable_token_indices": (),
    "target_parameters": (),
    "layer_replication": (),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    "bias": ("none",),
}
# Prefixes of `init_lora_weights` methods that also change the base model's weights before training.
CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


class AdapterConfig(msgspec.Struct, frozen=True):
    """The fields that define an adapter's computation.  Other fields are not read."""

    r: int
    lora_alpha: float
    target_modules: list[str] | str | None = None
    use_rslora: bool = False
    exclude_modules: list[str] | str | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    base_model_name_or_path: str | None = None  # a mismatch gives only a warning; the tensor shapes must fit

    def is_for(self, model: str) -> bool:
        """Return whether the adapter was trained on `model`, a hub name or path.  Compares only the last components."""
        named = self.base_model_name_or_path
        return not named or not model or last_word(named) == last_word(model)

    def scale(self, rank: int, alpha: float) -> float:
        """Return the scale s of the update s * B A."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def last_word(path: str) -> str:
    """Return the last component of a hub name or path, in lower case."""
    return path.rstrip("/").rpartition("/")[2].lower()


def parse_config(data: bytes | bytearray, where: str) -> AdapterConfig:
    """Parse the bytes of an adapter_config.json.  `where`: the file's name for errors.  Raises AdapterError."""
    check_values(data, where)
    try:
        fields: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
        kind = fields.get("peft_type", "")
        if kind != "LORA":
            raise AdapterError(f"{where}: peft_type is {kind!r}; only LORA is served")
        refuse_other_methods(fields, where)
        config = msgspec.convert(fields, AdapterConfig)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{where}: {error}") from None
    ranks = {"r": config.r, **{f"rank_pattern: {key}": rank for key, rank in (config.rank_pattern or {}).items()}}
    for name, rank in ranks.items():
        if not 1 <= rank <= MAX_RANK:
            raise AdapterError(f"{where}: {name} is {rank}; ranks from 1 to {MAX_RANK} are served", MAX_RANK, rank)
    for alpha in (config.lora_alpha, *(config.alpha_pattern or {}).values()):
        if not math.isfinite(alpha):
            raise AdapterError(f"{where}: alpha is {alpha}, not a finite number")
    return config


def check_values(data: bytes | bytearray, where: str) -> None:
    """Raise AdapterError if a JSON text may have more than MAX_VALUES values, by a count of separators."""
    count = sum(map(data.count, (b"[", b"{", b":", b",")))
    if count > MAX_VALUES:
        raise AdapterError(f"{where}: about {count} JSON values; at most {MAX_VALUES} are read", MAX_VALUES, count)


def refuse_other_methods(fields: dict[str, Any], where: str) -> None:
    """Raise AdapterError if the config uses another method than plain LoRA on linear layers."""
    for name, harmless in OTHER_METHODS.items():
        if (value := fields.get(name)) and value not in harmless:
            raise AdapterError(f"{where}: {name} is {str(value)[:60]!r}; only plain LoRA of linear layers is served")
    begun = fields.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(CHANGES_BASE):
        raise AdapterError(
            f"{where}: init_lora_weights is {begun[:60]!r}, which changes the base's weights; convert the adapter to "
            "plain LoRA as PEFT describes"
        )
