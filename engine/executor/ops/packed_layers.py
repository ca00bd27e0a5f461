"""Linear layers on a CPU with a weight that is packed once, at load.

Torch's own linear converts the weight in every call.  For the few rows of a decode step that takes as long as the GEMM.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from quire.engine.executor.ops.layers import rms_norm
from quire.engine.executor.ops.layers import silu_mul as _silu_mul

AMX_ROWS = 16  # rows of a matrix tile
PRODUCT_ROWS = {16: 12, 8: 5}  # vector lanes -> kRows of csrc/cpu/product_rows.h; 4 for other lanes


@dataclass(frozen=True)
class Packed:
    """A weight [out, in] in the layout of `packed_linear`."""

    values: torch.Tensor
    size: int  # out
    ordered: bool  # a row's bits do not depend on the batch
    float32_out: bool = False  # the result is not rounded to the weight's dtype
    widen: bool = False  # use matrix tiles for bfloat16; with many rows, dequantise int8 and int4 weights to bfloat16
    scale: torch.Tensor | None = None  # int8: [out, padded to strips]; int4: [strips, groups, columns per strip]
    zero: torch.Tensor | None = None  # [strips, groups, columns] u8: int4 weights with zero points

    @property
    def ours(self) -> bool:
        """Whether our operators use this weight, and not oneDNN's."""
        return self.ordered or self.widen


def pack_weight(weight: torch.Tensor, *, ordered: bool, float32_out: bool = False) -> Packed | None:
    """Pack weight [out, in] for `packed_linear` on a CPU.

    ordered: a row's bits must not depend on the batch.  If false, choose the fastest layout on this CPU; returns None
    if torch's own linear is the fastest.  float32_out: with 16-bit weights, give a float32 result.
    """
    size, inner = weight.shape
    float32_out = float32_out and weight.dtype != torch.float32
    if weight.dtype == torch.bfloat16 and inner % 2 == 0 and tiles_multiply() and (tiles_keep_order() or not ordered):
        return Packed(_in_strips(weight.detach()), size, tiles_keep_order(), float32_out, widen=True)
    if ordered or float32_out or _ordered_is_fast(weight.dtype):
        return Packed(_in_strips(weight.detach()), size, True, float32_out)
    if weight.dtype == torch.bfloat16 and _onednn_bfloat16():
        return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None), size, False)
    return None


def tiles_multiply() -> bool:
    """Whether `packed_linear` can multiply bfloat16 on matrix tiles (AMX): the CPU and this build have them."""
    together = torch.ops.quire.product_layout.default(torch.empty(0, dtype=torch.bfloat16))[1]
    return together == 2 and _onednn_bfloat16() and torch.cpu._is_amx_tile_supported()


@functools.cache
def tiles_keep_order() -> bool:
    """Whether a row's bits on matrix tiles are equal in any batch: oneDNN does not document this, so it is tested."""
    rows, inner = 130, 1100  # both sizes exceed what oneDNN computes in one block
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = Packed(_in_strips(x), rows, ordered=False, float32_out=True, widen=True)
    together = packed_linear(x, packed, None)
    return all(
        torch.equal(packed_linear(x[first : first + count], packed, None), together[first : first + count])
        for count in (1, 2, 15, 16, 17, 33, 64, 65, 129)
        for first in (0, rows - count)
    )


def tile_tokens(packed: Packed) -> int:
    """Return the rows per tile of `packed_linear`: a full tile takes little longer than a single row.

    Returns 1 without tiles, with oneDNN's layout, and for quantised weights, whose tiles have at most 6 rows."""
    if packed.scale is not None or not packed.ours:
        return 1
    if packed.widen:
        return AMX_ROWS
    lanes = packed_layout(packed.values.dtype)[0] // 2  # a strip has two vectors of columns
    return PRODUCT_ROWS.get(lanes, 4)


def widened_rows() -> tuple[int, int] | None:
    """Return the minimum rows for which `widen` dequantises (int8, int4) weights to bfloat16.

    Returns None without bfloat16 instructions: oneDNN is then slower than the integer kernels for any rows."""
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if not (native and _onednn_bfloat16()):
        return None
    of_int8, of_int4 = torch.ops.quire.widened_rows.default()
    return of_int8, of_int4


def pack_int8(values: torch.Tensor, scale: torch.Tensor, *, ordered: bool = True, float32_out: bool = False) -> Packed:
    """Pack the int8 weight values [out, in] times scale [out] float32 for `packed_linear` on a CPU.

    ordered      a row's bits must not depend on the batch.  If false, x in bfloat16 with many rows is multiplied by
                 weights dequantised to bfloat16, where that is faster (`widened_rows`)
    float32_out  the result is not rounded to the weight's dtype

    `packed_linear` takes x of any dtype and quantises each row to 16 bits.  The error against float64 is at most
    inner / 65,000 * max |x| * max |weight|, before the last rounding.  Bits of a row do not depend on the batch, on
    threads or on the CPU.  Weights that are dequantised to bfloat16 are exact; then x is not rounded, and sums are
    float32."""
    widen = not ordered and widened_rows() is not None
    strips = _in_strips(values.view(torch.uint8) ^ 0x80)
    columns = strips.shape[0] * strips.shape[2]
    padded = torch.nn.functional.pad(scale, (0, columns - len(scale)))
    return Packed(strips, len(values), not widen, float32_out, widen, scale=padded)


INT4_BLOCK, INT4_LARGEST_GROUP = 32, 4096  # group size of int4 weights: divisor and maximum, in inputs


