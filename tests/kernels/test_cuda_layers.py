"""Operators between the GEMMs of a decoder layer on a GPU, against float64: one rounding of the result."""

from __future__ import annotations

import math

import pytest
import torch

from quire.engine.executor import ops
from tests.kernels.test_layers import DTYPES, assert_rounded_once, exact_norm, norm_in_place

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
FP8 = torch.float8_e4m3fn


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "size"),
    [(0, 64), (1, 512), (3, 40), (7, 3), (5, 1000), (1, 4096), (300, 4096), (33, 8192), (2, 16384), (3, 5001)],
)
def test_rms_norm(dtype: torch.dtype, tokens: int, size: int) -> None:
    """Sizes below one 16-byte access, below a warp, of a thread block, and of all its registers."""
    x, weight = randn(tokens, size, dtype=dtype) * 3, randn(size, dtype=dtype)
    before = x.clone()
    out = torch.full_like(x, math.nan)
    torch.ops.quire.rms_norm.default(x, weight, 1e-6, out)
    assert torch.equal(x, before)
    if tokens:
        assert_rounded_once(out, exact_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_norm_of_each_head_in_place(dtype: torch.dtype, size: int) -> None:
    qkv, weight = randn(50, 9, size, dtype=dtype), randn(size, dtype=dtype)
    expected = qkv.clone()
    exact = exact_norm(qkv[:, 4:6], weight, 1e-6)
    norm_in_place(qkv[:, 4:6], weight)
    assert_rounded_once(qkv[:, 4:6], exact)
    expected[:, 4:6] = qkv[:, 4:6]
    assert torch.equal(qkv, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(0, 64), (1, 96), (5, 41), (100, 3072), (3, 14336), (70_000, 8)])
def test_silu_mul(dtype: torch.dtype, tokens: int, size: int) -> None:
    gate_up = randn(tokens, 2 * size, dtype=dtype)
    gate_up[:, :size] *= 8
    gate, up = gate_up.double().split(size, -1)
    out = torch.full((tokens, size), math.nan, dtype=dtype, device=CUDA)
    torch.ops.quire.silu_mul.default(gate_up, out)
    if tokens:
        assert_rounded_once(out, gate * torch.sigmoid(gate) * up)


def test_silu_mul_far_out() -> None:
    gate = torch.tensor([[-1e4, -100.0, -88.0, 100.0, 1e4, math.nan]], device=CUDA)
    out = ops.silu_mul(torch.cat([gate, torch.ones_like(gate)], -1))[0]
    assert (out[:3].abs() < 1e-30).all()
    assert out[3:5].tolist() == [100.0, 1e4]
    assert out[5].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [128, 256, 6])
def test_the_offset_of_a_norm_is_added_before_rounding(dtype: torch.dtype, size: int) -> None:
    """The weights plus the offset are exact in every dtype, so they can be given as one."""
    norms = torch.randint(-8, 8, (2, size), device=CUDA) / 8
    for tokens in (5, 300):
        qkv = torch.randn(tokens, 8, size, device=CUDA).to(dtype)
        cos, sin = torch.randn(2, tokens, size, device=CUDA).to(dtype)
        found = []
        for offset in (0.0, 1.0):
            ours, caches = qkv.clone(), torch.zeros(2, 20, 2, 16, size, device=CUDA).to(dtype)
            q_norm, k_norm = (norms + 1 - offset).to(dtype)
            how = {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6, "norm_offset": offset}
            ops.rope_kv_write(ours, cos, sin, caches[0], caches[1], torch.arange(tokens, device=CUDA), **how)
            found.append((ours, caches))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256, 6])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads"), [(1, 4, 2), (7, 32, 8), (150, 5, 1), (2, 64, 8), (3, 28, 4)])
