"""Packs int4 weights, on any device, in the layout of the GPU kernels (csrc/cuda/linear/int4.h).

`values` [out, in / 2], scale and zero [out, groups]
    │  16 rows x 128 inputs at a time
    v
packed blocks [out / 16, in / 128, bytes]: weights as mma fragments of the lanes, scales in float16, zero points
row scales [out] float32: powers of two, so that float16 holds the scales of a row
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, INPUTS = 16, 128  # rows and inputs per packed block; a weight's sizes are multiples of these
GROUPS = (128, 64, 32)  # inputs that share a scale; larger groups repeat their scales
NO_ZERO = 8  # zero point of symmetric weights
LARGEST_EXPONENT = 15  # scales divided by their row scale are below 2 to this power
MIN_EXPONENT = -100  # minimum exponent of a row's maximum scale: below it, the row scale would be subnormal
CHUNK = 1 << 24  # weights packed at a time


def pack(values: Tensor, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the packed blocks [out / 16, in / 128, bytes] u8 and the row scales [out] float32 of a weight.

    `values`  [out, in / 2] u8: columns 2 i and 2 i + 1 in the low and the high nibble of byte i
    scale      [out, groups] float32; groups are contiguous and have a multiple of 32 inputs
    zero       [out, groups] u8, 0 to 15; None: 8

    Weights and zero points are exact.  Scales keep 11 bits, enough for float16 and bfloat16 scales unless one is more
    than 2^28 times smaller than the maximum of its row.  Raises ValueError for other shapes."""
    rows, inner = len(values), 2 * values.shape[1]
    if rows % ROWS or inner % INPUTS:
        raise ValueError(f"a weight of shape {[rows, inner]} is not of multiples of {ROWS} and {INPUTS}")
    group = inner // scale.shape[1]
    if group * scale.shape[1] != inner or group % GROUPS[-1]:
        raise ValueError(f"{scale.shape[1]} groups in {inner} inputs are not of multiples of {GROUPS[-1]}")
    together = next(inputs for inputs in GROUPS if group % inputs == 0)
    scale = scale.repeat_interleave(group // together, 1)
    zeros = torch.full_like(scale, NO_ZERO, dtype=torch.uint8)
    if zero is not None:
        zeros = zero.repeat_interleave(group // together, 1)
    exponent = torch.frexp(scale.abs().amax(1)).exponent.clamp(min=MIN_EXPONENT) - LARGEST_EXPONENT
    row_scale = (exponent + 127 << 23).view(torch.float32)  # ldexp need not be exact on a GPU
    half = (scale / row_scale[:, None]).to(torch.float16)
    step = max(1, CHUNK // inner // ROWS) * ROWS
    made = [
        torch.cat(
            [
                _lane_words(values[first : first + step]),
                _by_lanes(half[first : first + step], inner).view(torch.uint8),
                _by_lanes(zeros[first : first + step], inner),
            ],
            2,
        )
        for first in range(0, rows, step)
    ]
    return torch.cat(made), row_scale


def _lane_words(values: Tensor) -> Tensor:
    """Return [row blocks, k blocks, 1024] u8: each lane's words, which come in turn from its two rows."""
    single = torch.stack([values & 0xF, values >> 4], -1).flatten(1)
    # The weight at row 8 r + g and column 64 half + 32 h + 8 t + 4 j + byte of a packed block is in byte `byte` of word
    # 2 j + r of lane 4 g + t: in the low nibble if h = 0, in the high nibble if h = 1.
    split = single.view(-1, 2, 8, single.shape[1] // INPUTS, 2, 2, 4, 2, 4)
    block, r, g, record, half, h, t, j, byte = range(9)
    low, high = split.permute(h, block, record, half, g, t, j, r, byte)
    packed: Tensor = low | high << 4
    return packed.flatten(2)


def _by_lanes(of_groups: Tensor, inner: int) -> Tensor:
    """Reorder values [out, groups] to [row blocks, k blocks, values]: the values of a lane's two rows are adjacent."""
    records = inner // INPUTS
    groups = of_groups.shape[1] // records
    halves = min(2, groups)
    split = of_groups.view(-1, 2, 8, records, halves, groups // halves)
    block, r, g, record, half, k = range(6)
    return split.permute(block, record, half, g, k, r).flatten(2)
