"""Families whose layers keep recurrent state, and our modules that replace transformers' own.

A family is served if its kinds of layers are listed here and the proof at load holds (`proof.py`).  Layers of
the same names in other families are refused (`check_architecture` of served_config.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from quire.engine.executor.errors import UnsupportedModel
from quire.engine.executor.models.recurrent.gated_delta import GatedDelta, grouped, joined, separate
from quire.engine.executor.models.recurrent.mamba2 import Mamba2
from quire.engine.executor.models.recurrent.short_conv import ShortConv
from quire.engine.executor.models.recurrent.states import StateShape

# Kinds of layers, by transformers' names, that a family's config may have besides attention.
FAMILIES: dict[str, set[str]] = {
    "lfm2": {"conv"},
    "lfm2_moe": {"conv"},
    "qwen3_next": {"linear_attention"},
    "qwen3_5_text": {"linear_attention"},
    "qwen3_5_moe_text": {"linear_attention"},
    "olmo_hybrid": {"linear_attention"},
    "bamba": {"linear_attention"},
    "granitemoehybrid": {"linear_attention"},
    "falcon_h1": {"hybrid"},
    "nemotron_h": {"linear_attention", "mlp", "moe"},
}
# Our modules, by the name of the class in transformers.
MODULES: dict[str, Callable[[Any], nn.Module]] = {
    "Lfm2ShortConv": ShortConv,
    "Lfm2MoeShortConv": ShortConv,
    "Qwen3NextGatedDeltaNet": partial(GatedDelta, project=grouped),
    "Qwen3_5GatedDeltaNet": partial(GatedDelta, project=joined),
    "Qwen3_5MoeGatedDeltaNet": partial(GatedDelta, project=joined),
    "OlmoHybridGatedDeltaNet": partial(GatedDelta, project=separate),
    "BambaMixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "FalconH1Mixer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
}
SILU = {None, "silu", "swish"}  # activations of a convolution; None: it has none


def known_kinds(config: PretrainedConfig) -> set[str]:
    """Return the kinds of layers that this family may have besides attention."""
    return FAMILIES.get(config.model_type, set())


def is_recurrent(config: PretrainedConfig) -> bool:
    """Whether the text part of a config names layers with recurrent state."""
    text = config.get_text_config()
    return bool(known_kinds(text) & set(getattr(text, "layer_types", None) or ()))


def check_ranks(config: PretrainedConfig, ranks: int) -> None:
    """Raise UnsupportedModel if the config has recurrent layers, which several ranks do not compute."""
    if is_recurrent(config) and ranks > 1:
        reason = "ranks cannot share the recurrent state of a layer"
        raise UnsupportedModel(f"{config.model_type}: --tensor-parallel is {ranks}, at most 1: {reason}")


def replace_layers(model: PreTrainedModel) -> list[StateShape]:
    """Replace layers with recurrent state by our modules.  Returns the state shape of each, by layer.

    Raises UnsupportedModel for a convolution with another activation than silu."""
    shapes = []
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if (make := MODULES.get(type(child).__name__)) is None:
                continue
            if (activation := getattr(child, "activation", None)) not in SILU:
                raise UnsupportedModel(
                    f"{model.config.model_type}: a convolution with activation {activation}, not silu"
                )
            ours: Any = make(child)
            setattr(parent, name, ours)
            shapes.append(ours.state)
    return sorted(shapes, key=lambda shape: shape.layer)