def pack_int4(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, *, ordered: bool = True) -> Packed:
    """Pack an int4 weight, (value - zero) * scale in groups of consecutive inputs, for `packed_linear` on a CPU.

    `values`  [out, in / 2] u8: columns 2 i and 2 i + 1 in the low and the high nibble of byte i
    scale    [out, groups] float32; in / groups is 32, 64, .. 4,096
    zero     [out, groups] u8, 0 to 15; None: 8
    ordered  as in `pack_int8`

    `packed_linear` takes x of any dtype and quantises each row to 16 bits.  The error against float64 is at most
    inner / 65,000 * max |x| * max |weight| + (2 + groups) / 16 million * sum |x| |weight|, before the last rounding.
    Bits of a row do not depend on the batch, on threads or on the CPU.  Weights dequantised to bfloat16 are rounded to
    it; then x is not rounded, and sums are float32."""
    widen = not ordered and widened_rows() is not None
    columns, _ = torch.ops.quire.product_layout.default(values)
    size, inner, together = len(values), 2 * values.shape[1], 4
    strips = values.new_empty(-(-size // columns), inner // together, columns // 2, together)
    step = max(1, PACKED_AT_ONCE // (columns * inner))
    for first in range(0, len(strips), step):
        rows = values[first * columns : (first + step) * columns]
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % columns))
        single = torch.stack([padded & 0xF, padded >> 4], -1)  # [padded, in / 2, 2]
        low, high = single.view(-1, 2, columns // 2, inner // together, together).unbind(1)
        strips[first : first + step] = (low | high << 4).transpose(1, 2)

    def by_strip(of_groups: torch.Tensor) -> torch.Tensor:
        wide = torch.nn.functional.pad(of_groups, (0, 0, 0, -size % columns))
        return wide.view(len(strips), columns, -1).transpose(1, 2).contiguous()

    half = scale.to(torch.float16)
    exact = torch.equal(half.to(torch.float32), scale)  # true for most checkpoints
    scales, zeros = by_strip(half if exact else scale), None if zero is None else by_strip(zero)
    return Packed(strips, size, not widen, widen=widen, scale=scales, zero=zeros)


PACKED_AT_ONCE = 1 << 20  # elements per step of the packing


def _in_strips(weight: torch.Tensor) -> torch.Tensor:
    """Copy weight [out, in] into strips (`packed_layout`), padded with zeros."""
    size, inner = weight.shape
    columns, together = torch.ops.quire.product_layout.default(weight)
    strips = weight.new_empty(-(-size // columns), -(-inner // together), columns, together)
    step = max(1, PACKED_AT_ONCE // (columns * inner))  # bounds the padded copy of each step
    for first in range(0, len(strips), step):
        rows = weight[first * columns : (first + step) * columns]
        padded = torch.nn.functional.pad(rows, (0, -inner % together, 0, -len(rows) % columns))
        strips[first : first + step] = padded.view(-1, columns, strips.shape[1], together).transpose(1, 2)
    return strips


def packed_linear(
    x: torch.Tensor,
    packed: Packed,
    bias: torch.Tensor | None,
    plus: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    silu_mul: bool = False,
) -> torch.Tensor:
    """Return x [..., in] times the packed weight transposed, plus bias [out], plus `plus` [..., out] (may be
    overwritten).

    Sums are float32 and rounded once to the dtype of x, or not at all if the weight was packed with `float32_out`.
    `plus` has the dtype of the result.  norm, eps: apply `rms_norm` to x first.  silu_mul: apply `silu_mul` to the
    result; `plus` must be None.
    """
    if not packed.ours:
        x = x if norm is None else rms_norm(x, norm, eps)
        y = _library_linear(x, packed, bias, plus)
        return _silu_mul(y) if silu_mul else y
    if x.dim() != 2:
        flat = x.reshape(-1, x.shape[-1])
        added = None if plus is None else plus.view(-1, plus.shape[-1])
        y = packed_linear(flat, packed, bias, added, norm=norm, eps=eps, silu_mul=silu_mul)
        return y.view(*x.shape[:-1], y.shape[-1]) if plus is None else plus
    y = x if plus is None else plus
    if plus is None:
        size = packed.size // 2 if silu_mul else packed.size
        y = x.new_empty(x.shape[0], size, dtype=torch.float32 if packed.float32_out else None)
    torch.ops.quire.packed_linear.default(
        x, packed.values, packed.scale, packed.zero, bias, norm, eps, silu_mul, packed.widen, plus, y
    )
    return y


def packed_layout(dtype: torch.dtype) -> tuple[int, int]:
    """Return (columns per strip, adjacent inputs per column) of a weight packed for `packed_linear` on this CPU."""
    columns, together = torch.ops.quire.product_layout.default(torch.empty(0, dtype=dtype))
    return columns, together


def _library_linear(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, plus: torch.Tensor | None
) -> torch.Tensor:
    y: torch.Tensor
    if plus is None:
        y = torch.ops.mkldnn._linear_pointwise(x, packed.values, bias, "none", [], "")
    else:
        y = torch.ops.mkldnn._linear_pointwise.binary(x, plus, packed.values, bias, "add")
    return y


def _onednn_bfloat16() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _ordered_is_fast(dtype: torch.dtype) -> bool:
    """Whether our GEMMs are at least as fast as oneDNN's, as measured in docs/notes/kernels/product.md.

    They are slower if oneDNN uses instructions (such as AMX) that this build lacks.
    """
    columns, together = torch.ops.quire.product_layout.default(torch.empty(0, dtype=dtype))
    if dtype == torch.bfloat16:
        return not _onednn_bfloat16() or together == 2
    return columns == 32 or "AVX512" not in torch.backends.cpu.get_cpu_capability()
