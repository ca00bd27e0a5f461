"""KV-cache writes, attention over block tables, and copies of KV blocks."""

from __future__ import annotations

import torch


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Write the step's keys and values to one layer's cache.

    key, value  [T, Hkv, D], any strides as long as rows of D are contiguous; dtype of the cache
    caches      [blocks, Hkv, block_size, D]
    kv_indices  [T] int64: block * block_size + offset, distinct; -1: the token is not stored
    scales      [2, Hkv] float32, for keys and for values, with a float8_e4m3fn cache: stored = value / scale
    """
    torch.ops.quire.kv_write.default(key, value, k_cache, v_cache, kv_indices, scales)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    q_start: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    out: torch.Tensor,
    *,
    decodes: int = 0,
    plan: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Causal attention of S sequences over the KV cache: decodes and prompt chunks in one ragged call.

    q, out      [T, H, D] float32, bfloat16 or float16, any strides as long as rows of D are contiguous
    caches      [blocks, Hkv, block_size, D], dtype of q; H is a multiple of Hkv; any block_size; D at most 512 on a
                CPU, one of 64, 80, 96, 128, 192 and 256 on a GPU
    tables      [max_rows, max_blocks] int32 block ids in logical order; entries past a sequence's end are ignored
    rows        [S] int32, the row of `tables` of each sequence
    q_start     [S + 1] int32, sequence s owns tokens q_start[s] .. q_start[s + 1] - 1
    lens        [S] int32, keys of each sequence, including this step's, which are in the cache already
    window      > 0: a query sees only the last `window` keys, its own included; 0: all keys before it
    soft_cap    > 0: scores become soft_cap * tanh(score / soft_cap); 0: no cap
    decodes     number of leading sequences with one query each (or none, if lens is 0)
    plan        written by `attention_plan` for this step; not needed on a CPU
    scales      [2, Hkv] float32, for keys and for values, with a float8_e4m3fn cache: value = stored * scale
    sinks       [H] float32: attention sink, a score without a value in every softmax of its head; -inf: no sink

    The last query of a sequence has position lens - 1.  On a CPU a query's result is bit-identical in any batch.  It
    does not depend on the chunks of its prompt, its block ids or the number of threads.
    """
    if plan is None:
        plan = torch.empty(0, dtype=torch.uint8, device=q.device)
    torch.ops.quire.paged_attention.default(
        q, k_cache, v_cache, tables, rows, q_start, lens, scales, sinks, decodes, plan, scale, window, soft_cap, out
    )


def attention_plan(
    q_start: torch.Tensor,
    lens: torch.Tensor,
    decodes: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    window: int,
    plan: torch.Tensor,
) -> None:
    """Partition the work of `paged_attention`, once per step, before the first layer with these sizes and this window.

    q_start, lens, decodes  as the layers will pass them; `tables` and `rows` must be written before this call
    plan    [attention_plan_bytes(...)] uint8 on the device; also holds partial results of long sequences
    """
    torch.ops.quire.attention_plan.default(q_start, lens, decodes, heads, kv_heads, head_size, window, plan)


def attention_plan_bytes(
    device: torch.device, *, max_seqs: int, max_tokens: int, heads: int, kv_heads: int, head_size: int
) -> int:
    """Return the bytes of a plan for steps of up to max_seqs sequences and max_tokens tokens; 0 on a CPU."""
    like = torch.empty(0, device=device)
    size: int = torch.ops.quire.attention_plan_bytes.default(like, max_seqs, max_tokens, heads, kv_heads, head_size)
    return size


def rope_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    scales: torch.Tensor | None = None,
    norm_offset: float = 0.0,
) -> None:
    """Apply rotary embedding to queries, in place, and write rotated keys and the values to the cache.

    qkv         [T, H + 2 * Hkv, D]: query, key and value heads; key heads are not modified
    cos, sin    [T, D], rows contiguous (say, halves of a table [positions, 2 * D]).  head[i] of the first half becomes
                head[i] * cos[i] - head[i + D / 2] * sin[i]; the second half has + in place of -
    caches, kv_indices, scales  as in `kv_write`
    q_norm, k_norm  [D]: `rms_norm` with `eps` of every query and key head before the rotation; its weight is
                    norm_offset + these
    """
    norms = q_norm, k_norm, eps
    torch.ops.quire.rope_kv_write.default(qkv, cos, sin, k_cache, v_cache, kv_indices, *norms, scales, norm_offset)


def block_copy(caches: list[torch.Tensor], pairs: torch.Tensor) -> None:
    """In each cache copy block pairs[i, 0] to block pairs[i, 1]; pairs [n, 2] int64.  All caches have the same shape.

    No block may be written twice, or both read and written.
    """
    torch.ops.quire.block_copy.default(caches, pairs)


def block_fill(caches: list[torch.Tensor], blocks: torch.Tensor, value: float) -> None:
    """In each cache fill blocks [n] int64 with one value (NaN, to catch reads of freed blocks)."""
    torch.ops.quire.block_fill.default(caches, blocks, value)


def block_gather(caches: list[torch.Tensor], blocks: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy block blocks[i] of caches[c] to buffer[i, c], as bytes.

    blocks [n] int64, buffer [n, caches, bytes of a block] uint8, on the device of the caches.
    """
    torch.ops.quire.block_gather.default(caches, blocks, buffer)


def block_scatter(buffer: torch.Tensor, blocks: torch.Tensor, caches: list[torch.Tensor]) -> None:
    """Copy buffer[i, c] to block blocks[i] of caches[c]: the inverse of `block_gather`, to the same or other blocks.

    Blocks must be distinct.
    """
    torch.ops.quire.block_scatter.default(buffer, blocks, caches)
