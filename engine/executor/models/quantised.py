"""Weights that stay quantised while they are served: 8 bits a number and a scale for each row.

    a float weight [out, in] ── Quantised.of ──> numbers [out, in] int8 or e4m3, scale [out] float32
    q, k, v of one input     ── Quantised.join ─> one weight, row after row

`QuantisedLinear` takes the place of nn.Linear in a transformers model, so that the probe computes with the weights that
are served.  `fuse` then makes products of it (linear.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.executor import ops
from engine.executor.errors import UnsupportedModel

log = logging.getLogger(__name__)

Kind = Literal["int8", "fp8"]
DTYPE: dict[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # what the largest number of a row becomes
FP8_CAPABILITY = (9, 0)  # of a GPU: Hopper
# Last parts of the names of layers that choose experts.  They are small, and a rounding may choose another expert.
ROUTERS = {"gate", "router", "shared_expert_gate"}


@dataclass(frozen=True)
class Quantised:
    """A weight [out, in]: numbers * scale[:, None]."""

    numbers: Tensor  # [out, in], int8 or float8_e4m3fn
    scale: Tensor  # [out] float32

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype) -> Self:
        """Round weight [out, in] to int8 or float8_e4m3fn, on its device.

        Scales are chosen for each row, so that its largest number becomes 127 or 448.  A number is then off by at most
        half a scale (int8), or a 16th of itself, or a scale / 1024 where that is more (e4m3)."""
        wide = weight.detach().to(torch.float32)
        scale = wide.abs().amax(1) / LARGEST[dtype]
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a row of zeros
        shrunk = wide / scale[:, None]
        return cls((shrunk.round_() if dtype == torch.int8 else shrunk).to(dtype), scale)

    @classmethod
    def join(cls, parts: Iterable[Quantised]) -> Self:
        """Return one weight of several with the same input: their rows, one after another."""
        parts = list(parts)
        # Bytes, because torch does not join e4m3 on every device.
        numbers = torch.cat([part.numbers.view(torch.uint8) for part in parts]).view(parts[0].numbers.dtype)
        return cls(numbers, torch.cat([part.scale for part in parts]))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], computed in float32 and rounded once."""
        return self.numbers.to(torch.float32).mul_(self.scale[:, None]).to(dtype)


class QuantisedLinear(nn.Module):
    """nn.Linear over a quantised weight: the reference, which dequantises in every call.  [..., in] -> [..., out]."""

    def __init__(self, quantised: Quantised, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = quantised.numbers.shape
        self.quantised = quantised  # no parameter: its dtypes are not the model's
        self.bias = bias
        # As in PackedLinear: code that asks for its dtype works, code that computes with it is refused at load.
        self.weight = torch.empty(0, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.quantised.dequantised(x.dtype), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the weight where the module is moved to."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.quantised = Quantised(fn(self.quantised.numbers), fn(self.quantised.scale))
        return self


def check_kind(kind: str, device: torch.device) -> None:
    """Raise UnsupportedModel unless the device multiplies with weights of this kind: the value of --quantize."""
    if kind == "int8" and device.type != "cpu":
        raise UnsupportedModel("--quantize int8: only a CPU multiplies with int8 weights; --device cpu can do it")
    if kind == "fp8" and device.type == "cpu":
        raise UnsupportedModel("--quantize fp8: a CPU has no product with fp8 weights; --quantize int8 is made for it")
    if kind == "fp8" and (found := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        wanted, has = (".".join(map(str, version)) for version in (FP8_CAPABILITY, found))
        raise UnsupportedModel(f"--quantize fp8: the GPU has compute capability {has}, its products need {wanted}")


def quantise_linears(model: PreTrainedModel, kind: Kind, device: torch.device) -> None:
    """Swap the linear layers of `model` for quantised ones on `device`, one at a time.

    The head, embeddings, routers, whatever is no nn.Linear, and layers of sizes that no fp8 product takes, stay as they
    are.  Raises UnsupportedModel if that leaves nothing to quantise, and for fp8 of a model in another dtype than
    bfloat16."""
    head, swapped, dtype = model.get_output_embeddings(), 0, DTYPE[kind]
    if kind == "fp8" and model.dtype != torch.bfloat16:
        raise UnsupportedModel(
            f"--quantize fp8: its products are of bfloat16, the model of {model.dtype}; --dtype bfloat16"
        )
    total = sum(parameter.numel() for parameter in model.parameters())
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child is not head and name not in ROUTERS and _fits(child, kind):
                swapped += child.weight.numel()
                setattr(parent, name, _quantised(child, dtype, device))
    if not swapped:
        raise UnsupportedModel(f"{model.config.model_type}: --quantize {kind}: it has no linear layers that it takes")
    log.info("quantised %.0f %% of the %.0f million weights to %s", 100 * swapped / total, total / 1e6, kind)


def _fits(linear: nn.Linear, kind: Kind) -> bool:
    """Whether a product with a quantised weight takes a layer of this size."""
    return kind != "fp8" or not (linear.in_features % ops.FP8_INNER or linear.out_features % ops.FP8_OUT)


def _quantised(linear: Any, dtype: torch.dtype, device: torch.device) -> QuantisedLinear:
    return QuantisedLinear(Quantised.of(linear.weight.to(device), dtype), linear.bias, linear.weight.dtype)
