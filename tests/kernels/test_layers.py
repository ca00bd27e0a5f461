"""Operators between the GEMMs of a decoder layer on a CPU, against float64: one rounding of the result, no more."""

from __future__ import annotations

import math

import pytest
import torch

from quire.engine.executor import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative error of float32 arithmetic before the result is rounded; measured: 2.6e-7 (norm), 2.4e-7 (silu * up).
ARITHMETIC = 4e-7


def assert_rounded_once(ours: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    """Check that `ours` is `exact` [f64] rounded to its dtype.  `scale`: reference of the arithmetic's error."""
    info = torch.finfo(ours.dtype)
    slack = ARITHMETIC * (exact if scale is None else scale).abs()
    bound = slack + (exact.abs() + slack) * info.eps / 2 + info.smallest_normal * info.eps
    worst = ((ours.double() - exact).abs() / bound).max()
    assert worst <= 1, f"{worst:.3f} times what one rounding explains"


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def norm_in_place(x: torch.Tensor, weight: torch.Tensor) -> None:
    """rms_norm in place.  x [T, heads, D]: a norm per head."""
    torch.ops.quire.rms_norm.default(x, weight, 1e-6, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(0, 64), (1, 512), (3, 40), (7, 3), (200, 512)])
def test_rms_norm(dtype: torch.dtype, tokens: int, size: int) -> None:
    """Sizes below a vector or not a multiple of it; 200 tokens are enough for several threads."""
    x = (torch.randn(tokens, size) * 3).to(dtype)
    weight = torch.randn(size).to(dtype)
    before = x.clone()
    out = ops.rms_norm(x, weight, 1e-6)
    assert torch.equal(x, before)
    if tokens:
        assert_rounded_once(out, exact_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_each_head_in_place(dtype: torch.dtype) -> None:
    """Key heads of a fused projection; queries and values are not modified."""
    qkv = torch.randn(50, 9, 80).to(dtype)
    weight = torch.randn(80).to(dtype)
    expected = qkv.clone()
    expected[:, 4:6] = ops.rms_norm(qkv[:, 4:6].reshape(-1, 80), weight, 1e-6).view(50, 2, 80)
    norm_in_place(qkv[:, 4:6], weight)
    assert torch.equal(qkv, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 96), (5, 41), (100, 512)])
def test_silu_mul(dtype: torch.dtype, tokens: int, size: int) -> None:
    gate_up = torch.randn(tokens, 2 * size).to(dtype)
    gate_up[:, :size] *= 8
    gate, up = gate_up.double().split(size, -1)
    assert_rounded_once(ops.silu_mul(gate_up), gate * torch.sigmoid(gate) * up)


def test_silu_mul_far_out() -> None:
    """If e^-gate overflows, silu is 0 to working precision; NaN stays NaN."""
    gate = torch.tensor([[-1e4, -100.0, -88.0, 100.0, 1e4, math.nan]])
    out = ops.silu_mul(torch.cat([gate, torch.ones_like(gate)], -1))[0]
    assert (out[:3].abs() < 1e-30).all()
    assert out[3:5].tolist() == [100.0, 1e4]
    assert out[5].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 6, 512])
