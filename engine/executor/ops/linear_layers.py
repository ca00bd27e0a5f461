"""Linear layers with weights as loaded, or quantised to fp8 or int4 on a GPU."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from quire.engine.executor import int4_layout

log = logging.getLogger("quire.engine.executor.ops")


@dataclass(frozen=True)
class Fp8:
    """An fp8 weight on a Hopper GPU: `values` * scale[:, None], or each 128 x 128 block times its scale."""

    values: torch.Tensor  # [out, in] float8_e4m3fn
    scale: torch.Tensor  # float32: [out], or [out / 128, in / 128]

    @property
    def rows(self) -> int:
        """Return `out`."""
        return len(self.values)


# `in` and `out` of an fp8 weight must be multiples of these.
FP8_INNER, FP8_OUT = 128, 16  # with a scale per row
FP8_BLOCKS_INNER, FP8_BLOCKS_OUT = 512, 128  # per block; 4 scales per row: versions of torch lay out 1 to 3 differently


@dataclass(frozen=True)
class Int4:
    """An int4 weight on a Hopper GPU, packed by `pack_int4_gpu`."""

    packed: torch.Tensor  # [out / 16, in / 128, bytes] uint8: packed blocks of weights, group scales and zero points
    scale: torch.Tensor  # [out] float32, row scales: factors of the group scales

    @property
    def rows(self) -> int:
        """Return `out`."""
        return len(self.scale)


def pack_int4_gpu(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> Int4:
    """Pack an int4 weight for a GPU.  Arguments as for `pack_int4`, but a group may have any multiple of 32 inputs.

    Scales keep 11 bits.  Raises ValueError unless `in` and `out` are multiples of INT4_GPU_INNER and INT4_GPU_OUT."""
    return Int4(*int4_layout.pack(values, scale, zero))


INT4_GPU_INNER, INT4_GPU_OUT = int4_layout.INPUTS, int4_layout.ROWS


@functools.cache
def multiplies_blocks(device: torch.device) -> bool:
    """Whether torch has fp8 GEMMs with block-wise weight scales: CUDA 12.9 and later."""
    x = torch.zeros(16, FP8_BLOCKS_INNER, dtype=torch.bfloat16, device=device)
    weight = Fp8(x.new_zeros(128, FP8_BLOCKS_INNER).to(torch.float8_e4m3fn), torch.ones(1, 4, device=device))
    try:
        linear(x, weight)
    except RuntimeError as error:
        log.warning(
            "dequantising block-scaled fp8 weights at load: this torch has no GEMM for them (%s)",
            str(error).splitlines()[0],
        )
        return False
    return True


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | Fp8 | Int4,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    silu_mul: bool = False,
    plus: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    float32_out: bool = False,
) -> torch.Tensor:
    """Return rms_norm(x, norm, eps) times the transposed weight, plus bias.  x [T, in], weight [size, in] -> [T, size].

    norm      [in]; None: no norm
    silu_mul  weight and bias hold `size` gate rows, then `size` up rows; the result is silu(gate) * up
    plus      [T, size]: the result is added to it, in place, and `plus` is returned
    out       [T, size], without `plus`: destination.  On a GPU it may be float32 if there is no silu_mul

    float32_out: allocate a float32 `out`; on a GPU, without silu_mul and plus.

    With an Fp8 weight all other tensors are bfloat16.  x keeps bfloat16 if a CTA can hold all of it: one token of up to
    16,384 elements, two of 8,192, four of 4,096.  Otherwise it is quantised to e4m3, with one scale per token, or per
    128 elements of a token if the weight has block scales.

    With an Int4 weight all other tensors are bfloat16, too.  Up to 64 tokens only the result is rounded.  With more
    tokens the weight is dequantised to bfloat16 first, in scratch memory.
    """
    assert plus is None or out is None
    if out is None:
        rows = len(weight) if isinstance(weight, torch.Tensor) else weight.rows
        size = rows // 2 if silu_mul else rows
        dtype = torch.float32 if float32_out else x.dtype
        out = torch.empty(x.shape[0], size, dtype=dtype, device=x.device) if plus is None else plus
    rest = (bias, norm, eps, plus is not None, silu_mul, out)
    if isinstance(weight, Fp8):
        torch.ops.quire.linear_fp8.default(x, weight.values, weight.scale, *rest)
    elif isinstance(weight, Int4):
        torch.ops.quire.linear_int4.default(x, weight.packed, weight.scale, *rest)
    else:
        torch.ops.quire.linear.default(x, weight, *rest)
    return out


def linear_sharing_x(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plus: torch.Tensor | None
) -> tuple[torch.Tensor, bool]:
    """Return (the result of `linear` without norm and activation, whether a following `lora_add` may read x before the
    GEMM ends), on a GPU."""
    out = torch.empty(x.shape[0], len(weight), dtype=x.dtype, device=x.device) if plus is None else plus
    return out, torch.ops.quire.linear_sharing_x.default(x, weight, bias, plus is not None, out)
