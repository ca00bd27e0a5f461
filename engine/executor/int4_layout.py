"""The layout of weights of 4 bits on a GPU, which csrc/cuda/linear/int4.h describes.  Packs them, on any device.

numbers [out, in / 2], scale and zero [out, groups]
    │  16 rows and 128 inputs at a time
    v
records [out / 16, in / 128, bytes]: numbers in the order of the tensor cores' lanes, scales in float16, zero points
row scales [out] float32: powers of two, so that float16 holds the scales of a row
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, INPUTS = 16, 128  # of a record; a weight has multiples of them
GROUPS = (128, 64, 32)  # inputs that share a scale; of larger groups the scales are repeated
NO_ZERO = 8  # the zero point of a weight that has none
LARGEST_EXPONENT = 15  # scales of a row are below 2 to the power of this
LEAST_EXPONENT = -100  # of the largest scale of a row: below, its row scale would not be a normal number
PIECE = 1 << 24  # numbers that are packed at a time


def pack(numbers: Tensor, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the records [out / 16, in / 128, bytes] u8 and the row scales [out] float32 of a weight.

    numbers  [out, in / 2] u8: columns 2 i and 2 i + 1 in the low and the high half of byte i
    scale    [out, groups] float32; groups follow one another and have a multiple of 32 inputs
    zero     [out, groups] u8, 0 to 15; None: 8

    Numbers and zero points are kept.  Scales keep 11 bits, which is all of a scale that was stored in float16 or
    bfloat16, unless it is below the largest of its row by more than 2^28.  Raises ValueError for other shapes."""
    rows, inner = len(numbers), 2 * numbers.shape[1]
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
    exponent = torch.frexp(scale.abs().amax(1)).exponent.clamp(min=LEAST_EXPONENT) - LARGEST_EXPONENT
    row_scale = (exponent + 127 << 23).view(torch.float32)  # ldexp need not be exact on a GPU
    half = (scale / row_scale[:, None]).to(torch.float16)
    step = max(1, PIECE // inner // ROWS) * ROWS
    made = [
        torch.cat(
            [
                _numbers(numbers[first : first + step]),
                _by_lanes(half[first : first + step], inner).view(torch.uint8),
                _by_lanes(zeros[first : first + step], inner),
            ],
            2,
        )
        for first in range(0, rows, step)
    ]
    return torch.cat(made), row_scale


def _numbers(numbers: Tensor) -> Tensor:
    """Return [blocks, records, 1024] u8: the words of each lane, of two rows in turn."""
    single = torch.stack([numbers & 0xF, numbers >> 4], -1).flatten(1)
    # Row 8 r + g of a block; column 64 half + 32 h + 8 t + 4 j + byte of a record, in word 2 j + r.
    split = single.view(-1, 2, 8, single.shape[1] // INPUTS, 2, 2, 4, 2, 4)
    block, r, g, record, half, h, t, j, byte = range(9)
    low, high = split.permute(h, block, record, half, g, t, j, r, byte)
    packed: Tensor = low | high << 4
    return packed.flatten(2)


def _by_lanes(of_groups: Tensor, inner: int) -> Tensor:
    """Return [blocks, records, numbers] of [out, groups]: those of a lane's two rows together."""
    records = inner // INPUTS
    groups = of_groups.shape[1] // records
    halves = min(2, groups)
    split = of_groups.view(-1, 2, 8, records, halves, groups // halves)
    block, r, g, record, half, k = range(6)
    return split.permute(block, record, half, g, k, r).flatten(2)
