"""kv_write, block_copy, block_fill and the block-table operators on a GPU, against indexing or the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from quire.engine.executor import ops

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = torch.float8_e4m3fn


def two_caches(
    dtype: torch.dtype, blocks: int = 40, block_size: int = 16, size: int = 80
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (blocks, 3, block_size, size)
    return torch.randn(shape, device=CUDA).to(dtype), torch.randn(shape, device=CUDA).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("size", [64, 80, 128, 7])
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
def test_kv_write_equals_indexing(dtype: torch.dtype, block_size: int, tokens: int, size: int) -> None:
    k_cache, v_cache = two_caches(dtype, block_size=block_size, size=size)
    key, value = (torch.randn(tokens, 3, size, device=CUDA).to(dtype) for _ in range(2))
    kv_indices = torch.randperm(40 * block_size, device=CUDA)[:tokens]
    kv_indices[::5] = -1
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    kept = kv_indices >= 0
    expected_k[kv_indices[kept] // block_size, :, kv_indices[kept] % block_size] = key[kept]
    expected_v[kv_indices[kept] // block_size, :, kv_indices[kept] % block_size] = value[kept]
    ops.kv_write(key, value, k_cache, v_cache, kv_indices)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_kv_write_takes_views() -> None:
    both = torch.zeros(9, 2, 3, 16, 80, device=CUDA)
    key = torch.randn(3, 20, 80, device=CUDA).transpose(0, 1)
    value = torch.randn(20, 3, 200, device=CUDA)[..., 101:181]
    kv_indices = torch.randperm(9 * 16, device=CUDA)[:20]
    ops.kv_write(key, value, both[:, 0], both[:, 1], kv_indices)
    assert torch.equal(both[kv_indices // 16, 0, :, kv_indices % 16], key)
    assert torch.equal(both[kv_indices // 16, 1, :, kv_indices % 16], value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("caches", [8, 300])
@pytest.mark.parametrize("block_size", [16, 64])
def test_block_copy(dtype: torch.dtype, caches: int, block_size: int) -> None:
    """300 caches exceed one launch; blocks of 64 exceed one part."""
    size = 256 if block_size == 64 else 8
    all_caches = [torch.randn(12, 3, block_size, size, device=CUDA).to(dtype) for _ in range(caches)]
    pairs = [(0, 5), (0, 7), (1, 8), (11, 2)]
    expected = [cache.clone() for cache in all_caches]
    for cache in expected:
        for source, target in pairs:
            cache[target] = cache[source]
    ops.block_copy(all_caches, torch.tensor(pairs, device=CUDA))
    for cache, want in zip(all_caches, expected, strict=True):
        assert torch.equal(cache, want)


@pytest.mark.parametrize("shape", [(3, 16, 80), (1, 8, 7), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [*DTYPES, FP8])
@pytest.mark.parametrize("value", [math.nan, 0.0, -1.5])
def test_block_fill(dtype: torch.dtype, value: float, shape: tuple[int, ...]) -> None:
    caches = [torch.randn(40, *shape, device=CUDA).to(dtype) for _ in range(4)]
    expected = [cache.float() for cache in caches]
    for cache in expected:
        cache[[3, 39]] = value
    ops.block_fill(caches, torch.tensor([3, 39], device=CUDA), value)
    for cache, want in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache.float(), want, rtol=0, atol=0, equal_nan=True)


def test_nothing_to_do() -> None:
    caches = list(two_caches(torch.float32))
    expected = [cache.clone() for cache in caches]
    ops.block_copy(caches, torch.zeros(0, 2, dtype=torch.int64, device=CUDA))
    ops.block_fill(caches, torch.zeros(0, dtype=torch.int64, device=CUDA), math.nan)
    ops.block_copy([], torch.zeros(1, 2, dtype=torch.int64, device=CUDA))
    for cache, want in zip(caches, expected, strict=True):
        assert torch.equal(cache, want)


@pytest.mark.parametrize("rows", [1, 5, 1024])
def test_the_mirror_moves_as_on_the_cpu(rows: int) -> None:
    """Ten steps of edits, inputs and outputs: random slots with padding, one past the end of its table."""
    columns, block_size = 9, 16
    token, position = torch.randint(0, 1000, (rows,)), torch.randint(0, columns * block_size, (rows,))
    wide = torch.randint(0, 1 << 30, (rows, columns + 3), dtype=torch.int32)
    host = [token, position, wide[:, 1 : columns + 1]]
    device = [token.to(CUDA), position.to(CUDA), wide.to(CUDA)[:, 1 : columns + 1]]
    for _ in range(10):
        slots = torch.randperm(rows, dtype=torch.int32)[: torch.randint(1, rows + 1, ()).item()]
        slots[torch.rand(len(slots)) < 0.2] = -1
        places = torch.randperm(rows * columns, dtype=torch.int32)[: min(50, rows)]
        blocks = torch.randint(0, 1 << 30, places.shape, dtype=torch.int32)
        edits = torch.stack([places // columns, places % columns, blocks], 1)
        edits[::4, 0] = -1
        tokens = torch.randint(0, 1000, (len(slots),))
        results = []
        for token, position, tables in (host, device):
            where = tables.device
            ops.apply_edits(edits.to(where), tables)
            out = {name: torch.full((len(slots),), -77, device=where) for name in ("ids", "positions", "kv_indices")}
            out |= {name: torch.full((len(slots),), -77, dtype=torch.int32, device=where) for name in ("rows", "lens")}
            ops.decode_inputs(slots.to(where), token, position, tables, block_size, **out)
            ops.decode_outputs(slots.to(where), tokens.to(where), token, position)
            results.append([*out.values(), token, position, tables])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(theirs.cpu(), ours)


def test_shapes_and_devices_are_checked() -> None:
    caches = list(two_caches(torch.float32))
    with pytest.raises(ValueError, match="pairs: columns is 3, a pair has 2"):
        ops.block_copy(caches, torch.tensor([[0, 1, 2]], device=CUDA))
    with pytest.raises(ValueError, match="caches: is on cpu"):
        ops.block_fill([caches[0].cpu()], torch.tensor([1], device=CUDA), 0.0)
    key = torch.zeros(4, 3, 80, device=CUDA)
    with pytest.raises(ValueError, match="k_cache: dtype is Float, key has Half"):
        ops.kv_write(key.half(), key.half(), caches[0], caches[1], torch.arange(4, device=CUDA))
