"""Vocab-parallel logits: each rank has some columns, from which all ranks choose the same tokens.

    all slots greedy                  own columns ── a key per row ── maximum over all ranks ──> tokens
    any other settings in the step    own columns ── all-gather ──> `ops.sample`, as with one rank

A key is 8 bytes: the value of the largest logit, and its token.  A row of logits has 4 bytes per token of the
vocabulary. Both ways choose the tokens that one rank would choose from the same values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.executor import ops
from quire.engine.executor.ranks.ranks import Ranks

MIN_KEY = torch.iinfo(torch.int64).min  # minimum key, of a rank without columns


class VocabParallelLogits:
    """One rank's columns of the logits [., V]: `columns` tokens from rank * columns on."""

    def __init__(self, ranks: Ranks, vocab_size: int, columns: int) -> None:
        """columns: number of columns of every rank; those of the last ranks may lie beyond the vocabulary (padding)."""
        self._ranks = ranks
        self._vocab = vocab_size
        self.columns = columns
        self._first = ranks.rank * columns
        self._mine = min(columns, max(0, vocab_size - self._first))  # columns that are not padding

    def whole(self, own: Tensor) -> Tensor:
        """Return the complete logits [N, V] from this rank's [N, columns].  All ranks must call this."""
        return self._ranks.gather_columns(own, self._vocab)

    def choose_argmax(self, own: Tensor, slots: Tensor, tokens: Tensor, outcome: Tensor) -> None:
        """Choose the argmax of each row, as `SamplerBank.run` does if `general` is false.

        own [N, columns]; slots [N] i64; tokens [N] i64 and outcome [N] u8 are written.  All ranks must call this."""
        keys = torch.full_like(slots, MIN_KEY)
        if self._mine:
            ops.argmax(own[:, : self._mine], self._first, keys)
        self._ranks.all_max_on_device(keys)
        ops.chosen(keys, slots, tokens, outcome)
