"""All-reduce over the ranks of a model, one GPU each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SUM_CTAS, MAX_SUM_RANKS, MAX_SUMMED = 256, 8, 16384  # maximum CTAs per call, maximum ranks, maximum elements per row
_MARK_BYTES, _PACK_BYTES, _SUM_THREADS = 16, 16, 1024  # as in csrc/cuda/ranks


@dataclass(frozen=True)
class Inboxes:
    """Memory for the all-reduce: each rank writes its part to the others' inboxes and reads its own."""

    own: torch.Tensor  # [bytes] uint8, this rank's inbox, initially zeros
    addresses: list[int]  # address of each rank's inbox, as mapped by this process
    calls: torch.Tensor  # [SUM_CTAS] int32, number of calls per CTA, initially zeros
    rank: int
    words_share: int  # bytes of part per CTA and call in the words protocol (call number in every 8 bytes)
    blocks_share: int  # bytes of part per CTA and call in the blocks protocol
    multiprocessors: int  # minimum over the ranks' GPUs: all CTAs of a call must be resident at once

    @staticmethod
    def bytes_of(ranks: int, words_share: int, blocks_share: int) -> int:
        """Return the size of an inbox."""
        return 2 * ranks * SUM_CTAS * (_MARK_BYTES + 2 * words_share + blocks_share)

    def ctas(self, row_bytes: int) -> int:
        """Return the maximum CTAs per call: two per multiprocessor, or one if a row takes over half of its threads."""
        each = 2 if row_bytes <= _PACK_BYTES * _SUM_THREADS // 2 else 1
        return min(each * self.multiprocessors, SUM_CTAS)

    def takes(self, rows: int, size: int, dtype: torch.dtype, *, words: bool) -> bool:
        """Return whether `rank_sum` supports a part of this shape.  Equal on all ranks."""
        row_bytes = size * dtype.itemsize
        if dtype not in (torch.float32, torch.bfloat16, torch.float16) or row_bytes % _PACK_BYTES or size > MAX_SUMMED:
            return False
        return 0 < -(-rows // self.ctas(row_bytes)) * row_bytes <= (self.words_share if words else self.blocks_share)


def rank_sum(
    part: torch.Tensor,
    inboxes: Inboxes,
    *,
    words: bool,
    plus: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All-reduce `part` [rows, size] in place, in one kernel per GPU.  Returns (the result, the result after a norm).

    words  send the call number in every 8 bytes: minimum latency, twice the bytes; if false, one number per CTA
    plus   [rows, size], equal on all ranks: the sum of the parts is added to it, in place, and `plus` is returned
    norm   [size]: also return rms_norm(the result, norm, eps); None: the second value is None

    All ranks must make the same calls in the same order, with equal shapes that fit into `inboxes`.  Parts are summed
    in rank order, then `plus` is added, in float32 with one rounding: equal bits on all ranks.  The kernel waits for
    the other ranks, without a limit."""
    normed = None if norm is None else torch.empty_like(part)
    size = part.shape[-1]
    torch.ops.quire.rank_sum.default(
        part,
        plus,
        norm,
        eps,
        normed,
        inboxes.own,
        inboxes.addresses,
        inboxes.calls,
        inboxes.rank,
        inboxes.ctas(size * part.element_size()),
        inboxes.words_share,
        inboxes.blocks_share,
        words,
    )
    return (part if plus is None else plus), normed


def torch_rank_sum(shared: torch.Tensor, part: torch.Tensor, group: str, *, two_shot: bool) -> torch.Tensor:
    """All-reduce by torch's symmetric-memory kernels, for comparison: one-shot, or reduce-scatter and all-gather.

    shared  tensor in this rank's symmetric memory, with shape and dtype of `part`; two_shot: the part is already in it,
            otherwise it is copied there
    group   torch's name of the process group"""
    y: torch.Tensor
    if two_shot:
        y = torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)
    else:
        y = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, part, "sum", group)
    return y
