"""Reads a checkpoint's config, and refuses architectures and settings that Quire does not support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from quire.engine.executor.errors import ModelLoadError, UnsupportedModel
from quire.engine.executor.models import multimodal, overrides, rope, text_tower
from quire.engine.executor.models.quantised.quantisation import read_quantisation
from quire.engine.executor.models.recurrent import families

PLAIN_LAYERS = {"full_attention", "sliding_attention"}
CHUNKED = "chunked_attention"  # a token sees only its own chunk; within the first chunk, that is full attention


def read_config(directory: Path, changes: dict[str, Any] | None = None) -> PretrainedConfig:
    """Return a checkpoint's config with the operator's changes.  Raises UnsupportedModel for an unknown
    quantisation."""
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"{directory}: no config.json")
    config = overrides.load_config(directory, changes or {})
    text = config.get_text_config()
    if not hasattr(text, "vocab_size"):
        raise UnsupportedModel(f"{config.model_type}: its config has no vocab_size, so it is no language model")
    read_quantisation(directory, config.model_type)
    for described in (config, text):
        if named := getattr(described, "transformers_weights", None):
            reason = "which is not read; name it model.safetensors, or list it in model.safetensors.index.json"
            raise UnsupportedModel(f"{directory}/config.json: transformers_weights names {named}, {reason}")
        vars(described).pop("quantization_config", None)  # our reader dequantises the weights
    padding = getattr(text, "pad_token_id", None)
    if padding is not None and not 0 <= padding < text.vocab_size:
        text.pad_token_id = None  # torch refuses such a token; no batch is padded here
    return config


def served_part(whole: PretrainedConfig, directory: Path, changes: dict[str, Any] | None = None) -> PretrainedConfig:
    """Return the config of the served model: the language model of a multimodal model, else `whole`.

    changes: the operator's changes, already in `whole`.  Raises UnsupportedModel, and ModelLoadError for changes
    without effect."""
    if changes:
        check_effect(directory, changes)
    if not text_tower.has_tower(whole):
        check_architecture(whole)
        if multimodal.loses_towers(whole):
            text_tower.lend_fields(whole, whole.get_text_config())
        without_temperature(whole.get_text_config())
        return whole
    text = text_tower.text_config(whole, directory)
    try:
        check_architecture(text)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{whole.model_type}: its text part: {error}") from None
    return without_temperature(text)


def check_effect(directory: Path, changes: dict[str, Any]) -> None:
    """Raise ModelLoadError for an operator's change that does not affect the served model.

    Such changes concern a part that is not loaded, or what weight files decide.  `eos_ids` checks its own field."""
    whole, served = fields_of(directory, changes)
    for path, others in overrides.each_left_out(changes, overrides.load_config(directory, {})):
        if path.endswith("eos_token_id"):
            continue
        try:
            whole_without, served_without = fields_of(directory, others)
        except ModelLoadError:  # without this change the config is not valid
            continue
        if whole != whole_without and served == served_without:
            raise ModelLoadError(f"{overrides.OPTION}: {path} has no effect on the model that is served")


def fields_of(directory: Path, changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of a changed checkpoint config, and the fields that the served model depends on."""
    whole = overrides.load_config(directory, changes).to_dict()
    return whole, multimodal.text_fields(served_part(read_config(directory, changes), directory))


def without_temperature(text: PretrainedConfig) -> PretrainedConfig:
    """Switch off attention temperature.  It is 1 within `plain_positions`; transformers would compute it from a token's
    index in the batch instead of its position."""
    if hasattr(text, "attn_temperature_tuning"):
        text.attn_temperature_tuning = False
    return text


def check_architecture(config: PretrainedConfig) -> None:
    """Refuse, before any weight is read, architectures known to need more than causal paged attention."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{kind}: an encoder-decoder; only decoder-only language models are served")
    if multimodal.class_of(config) is None:
        raise UnsupportedModel(f"{kind}: transformers has no class of this type that generates text")
    text = config.get_text_config()
    if multimodal.loses_towers(config) and text is not config:
        kind = f"{kind}: its text part, {text.model_type}"
    kinds = set(getattr(text, "layer_types", None) or [])
    if getattr(text, "cross_attention_layers", None):  # mllama
        kinds.add("cross_attention")
    if odd := sorted(kinds - PLAIN_LAYERS - {CHUNKED} - families.known_kinds(text)):
        raise UnsupportedModel(f"{kind}: layers of type {odd[0]}; only full and sliding-window attention are computed")
    if not (multimodal.passes_attention(config) or families.known_kinds(text)):  # the proof at load checks these
        raise UnsupportedModel(f"{kind}: computes attention itself, without the interface that our kernels implement")
    if getattr(text, "alibi", False):
        raise UnsupportedModel(f"{kind}: ALiBi position bias")


def positions_of(text: PretrainedConfig) -> int:
    """Return the number of positions of a model by its config; 0: the config does not have it."""
    return getattr(text, "max_position_embeddings", None) or 0


def plain_positions(text: PretrainedConfig) -> tuple[int, str] | None:
    """Return the number of positions with plain attention, and what limits it; None: no limit.

    In Llama 4: the first attention chunk, and positions with an attention temperature of 1."""
    bounds = []
    if CHUNKED in (getattr(text, "layer_types", None) or []):
        bounds.append((int(text.attention_chunk_size), "the first chunk of its attention"))
    if hasattr(text, "attn_temperature_tuning"):
        bounds.append((int(text.floor_scale) - 1, "the positions before its attention's temperature changes"))
    return min(bounds, default=None)


def check_length(config: PretrainedConfig, asked: int, own: PretrainedConfig | None = None) -> int:
    """Return max_model_len: `asked`, or the model's own maximum.

    Raises ModelLoadError if `asked` exceeds the maximum positions of RoPE scaling.  `own`: the config before the
    operator's changes."""
    text = config.get_text_config()
    made_for, plain = positions_of(text), plain_positions(text)
    if not made_for:
        raise UnsupportedModel(f"{config.model_type}: the config does not name the maximum number of positions")
    most = rope.reach(text, made_for, own and own.get_text_config())
    hint = f"; {overrides.OPTION} with rope scaling extends models with rotary embeddings"
    if plain is not None:
        made_for = min(made_for, plain[0])
        if plain[0] <= most:
            most, hint = plain[0], f"; it is served within {plain[1]}"
    if asked > most:
        raise ModelLoadError(f"max_model_len {asked} is over the {most} positions {config.model_type} can serve{hint}")
    return asked or rope.short_reach(text, made_for)
