"""Weights that stay quantised while they are served: int8 or e4m3 with a scale per row or block, or int4.

    a float weight [out, in] ── Quantised.of ──> values [out, in] int8 or e4m3, scale [out] float32
                                                 4 bits: values [out, in / 2], scale and zero [out, in / 32]
    stored e4m3 in blocks    ── as it is ──────> values [out, in] e4m3, scale [out / 128, in / 128] float32
    q, k, v of one input     ── Quantised.join ─> one weight, row after row

`QuantisedLinear` replaces nn.Linear in a transformers model (quantising.py), so that the probe computes with the served
weights.  `fuse` then replaces it by a quantised GEMM (linear.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from quire.engine.executor import ops

Kind = Literal["int8", "fp8", "int4"]
DTYPE: dict[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
BITS = {torch.int8: 8, torch.float8_e4m3fn: 8, torch.uint8: 4}
BLOCK = 128  # rows and columns of a block that has one scale
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # value to which the maximum of a row is scaled
MIDDLE = 8  # zero point of int4 weights that store none
PIECE = 1 << 15  # values quantised at a time: in float32 below WHILE_LOADING (host_memory.py), so memory is reused
PIECE_ON_GPU = 1 << 18


class Scales(NamedTuple):
    """Scales and zero points of a quantised weight."""

    scale: Tensor
    zero: Tensor | None


@dataclass(frozen=True)
class Quantised:
    """A weight [out, in]: `values` * scale[:, None], or each block of 128 x 128 times its scale.

    int4: (value - zero) * scale, with a zero point and a scale per group of consecutive inputs."""

    values: Tensor  # [out, in], int8 or float8_e4m3fn; int4: uint8 [out, in / 2], first in the low nibble
    scale: Tensor  # float32: [out]; e4m3 in blocks: [out / 128, in / 128]; int4: [out, groups]
    zero: Tensor | None = None  # int4: uint8 [out, groups]; None: all are 8

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight: [out, in]."""
        out, columns = self.values.shape
        return out, columns * 8 // BITS[self.values.dtype]

    @property
    def scales(self) -> Scales:
        """Return the scales and zero points."""
        return Scales(self.scale, self.zero)

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype, largest_of_rows: Callable[[Tensor], Tensor] | None = None) -> Self:
        """Round weight [out, in] to int8, float8_e4m3fn, or int4 (uint8), on its device.

        largest_of_rows: for a shard of columns, maps the maxima [out] of the shard's rows to those of the complete
        rows.

        8-bit scales are per row, so that the row's maximum becomes 127 (int8) or 448 (e4m3).  The error of an int8
        value is at most half a scale; that of an e4m3 value is at most a 16th of it, or scale / 1024 if that is more.

        int4 weights have a scale and a zero point per 32 inputs, chosen so that zero and the group's values map to 0 to
        15.  The error of a value is at most 0.51 scales.  Scales are exact in float16, except for those below 2^-14."""
        if dtype == torch.uint8:
            return cls._of_4_bits(weight.detach())
        weight = weight.detach()
        largest = torch.cat([weight[piece].to(torch.float32).abs().amax(1) for piece in _pieces(weight)])
        scale = (largest if largest_of_rows is None else largest_of_rows(largest)) / LARGEST[dtype]
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a row of zeros
        values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        for piece in _pieces(weight):
            shrunk = weight[piece].to(torch.float32) / scale[piece, None]
            values[piece] = (shrunk.round_() if dtype == torch.int8 else shrunk).to(dtype)
        return cls(values, scale)

    @classmethod
    def _of_4_bits(cls, weight: Tensor) -> Self:
        rows, columns = weight.shape
        groups = columns // ops.INT4_BLOCK
        values = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(rows, groups, device=weight.device)
        zeros = torch.empty(rows, groups, dtype=torch.uint8, device=weight.device)
        for rows_of_piece in _pieces(weight):
            piece = weight[rows_of_piece].to(torch.float32).view(-1, groups, ops.INT4_BLOCK)
            low, high = piece.amin(2).clamp_(max=0), piece.amax(2).clamp_(min=0)
            scale = (high - low) / 15
            half = scale.to(torch.float16).to(torch.float32)
            scale = torch.where((scale >= 2**-14) & half.isfinite(), half, scale)
            scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a group of zeros
            zero = (low / -scale).round_()
            found = (piece / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, 15).to(torch.uint8).flatten(1)
            values[rows_of_piece] = found[:, ::2] | found[:, 1::2] << 4
            scales[rows_of_piece], zeros[rows_of_piece] = scale, zero
        return cls(values, scales, zeros)

    @staticmethod
    def join(parts: Iterable[Quantised]) -> Quantised:
        """Concatenate the rows of weights with the same input and dtype.

        A single weight is not copied.  int4 groups become as small as the smallest groups of all parts."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        # Bytes, because torch does not join e4m3 on every device.
        values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(parts[0].values.dtype)
        if values.dtype != torch.uint8:
            return Quantised(values, torch.cat([part.scale for part in parts]))
        groups = math.lcm(*(part.scale.shape[1] for part in parts))
        scales = [part.scale.repeat_interleave(groups // part.scale.shape[1], 1) for part in parts]
        if all(part.zero is None for part in parts):
            return Quantised(values, torch.cat(scales))
        zeros = [
            torch.full_like(part.scale, MIDDLE, dtype=torch.uint8) if part.zero is None else part.zero for part in parts
        ]
        return Quantised(
            values,
            torch.cat(scales),
            torch.cat([zero.repeat_interleave(groups // zero.shape[1], 1) for zero in zeros]),
        )

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], computed in float32 and rounded once."""
        result = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        widen = self._widened_4_bits if self.values.dtype == torch.uint8 else self._widened_8_bits
        for rows in _pieces(self.values):
            result[rows] = widen(rows)
        return result

    def _widened_8_bits(self, rows: slice) -> Tensor:
        if self.scale.dim() == 2:
            blocks = torch.arange(rows.start, rows.stop, device=self.scale.device) // BLOCK
            scale = self.scale[blocks].repeat_interleave(BLOCK, 1)
        else:
            scale = self.scale[rows, None]
        return self.values[rows].to(torch.float32).mul_(scale)

    def _widened_4_bits(self, rows: slice) -> Tensor:
        values, scale = self.values[rows], self.scale[rows, :, None]
        wide = torch.stack([values & 0xF, values >> 4], -1).to(torch.float32)
        groups = wide.view(*scale.shape[:2], -1)
        groups.sub_(MIDDLE if self.zero is None else self.zero[rows, :, None]).mul_(scale)
        return groups.flatten(1)

    def to(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return the weight with `move` applied to all its tensors."""
        return type(self)(move(self.values), move(self.scale), None if self.zero is None else move(self.zero))


def _pieces(weight: Tensor) -> Iterator[slice]:
    """Yield ranges of rows with about PIECE values, or PIECE_ON_GPU; at least one range."""
    rows, columns = weight.shape
    step = max(1, (PIECE if weight.device.type == "cpu" else PIECE_ON_GPU) // columns)
    for first in range(0, max(1, rows), step):
        yield slice(first, min(first + step, rows))


class QuantisedLinear(nn.Module):
    """nn.Linear that dequantises its weight in every call, the reference of our GEMMs.  [..., in] -> [..., out]."""

    def __init__(self, quantised: Quantised, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = quantised.shape
        self.quantised = quantised  # no parameter, because its dtypes are not the model's
        self.bias = bias
        # Other code may read the dtype of this empty tensor.  Code that computes with it fails at load.
        self.weight = torch.empty(0, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.quantised.dequantised(x.dtype), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the weight together with the module."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.quantised = self.quantised.to(fn)
        return self
