"""Adapter slots of a worker, and which rows of a step have which adapter.

    StepPlan.adapters ──────> adapter slot -> adapter
    Start.adapter, forks ───> batch slot -> adapter slot
    tokens of the step ─ rows ─> AdapterRows: rows sorted by adapter; None: the step has none

On a CPU a slot names an adapter in host memory, so a load copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.engine.core.plan import StepPlan
from quire.engine.executor.lora.store import AdapterStore
from quire.engine.executor.ops import AdapterRows
from quire.engine.executor.staging import Array


class AdapterBank:
    """What one worker knows of adapters."""

    def __init__(self, store: AdapterStore, max_seqs: int) -> None:
        self.store = store
        self._loaded: dict[int, str] = {}  # adapter slot -> adapter id
        self._of_slot = np.full(max_seqs, -1, dtype=np.int32)  # batch slot -> adapter slot
        self._adapted = 0  # batch slots with an adapter
        self._decoding: tuple[int, ...] | None = None  # the slots that `_decoding_rows` is of
        self._decoding_rows: AdapterRows | None = None

    def take(self, plan: StepPlan) -> None:
        """Take a plan's loads, starts and forks in.  Raises KeyError for an adapter that is not in host memory."""
        for slot in plan.freed_slots:
            self._put(slot, -1)
        for slot, adapter in plan.adapters:
            self.store.packed(adapter)
            self._loaded[slot] = adapter
            self._decoding = None
        for start in plan.starts:
            self._put(start.slot, start.adapter)
        for fork in plan.forks:
            self._put(fork.slot, int(self._of_slot[fork.parent]))

    def _put(self, slot: int, adapter: int) -> None:
        """Let a batch slot have an adapter slot; -1: the base model."""
        before = int(self._of_slot[slot])
        if before != adapter:
            self._adapted += (adapter >= 0) - (before >= 0)
            self._of_slot[slot] = adapter
            self._decoding = None

    def reset(self) -> None:
        """Free every batch slot."""
        self._of_slot[:] = -1
        self._adapted = 0
        self._decoding = None

    def rows(self, plan: StepPlan, decoding: Sequence[int], all_decoding: tuple[int, ...]) -> AdapterRows | None:
        """Return the rows of a step in which `decoding` compute one token each, followed by the plan's slices; None: no
        row has an adapter.

        all_decoding: the same tuple in each step of the same slots without slices, whose rows are found once."""
        if not self._adapted:
            return None
        if plan.slices:
            slots = [*decoding, *(piece.slot for piece in plan.slices)]
            return self._sorted(slots, [*[1] * len(decoding), *(len(piece.token_ids) for piece in plan.slices)])
        if all_decoding is not self._decoding:
            self._decoding_rows, self._decoding = self._sorted(all_decoding, [1] * len(all_decoding)), all_decoding
        return self._decoding_rows

    def _sorted(self, slots: Sequence[int], tokens: Sequence[int]) -> AdapterRows | None:
        """Return the rows of slots that compute so many tokens each, sorted by adapter."""
        of_rows = np.repeat(self._of_slot[np.asarray(slots, dtype=np.int64)], tokens)
        order = np.argsort(of_rows, kind="stable").astype(np.int32)
        order = order[np.count_nonzero(of_rows < 0) :]
        if not len(order):
            return None
        found, firsts = np.unique(of_rows[order], return_index=True)
        packed = [self.store.packed(self._loaded[slot]) for slot in found.tolist()]
        starts: Array = np.append(firsts, len(order)).astype(np.int32)
        return AdapterRows(
            [one.weights for one in packed],
            [one.table for one in packed],
            torch.from_numpy(order),
            torch.from_numpy(starts),
        )
