"""Serves the language model of a multimodal model by the multimodal class, without its vision and audio towers.  Used
if transformers has no causal class for the language model; `text_tower.py` serves the other multimodal models.

    model
    ├─ model
    │  ├─ visual            a tower, which holds neither the decoder nor the head: removed before weights are read
    │  └─ language_model    the decoder
    └─ lm_head

The forward pass of the class stays as its authors wrote it, with its embeddings, scales and soft caps.  If text needs a
tower, the probe at load fails without it, and the model is refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
)

from quire.engine.executor.attention import NAME
from quire.engine.executor.errors import UnsupportedModel, one_line
from quire.engine.executor.models.weights import Names

# Mappings to classes that generate text from images and other inputs.  The second also has classes for audio.
MAPPINGS = (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)


def class_of(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that computes the text of models of this config; None: transformers has none."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        causal: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return causal
    whole = next((mapping[type(config)] for mapping in MAPPINGS if type(config) in mapping), None)
    return None if whole is None else without_towers(whole)


def served_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that computes the text of a config that served_config.py has accepted."""
    found = class_of(config)
    assert found is not None
    return found


def loses_towers(config: PretrainedConfig) -> bool:
    """Whether models of this config are served by their multimodal class."""
    return type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and class_of(config) is not None


@functools.cache
def without_towers(whole: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a class of the same name whose models have no towers."""

    def make(self: PreTrainedModel, config: PretrainedConfig, *args: Any, **options: Any) -> None:
        whole.__init__(self, config, *args, **options)
        remove_towers(self)

    return type(whole.__name__, (whole,), {"__init__": make, "__module__": whole.__module__})


def remove_towers(model: PreTrainedModel) -> list[str]:
    """Remove the modules that hold neither the decoder nor the head, and return their paths."""
    decoder = model.get_decoder()
    needed = {id(decoder), id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    removed: list[str] = []
    if decoder is not model:
        _remove(model, "", needed, removed)
    return removed


def _remove(parent: nn.Module, path: str, needed: set[int], removed: list[str]) -> bool:
    """Remove the towers inside a module.  Return whether text needs the module."""
    if id(parent) in needed:
        return True
    kept = {name: _remove(child, f"{path}{name}.", needed, removed) for name, child in parent.named_children()}
    if any(kept.values()):
        for name in [name for name, keep in kept.items() if not keep]:
            if next(parent.get_submodule(name).parameters(), None) is not None:  # none: text may use it
                delattr(parent, name)
                removed.append(path + name)
    return any(kept.values())


def names_of(config: PretrainedConfig) -> Names:
    """Return the mapping from a checkpoint's tensor names to those of a model without towers, which omits towers.

    Files may have another order of parts, so a tower's name counts at any of the first three places of a tensor's path.
    Raises UnsupportedModel for a class that cannot be made."""
    whole = served_class(config).__mro__[1]
    try:
        with torch.device("meta"):
            towers = {path.rpartition(".")[2] for path in remove_towers(whole(copy.deepcopy(config)))}
    except Exception as error:  # model classes raise any kind of error
        reason = f"its class, whose text would be served, cannot be made: {one_line(error)}"
        raise UnsupportedModel(f"{config.model_type}: {reason}") from error
    of_tower = re.compile(rf"(\w+\.){{0,2}}({'|'.join(map(re.escape, sorted(towers)))})(\.|$)")
    return Names(own=lambda name: "" if towers and of_tower.match(name) else name)


def attention_of(config: PretrainedConfig) -> str | dict[str, str]:
    """Return the name of the attention implementation per part: ours for the language model, "eager" for towers."""
    if not loses_towers(config):
        return NAME
    text = config.get_text_config()
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return {"": NAME} | {name: NAME if part is text else "eager" for name, part in parts.items() if part is not None}


def passes_attention(config: PretrainedConfig) -> bool:
    """Whether the language model's class declares that its attention function can be replaced."""
    text = config.get_text_config()
    own = class_of(config)
    if loses_towers(config) and type(text) in MODEL_MAPPING:
        with contextlib.suppress(ValueError):  # transformers lists classes that it does not export
            own = MODEL_MAPPING[type(text)]
    return bool(getattr(own, "_supports_attention_backend", False))


def text_fields(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a config that the language model depends on: all except the configs of towers."""
    described: dict[str, Any] = config.to_dict()
    if not loses_towers(config):
        return described
    text = config.get_text_config()
    towers = {name for name, value in vars(config).items() if isinstance(value, PretrainedConfig) and value is not text}
    return {name: value for name, value in described.items() if name not in towers | {"_name_or_path"}}
