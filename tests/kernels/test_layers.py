"""What a decoder layer does between its products, against float64: off by one rounding of the result, no more."""

from __future__ import annotations

import math

import pytest
import torch

from engine.executor import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative error of float32 arithmetic before the result is rounded; measured: 2.6e-7 (norm), 2.2e-7 (silu * up).
ARITHMETIC = 4e-7


def assert_rounded_once(ours: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    """`ours` is `exact` [f64] rounded to its dtype; `scale`: what the arithmetic's error is relative to (exact)."""
    info = torch.finfo(ours.dtype)
    slack = ARITHMETIC * (exact if scale is None else scale).abs()
    bound = slack + (exact.abs() + slack) * info.eps / 2 + info.smallest_normal * info.eps
    worst = ((ours.double() - exact).abs() / bound).max()
    assert worst <= 1, f"{worst:.3f} times what one rounding explains"


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(0, 64), (1, 512), (3, 40), (7, 3), (200, 512)])
def test_rms_norm(dtype: torch.dtype, tokens: int, size: int) -> None:
    """Sizes that fill no vector or not all of them; 200 tokens are enough to be shared among threads."""
    x = (torch.randn(tokens, size) * 3).to(dtype)
    weight = torch.randn(size).to(dtype)
    before = x.clone()
    out = ops.rms_norm(x, weight, 1e-6)
    assert torch.equal(x, before)
    if tokens:
        assert_rounded_once(out, exact_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 512), (3, 40), (200, 512)])
def test_add_rms_norm_is_a_sum_and_a_norm(dtype: torch.dtype, tokens: int, size: int) -> None:
    x, delta = (torch.randn(tokens, size).to(dtype) for _ in range(2))
    weight = torch.randn(size).to(dtype)
    total = x + delta
    out = ops.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(x, total)
    assert torch.equal(out, ops.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_each_head_in_place(dtype: torch.dtype) -> None:
    """Of the key heads of a merged projection; queries and values stay as they are."""
    qkv = torch.randn(50, 9, 80).to(dtype)
    weight = torch.randn(80).to(dtype)
    expected = qkv.clone()
    expected[:, 4:6] = ops.rms_norm(qkv[:, 4:6].reshape(-1, 80), weight, 1e-6).view(50, 2, 80)
    ops.rms_norm_(qkv[:, 4:6], weight, 1e-6)
    assert torch.equal(qkv, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 96), (5, 41), (100, 512)])
def test_silu_mul(dtype: torch.dtype, tokens: int, size: int) -> None:
    gate_up = torch.randn(tokens, 2 * size).to(dtype)
    gate_up[:, :size] *= 8
    gate, up = gate_up.double().split(size, -1)
    assert_rounded_once(ops.silu_mul(gate_up), gate * torch.sigmoid(gate) * up)


def test_silu_mul_far_out() -> None:
    """Where e^-gate overflows silu is 0 to any precision that matters; NaN stays NaN."""
    gate = torch.tensor([[-1e4, -100.0, -88.0, 100.0, 1e4, math.nan]])
    out = ops.silu_mul(torch.cat([gate, torch.ones_like(gate)], -1))[0]
    assert (out[:3].abs() < 1e-30).all()
    assert out[3:5].tolist() == [100.0, 1e4]
    assert out[5].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 6])
@pytest.mark.parametrize("tokens", [1, 7, 150])
def test_rope_kv_write(dtype: torch.dtype, size: int, tokens: int) -> None:
    """Four query, two key, two value heads; every fifth token is skipped; all other slots stay as they were."""
    qkv = torch.randn(tokens, 8, size).to(dtype)
    cos, sin = torch.randn(tokens, size).to(dtype), torch.randn(tokens, size).to(dtype)
    k_cache, v_cache = torch.randn(20, 2, 16, size).to(dtype), torch.randn(20, 2, 16, size).to(dtype)
    slots = torch.randperm(20 * 16)[:tokens]
    slots[::5] = -1
    given, expected_k, expected_v = qkv.clone(), k_cache.clone(), v_cache.clone()
    x, c, s = given.double(), cos.double()[:, None], sin.double()[:, None]
    swapped = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
    exact, scale = x * c + swapped * s, (x * c).abs() + (swapped * s).abs()
    ops.rope_kv_write(qkv, cos, sin, k_cache, v_cache, slots)
    assert_rounded_once(qkv[:, :4], exact[:, :4], scale[:, :4])
    assert torch.equal(qkv[:, 4:], given[:, 4:])
    kept = slots >= 0
    at, offset = slots[kept] // 16, slots[kept] % 16
    if kept.any():
        assert_rounded_once(k_cache[at, :, offset], exact[kept, 4:6], scale[kept, 4:6])
    expected_k[at, :, offset] = k_cache[at, :, offset]
    expected_v[at, :, offset] = given[kept, 6:]
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 64, 1000, 16_000])
def test_row_max(dtype: torch.dtype, size: int) -> None:
    """The first of equals: in bfloat16 a row of 16,000 has many."""
    x = torch.randn(9, size).to(dtype)
    x[3] = -math.inf
    x[4] = x[4, 0]
    values, places = ops.row_max(x)
    assert torch.equal(values, x.amax(-1).float())
    assert places.tolist() == [row.tolist().index(max(row.tolist())) for row in x]


@pytest.mark.parametrize("place", [0, 17, 63, 64, 99])
def test_row_max_of_a_row_with_nan(place: int) -> None:
    x = torch.randn(3, 100)
    x[1, place] = math.nan
    values, places = ops.row_max(x)
    assert values.isnan().tolist() == [False, True, False]
    assert places[1] == 0


def test_row_max_takes_views() -> None:
    x = torch.randn(6, 300)
    values, places = ops.row_max(x[::2, 100:250])
    assert torch.equal(values, x[::2, 100:250].amax(-1))
    assert torch.equal(places, x[::2, 100:250].argmax(-1))


def test_shapes_and_indices_are_checked() -> None:
    x, weight = torch.zeros(4, 64), torch.zeros(64)
    with pytest.raises(ValueError, match="weight: size is 32, x said 64"):
        ops.rms_norm(x, weight[:32], 1e-6)
    with pytest.raises(ValueError, match="weight: dtype is Half, x said Float"):
        ops.rms_norm(x, weight.half(), 1e-6)
    with pytest.raises(ValueError, match="delta: tokens is 3, x said 4"):
        ops.add_rms_norm(x, x[:3], weight, 1e-6)
    with pytest.raises(ValueError, match="gate_up: gate and up is 65, out said 64"):
        ops.silu_mul(torch.zeros(4, 65))
    with pytest.raises(ValueError, match="x: dtype is Long"):
        ops.row_max(torch.zeros(2, 2, dtype=torch.int64))
    cache = torch.zeros(2, 1, 16, 64)
    angles = torch.zeros(4, 64)
    with pytest.raises(ValueError, match="qkv: has 2 heads, too few for 1 KV heads"):
        ops.rope_kv_write(torch.zeros(4, 2, 64), angles, angles, cache, cache.clone(), torch.arange(4))
    with pytest.raises(ValueError, match="cos: tokens is 3, qkv said 4"):
        ops.rope_kv_write(torch.zeros(4, 3, 64), angles[:3], angles, cache, cache.clone(), torch.arange(4))
    with pytest.raises(IndexError, match=r"slots\[3\] is 32, not in \[-1, 32\)"):
        ops.rope_kv_write(torch.ones(4, 3, 64), angles, angles, cache, cache.clone(), torch.tensor([0, 1, 2, 32]))
    assert not cache.any()