def test_rope_kv_write(dtype: torch.dtype, size: int, tokens: int, heads: int, kv_heads: int, normed: bool) -> None:
    """Every fifth token is skipped; all other entries keep their values; cos and sin are halves of one table's rows."""
    qkv = randn(tokens, heads + 2 * kv_heads, size, dtype=dtype)
    cos, sin = randn(tokens, 2 * size, dtype=dtype).chunk(2, -1)
    q_norm, k_norm = randn(2, size, dtype=dtype).unbind() if normed else (None, None)
    k_cache, v_cache = randn(20, kv_heads, 16, size, dtype=dtype), randn(20, kv_heads, 16, size, dtype=dtype)
    kv_indices = torch.randperm(20 * 16, device=CUDA)[:tokens]
    kv_indices[::5] = -1
    given, expected_k, expected_v = qkv.clone(), k_cache.clone(), v_cache.clone()
    x, c, s = given.clone(), cos.double()[:, None], sin.double()[:, None]
    if q_norm is not None and k_norm is not None:  # rounded before the rotation; equal except for rare ties
        norm_in_place(x[:, :heads], q_norm)
        norm_in_place(x[:, heads : heads + kv_heads], k_norm)
    x = x.double()
    swapped = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
    exact, scale = x * c + swapped * s, (x * c).abs() + (swapped * s).abs()
    ops.rope_kv_write(qkv, cos, sin, k_cache, v_cache, kv_indices, q_norm=q_norm, k_norm=k_norm, eps=1e-6)

    def check(ours: torch.Tensor, part: slice, rows: torch.Tensor | slice) -> None:
        if not normed:
            assert_rounded_once(ours, exact[rows, part], scale[rows, part])
            return
        # The order of the norm's sum differs, so a value is sometimes rounded to its neighbour before the rotation.
        eps = torch.finfo(dtype).eps
        off = (ours.double() - exact[rows, part]).abs() / (scale[rows, part] * eps + 1e-6)
        assert off.max() < 2.0
        assert (off > 0.6).double().mean() < (0.2 if dtype == torch.float32 else 0.01)

    check(qkv[:, :heads], slice(0, heads), slice(None))
    assert torch.equal(qkv[:, heads:], given[:, heads:])
    kept = kv_indices >= 0
    at, offset = kv_indices[kept] // 16, kv_indices[kept] % 16
    if kept.any():
        check(k_cache[at, :, offset], slice(heads, heads + kv_heads), kept)
    expected_k[at, :, offset] = k_cache[at, :, offset]
    expected_v[at, :, offset] = given[kept, heads + kv_heads :]
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_replays_in_a_graph_with_dependent_launches() -> None:
    """A chain of small kernels, each started while the one before it runs, replayed with new inputs."""
    x, delta, weight = randn(64, 4096, dtype=torch.bfloat16), randn(64, 4096, dtype=torch.bfloat16), randn(4096)
    weight = weight.bfloat16()

    def chain(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(20):
            y = ops.rms_norm(x + y, weight, 1e-5)
            y = ops.silu_mul(torch.cat([y, delta], -1))
            y = ops.rms_norm(y, weight, 1e-5)
        return y

    static = x.clone()
    chain(x.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(static)
    for _ in range(3):
        fresh = randn(64, 4096, dtype=torch.bfloat16)
        static.copy_(fresh)
        graph.replay()
        assert torch.equal(out, chain(fresh))


def test_shapes_and_devices_are_checked() -> None:
    x, weight = torch.zeros(4, 64, device=CUDA), torch.zeros(64, device=CUDA)
    with pytest.raises(ValueError, match="weight: size is 32, x has 64"):
        ops.rms_norm(x, weight[:32], 1e-6)
    with pytest.raises(ValueError, match="weight: dtype is Half, x has Float"):
        ops.rms_norm(x, weight.half(), 1e-6)
    with pytest.raises(ValueError, match="weight: is on cpu, not on a GPU"):
        ops.rms_norm(x, weight.cpu(), 1e-6)
    with pytest.raises(ValueError, match="size 20000 is over 16384"):
        ops.rms_norm(torch.zeros(1, 20_000, device=CUDA), torch.zeros(20_000, device=CUDA), 1e-6)
    cache, angles = torch.zeros(2, 1, 16, 64, device=CUDA), torch.zeros(4, 64, device=CUDA)
    kv_indices = torch.arange(4, device=CUDA)
    qkv = torch.zeros(4, 3, 64, device=CUDA)
    with pytest.raises(ValueError, match="cos: tokens is 3, qkv has 4"):
        ops.rope_kv_write(qkv, angles[:3], angles, cache, cache.clone(), kv_indices)
    with pytest.raises(ValueError, match="only one of them is given"):
        ops.rope_kv_write(qkv, angles, angles, cache, cache.clone(), kv_indices, q_norm=weight)
    with pytest.raises(ValueError, match="scales: missing for a cache of Float8_e4m3fn"):
        ops.rope_kv_write(qkv, angles, angles, cache.to(FP8), cache.to(FP8), kv_indices)
