"""packed_linear on a CPU: norm, GEMM with any kind of weight, activation or residual."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from quire.engine.executor import ops
from quire.engine.executor.models.quantised.quantised import DTYPE, Quantised

KINDS = ["plain", "int8", "int4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed(kind: str, weight: torch.Tensor) -> ops.Packed:
    if kind == "plain":
        found = ops.pack_weight(weight, ordered=True)
        assert found is not None
        return found
    quantised = Quantised.of(weight, DTYPE["int8" if kind == "int8" else "int4"])
    if kind == "int8":
        return ops.pack_int8(quantised.values, quantised.scale)
    return ops.pack_int4(quantised.values, quantised.scale, quantised.zero)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("with_bias", [False, True])
def test_bits_are_those_of_the_operators_one_by_one(kind: str, dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    rng = torch.Generator().manual_seed(rows)
    weight = packed(kind, torch.randn(192, 96, generator=rng).to(dtype))
    x, norm = torch.randn(rows, 96, generator=rng).to(dtype), torch.rand(96, generator=rng).to(dtype)
    bias = torch.randn(192, generator=rng).to(dtype) if with_bias else None
    plus = torch.randn(rows, 192, generator=rng).to(dtype)
    normed = ops.rms_norm(x, norm, 1e-5)
    alone = ops.packed_linear(normed, weight, bias)
    assert torch.equal(ops.packed_linear(x, weight, bias, norm=norm, eps=1e-5), alone)
    activated = ops.packed_linear(x, weight, bias, norm=norm, eps=1e-5, silu_mul=True)
    assert torch.equal(activated, ops.silu_mul(alone))
    assert torch.equal(ops.packed_linear(normed, weight, bias, silu_mul=True), ops.silu_mul(alone))
    added = plus.clone()
    assert ops.packed_linear(x, weight, bias, added, norm=norm, eps=1e-5) is added
    assert torch.equal(added, ops.packed_linear(normed, weight, bias, plus.clone()))
    assert torch.equal(
        ops.packed_linear(x.view(rows, 1, 96), weight, bias, norm=norm, eps=1e-5), alone.view(rows, 1, -1)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused(kind: str) -> None:
    weight = packed(kind, torch.randn(64, 96))
    x = torch.randn(2, 96)
    with pytest.raises(ValueError, match="plus: must be None with silu_mul"):
        ops.packed_linear(x, weight, None, torch.zeros(2, 32), silu_mul=True)
    with pytest.raises(ValueError, match="weight: size is 95"):
        ops.packed_linear(x, weight, None, norm=torch.ones(95))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tile_of_rows_is_that_of_the_kernel(dtype: torch.dtype) -> None:
    """Drafts are counted by it.  The source of the kernel names it for 16 lanes, for 8, and for fewer."""
    source = (Path(__file__).parents[2] / "csrc/cpu/product_rows.h").read_text(encoding="utf-8")
    found = re.search(r"kRows = kLanes == 16 \? (\d+) : kLanes == 8 \? (\d+) : (\d+);", source)
    assert found is not None
    columns, _ = ops.packed_layout(dtype)
    own = int(found[{32: 1, 16: 2}.get(columns, 3)])
    weight = packed("plain", torch.randn(64, 96).to(dtype))
    assert ops.tile_tokens(weight) == (16 if weight.widen else own)
    assert ops.tile_tokens(packed("int8", torch.randn(64, 96))) == 1
