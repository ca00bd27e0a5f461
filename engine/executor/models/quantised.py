"""Weights that stay quantised while they are served: 8 bits a number, and a scale for each row or block.

    a float weight [out, in] ── Quantised.of ──> numbers [out, in] int8 or e4m3, scale [out] float32
    stored e4m3 in blocks    ── as it is ──────> numbers [out, in] e4m3, scale [out / 128, in / 128] float32
    q, k, v of one input     ── Quantised.join ─> one weight, row after row

`QuantisedLinear` takes the place of nn.Linear in a transformers model (quantising.py), so that the probe computes with
the weights that are served.  `fuse` then makes products of it (linear.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

Kind = Literal["int8", "fp8"]
DTYPE: dict[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
BLOCK = 128  # rows and columns of a block that has one scale
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # what the largest number of a row becomes


@dataclass(frozen=True)
class Quantised:
    """A weight [out, in]: numbers * scale[:, None], or each block of 128 x 128 times its scale."""

    numbers: Tensor  # [out, in], int8 or float8_e4m3fn
    scale: Tensor  # float32: [out], or [out / 128, in / 128] of e4m3 in blocks, whose sizes are multiples of 128

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype, largest_of_rows: Callable[[Tensor], Tensor] | None = None) -> Self:
        """Round weight [out, in] to int8 or float8_e4m3fn, on its device.

        largest_of_rows: of a part of the columns, returns the largest number [out] of each whole row from those of the
        part.

        Scales are chosen for each row, so that its largest number becomes 127 or 448.  A number is then off by at most
        half a scale (int8), or a 16th of itself, or a scale / 1024 where that is more (e4m3)."""
        wide = weight.detach().to(torch.float32)
        largest = wide.abs().amax(1)
        scale = (largest if largest_of_rows is None else largest_of_rows(largest)) / LARGEST[dtype]
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a row of zeros
        shrunk = wide / scale[:, None]
        return cls((shrunk.round_() if dtype == torch.int8 else shrunk).to(dtype), scale)

    @staticmethod
    def join(parts: Iterable[Quantised]) -> Quantised:
        """Return one weight of several with the same input: their rows, one after another; of one no copy."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        # Bytes, because torch does not join e4m3 on every device.
        numbers = torch.cat([part.numbers.view(torch.uint8) for part in parts]).view(parts[0].numbers.dtype)
        return Quantised(numbers, torch.cat([part.scale for part in parts]))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], computed in float32 and rounded once."""
        scale = self.scale[:, None]
        if self.scale.dim() == 2:
            scale = self.scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return self.numbers.to(torch.float32).mul_(scale).to(dtype)


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
