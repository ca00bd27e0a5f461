"""Block tables of sliding-window layers (window groups); `batch.py` has the block tables of full-attention layers.

    plan.edits  (slot, index, id) ──id──> full layers: Batch.tables      group 1: tables, kv_indices      group 2: ...

Entries of blocks before a sequence's window are stale, like entries past its length: no kernel reads them.  A model
without window groups has no such tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.engine.executor import ops
from quire.engine.executor.staging import Array


class GroupPlaces(NamedTuple):
    """Cache indices and block tables of a KV group's layers, in one step."""

    kv_indices: Tensor  # [T] i64: index in the cache for each token's key and value; -1: not stored
    tables: Tensor  # [max_seqs, max_blocks] i32: block ids, numbered within the group


class WindowTables:
    """The block tables of all window groups, on the device and on the host."""

    def __init__(
        self, ids: Sequence[range], *, max_seqs: int, columns: int, block_size: int, device: torch.device
    ) -> None:
        """`ids`: range of each group's block ids in plans, ascending.  `columns`: maximum blocks of a sequence."""
        self._ids, self._block_size = ids, block_size
        self._tables = [torch.zeros(max_seqs, columns, dtype=torch.int32, device=device) for _ in ids]
        self._host = [np.zeros((max_seqs, columns), dtype=np.int32) for _ in ids]
        self._decode = [torch.zeros(max_seqs, dtype=torch.int64, device=device) for _ in ids]

    def split(self, edits: Array | None) -> tuple[Array | None, list[Array]]:
        """Return a plan's edits [n, 3] of full-attention layers, and of each window group, which are also applied to
        the host's tables."""
        if edits is None or not self._ids:
            return edits, []
        found = []
        for ids, host in zip(self._ids, self._host, strict=True):
            own = edits[(edits[:, 2] >= ids.start) & (edits[:, 2] < ids.stop)]
            own[:, 2] -= ids.start
            host[own[:, 0], own[:, 1]] = own[:, 2]
            found.append(own)
        return edits[edits[:, 2] < self._ids[0].start], found

    def split_blocks(self, blocks: Array | None) -> list[Array | None]:
        """Return a plan's blocks, or pairs of blocks, per group, full attention first; None: the group has none."""
        if blocks is None or not self._ids:
            return [blocks, *([None] * len(self._ids))]
        first = blocks if blocks.ndim == 1 else blocks[:, 0]
        found: list[Array | None] = []
        for ids in (range(self._ids[0].start), *self._ids):
            own = blocks[(first >= ids.start) & (first < ids.stop)] - ids.start
            found.append(own if len(own) else None)
        return found

    def apply(self, edits: Sequence[Tensor]) -> None:
        """Bring the device copies up to date with the staged edits of each group."""
        for own, tables in zip(edits, self._tables, strict=False):
            if len(own):
                ops.apply_edits(own, tables)

    def __len__(self) -> int:
        return len(self._ids)

    def fill_slices(self, slots: Array, positions: Array, kv_indices: Array) -> None:
        """Fill the kv_indices [groups, tokens] i64 of a step's slices.  slots, positions: [tokens]."""
        size = self._block_size
        for own, host in zip(kv_indices, self._host, strict=True):
            own[:] = host[slots, positions // size].astype(np.int64) * size + positions % size

    def decode_places(self, count: int) -> tuple[GroupPlaces, ...]:
        """Return kv_indices and tables of a step of `count` decoding slots; `Batch.gather` fills the kv_indices."""
        pairs = zip(self._decode, self._tables, strict=True)
        return tuple(GroupPlaces(indices[:count], tables) for indices, tables in pairs)

    def mixed_places(self, kv_indices: Tensor) -> tuple[GroupPlaces, ...]:
        """Return kv_indices and tables of a step with slices, by group.  kv_indices: [groups, T] i64."""
        return tuple(GroupPlaces(*pair) for pair in zip(kv_indices, self._tables, strict=True))
