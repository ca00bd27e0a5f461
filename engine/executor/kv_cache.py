"""The KV cache: one pair of tensors per layer, allocated once, and the number of blocks that fit.

k[layer], v[layer]   [blocks, Hkv, block_size, D]   dtype of the model, or e4m3 (8 bits) with a scale per head
                        |     |        |       └ one head's vector, contiguous
                        |     |        └ token in the block, so a head's block is one contiguous run to read
                        |     └ heads outside tokens: a kernel for one KV head reads nothing of the others
                        └ block id, the entries of block tables;  kv_index = block id * block_size + offset

Layers may differ in Hkv and D, and one may read the keys and values of an earlier layer.  A block id means the same
tokens in all layers of a group (kv_groups.py), so a block's size is the sum over these layers.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.engine.executor.errors import NotEnoughMemory
from quire.engine.executor.host_memory import CPU_DEFAULT_GIB

GIB = 1 << 30
GRAPH_BYTES = 2 * GIB  # reserve for CUDA graphs; a conservative estimate: 10 GiB of an H200 stayed unused
GPU_FREE_FRACTION = 0.94  # the rest is for fragmentation, CUDA graphs, and kernels not loaded yet


@dataclass(frozen=True)
class KVShape:
    """Key and value that a layer stores per token, each [heads, head_size]."""

    heads: int  # KV heads: fewer than attention heads with GQA; 0: a layer without attention
    head_size: int  # elements of a key and of a value, including padding
    shares: int | None = None  # the layer whose keys and values this one reads; None: it has its own


class LayerState(NamedTuple):
    """Recurrent state of one layer, with an entry per state slot (`models/recurrent/states.py`)."""

    conv: Tensor  # [state slots, taps - 1, channels], dtype of the model
    recurrent: Tensor | None  # [state slots, heads, keys, values] f32; None: the layer is a convolution only


class LayerCache(NamedTuple):
    """KV cache tensors of one layer; empty ones if it has no attention."""

    k: Tensor
    v: Tensor
    scales: Tensor | None  # [2, Hkv] f32, for keys and for values, if the cache is e4m3: value = stored * scale
    state: LayerState | None = None  # None: the layer keeps no recurrent state
    group: int = 0  # index of the block tables that it uses (kv_groups.py)
    window: int = 0  # tokens that its group keeps; 0: all


class WindowBlocks(NamedTuple):
    """Blocks of a layer in a window group."""

    blocks: int
    group: int
    window: int  # tokens


Caches = list[LayerCache]
KV_DTYPES = {"e4m3": torch.float8_e4m3fn}  # dtype by option value; for other values the model's dtype


def bytes_per_token(layers: list[KVShape], dtype: torch.dtype) -> int:
    """Return 2 x layers x KV heads x head size x bytes per element (PagedAttention, SOSP 2023, section 3).

    A layer that shares another layer's cache adds nothing."""
    return sum(2 * layer.heads * layer.head_size for layer in layers if layer.shares is None) * dtype.itemsize


def by_shape(caches: Caches) -> list[list[Tensor]]:
    """Return the tensors of all layers, each once, grouped by shape, because one call that moves blocks supports one
    shape."""
    groups: dict[torch.Size, dict[int, Tensor]] = {}
    for cache in caches:
        for tensor in (cache.k, cache.v):
            if not tensor.numel():  # a layer without attention
                continue
            groups.setdefault(tensor.shape, {})[id(tensor)] = tensor
    return [list(group.values()) for group in groups.values()]


def cache_bytes(
    device: torch.device,
    *,
    kv_memory_gib: float = 0.0,
    activations: int = 0,
    cpu_budget: int = int(CPU_DEFAULT_GIB * GIB),
) -> int:
    """Return the bytes of memory for the KV cache: `kv_memory_gib` if set, else the free memory of the device.

    activations: bytes of a GPU to leave free for the largest step.
    cpu_budget: bytes of the cache on a CPU (`host_memory.divide`)."""
    if kv_memory_gib > 0:
        return int(kv_memory_gib * GIB)
    if device.type == "cuda":
        return max(0, int(torch.cuda.mem_get_info(device)[0] * GPU_FREE_FRACTION) - GRAPH_BYTES - activations)
    return cpu_budget


def blocks_that_fit(
    *,
    token_bytes: int,
    block_size: int,
    max_model_len: int,
    kv_blocks: int,
    memory: int,
    agree: Callable[[int], int] = int,
) -> int:
    """Return the number of KV blocks to allocate: `kv_blocks` if set, else the maximum that fits `memory` bytes.

    agree: maps the number that fits on this rank to the minimum over all ranks.

    Raises NotEnoughMemory when a single sequence of max_model_len tokens does not fit: it could never finish.
    """
    block_bytes = token_bytes * block_size
    if kv_blocks == 0:
        kv_blocks = agree(max(0, memory) // block_bytes)
    needed = -(-max_model_len // block_size)
    if kv_blocks < needed:
        raise NotEnoughMemory(
            f"the KV cache has {kv_blocks} blocks of {block_size} tokens ({kv_blocks * block_bytes / GIB:.2f} GiB), "
            f"but one sequence of max_model_len {max_model_len} needs {needed} ({needed * block_bytes / GIB:.2f} GiB): "
            f"raise kv_memory_gib (or kv_blocks), or lower max_model_len"
        )
    return kv_blocks


def allocate(
    layers: list[KVShape],
    blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    fill: float = 0.0,
    *,
    on_demand: bool = False,
    scales: Sequence[Tensor | None] | None = None,
    windows: Mapping[int, WindowBlocks] | None = None,
) -> Caches:
    """Allocate the KV cache of all layers and write it once, so that its pages exist before traffic arrives.

    on_demand: on a CPU, let the system allocate each zero page at its first write.  This saves an activated spare
    engine 0.6 s per GiB; the engine before it has shown that the machine has the memory. scales: [2, Hkv] per layer,
    for e4m3; None: 1, because e4m3's range of 448 suffices for trained models. windows: layer index -> its blocks."""

    def tensor(layer: KVShape, count: int) -> Tensor:
        shape = count, layer.heads, block_size, layer.head_size
        if on_demand and device.type == "cpu" and fill == 0 and layer.heads:
            pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
            return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device).fill_(fill)

    def cache(index: int, layer: KVShape, given: Tensor | None) -> LayerCache:
        own = None
        if dtype == torch.float8_e4m3fn:
            own = torch.ones(2, layer.heads, device=device) if given is None else given.to(device)
        of_group = windows.get(index) if windows else None
        count, group, window = of_group or WindowBlocks(blocks, 0, 0)
        return LayerCache(tensor(layer, count), tensor(layer, count), own, None, group, window)

    caches: Caches = []
    try:
        for index, (layer, given) in enumerate(zip(layers, scales or [None] * len(layers), strict=True)):
            caches.append(cache(index, layer, given) if layer.shares is None else caches[layer.shares])
    except (RuntimeError, OSError) as error:  # RuntimeError: torch, on a CPU or a GPU; OSError: mmap
        total = bytes_per_token(layers, dtype) * block_size * blocks
        raise NotEnoughMemory(f"no memory for a KV cache of {total / GIB:.2f} GiB: lower kv_memory_gib") from error
    return caches
