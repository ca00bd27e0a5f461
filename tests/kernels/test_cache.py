"""kv_write, block_copy and block_fill against indexing."""

from __future__ import annotations

import math

import pytest
import torch

from quire.engine.executor import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def two_caches(dtype: torch.dtype, blocks: int = 40, block_size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(blocks, 3, block_size, 80).to(dtype), torch.randn(blocks, 3, block_size, 80).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
def test_kv_write_equals_indexing(dtype: torch.dtype, block_size: int, tokens: int) -> None:
    """300 tokens use several threads; every fifth token is skipped; all other entries keep their values."""
    k_cache, v_cache = two_caches(dtype, block_size=block_size)
    key, value = (torch.randn(tokens, 3, 80).to(dtype) for _ in range(2))
    kv_indices = torch.randperm(40 * block_size)[:tokens]
    kv_indices[::5] = -1
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    kept = kv_indices >= 0
    expected_k[kv_indices[kept] // block_size, :, kv_indices[kept] % block_size] = key[kept]
    expected_v[kv_indices[kept] // block_size, :, kv_indices[kept] % block_size] = value[kept]
    ops.kv_write(key, value, k_cache, v_cache, kv_indices)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_kv_write_takes_views() -> None:
    """Keys transposed, values a slice of a fused projection, the two caches halves of one tensor of blocks."""
    both = torch.zeros(9, 2, 3, 16, 80)
    key = torch.randn(3, 20, 80).transpose(0, 1)
    value = torch.randn(20, 3, 200)[..., 100:180]
    kv_indices = torch.randperm(9 * 16)[:20]
    ops.kv_write(key, value, both[:, 0], both[:, 1], kv_indices)
    assert torch.equal(both[kv_indices // 16, 0, :, kv_indices % 16], key)
    assert torch.equal(both[kv_indices // 16, 1, :, kv_indices % 16], value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_kv_write_rounds_to_e4m3(dtype: torch.dtype, tokens: int) -> None:
    """Values of all magnitudes: torch's conversion of value / scale, but ours saturates at 448; NaN stays NaN."""
    k_cache, v_cache = (torch.zeros(40, 3, 16, 80).to(torch.float8_e4m3fn) for _ in range(2))
    key, value = ((torch.randn(tokens, 3, 80) * 2.0 ** torch.randint(-12, 10, (tokens, 3, 80))).to(dtype) for _ in "kv")
    key[0, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    scales = torch.rand(2, 3) + 0.1
    kv_indices = torch.randperm(40 * 16)[:tokens]
    kv_indices[1::5] = -1
    ops.kv_write(key, value, k_cache, v_cache, kv_indices, scales=scales)
    kept = kv_indices >= 0
    for rows, cache, scale in ((key, k_cache, scales[0]), (value, v_cache, scales[1])):
        expected = torch.zeros(40, 3, 16, 80)
        scaled = (rows.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        expected[kv_indices[kept] // 16, :, kv_indices[kept] % 16] = scaled[kept].float()
        assert torch.equal(cache.float().nan_to_num(7e5), expected.nan_to_num(7e5))


def test_every_e4m3_number_is_read_and_written() -> None:
    """Attention to a single key returns its value: all 256 values of e4m3, as written."""
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(16, 1, 16)
    value = stored.float()
    k_cache, v_cache = (torch.zeros(16, 1, 8, 16).to(torch.float8_e4m3fn) for _ in range(2))
    kv_indices = torch.arange(16) * 8
    ops.kv_write(torch.zeros_like(value), value, k_cache, v_cache, kv_indices, scales=torch.ones(2, 1))
    assert torch.equal(v_cache[:, :, 0].view(torch.uint8), stored.view(torch.uint8))
    out = torch.full_like(value, math.nan)
    one = torch.ones(16, dtype=torch.int32)
    tables, start = torch.arange(16, dtype=torch.int32)[:, None], torch.arange(17, dtype=torch.int32)
    ops.paged_attention(
        *(torch.ones_like(value), k_cache, v_cache, tables, start[:16], start, one, 1.0, 0, 0.0, out),
        scales=torch.ones(2, 1),
    )
    torch.testing.assert_close(out, value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"key": torch.zeros(4, 2, 80)}, ValueError, "key: KV heads is 2, k_cache has 3"),
        ({"value": torch.zeros(5, 3, 80)}, ValueError, "value: tokens is 5, key has 4"),
        ({"key": torch.zeros(4, 3, 80).half()}, ValueError, "value: dtype is Float, key has Half"),
        ({"key": torch.zeros(4, 80, 3).mT}, ValueError, "key: last dimension has stride 3, not 1"),
        ({"kv_indices": torch.zeros(4).int()}, ValueError, "kv_indices: dtype is Int, this operator needs Long"),
        ({"kv_indices": torch.tensor([0, 1, 640, 3])}, IndexError, r"kv_indices\[2\] is 640, not in \[-1, 640\)"),
        ({"kv_indices": torch.tensor([0, -2, 1, 3])}, IndexError, r"kv_indices\[1\] is -2, not in"),
    ],
)
def test_kv_write_refuses(change: dict[str, torch.Tensor], kind: type[Exception], message: str) -> None:
    k_cache, v_cache = two_caches(torch.float32)
    given = {"key": torch.zeros(4, 3, 80), "value": torch.zeros(4, 3, 80), "kv_indices": torch.arange(4)} | change
    before = k_cache.clone()
    with pytest.raises(kind, match=message):
        ops.kv_write(given["key"], given["value"], k_cache, v_cache, given["kv_indices"])
    assert torch.equal(k_cache, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_copy_equals_one_clone_at_a_time(dtype: torch.dtype) -> None:
    """Six copies in four layers; one reads a block that an earlier one wrote."""
    caches = [cache for _ in range(4) for cache in two_caches(dtype)]
    pairs = [(0, 5), (5, 7), (1, 8), (1, 9), (39, 38), (2, 2)]
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        for source, target in pairs:
            cache[target] = cache[source].clone()
    ops.block_copy(caches, torch.tensor(pairs))
    for cache, want in zip(caches, expected, strict=True):
        assert torch.equal(cache, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, 0.0, -1.5])
def test_block_fill(dtype: torch.dtype, value: float) -> None:
    caches = [*two_caches(dtype), *two_caches(dtype)]
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        cache[[3, 39]] = value
    ops.block_fill(caches, torch.tensor([3, 39]), value)
    for cache, want in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, want, rtol=0, atol=0, equal_nan=True)


def test_nothing_to_do() -> None:
    caches = list(two_caches(torch.float32))
    expected = [cache.clone() for cache in caches]
    ops.block_copy(caches, torch.zeros(0, 2, dtype=torch.int64))
    ops.block_fill(caches, torch.zeros(0, dtype=torch.int64), math.nan)
    for cache, want in zip(caches, expected, strict=True):
        assert torch.equal(cache, want)


def test_blocks_outside_the_pool_are_refused() -> None:
    caches = list(two_caches(torch.float32))
    with pytest.raises(IndexError, match=r"pairs\[1\] is 40, not in \[0, 40\)"):
        ops.block_copy(caches, torch.tensor([[0, 40]]))
    with pytest.raises(IndexError, match=r"blocks\[0\] is -1"):
        ops.block_fill(caches, torch.tensor([-1]), 0.0)
    with pytest.raises(ValueError, match="pairs: columns is 3, a pair has 2"):
        ops.block_copy(caches, torch.tensor([[0, 1, 2]]))
