"""Turns the stored tensors of one quantised weight into that weight: [out, in], in the model's dtype.

Values of b bits are packed into int32, the first one in the lowest bits.  With q a stored value:

    format   parts, and their shapes                                                          weight[o, i]
    scaled   weight [out, in] e4m3 or int8, scale, zero_point                                  (q - zero) * scale
    packed   packed [out, in * b / 32], scale and zero_point [out, groups], shape [2], g_idx   (q - zero) * scale
    gptq     qweight [in * b / 32, out], qzeros and scales [groups, out], g_idx [in]           (q - zero) * scale
    awq      qweight [in, out / 8], qzeros and scales [groups, out]; 8 columns in an own order (q - zero) * scale
    mxfp4    blocks u8 [experts, out, in / 32, 16], scales u8 [experts, out, in / 32]          e2m1[q] * 2^(scale - 127)
    fp4      packed u8 [out, in / 2], scale e4m3 or u8 [out, in / group], scale_2 [], global_scale [1]  (see below)

`packed` adds half the range to q and to zero points before it stores them.  Its zero points are packed along the rows,
those of gptq and awq along the columns.  g_idx has the group of each column (act-order); without it, groups are
consecutive columns.

An e2m1 value of `fp4` is multiplied by its scale (a scale in u8 stands for 2^(scale - 127)), and by the tensor's
float32 scale_2 (NVFP4 of modelopt) or 1 / global_scale (NVFP4 of compressed-tensors).

Weights are computed in float32 and rounded once, in chunks of PIECE values.  So besides the stored tensors and the
weight, memory holds little more than a byte per value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from quire.engine.executor import ops
from quire.engine.executor.models.quantised.quantisation import Format, Quantisation
from quire.engine.executor.models.quantised.quantised import BLOCK, Quantised

PIECE = 1 << 22  # values per chunk
WORD = 32  # bits of a word of packed values
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # place, within a word, of each of 8 consecutive columns
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # values by their three low bits; the fourth is the sign
SIGNED_E2M1 = [*E2M1, *(-number for number in E2M1)]
NEEDED: dict[Format, set[str]] = {
    "scaled": {"weight", "scale"},
    "packed": {"packed", "scale", "shape"},
    "awq": {"qweight", "qzeros", "scales"},
    "gptq": {"qweight", "qzeros", "scales"},
    "mxfp4": {"blocks", "scales"},
    "fp4": {"packed", "scale"},
}
Shape = tuple[int, ...]
Kept = Literal["int8", "fp8", "fp8 blocks", "int4", "mxfp4"]  # formats of weights that are served as stored


def check_shapes(how: Quantisation, shapes: dict[str, Shape]) -> None:
    """Raise ValueError if a stored tensor of a weight is absent, or if its shape does not fit the others."""
    if absent := sorted(NEEDED[how.format] - shapes.keys()):
        raise ValueError(f"its {absent[0]} is not in the files")
    if absent := sorted(how.demanded - shapes.keys()):
        raise ValueError(f"its {absent[0]}, which the config requires, is not in the files")
    if how.format == "mxfp4":
        experts, out, groups, half = shapes["blocks"]
        _check("scales", shapes["scales"], (experts, out, groups))
        _check("blocks", (half,), (16,))
    elif how.format == "scaled":
        *lead, out, columns = shapes["weight"]
        _check("scale", shapes["scale"], *_grids(how, tuple(lead), out, columns))
        _check("zero_point", shapes.get("zero_point", ()), (), shapes["scale"])
    elif how.format == "fp4":
        out, half = shapes["packed"]
        _check("scale", shapes["scale"], (out, math.ceil(2 * half / how.group)))
        for part in how.demanded:
            _check(part, shapes[part], (1,), ())
    elif how.format == "packed":
        out, _words = shapes["packed"]
        _, groups = shapes["scale"]
        _check("scale", shapes["scale"], (out, groups if how.strategy == "group" else 1))
        _check("zero_point", shapes.get("zero_point", ()), (), (math.ceil(out * how.bits / WORD), groups))
    else:
        rows, columns = shapes["qweight"]
        groups, out = shapes["scales"]
        words = out * how.bits // WORD
        inputs = rows if how.format == "awq" else rows * WORD // how.bits
        _check("qweight", (columns,), (words if how.format == "awq" else out,))
        _check("qzeros", shapes["qzeros"], (groups, words))
        _check("scales", (groups,), (math.ceil(inputs / (how.group or inputs)),))
        _check("g_idx", shapes.get("g_idx", ()), (), (inputs,))


def _grids(how: Quantisation, lead: Shape, out: int, columns: int) -> list[Shape]:
    """Return the shapes that a scale of `scaled` weights may have; lead: number of experts, if they are one tensor."""
    if how.strategy == "block":
        return [(*lead, math.ceil(out / how.block[0]), math.ceil(columns / how.block[1]))]
    if how.strategy == "channel":
        return [(*lead, out), (*lead, out, 1)]
    return [(*lead, 1, 1), (*lead, 1), lead]


def check_packed(how: Quantisation, shape: Sequence[int], words: Sequence[int]) -> None:
    """Raise ValueError unless a weight of `shape`, as its file says, is packed into this number of words."""
    rows, columns = shape
    if (rows, math.ceil(columns * how.bits / WORD)) != tuple(words):
        raise ValueError(f"its packed has shape {list(words)}, for a weight of {[rows, columns]}")


def _check(part: str, shape: Shape, *wanted: Shape) -> None:
    if shape not in wanted:
        raise ValueError(f"its {part} has shape {list(shape)} instead of {list(wanted[-1])}")


def dequantise(how: Quantisation, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the weight of these stored tensors, whose shapes were checked.  Raises ValueError for invalid values."""
    if how.format == "mxfp4":
        return dequantise_mxfp4(parts["blocks"], parts["scales"], dtype)
    if how.format == "fp4":
        return _dequantise_fp4(how, parts, dtype)
    if how.format == "scaled":
        return _dequantise_scaled(how, parts["weight"], parts["scale"], parts.get("zero_point"), dtype)
    if how.format == "packed":
        return _dequantise_packed(how, parts, dtype)
    return _dequantise_transposed(how, parts, dtype)


