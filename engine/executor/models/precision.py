"""What numbers a checkpoint stores, and whether they are the weights themselves or need scales to become weights.

transformers casts what it does not know as quantised, without its scales: every token is then wrong.  So a checkpoint
is refused by name, before any tensor is read, when

    its config, or hf_quant_config.json (NVIDIA ModelOpt), names a quantisation
    a weight has fewer than 16 bits, or is an integer, and no config says why
    its numbers are of a type that no kernel here computes with
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import PretrainedConfig

from engine.executor.errors import ModelLoadError, UnsupportedModel, one_line
from engine.executor.models.weights import tensor_dtypes, weight_files

DTYPES = {torch.float32, torch.bfloat16, torch.float16}
PLAIN = {"F64", "F32", "F16", "BF16"}  # how safetensors calls types of numbers that need no scale
CHOOSE = "choose --dtype float32, bfloat16 or float16"


def check_quantisation(directory: Path, config: PretrainedConfig) -> None:
    """Raise UnsupportedModel, naming the method, if the config or a file next to it names a quantisation."""
    for found in (
        getattr(config, "quantization_config", None),
        getattr(config.get_text_config(), "quantization_config", None),
    ):
        if found is not None:
            refuse(config.model_type, found if isinstance(found, dict) else found.to_dict())
    file = directory / "hf_quant_config.json"
    if file.is_file():
        try:
            described = json.loads(file.read_bytes())
            refuse(config.model_type, described["quantization"] | {"producer": described.get("producer")})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelLoadError(f"{file}: {one_line(error)}") from error


def refuse(kind: str, described: dict[str, Any]) -> NoReturn:
    """Raise UnsupportedModel for weights quantised as `described`."""
    producer = described.get("producer")
    method = described.get("quant_method") or (producer.get("name") if isinstance(producer, dict) else None)
    named = f"{method or 'an unnamed method'}" + (f" ({algo})" if (algo := described.get("quant_algo")) else "")
    raise UnsupportedModel(f"{kind}: weights quantised by {named}, which is not implemented; serve an unquantised copy")


def check_stored_dtypes(directory: Path, kind: str) -> None:
    """Raise UnsupportedModel for a weight that is no plain floating-point number.  The files must have been checked."""
    for name, stored in sorted(tensor_dtypes(weight_files(directory)).items()):
        # Integer tensors of other names are buffers: positions, masks.
        if stored not in PLAIN and (stored.startswith("F") or name.endswith("weight")):
            reason = "and the config says nothing of quantised weights"
            raise UnsupportedModel(f"{kind}: {name} is {stored} in the weight files, {reason}")


def check_dtype(kind: str, dtype: object) -> None:
    """Raise UnsupportedModel for a type of numbers that no kernel computes with."""
    if dtype is not None and dtype not in DTYPES:
        raise UnsupportedModel(f"{kind}: weights in {str(dtype).removeprefix('torch.')}; {CHOOSE}")
