from __future__ import annotations

import pytest
import torch

from quire.engine.executor.errors import NotEnoughMemory
from quire.engine.executor.kv_cache import (
    GIB,
    KV_DTYPES,
    KVShape,
    allocate,
    blocks_that_fit,
    by_shape,
    bytes_per_token,
    cache_bytes,
)

CPU = torch.device("cpu")
LLAMA_70B = [KVShape(heads=8, head_size=128)] * 80  # 64 attention heads share 8 KV heads
SMALL = [KVShape(heads=2, head_size=64), KVShape(heads=1, head_size=32)]


def test_bytes_per_token() -> None:
    assert bytes_per_token([KVShape(40, 128)] * 40, torch.float16) == 2 * 40 * 40 * 128 * 2 == 819_200
    assert bytes_per_token(LLAMA_70B, torch.bfloat16) == 327_680
    assert bytes_per_token(SMALL, torch.float32) == 2 * (2 * 64 + 32) * 4


def fit(**changes: object) -> int:
    options = {
        "token_bytes": 1024,
        "block_size": 16,
        "max_model_len": 100,
        "kv_blocks": 0,
        "memory": cache_bytes(CPU),
    }
    return blocks_that_fit(**(options | changes))  # type: ignore[arg-type]


def test_how_many_blocks_fit() -> None:
    assert fit() == GIB // (1024 * 16)
    assert fit(memory=cache_bytes(CPU, kv_memory_gib=0.25)) == GIB // 4 // (1024 * 16)
    assert fit(kv_blocks=7) == 7  # 100 tokens are 6 full blocks and a part of the seventh


def test_less_than_one_sequence() -> None:
    with pytest.raises(NotEnoughMemory, match=r"has 6 blocks of 16 .* max_model_len 100 needs 7 .*raise kv_memory_gib"):
        fit(kv_blocks=6)
    with pytest.raises(NotEnoughMemory, match=r"has 65 blocks of 16 tokens \(0\.00 GiB\).* needs 125 "):
        fit(memory=cache_bytes(CPU, kv_memory_gib=0.001), max_model_len=2000)


def test_allocated_once_and_filled() -> None:
    caches = allocate(SMALL, 5, 16, torch.bfloat16, CPU)
    assert [tuple(cache.k.shape) for cache in caches] == [(5, 2, 16, 64), (5, 1, 16, 32)]
    assert all(cache.k.shape == cache.v.shape and not cache.k.any() and not cache.v.any() for cache in caches)
    assert sum(cache.k.nbytes + cache.v.nbytes for cache in caches) == bytes_per_token(SMALL, torch.bfloat16) * 5 * 16
    poisoned = allocate(SMALL, 2, 8, torch.float32, CPU, float("nan"))
    assert all(cache.k.isnan().all() and cache.v.isnan().all() for cache in poisoned)
    assert all(cache.scales is None for cache in caches)


def test_a_layer_may_read_the_cache_of_another() -> None:
    layers = [*SMALL, KVShape(heads=2, head_size=64, shares=0)]
    assert bytes_per_token(layers, torch.float32) == bytes_per_token(SMALL, torch.float32)
    caches = allocate(layers, 5, 16, torch.float32, CPU)
    assert caches[2] is caches[0]
    assert [[tuple(tensor.shape) for tensor in group] for group in by_shape(caches)] == [
        [(5, 2, 16, 64)] * 2,
        [(5, 1, 16, 32)] * 2,
    ]


def test_eight_bits_a_number_have_scales() -> None:
    caches = allocate(SMALL, 5, 16, KV_DTYPES["e4m3"], CPU, float("nan"))
    assert sum(cache.k.nbytes + cache.v.nbytes for cache in caches) == bytes_per_token(SMALL, torch.int8) * 5 * 16
    assert [cache.scales.shape for cache in caches if cache.scales is not None] == [(2, 2), (2, 1)]
    assert all(cache.k.float().isnan().all() for cache in caches)


def test_more_than_the_machine_has() -> None:
    with pytest.raises(NotEnoughMemory, match=r"^no memory for a KV cache of \d+\.\d\d GiB: lower kv_memory_gib$"):
        allocate(LLAMA_70B, 1 << 40, 16, torch.bfloat16, CPU)
