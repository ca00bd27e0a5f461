"""Checks that a checkpoint without a quantisation config stores plain weights, not quantised values that need scales.

transformers casts quantised values that it does not recognise, without their scales: every token is then wrong.  So a
checkpoint whose config names no quantisation (`quantisation.py`) is refused by name, before any tensor is read, if

    a weight, bias or other parameter has fewer than 16 bits, or is an integer
    a parameter has a dtype that no kernel here computes with

The same holds for tensors of a quantised checkpoint that belong to no quantised weight.  Buffers, such as positions
and masks, may be integers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import PretrainedConfig

from quire.engine.executor.errors import ModelLoadError, UnsupportedModel, one_line
from quire.engine.executor.models.multimodal import served_class
from quire.engine.executor.models.weights import UNCHANGED, Names, StoredTensor, stored_tensors, weight_files

DTYPES = {torch.float32, torch.bfloat16, torch.float16}
PLAIN = {"F64", "F32", "F16", "BF16"}  # safetensors' names of dtypes that need no scale
CHOOSE = "choose --dtype float32, bfloat16 or float16"


def check_stored_dtypes(directory: Path, config: PretrainedConfig, names: Names = UNCHANGED) -> None:
    """Raise UnsupportedModel for a parameter that is not stored as floating point.  The files must have been checked.

    config: config of the served model.  names: maps names in the files to the model's."""
    reason = " in the weight files, and the config names no quantisation"
    check_plain(stored_tensors(weight_files(directory), names), config, reason)


def check_plain(stored: Mapping[str, StoredTensor], config: PretrainedConfig, reason: str) -> None:
    """Raise UnsupportedModel for a tensor that may be a parameter and whose dtype has no meaning without a scale.

    reason: the end of the message, after the tensor's name and type."""
    odd = {name: tensor.dtype for name, tensor in sorted(stored.items()) if tensor.dtype not in PLAIN}
    others = other_tensors(config) if odd else None
    for name, dtype in odd.items():
        if dtype.startswith("F") or name.endswith("weight") or others is None or not others(name):
            raise UnsupportedModel(f"{config.model_type}: {name} is {dtype}{reason}")


def other_tensors(config: PretrainedConfig) -> Callable[[str], bool]:
    """Return a predicate of tensor names: the tensor is a buffer of the model, or the model's class ignores it.

    Buffers have moved between modules, so the last part of the name decides.  Makes the model, without memory.  Raises
    ModelLoadError if its class refuses the config."""
    own = served_class(config)
    try:
        with torch.device("meta"):
            model = own(copy.deepcopy(config))
    except Exception as error:  # model classes raise any kind of error
        raise ModelLoadError(f"{config.model_type}: {one_line(error)}") from error
    prefix = own.base_model_prefix + "."  # prefix that names in files may lack
    parameters = {name.removeprefix(prefix) for name, _ in model.named_parameters()}
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    dropped = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]

    def is_other(name: str) -> bool:
        if name.removeprefix(prefix) in parameters:
            return False
        return name.rpartition(".")[2] in buffers or any(each.search(name) for each in dropped)

    return is_other


def check_dtype(kind: str, dtype: object) -> None:
    """Raise UnsupportedModel for a dtype that no kernel computes with."""
    if dtype is not None and dtype not in DTYPES:
        raise UnsupportedModel(f"{kind}: weights in {str(dtype).removeprefix('torch.')}; {CHOOSE}")
