"""The KV cache: one pair of tensors a layer, allocated once; how many blocks fit.

k[layer], v[layer]   [blocks, Hkv, block_size, D]   dtype of the model
                        |     |        |       └ one head's vector, contiguous
                        |     |        └ token in the block, so a head's block is one contiguous run to read
                        |     └ heads outside tokens: a kernel that owns a KV head reads nothing of the others
                        └ block id, what tables hold;  slot = block id * block_size + offset
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.executor.errors import NotEnoughMemory

GIB = 1 << 30
CPU_DEFAULT_GIB = 1.0
GPU_FREE_FRACTION = 0.9  # the rest is for activations


@dataclass(frozen=True)
class KVShape:
    """What one layer stores of a token: a key and a value, each [heads, head_size]."""

    heads: int  # KV heads, not attention heads: with grouped queries there are fewer
    head_size: int


Caches = list[tuple[Tensor, Tensor]]  # (k, v) of each layer


def bytes_per_token(layers: list[KVShape], dtype: torch.dtype) -> int:
    """2 x layers x KV heads x head size x bytes of an element (PagedAttention, SOSP 2023, section 3)."""
    return sum(2 * layer.heads * layer.head_size for layer in layers) * dtype.itemsize


def blocks_that_fit(
    *,
    token_bytes: int,
    block_size: int,
    max_model_len: int,
    kv_blocks: int,
    kv_memory_gib: float,
    device: torch.device,
) -> int:
    """How many KV blocks to allocate: `kv_blocks` where set, else as many as the memory holds.

    Raises NotEnoughMemory when a single sequence of max_model_len tokens does not fit: it could never finish.
    """
    block_bytes = token_bytes * block_size
    if kv_blocks == 0:
        if kv_memory_gib > 0:
            budget = kv_memory_gib * GIB
        elif device.type == "cuda":
            budget = torch.cuda.mem_get_info(device)[0] * GPU_FREE_FRACTION
        else:
            budget = CPU_DEFAULT_GIB * GIB
        kv_blocks = int(budget // block_bytes)
    needed = -(-max_model_len // block_size)
    if kv_blocks < needed:
        raise NotEnoughMemory(
            f"the KV cache has {kv_blocks} blocks of {block_size} tokens ({kv_blocks * block_bytes / GIB:.2f} GiB), "
            f"but one sequence of max_model_len {max_model_len} needs {needed} ({needed * block_bytes / GIB:.2f} GiB): "
            f"raise kv_memory_gib (or kv_blocks), or lower max_model_len"
        )
    return kv_blocks


def allocate(
    layers: list[KVShape], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, fill: float = 0.0
) -> Caches:
    """All the KV memory there will ever be.  Written once here, so that the pages really exist before traffic does."""
    try:
        return [
            (
                torch.empty(blocks, layer.heads, block_size, layer.head_size, dtype=dtype, device=device).fill_(fill),
                torch.empty(blocks, layer.heads, block_size, layer.head_size, dtype=dtype, device=device).fill_(fill),
            )
            for layer in layers
        ]
    except RuntimeError as error:  # torch's "can't allocate memory", on either kind of device
        total = bytes_per_token(layers, dtype) * block_size * blocks
        raise NotEnoughMemory(f"no memory for a KV cache of {total / GIB:.2f} GiB: lower kv_memory_gib") from error
