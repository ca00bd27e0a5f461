"""Attention function that Hugging Face models call instead of their own.

    model(..., step=step) ── unknown keywords are passed down to ──> kv_blocks(module, q, k, v, ..., step=step)
                                                                   1. write k, v of this step's tokens to the cache
                                                                   2. attend from q over the sequence's block table

All inputs arrive with the `step` keyword.  There are no globals, so two workers may live in one process.

The function's registered name matters: transformers strips a `paged|` prefix and treats names with `sdpa` or `flash`
specially.  It builds no mask for a name missing in its mask registry.  The kernel is causal and needs no mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from quire.engine.executor import ops
from quire.engine.executor.kv_cache import LayerCache
from quire.engine.executor.step_tensors import StepTensors

NAME = "kv_blocks"


def kv_blocks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: StepTensors,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one layer over the KV blocks.

    query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv]: views, usually a transposed [1, T, H, D].  T: all
    tokens of the step, ordered by sequence.  Returns [1, T, H, Dv] and no attention weights.  D and Dv may be below
    the head size of the cache (`models/cache_shapes.py`).
    The model passes `scaling`, `softcap`, `s_aux` (sinks [H]), `sliding_window` and others.  Keywords that would
    change the result are refused at load (`models/hf.py`), not here.
    """
    cache = step.caches[module.layer_idx]  # type: ignore[index]  # an int on every attention module
    # The kernels take any strides, as long as a head's vector is contiguous.
    q, k, v = (padded(each[0].transpose(0, 1), cache.k.shape[3]) for each in (query, key, value))
    ops.kv_write(k, v, cache.k, cache.v, step.places[cache.group].kv_indices, cache.scales)
    out = attend(step, q, cache, scaling, window_of(module, others), softcap or 0.0, s_aux)
    return out[None, ..., : value.shape[3]].contiguous(), None


def padded(heads: Tensor, size: int) -> Tensor:
    """Return heads [T, H, D] padded with zeros to [T, H, size]; unchanged if they have that size."""
    return heads if heads.shape[2] == size else nn.functional.pad(heads, (0, size - heads.shape[2]))


def window_of(module: nn.Module, keywords: dict[str, Any]) -> int:
    """Return the sliding window of an attention layer, in tokens including the query's own; 0: the layer has no window.

    Layers of some models (qwen2_moe) have the window as an attribute and do not pass it as a keyword."""
    found: int | None = keywords.get("sliding_window", getattr(module, "sliding_window", None))
    return found or 0


def attend(
    step: StepTensors,
    q: Tensor,
    cache: LayerCache,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention [T, H, D] of a step's queries [T, H, D] over one layer's cache, which already has the
    step's keys and values.

    window 0: every token is seen; soft_cap 0.0: scores are not capped.  sinks [H]: attention sink per head, a score
    that enters each softmax but has no value vector."""
    heads, size = q.shape[1:]
    if cache.window and not 0 < window <= cache.window:
        raise ValueError(f"a layer reads {window or 'all'} tokens of a cache that keeps {cache.window}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    ops.paged_attention(
        q,
        cache.k,
        cache.v,
        step.places[cache.group].tables,
        step.rows,
        step.q_start,
        step.lens,
        scale,
        window,
        soft_cap,
        out,
        decodes=step.decodes,
        plan=step.attention_plan(heads, cache.k.shape[1], size, window),
        scales=cache.scales,
        sinks=None if sinks is None else sinks.float(),
    )
    return out


AttentionInterface.register(NAME, kv_blocks)
