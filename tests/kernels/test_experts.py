"""A mixture of experts on a CPU: the plain loops that say what the GPU's kernels compute."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quire.engine.executor import ops
from quire.engine.executor.models.quantised.dequantise import dequantise_mxfp4
from quire.engine.executor.ops import mixtures
from tests.kernels.test_cuda_experts import CLAMPED, exact
from tests.kernels.test_cuda_linear import error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape)).to(dtype)


def layer(count: int, hidden: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = randn(count, 2 * inner, hidden, dtype=dtype, scale=1 / math.sqrt(hidden))
    return gate_up, randn(count, hidden, inner, dtype=dtype, scale=1 / math.sqrt(inner))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("normalise", "rounded"), [(False, False), (True, False), (True, True)])
def test_routes(dtype: torch.dtype, normalise: bool, rounded: bool) -> None:
    """The largest logits, of equal ones the first; their shares of all."""
    logits = randn(50, 40, dtype=dtype, scale=3).round()  # many are equal
    order = torch.argsort(logits.double(), dim=-1, descending=True, stable=True)[:, :6]
    want = logits.double().softmax(-1).gather(1, order)
    want = want / want.sum(-1, keepdim=True) if normalise else want
    chosen, weights = ops.route(logits, 6, normalise=normalise, rounded=rounded)
    assert torch.equal(chosen.long(), order)
    torch.testing.assert_close(weights.double(), want, rtol=torch.finfo(dtype).eps if rounded else 1e-5, atol=1e-7)
    assert not rounded or torch.equal(weights.to(dtype).float(), weights)


def test_values_that_are_not_finite_route_to_experts_that_exist() -> None:
    logits = randn(4, 40, dtype=torch.bfloat16)
    logits[0, 3], logits[1], logits[2, 5], logits[3] = math.nan, math.nan, math.inf, -math.inf
    chosen, weights = ops.route(logits, 8, normalise=True, rounded=True)
    assert all(len(set(row)) == 8 and max(row) < 40 for row in chosen.tolist())
    assert weights.isnan().any(1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamped", [None, CLAMPED])
@pytest.mark.parametrize("biased", [{"gate_up_bias"}, {"down_bias"}, set()])
def test_experts(dtype: torch.dtype, clamped: ops.Clamped | None, biased: set[str]) -> None:
    """Sizes that leave a rest of a vector; experts without tokens; inputs that either clamp acts on."""
    x, plus = randn(9, 44, dtype=dtype, scale=3), randn(9, 44, dtype=dtype)
    weights = layer(7, 44, 21, dtype)
    sizes = {"gate_up_bias": 42, "down_bias": 44}
    biases: dict[str, Any] = {name: randn(7, sizes[name], dtype=dtype) for name in biased}
    chosen, shares = ops.route(randn(9, 7, dtype=dtype), 3, normalise=True, rounded=False)
    before = plus.clone()
    alone = ops.experts(x, chosen, shares, *weights, **biases, clamped=clamped)
    assert torch.equal(alone, ops.experts(x, chosen, shares, *weights, torch.zeros_like(x), **biases, clamped=clamped))
    assert ops.experts(x, chosen, shares, *weights, plus, **biases, clamped=clamped) is plus
    want = before.double() + exact(x, chosen, shares, *weights, **biases, clamped=clamped)
    assert error(plus, want) < 2 * torch.finfo(dtype).eps


def test_more_tokens_than_a_call_takes_are_computed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = randn(50, 24, dtype=torch.bfloat16), layer(6, 24, 16, torch.bfloat16)
    chosen, shares = ops.route(randn(50, 6, dtype=torch.bfloat16), 2, normalise=True, rounded=True)
    together = ops.experts(x, chosen, shares, *weights, torch.ones_like(x))
    monkeypatch.setattr(mixtures, "MAX_TOKENS", 7)
    assert torch.equal(ops.experts(x, chosen, shares, *weights, torch.ones_like(x)), together)
    none = x[:0]
    assert ops.experts(none, chosen[:0], shares[:0], *weights, none) is none


def test_what_does_not_fit_is_refused() -> None:
    x, (gate_up, down) = randn(3, 8, dtype=torch.float32), layer(4, 8, 6, torch.float32)
    chosen, shares = ops.route(randn(3, 4, dtype=torch.float32), 2, normalise=True, rounded=False)
    with pytest.raises(IndexError, match=r"chosen\[1\] is 4, not in \[0, 4\)"):
        ops.experts(x, torch.tensor([[0, 4]] * 3, dtype=torch.int32), shares, gate_up, down, x)
    with pytest.raises(ValueError, match="5 experts of a token, the maximum is 32 and all"):
        ops.route(randn(1, 4, dtype=torch.float32), 5, normalise=True, rounded=True)
    with pytest.raises(ValueError, match="gate_up: gate and up rows is 10, down has 12"):
        ops.experts(x, chosen, shares, gate_up[:, :10].contiguous(), down, x)
    with pytest.raises(ValueError, match="weights: dtype is Double"):
        ops.experts(x, chosen, shares.double(), gate_up, down, x)
    with pytest.raises(ValueError, match="limit: 0 is not over 0"):
        ops.experts(x, chosen, shares, gate_up, down, x, clamped=ops.Clamped(1.0, 0.0))


def stored_mxfp4(count: int, rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales as gpt-oss stores them, with the smallest and the largest scales of the kernels."""
    blocks = torch.randint(0, 256, (count, rows, size // 32, 16), dtype=torch.uint8)
    scales = torch.randint(118, 124, (count, rows, size // 32), dtype=torch.uint8)
    scales[:, 3], scales[:, 5] = 0, 128
    return blocks, scales


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_in_mxfp4(dtype: torch.dtype) -> None:
    """The bits of dequantised weights; the last row tile of `down` is half empty."""
    x, hidden, inner = randn(9, 192, dtype=dtype), 192, 128
    gate_up, down = stored_mxfp4(5, 2 * inner, hidden), stored_mxfp4(5, hidden, inner)
    biases: dict[str, Any] = {
        "gate_up_bias": randn(5, 2 * inner, dtype=dtype),
        "down_bias": randn(5, hidden, dtype=dtype),
    }
    chosen, shares = ops.route(randn(9, 5, dtype=dtype), 3, normalise=True, rounded=False)
    wide = [dequantise_mxfp4(*stored, torch.float32).mT.contiguous().to(dtype) for stored in (gate_up, down)]
    packed = ops.pack_mxfp4(*gate_up, interleaved=True), ops.pack_mxfp4(*down, interleaved=False)
    want, found = torch.ones_like(x), torch.ones_like(x)
    ops.experts(x, chosen, shares, wide[0], wide[1], want, clamped=CLAMPED, **biases)
    ops.experts(x, chosen, shares, packed[0], packed[1], found, clamped=CLAMPED, **biases)
    assert torch.equal(want, found)
    assert not torch.equal(found, torch.ones_like(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_in_fp8(dtype: torch.dtype) -> None:
    """The bits of weights that are dequantised in float32 and rounded once."""
    x, hidden, inner = randn(9, 192, dtype=dtype), 192, 128
    gate_up, down = (randn(5, *shape, dtype=torch.float32) for shape in ((2 * inner, hidden), (hidden, inner)))
    values = [weight.to(torch.float8_e4m3fn) for weight in (gate_up, down)]
    scales = [0.1 * torch.rand(*weight.shape[:2], groups) for weight, groups in ((gate_up, 3), (down, 1))]
    chosen, shares = ops.route(randn(9, 5, dtype=dtype), 3, normalise=True, rounded=False)
    wide = [
        (value.float().unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2).to(dtype)
        for value, scale in zip(values, scales, strict=True)
    ]
    packed = [ops.pack_fp8(value, scale) for value, scale in zip(values, scales, strict=True)]
    want = ops.experts(x, chosen, shares, wide[0], wide[1], torch.ones_like(x))
    found = ops.experts(x, chosen, shares, packed[0], packed[1], torch.ones_like(x))
    assert torch.equal(want, found)


def test_packed_experts_of_other_sizes_are_refused() -> None:
    gate_up, down = stored_mxfp4(5, 256, 192), stored_mxfp4(5, 192, 128)
    packed = ops.pack_mxfp4(*gate_up, interleaved=True), ops.pack_mxfp4(*down, interleaved=False)
    x, chosen = torch.zeros(2, 128), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="down: row tiles of down is 2, x has 1"):
        ops.experts(x, chosen, torch.ones(2, 1), packed[0], packed[1], torch.zeros_like(x), clamped=CLAMPED)
    other = [ops.PackedRows("int3", weight.tiles) for weight in packed]  # type: ignore[arg-type]
    x = torch.zeros(2, 192)
    with pytest.raises(ValueError, match="format: int3 is neither mxfp4 nor fp8"):
        ops.experts(x, chosen, torch.ones(2, 1), other[0], other[1], torch.zeros_like(x), clamped=CLAMPED)
