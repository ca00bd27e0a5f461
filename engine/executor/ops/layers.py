"""Operators between the GEMMs of a decoder layer, and all layers of a step in one call on a CPU.

Tensors are float32, bfloat16 or float16; arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.engine.executor.kv_cache import LayerCache
from quire.engine.executor.ops.adapters import AdapterRows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension.  x [T, size], weight [size] -> [T, size]."""
    out = torch.empty_like(x)
    torch.ops.quire.rms_norm.default(x, weight, eps, out)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up.  gate_up [T, 2 * size] has gate, then up, in every row -> [T, size]."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    torch.ops.quire.silu_mul.default(gate_up, out)
    return out


@dataclass(frozen=True)
class DecoderLayers:
    """Arguments of `decoder_layers` that do not change from step to step."""

    weights: list[torch.Tensor | None]  # 20 per layer, in the order of csrc/ops.cpp
    heads: int
    inner: int  # inputs of the down projection
    eps: float  # epsilon of the layer norms; head_eps: of the norms of query and key heads
    head_eps: float
    scale: float
    windows: list[int]
    widen: bool  # `Packed.widen` of all linear layers


def decoder_layers(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layers: DecoderLayers,
    caches: Sequence[LayerCache],
    places: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rows: torch.Tensor,
    q_start: torch.Tensor,
    lens: torch.Tensor,
    adapters: AdapterRows | None = None,
) -> None:
    """Compute all layers of a decoder on a CPU, in place of x [T, hidden].  Bit-identical to separate operators.

    caches: per layer the key cache, the value cache and their scales.  places: (kv_indices, tables) per KV group.
    adapters: the site of a linear layer is 4 * layer + its index (qkv; o; gate and up; down).  Other arguments: see
    `rope_kv_write`, `paged_attention`.  Raises ValueError for a layer that reads more tokens than its group keeps.
    """
    keys, values, scales = zip(*((cache.k, cache.v, cache.scales) for cache in caches), strict=True)
    groups = [cache.group for cache in caches]
    for cache, window in zip(caches, layers.windows, strict=False):  # the operator refuses unequal lengths
        if cache.window and not 0 < window <= cache.window:
            raise ValueError(f"a layer reads {window or 'all'} tokens of a cache that keeps {cache.window}")
    step = *zip(*places, strict=True), groups, rows, q_start, lens
    sizes = layers.heads, layers.inner, layers.eps, layers.head_eps, layers.scale, layers.windows, layers.widen
    lora: tuple[object, ...] = ([], [], None, None)
    if adapters is not None:
        lora = adapters.weights, adapters.tables, adapters.rows, adapters.starts
    torch.ops.quire.decoder_layers.default(x, cos, sin, layers.weights, keys, values, scales, *step, *sizes, *lora)