def as_stored(how: Quantisation, parts: dict[str, Tensor]) -> Quantised:
    """Return these stored values, their scales and zero points, unchanged.  `stored_as` must return a format."""
    if how.bits == 4:
        return _four_bits(how, parts)
    if how.format == "packed":
        rows, columns = parts["shape"].tolist()
        # Stored with an offset of half the range, so the sign bit is flipped.
        values = (unpack(parts["packed"], 8)[:rows, :columns] ^ 0x80).view(torch.int8).contiguous()
    else:
        values = parts["weight"]
    scale = parts["scale"].to(torch.float32)
    if how.strategy == "block":
        return Quantised(values, scale.contiguous())
    return Quantised(values, scale.reshape(-1).expand(len(values)).contiguous())


def _four_bits(how: Quantisation, parts: dict[str, Tensor]) -> Quantised:
    zero: Tensor | None = None
    if how.format == "packed":
        values, scale = parts["packed"].contiguous().view(torch.uint8), parts["scale"]
        if parts["shape"].tolist() != [len(values), 2 * values.shape[1]]:
            raise ValueError(
                f"its packed has shape {list(parts['packed'].shape)}, for a weight of {parts['shape'].tolist()}"
            )
        if "zero_point" in parts:
            zero = unpack(parts["zero_point"].T, 4).T[: len(values)]
    else:
        zero, scale = _zeros_by_row(how, parts), parts["scales"].T
        if how.format == "awq":
            single = _in_order(unpack(parts["qweight"], 4)).T
            values = single[:, ::2] | single[:, 1::2] << 4
        else:
            values = parts["qweight"].T.contiguous().view(torch.uint8)
    scale = scale.to(torch.float32)
    if how.group == 0 and 2 * values.shape[1] > ops.INT4_LARGEST_GROUP:  # split into smaller groups with equal scales
        groups = 2 * values.shape[1] // ops.INT4_BLOCK
        scale, zero = scale.expand(-1, groups), None if zero is None else zero.expand(-1, groups)
    return Quantised(values.contiguous(), scale.contiguous(), None if zero is None else zero.contiguous())


