"""Joins experts that are stored one by one, for a model with one tensor of transposes per layer: Llama 4.

    experts.0.gate_proj.weight [out, in] ┐
    experts.0.up_proj.weight   [out, in] ├─ transposed, side by side ─> experts.gate_up_proj [experts, in, 2 * out]
    experts.1. ..                        ┘
    experts.0.down_proj.weight [in, out] ── transposed ───────────────> experts.down_proj [experts, out, in]

Tools that quantise Llama 4 write its experts this way.  For other models with such files, transformers joins them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from quire.engine.executor.errors import ModelLoadError

KINDS = {"llama4_text"}  # model types
OF_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")
PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}  # parameter of all experts -> parts that it is made of


def joined_name(kind: str, name: str) -> str:
    """Return the parameter of all experts that a tensor is joined into, or the tensor's own name."""
    if kind not in KINDS or not (found := OF_EXPERT.fullmatch(name)):
        return name
    return next(f"{found['experts']}.{own}" for own, parts in PARTS.items() if found["part"] in parts)


@dataclass(frozen=True)
class JoinedExperts:
    """The weights [out, in] of all experts of a layer, read one after another when `weights[...]` asks for them."""

    of_experts: list[list[Any]]  # tensors by expert: gate and up, or down
    dtype: torch.dtype

    def __getitem__(self, everything: EllipsisType) -> Tensor:
        joined: Tensor | None = None
        for number, weights in enumerate(self.of_experts):
            first = 0
            for weight in weights:
                made: Tensor = weight[...]
                rows, columns = made.shape
                if joined is None:
                    joined = made.new_empty(len(self.of_experts), columns, rows * len(weights), dtype=self.dtype)
                joined[number, :, first : first + rows] = made.T
                first += rows
        assert joined is not None
        return joined


def join_experts(kind: str, tensors: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the tensors of a checkpoint with the experts of each layer as a model of this dtype has them.

    Raises ModelLoadError if a layer lacks one of an expert's weights."""
    found: dict[str, Any] = {}
    parts: dict[str, dict[tuple[int, str], Any]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if (own := joined_name(kind, name)) == name:
            found[name] = tensor
        elif match := OF_EXPERT.fullmatch(name):
            parts[own][int(match["number"]), match["part"]] = tensor
    for own, weights in parts.items():
        experts, _, parameter = own.rpartition(".")
        count = 1 + max(number for number, _ in weights)
        places = [[(number, part) for part in PARTS[parameter]] for number in range(count)]
        if lacking := [place for each in places for place in each if place not in weights]:
            number, part = lacking[0]
            raise ModelLoadError(f"{kind}: the weight files lack {experts}.{number}.{part}_proj.weight")
        found[own] = JoinedExperts([[weights[place] for place in each] for each in places], dtype)
    return found