@pytest.mark.parametrize("tokens", [1, 7, 150])
def test_rope_kv_write(dtype: torch.dtype, size: int, tokens: int) -> None:
    """Four query, two key, two value heads; every fifth token is skipped; all other entries keep their values."""
    qkv = torch.randn(tokens, 8, size).to(dtype)
    cos, sin = torch.randn(tokens, size).to(dtype), torch.randn(tokens, size).to(dtype)
    k_cache, v_cache = torch.randn(20, 2, 16, size).to(dtype), torch.randn(20, 2, 16, size).to(dtype)
    kv_indices = torch.randperm(20 * 16)[:tokens]
    kv_indices[::5] = -1
    given, expected_k, expected_v = qkv.clone(), k_cache.clone(), v_cache.clone()
    x, c, s = given.double(), cos.double()[:, None], sin.double()[:, None]
    swapped = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
    exact, scale = x * c + swapped * s, (x * c).abs() + (swapped * s).abs()
    ops.rope_kv_write(qkv, cos, sin, k_cache, v_cache, kv_indices)
    assert_rounded_once(qkv[:, :4], exact[:, :4], scale[:, :4])
    assert torch.equal(qkv[:, 4:], given[:, 4:])
    kept = kv_indices >= 0
    at, offset = kv_indices[kept] // 16, kv_indices[kept] % 16
    if kept.any():
        assert_rounded_once(k_cache[at, :, offset], exact[kept, 4:6], scale[kept, 4:6])
    expected_k[at, :, offset] = k_cache[at, :, offset]
    expected_v[at, :, offset] = given[kept, 6:]
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [128, 256, 6])
def test_the_offset_of_a_norm_is_added_before_rounding(dtype: torch.dtype, size: int) -> None:
    """The weights plus the offset are exact in every dtype, so they can be given as one."""
    norms = torch.randint(-8, 8, (2, size)) / 8
    for tokens in (5, 300):
        qkv = torch.randn(tokens, 8, size).to(dtype)
        cos, sin = torch.randn(2, tokens, size).to(dtype)
        found = []
        for offset in (0.0, 1.0):
            ours, caches = qkv.clone(), torch.zeros(2, 20, 2, 16, size).to(dtype)
            q_norm, k_norm = (norms + 1 - offset).to(dtype)
            how = {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6, "norm_offset": offset}
            ops.rope_kv_write(ours, cos, sin, caches[0], caches[1], torch.arange(tokens), **how)
            found.append((ours, caches))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 6, 512])
def test_rope_after_a_norm_of_each_head_is_one_after_the_other(dtype: torch.dtype, size: int) -> None:
    """cos and sin are halves of the rows of one table."""
    qkv = torch.randn(50, 8, size).to(dtype)
    cos, sin = torch.randn(50, 2 * size).to(dtype).chunk(2, -1)
    q_norm, k_norm = torch.randn(2, size).to(dtype)
    kv_indices = torch.randperm(64)[:50]
    kv_indices[::5] = -1
    caches, expected = torch.zeros(2, 4, 2, 16, size).to(dtype), torch.zeros(2, 4, 2, 16, size).to(dtype)
    plain, given = qkv.clone(), qkv.clone()
    norm_in_place(plain[:, :4], q_norm)
    norm_in_place(plain[:, 4:6], k_norm)
    ops.rope_kv_write(plain, cos, sin, expected[0], expected[1], kv_indices)
    ops.rope_kv_write(qkv, cos, sin, caches[0], caches[1], kv_indices, q_norm=q_norm, k_norm=k_norm, eps=1e-6)
    assert torch.equal(qkv[:, :4], plain[:, :4])
    assert torch.equal(qkv[:, 4:], given[:, 4:])
    assert torch.equal(caches, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 6, 512])
