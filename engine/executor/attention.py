"""The attention function that transformers' models call in place of their own.

    model(..., step=step) ── unknown keywords travel down to ──> kv_blocks(module, q, k, v, ..., step=step)
                                                                   1. write k, v of this step's tokens to the cache
                                                                   2. attend from q over the sequence's block table

All inputs arrive with the `step` keyword.  There are no globals, so two workers may live in one process.

The name matters: transformers strips a `paged|` prefix and treats names with `sdpa` or `flash` specially.  It builds no
mask for a name that its mask registry lacks.  None is needed: the kernel is causal by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from quire.engine.executor import ops
from quire.engine.executor.batch import StepTensors
from quire.engine.executor.kv_cache import LayerCache

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
    tokens of the step, sequence after sequence.  Returns [1, T, H, Dv] and no attention weights.  D and Dv may be below
    the head size of the cache (`models/cache_shapes.py`).
    `scaling`, `softcap`, `s_aux` (sinks [H]) and among others `sliding_window` are what the model passes.
    Keywords a model may add and that would change the result are refused once, at load (`models/hf.py`), not here.
    """
    cache = step.caches[module.layer_idx]  # type: ignore[index]  # an int on every attention module
    # The kernels take any strides, as long as a head's vector is contiguous.
    q, k, v = (padded(each[0].transpose(0, 1), cache.k.shape[3]) for each in (query, key, value))
    ops.kv_write(k, v, cache.k, cache.v, step.kv_indices, cache.scales)
    out = attend(step, q, cache, scaling, window_of(module, others), softcap or 0.0, s_aux)
    return out[None, ..., : value.shape[3]].contiguous(), None


def padded(heads: Tensor, size: int) -> Tensor:
    """Return heads [T, H, D] with zeros behind each, [T, H, size]; themselves if they are of that size."""
    return heads if heads.shape[2] == size else nn.functional.pad(heads, (0, size - heads.shape[2]))


def window_of(module: nn.Module, keywords: dict[str, Any]) -> int:
    """Return how many tokens a query of an attention layer sees, itself included; 0: all before it.

    Some models (qwen2_moe) leave the window to a mask: their layers know it and do not pass it."""
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
    """Causal attention of a step's queries [T, H, D] over one layer's cache, where their keys are already -> [T, H, D].

    window 0 and soft_cap 0.0: none.  sinks [H]: one more score in every softmax of a head, without a value.
    """
    heads, size = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    ops.paged_attention(
        q,
        cache.k,
        cache.v,
        step.tables,
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
