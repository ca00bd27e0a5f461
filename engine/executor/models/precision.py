"""What numbers a checkpoint stores, and whether they are the weights themselves or need scales to become weights.

transformers casts what it does not know as quantised, without its scales: every token is then wrong.  So a checkpoint
whose config names no quantisation (`quantisation.py`) is refused by name, before any tensor is read, when

    a weight has fewer than 16 bits, or is an integer
    its numbers are of a type that no kernel here computes with
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.executor.errors import UnsupportedModel
from engine.executor.models.weights import stored_tensors, weight_files

DTYPES = {torch.float32, torch.bfloat16, torch.float16}
PLAIN = {"F64", "F32", "F16", "BF16"}  # how safetensors calls types of numbers that need no scale
CHOOSE = "choose --dtype float32, bfloat16 or float16"


def check_stored_dtypes(directory: Path, kind: str) -> None:
    """Raise UnsupportedModel for a weight that is no plain floating-point number.  The files must have been checked."""
    for name, stored in sorted(stored_tensors(weight_files(directory)).items()):
        if is_scaleless(name, stored.dtype):
            reason = "and the config says nothing of quantised weights"
            raise UnsupportedModel(f"{kind}: {name} is {stored.dtype} in the weight files, {reason}")


def is_scaleless(name: str, stored: str) -> bool:
    """Whether a tensor of the stored type would need a scale to be a weight."""
    # Integer tensors of other names are buffers: positions, masks.
    return stored not in PLAIN and (stored.startswith("F") or name.endswith("weight"))


def check_dtype(kind: str, dtype: object) -> None:
    """Raise UnsupportedModel for a type of numbers that no kernel computes with."""
    if dtype is not None and dtype not in DTYPES:
        raise UnsupportedModel(f"{kind}: weights in {str(dtype).removeprefix('torch.')}; {CHOOSE}")