def _fits_4_bits(how: Quantisation, shape: Shape) -> bool:
    """Whether the int4 GEMMs support the group size of a weight.  shape: shape of the stored values."""
    columns = shape[0] if how.format == "awq" else shape[0 if how.format == "gptq" else 1] * WORD // 4
    group = how.group or ops.INT4_BLOCK
    return columns % group == 0 and group % ops.INT4_BLOCK == 0 and group <= ops.INT4_LARGEST_GROUP


def in_order_of_groups(group: Tensor, how: Quantisation) -> bool:
    """Whether g_idx [in] says only that groups are consecutive columns."""
    if int(group[0]) < 0:  # compressed-tensors fills it with -1 if it has no meaning
        return True
    return torch.equal(group, (torch.arange(len(group)) // (how.group or len(group))).to(group.dtype))


def stored_as(how: Quantisation, parts: Collection[str], dtype: str, shape: Shape) -> Kept | None:
    """Return the format in which `as_stored` can keep a weight [out, in]; None: it must be dequantised.

    int8 must be symmetric, with one scale per tensor or per row. e4m3 may also have one per block of 128 x 128.  Its
    GEMMs quantise activations to e4m3, so the config must ask for that.  int4 groups must have 32, 64, .. 4,096 inputs,
    or a complete row; the caller checks a g_idx (`in_order_of_groups`).  mxfp4 experts need sizes that the kernels can
    tile (`quantised_experts.py`).

    dtype, shape: those of the stored values; the dtype as safetensors names it."""
    if how.format == "mxfp4":
        return "mxfp4" if shape[2] * how.group % ops.TILE == 0 else None
    if how.bits == 4 and how.format in ("packed", "awq", "gptq"):
        return "int4" if _fits_4_bits(how, shape) else None
    if how.bits != 8 or len(shape) != 2 or "zero_point" in parts:
        return None
    if how.strategy in ("tensor", "channel"):
        if how.format == "packed":
            return "int8" if "g_idx" not in parts else None
        if how.format == "scaled" and dtype == "I8":
            return "int8"
        return "fp8" if how.format == "scaled" and how.quantises_activations else None
    return "fp8 blocks" if how.block == (BLOCK, BLOCK) and dtype == "F8_E4M3" and how.quantises_activations else None


def _dequantise_scaled(
    how: Quantisation, weight: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype
) -> Tensor:
    result = torch.empty(weight.shape, dtype=dtype)
    if weight.dim() == 3:
        for expert, place in enumerate(result):
            place.copy_(
                _dequantise_scaled(how, weight[expert], scale[expert], None if zero is None else zero[expert], dtype)
            )
        return result
    rows, columns = weight.shape
    high, wide = how.block if how.strategy == "block" else (1 if how.strategy == "channel" else rows, columns)
    grid = (math.ceil(rows / high), math.ceil(columns / wide))
    scale = scale.to(torch.float32).reshape(grid)
    for first, end in _pieces(rows, columns):
        at = torch.arange(first, end) // high
        values = weight[first:end].to(torch.float32)
        if zero is not None:
            values -= _widen(zero.to(torch.float32).reshape(grid)[at], wide, columns)
        result[first:end] = values.mul_(_widen(scale[at], wide, columns))
    return result


def _widen(grid: Tensor, wide: int, columns: int) -> Tensor:
    """Repeat each column of `grid` for the `wide` columns that share it."""
    return grid if grid.shape[1] == 1 else grid.repeat_interleave(wide, 1)[:, :columns]


def _dequantise_packed(how: Quantisation, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    rows, columns = shape = parts["shape"].tolist()
    words, scale = parts["packed"], parts["scale"]
    check_packed(how, shape, words.shape)
    if "zero_point" in parts:
        zero = unpack(parts["zero_point"].T, how.bits).T[:rows]
    else:
        zero = torch.full(scale.shape, 1 << (how.bits - 1), dtype=torch.uint8)
    return _grouped(how, unpack(words, how.bits)[:, :columns], zero, scale, parts.get("g_idx"), dtype)


def _dequantise_transposed(how: Quantisation, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Dequantise awq and gptq, which store the transpose of a weight."""
    words = parts["qweight"]
    if how.format == "awq":
        values = _in_order(unpack(words, how.bits)).T.contiguous()
    else:
        values = unpack(words.T, how.bits)
    return _grouped(how, values, _zeros_by_row(how, parts), parts["scales"].T, parts.get("g_idx"), dtype)


def _zeros_by_row(how: Quantisation, parts: dict[str, Tensor]) -> Tensor:
    """Return the zero points of awq and gptq: u8 [out, groups]."""
    zero = unpack(parts["qzeros"], how.bits)
    # gptq stores a zero point of 0 as -1, which is the largest unsigned value.
    zero = _in_order(zero) if how.format == "awq" else zero + how.zero_shift & (1 << how.bits) - 1
    return zero.T


def _in_order(values: Tensor) -> Tensor:
    """Put the columns of awq's values, u8 [r, c], in the order of the weight's columns."""
    return values.view(len(values), -1, len(AWQ_ORDER))[..., AWQ_ORDER].flatten(1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the values of int32 words [r, c], of 4 or 8 bits: u8 [r, c * 32 / bits]."""
    # Every supported CPU is little endian.  Flatten first: `view(torch.uint8)` needs a last stride of 1, which a matrix
    # of one column may lack.
    values = words.contiguous().view(-1).view(torch.uint8).view(len(words), -1)
    if bits == 4:
        values = torch.stack([values & 0xF, values >> 4], -1).flatten(1)
    return values


def _grouped(
    how: Quantisation, values: Tensor, zero: Tensor, scale: Tensor, group: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return (value - zero) * scale.  `values` u8 [out, in]; zero u8 and scale [out, groups]; group [in]."""
    rows, columns = values.shape
    wide, groups = how.group or columns, scale.shape[1]
    if group is None or int(group[0]) < 0:  # compressed-tensors fills it with -1 if it has no meaning
        group = None if columns % wide == 0 else torch.arange(columns) // wide
    elif int(group.min()) < 0 or int(group.max()) >= groups:
        raise ValueError(f"a column is of group {int(group.max())}, and there are {groups}")
    zero, scale = zero.to(torch.float32), scale.to(torch.float32)
    result = torch.empty(rows, columns, dtype=dtype)
    for first, end in _pieces(rows, columns):
        piece = values[first:end].to(torch.float32)
        if group is None:
            view = piece.view(end - first, groups, wide)
            view.sub_(zero[first:end, :, None]).mul_(scale[first:end, :, None])
        else:
            piece.sub_(zero[first:end].index_select(1, group)).mul_(scale[first:end].index_select(1, group))
        result[first:end] = piece
    return result


def _dequantise_fp4(how: Quantisation, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return [out, in] from e2m1 values, two per byte, the first in the low nibble."""
    packed, scale = parts["packed"], parts["scale"]
    if scale.dtype == torch.uint8:
        scale = torch.ldexp(torch.ones(scale.shape), scale.to(torch.int32) - 127)
    scale = scale.to(torch.float32)
    if "scale_2" in parts:
        scale = scale * parts["scale_2"].to(torch.float32)
    if "global_scale" in parts:
        scale = scale / parts["global_scale"].to(torch.float32)
    rows, columns = len(packed), 2 * packed.shape[1]
    table = torch.tensor(SIGNED_E2M1)
    result = torch.empty(rows, columns, dtype=dtype)
    for first, end in _pieces(rows, columns):
        pair = packed[first:end]
        values = table[torch.stack([pair & 0xF, pair >> 4], -1).flatten(1).to(torch.int32)]
        result[first:end] = values.mul_(_widen(scale[first:end], how.group, columns))
    return result


def dequantise_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [experts, in, out], because gpt-oss multiplies by the transpose."""
    experts, out, groups, _ = blocks.shape
    values = torch.tensor(SIGNED_E2M1, device=blocks.device)
    result = torch.empty(experts, groups * 32, out, dtype=dtype, device=blocks.device)
    for expert in range(experts):
        for first, end in _pieces(out, groups * 32):
            pair = blocks[expert, first:end]
            index = torch.stack([pair & 0xF, pair >> 4], -1).flatten(-2).to(torch.int32)
            power = scales[expert, first:end, :, None].to(torch.int32) - 127
            result[expert, :, first:end] = torch.ldexp(values[index], power).flatten(1).T
    return result


def _pieces(rows: int, columns: int) -> list[tuple[int, int]]:
    """Return ranges (first, end) of rows that have about PIECE values each."""
    step = max(1, PIECE // max(1, columns))
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]
