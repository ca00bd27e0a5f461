"""Weights that stay quantised while they are served: int8 or e4m3 with a scale per row or block, or int4.

    a float weight [out, in] ── Quantised.of ──> numbers [out, in] int8 or e4m3, scale [out] float32
                                                 4 bits: numbers [out, in / 2], scale and zero [out, in / 32]
    stored e4m3 in blocks    ── as it is ──────> numbers [out, in] e4m3, scale [out / 128, in / 128] float32
    q, k, v of one input     ── Quantised.join ─> one weight, row after row

`QuantisedLinear` takes the place of nn.Linear in a transformers model (quantising.py), so that the probe computes with
the weights that are served.  `fuse` then makes GEMMs of it (linear.py).
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
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # what the largest number of a row becomes
MIDDLE = 8  # the zero point of 4 bits if there is none
PIECE = 1 << 15  # values of a weight that are rounded or widened at a time: in float32 less than the heap returns
PIECE_ON_GPU = 1 << 18


class Scales(NamedTuple):
    """A quantised weight without its values."""

    scale: Tensor
    zero: Tensor | None


@dataclass(frozen=True)
class Quantised:
    """A weight [out, in]: numbers * scale[:, None], or each block of 128 x 128 times its scale.

    Of 4 bits: (number - zero) * scale, each of them of a group of consecutive inputs."""

    numbers: Tensor  # [out, in], int8 or float8_e4m3fn; [out, in / 2] uint8: the first of two in the low half
    scale: Tensor  # float32: [out], [out / 128, in / 128] of e4m3 in blocks, or [out, groups] of 4 bits
    zero: Tensor | None = None  # uint8 [out, groups] of 4 bits; None: all are 8

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight: [out, in]."""
        out, columns = self.numbers.shape
        return out, columns * 8 // BITS[self.numbers.dtype]

    @property
    def scales(self) -> Scales:
        """Return the scales and zero points."""
        return Scales(self.scale, self.zero)

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype, largest_of_rows: Callable[[Tensor], Tensor] | None = None) -> Self:
        """Round weight [out, in] to int8, float8_e4m3fn, or 4 bits (uint8), on its device.

        largest_of_rows: of a part of the columns, returns the largest number [out] of each whole row from those of the
        part.

        Scales are chosen for each row, so that its largest number becomes 127 or 448.  A number is then off by at most
        half a scale (int8), or a 16th of itself, or a scale / 1024 where that is more (e4m3).

        4 bits have a scale and a zero point for each 32 inputs, so that the values of a group and zero lie within 0 to
        15.  A number is off by at most 0.51 scales.  Scales are such that float16 holds them, but for those below
        2^-14."""
        if dtype == torch.uint8:
            return cls._of_4_bits(weight.detach())
        weight = weight.detach()
        largest = torch.cat([weight[piece].to(torch.float32).abs().amax(1) for piece in _pieces(weight)])
        scale = (largest if largest_of_rows is None else largest_of_rows(largest)) / LARGEST[dtype]
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a row of zeros
        numbers = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        for piece in _pieces(weight):
            shrunk = weight[piece].to(torch.float32) / scale[piece, None]
            numbers[piece] = (shrunk.round_() if dtype == torch.int8 else shrunk).to(dtype)
        return cls(numbers, scale)

    @classmethod
    def _of_4_bits(cls, weight: Tensor) -> Self:
        rows, columns = weight.shape
        groups = columns // ops.INT4_BLOCK
        numbers = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
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
            numbers[rows_of_piece] = found[:, ::2] | found[:, 1::2] << 4
            scales[rows_of_piece], zeros[rows_of_piece] = scale, zero
        return cls(numbers, scales, zeros)

    @staticmethod
    def join(parts: Iterable[Quantised]) -> Quantised:
        """Return one weight of several with the same input, all of one dtype: their rows, one after another.

        Of one weight no copy is made.  Groups of 4 bits become as small as those of all parts allow."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        # Bytes, because torch does not join e4m3 on every device.
        numbers = torch.cat([part.numbers.view(torch.uint8) for part in parts]).view(parts[0].numbers.dtype)
        if numbers.dtype != torch.uint8:
            return Quantised(numbers, torch.cat([part.scale for part in parts]))
        groups = math.lcm(*(part.scale.shape[1] for part in parts))
        scales = [part.scale.repeat_interleave(groups // part.scale.shape[1], 1) for part in parts]
        if all(part.zero is None for part in parts):
            return Quantised(numbers, torch.cat(scales))
        zeros = [
            torch.full_like(part.scale, MIDDLE, dtype=torch.uint8) if part.zero is None else part.zero for part in parts
        ]
        return Quantised(
            numbers,
            torch.cat(scales),
            torch.cat([zero.repeat_interleave(groups // zero.shape[1], 1) for zero in zeros]),
        )

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], computed in float32 and rounded once."""
        result = torch.empty(self.shape, dtype=dtype, device=self.numbers.device)
        widen = self._widened_4_bits if self.numbers.dtype == torch.uint8 else self._widened_8_bits
        for rows in _pieces(self.numbers):
            result[rows] = widen(rows)
        return result

    def _widened_8_bits(self, rows: slice) -> Tensor:
        if self.scale.dim() == 2:
            blocks = torch.arange(rows.start, rows.stop, device=self.scale.device) // BLOCK
            scale = self.scale[blocks].repeat_interleave(BLOCK, 1)
        else:
            scale = self.scale[rows, None]
        return self.numbers[rows].to(torch.float32).mul_(scale)

    def _widened_4_bits(self, rows: slice) -> Tensor:
        numbers, scale = self.numbers[rows], self.scale[rows, :, None]
        wide = torch.stack([numbers & 0xF, numbers >> 4], -1).to(torch.float32)
        groups = wide.view(*scale.shape[:2], -1)
        groups.sub_(MIDDLE if self.zero is None else self.zero[rows, :, None]).mul_(scale)
        return groups.flatten(1)

    def to(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return the weight with `move` applied to all its parts."""
        return type(self)(move(self.numbers), move(self.scale), None if self.zero is None else move(self.zero))


def _pieces(weight: Tensor) -> Iterator[slice]:
    """Cut the rows of a matrix into chunks of about PIECE values, or PIECE_ON_GPU; at least one."""
    rows, columns = weight.shape
    step = max(1, (PIECE if weight.device.type == "cpu" else PIECE_ON_GPU) // columns)
    for first in range(0, max(1, rows), step):
        yield slice(first, min(first + step, rows))


class QuantisedLinear(nn.Module):
    """nn.Linear over a quantised weight: the reference, which dequantises in every call.  [..., in] -> [..., out]."""

    def __init__(self, quantised: Quantised, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = quantised.shape
        self.quantised = quantised  # no parameter: its dtypes are not the model's
        self.bias = bias
        # As in PackedLinear: code that asks for its dtype works, code that computes with it is refused at load.
        self.weight = torch.empty(0, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.quantised.dequantised(x.dtype), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the weight where the module is moved to."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.quantised = self.quantised.to(fn)
        return self
