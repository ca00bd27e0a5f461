"""Logits of which each rank has its own columns, and the choice of tokens from them.

    every row takes its likeliest token   own columns ── a key a row ── the greatest of all ranks ──> tokens
    any other wish in the step            own columns ── gathered ──> `ops.sample`, as with one rank

A key is 8 bytes: the number of the most probable token and the token.  The logits of a row are 4 bytes a token of the
vocabulary.  Both ways choose the tokens that one rank chooses from the same values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.executor import ops
from quire.engine.executor.ranks.ranks import Ranks

LEAST = torch.iinfo(torch.int64).min  # the key of no token


class DividedLogits:
    """One rank's columns of the logits [., V]: of tokens rank * columns and those after it."""

    def __init__(self, ranks: Ranks, vocab_size: int, columns: int) -> None:
        """columns: of every rank; the last ranks' may be padded, beyond the vocabulary."""
        self._ranks = ranks
        self._vocab = vocab_size
        self.columns = columns
        self._first = ranks.rank * columns
        self._mine = min(columns, max(0, vocab_size - self._first))  # columns that are no padding

    def whole(self, own: Tensor) -> Tensor:
        """Return all ranks' logits [N, V] from this rank's [N, columns].  All ranks must call this."""
        return self._ranks.gather_columns(own, self._vocab)

    def choose_likeliest(self, own: Tensor, slots: Tensor, tokens: Tensor, outcome: Tensor) -> None:
        """Choose the most probable token of each row, as `SamplerBank.run` does where `general` is false.

        own [N, columns]; slots [N] i64; tokens [N] i64 and outcome [N] u8 are written.  All ranks must call this."""
        keys = torch.full_like(slots, LEAST)
        if self._mine:
            ops.likeliest(own[:, : self._mine], self._first, keys)
        self._ranks.keep_greatest(keys)
        ops.chosen(keys, slots, tokens, outcome)