def test_rope_into_a_cache_of_e4m3(dtype: torch.dtype, size: int) -> None:
    """Keys are rounded once, from float32 to e4m3; values as kv_write rounds them."""
    qkv = torch.randn(50, 8, size).to(dtype)
    cos, sin = torch.randn(2, 50, size).to(dtype)
    scales = torch.rand(2, 2) + 0.01
    kv_indices = torch.randperm(64)[:50]
    kv_indices[::5] = -1
    caches = torch.zeros(2, 4, 2, 16, size).to(torch.float8_e4m3fn)
    expected, wide = caches.clone(), torch.zeros(2, 4, 2, 16, size)
    ops.kv_write(qkv[:, 4:6], qkv[:, 6:], expected[0], expected[1], kv_indices, scales)
    exact = qkv.float()
    ops.rope_kv_write(exact, cos.float(), sin.float(), wide[0], wide[1], kv_indices)
    ops.rope_kv_write(qkv, cos, sin, caches[0], caches[1], kv_indices, scales=scales)
    keys = (wide[0] / scales[0, :, None, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(caches[0].float(), keys.float())
    assert torch.equal(caches[1].float(), expected[1].float())
    assert torch.equal(qkv[:, :4], exact[:, :4].to(dtype))


def test_shapes_and_indices_are_checked() -> None:
    x, weight = torch.zeros(4, 64), torch.zeros(64)
    with pytest.raises(ValueError, match="weight: size is 32, x has 64"):
        ops.rms_norm(x, weight[:32], 1e-6)
    with pytest.raises(ValueError, match="weight: dtype is Half, x has Float"):
        ops.rms_norm(x, weight.half(), 1e-6)
    with pytest.raises(ValueError, match="gate_up: gate and up is 65, out has 64"):
        ops.silu_mul(torch.zeros(4, 65))
    cache = torch.zeros(2, 1, 16, 64)
    angles = torch.zeros(4, 64)
    with pytest.raises(ValueError, match="qkv: has 2 heads, too few for 1 KV heads"):
        ops.rope_kv_write(torch.zeros(4, 2, 64), angles, angles, cache, cache.clone(), torch.arange(4))
    with pytest.raises(ValueError, match="cos: tokens is 3, qkv has 4"):
        ops.rope_kv_write(torch.zeros(4, 3, 64), angles[:3], angles, cache, cache.clone(), torch.arange(4))
    with pytest.raises(ValueError, match="only one of them is given"):
        ops.rope_kv_write(torch.zeros(4, 3, 64), angles, angles, cache, cache, torch.arange(4), q_norm=weight)
    with pytest.raises(IndexError, match=r"kv_indices\[3\] is 32, not in \[-1, 32\)"):
        ops.rope_kv_write(torch.ones(4, 3, 64), angles, angles, cache, cache.clone(), torch.tensor([0, 1, 2, 32]))
    assert not cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_linear_is_a_chain(dtype: torch.dtype, silu_mul: bool, plus: bool, extras: bool) -> None:
    """With and without norm and bias: equal to the separate operators, into rows of a wider tensor."""
    x, weight = torch.randn(5, 48).to(dtype), torch.randn(64 if silu_mul else 32, 48).to(dtype)
    norm, bias = (torch.randn(48).to(dtype), torch.randn(len(weight)).to(dtype)) if extras else (None, None)
    y = ops.rms_norm(x, norm, 1e-5) if norm is not None else x
    y = torch.nn.functional.linear(y, weight, bias)
    if silu_mul:
        y = ops.silu_mul(y)
    wide = torch.randn(5, 50).to(dtype)
    rest, out = wide[:, 32:].clone(), wide[:, :32]
    expected = out + y if plus else y
    if plus:
        ops.linear(x, weight, bias, norm=norm, eps=1e-5, silu_mul=silu_mul, plus=out)
    else:
        ops.linear(x, weight, bias, norm=norm, eps=1e-5, silu_mul=silu_mul, out=out)
    # The GEMM's result may have been rounded once more before the addition.
    scale = (out.double().abs() + y.double().abs()) * torch.finfo(dtype).eps
    assert ((out.double() - expected.double()).abs() <= scale).all()
    assert torch.equal(wide[:, 32:], rest)


def test_linear_says_who_disagrees() -> None:
    x, weight = torch.randn(2, 8), torch.randn(6, 8)
    with pytest.raises(ValueError, match="weight: inner size is 8, x has 7"):
        ops.linear(x[:, :7], weight)
    with pytest.raises(ValueError, match="weight: rows of the weight is 6, out has 8"):
        ops.linear(x, weight, silu_mul=True, out=torch.empty(2, 4))
    with pytest.raises(ValueError, match="norm: inner size is 6, x has 8"):
        ops.linear(x, weight, norm=torch.randn(6))
