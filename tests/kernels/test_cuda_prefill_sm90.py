"""paged_attention on a Hopper GPU: cases of its own prefill kernel (tiles, half tiles, split-KV, ping-pong)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.paged import Batch, check_sinks, error, make_batch, reference

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}  # as in test_cuda_prefill.py


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")


def assert_close(batch: Batch, window: int = 0) -> None:
    assert error(batch.to("cuda").attend(window), reference(batch, window)) <= TOLERANCE[batch.q.dtype]


@pytest.mark.parametrize("dim", [64, 128])
def test_ends_of_tiles(dim: int) -> None:
    """Sequences that end anywhere in a tile of keys, with chunks that begin anywhere in it."""
    lens = [*range(1, 260, 17), 64, 65, 128, 129, 192, 193]
    queries = [1 + 37 * i % n for i, n in enumerate(lens)]
    batch = make_batch(lens, queries, heads=8, kv_heads=2, dim=dim, dtype=torch.bfloat16)
    assert_close(batch)
    assert_close(batch, window=50)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts(dtype: torch.dtype) -> None:
    """Few tiles over many keys: split-KV, whose partial results in the plan are merged."""
    batch = make_batch([9000, 700, 5000], [70, 40, 200], heads=12, kv_heads=2, dim=128, dtype=dtype)
    assert_close(batch)
    assert_close(batch, window=3000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 8), (12, 4)])
@pytest.mark.parametrize("dim", [64, 128])
def test_sinks(dim: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Tiles without and with split-KV."""
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": dtype}
    check_sinks(make_batch([700, 300, 0, 129], [700, 120, 0, 129], **shape), TOLERANCE[dtype])
    check_sinks(make_batch([9000, 700, 5000], [70, 40, 900], **shape), TOLERANCE[dtype])
    check_sinks(make_batch([9000, 700, 5000], [70, 40, 900], **shape), TOLERANCE[dtype], window=3000)


def test_a_query_gets_the_same_bits_in_any_chunk() -> None:
    """Key tiles begin at the same positions for any chunk.  This holds without split-KV and if the chunk is too large
    for `prefill_mma`."""
    batch = make_batch([700], [700], heads=64, kv_heads=8, dim=128, dtype=torch.bfloat16).to("cuda")
    whole = batch.attend()
    for first, last in [(0, 130), (130, 333), (333, 700)]:
        assert torch.equal(batch.only(0, slice(first, last)).attend(), whole[first:last])


def test_blocks_apart() -> None:
    """A cache that is a slice of a larger one: blocks have gaps between them."""
    batch = make_batch([300, 90], [300, 50], heads=16, kv_heads=4, dim=128, dtype=torch.bfloat16).to("cuda")
    expected = batch.attend()
    for name in ("k_cache", "v_cache"):
        cache = getattr(batch, name)
        setattr(batch, name, torch.stack([cache, torch.full_like(cache, torch.nan)], dim=1)[:, 0])
    assert torch.equal(batch.attend(), expected)
