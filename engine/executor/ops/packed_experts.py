"""Packs quantised weights of experts into the layout of csrc/experts_layout.h.

    mxfp4   e2m1 values and a power of two per 32 elements of a row, as gpt-oss stores them
    fp8     e4m3 values and a float32 scale per row, or per group of a row's elements

The kernels widen values to the dtype of the activations, so results are those of dequantised weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Format = Literal["mxfp4", "fp8"]
TILE = 64  # rows and elements per tile; the sizes of a layer must be multiples of it
LARGEST_SCALE = 128  # maximum stored scale of mxfp4: it means 2^1; larger ones exceed the kernels' range
_SCALE_OFFSET = 126  # added to a stored scale


@dataclass(frozen=True)
class PackedRows:
    """A weight of all experts of a layer: u8 [experts, row tiles, slabs, 2, tile bytes]."""

    format: Format
    tiles: Tensor

    @property
    def bytes(self) -> int:
        """Memory of the weight in bytes."""
        return self.tiles.numel()


def pack_mxfp4(blocks: Tensor, scales: Tensor, *, interleaved: bool) -> PackedRows:
    """Pack stored mxfp4 experts, on their device.

    blocks       u8 [experts, rows, size / 32, 16]: two e2m1 values per byte, the first in the low nibble
    scales       u8 [experts, rows, size / 32]: exponent + 127, at most LARGEST_SCALE
    interleaved  low and high rows alternate (gate and up of gpt-oss); else the low rows are the first half"""
    packed = [
        _mxfp4_tiles(_halves(values.flatten(1), interleaved), _halves(powers, interleaved))
        for values, powers in zip(blocks, scales, strict=True)
    ]
    return PackedRows("mxfp4", torch.stack(packed))


def pack_fp8(values: Tensor, scales: Tensor) -> PackedRows:
    """Pack experts in e4m3, on their device.

    values   [experts, rows, size], low rows first
    scales   float32 [experts, rows, groups], of equal groups of consecutive elements; a group is a multiple of TILE"""
    packed = [
        _fp8_tiles(_halves(each.view(torch.uint8), False), _halves(of_rows, False))
        for each, of_rows in zip(values, scales, strict=True)
    ]
    return PackedRows("fp8", torch.stack(packed))


def _halves(rows: Tensor, interleaved: bool) -> Tensor:
    """Return rows [2 n, columns] as low and high rows, padded to tiles: [2, multiple of TILE, columns]."""
    halves = torch.stack([rows[0::2], rows[1::2]] if interleaved else rows.chunk(2))
    return torch.nn.functional.pad(halves, (0, 0, 0, -halves.shape[1] % TILE))


def _in_lanes(values: Tensor) -> Tensor:
    """Reorder [2, rows, size] to [row tile, slab, low or high, warp, g, t, k, pair's column block, pair's row half, e].

    csrc/experts_layout.h names these: row = 16 warp + 8 half + g, column = 16 k + 8 block + 2 t + e."""
    two, rows, size = values.shape
    split = values.view(two, rows // TILE, 4, 2, 8, size // TILE, 4, 2, 4, 2)
    return split.permute(1, 5, 0, 2, 4, 8, 6, 7, 3, 9)


def _mxfp4_tiles(pairs: Tensor, powers: Tensor) -> Tensor:
    """Pack pairs u8 [2, rows, size / 2] and powers u8 [2, rows, size / 32] -> u8 [row tiles, slabs, 2, tile bytes]."""
    values = _in_lanes(torch.stack([pairs & 0xF, pairs >> 4], -1).flatten(2)).to(torch.int32)
    sign, e1, low = values >> 3, values >> 2 & 1, values & 3
    size = values & 7
    pair = (slice(None),) * 7
    at = [(*pair, 0, 0), (*pair, 0, 1), (*pair, 1, 0), (*pair, 1, 1)]  # pairs 0 to 3: column block, row half
    half = sign[at[0]] << 15 | size[at[0]] << 6
    half |= sign[at[1]] << 12 | size[at[1]] << 3
    half |= sign[at[2]] << 9 | size[at[2]]
    half |= sign[at[3]] << 14 | e1[at[3]] << 13 | low[at[3]] << 10
    words = torch.stack([half & 0xFF, half >> 8], -1).to(torch.uint8).flatten(3)
    two, rows, groups = powers.shape
    split = powers.view(two, rows // TILE, 4, 2, 8, groups // 2, 2).permute(1, 5, 0, 2, 4, 3, 6)
    return torch.cat([words, (split + _SCALE_OFFSET).flatten(3)], -1)


def _fp8_tiles(values: Tensor, scales: Tensor) -> Tensor:
    """Pack values u8 [2, rows, size], scales float32 [2, rows, groups] -> u8 [row tiles, slabs, 2, tile bytes]."""
    lanes = _in_lanes(values)  # [tile, slab, 2, warp, g, t, k, block, half, e]
    tiles, slabs = lanes.shape[:2]
    by_half = lanes.reshape(tiles, slabs, 2, 4 * 8 * 4, 2, 16).transpose(3, 4).flatten(3)
    of_slabs = scales.repeat_interleave(slabs // scales.shape[-1], -1)
    of_rows = of_slabs.view(2, tiles, TILE, slabs).permute(1, 3, 0, 2).contiguous()
    return torch.cat([by_half, of_rows.view(torch.uint8)], -1)
