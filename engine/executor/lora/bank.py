"""Adapter slots of a worker, and the adapter of each row of a step.

    StepPlan.adapters ──────> adapter slot -> adapter
    Start.adapter, forks ───> batch slot -> adapter slot
    tokens of the step ─ rows ─> AdapterRows: rows sorted by adapter; None: the step has none

On a CPU an adapter slot refers to an adapter in host memory, so a load copies nothing.  On a GPU a load copies the
adapter to the slot's device memory, which also has the lists of rows (`device_slots.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from quire.engine.config import EngineConfig
from quire.engine.core.plan import StepPlan
from quire.engine.executor.kv_cache import GIB
from quire.engine.executor.lora.device_slots import DeviceSlots
from quire.engine.executor.lora.packing import gpu_pack, packer_for
from quire.engine.executor.lora.sites import Sites
from quire.engine.executor.lora.store import AdapterStore
from quire.engine.executor.ops import AdapterRows, DeviceAdapters
from quire.engine.executor.staging import Array, Staging

log = logging.getLogger(__name__)


class AdapterBank:
    """A worker's adapter slots, and the adapter slot of each batch slot."""

    def __init__(self, store: AdapterStore, max_seqs: int, device_slots: DeviceSlots | None = None) -> None:
        """`device_slots`: slots in a GPU's memory; None on a CPU."""
        self.store, self.device_slots = store, device_slots
        self._loaded: dict[int, str] = {}  # adapter slot -> adapter id
        self._of_slot = np.full(max_seqs, -1, dtype=np.int32)  # batch slot -> adapter slot
        self._adapted = 0  # batch slots with an adapter
        self._decoding: tuple[int, ...] | None = None  # decoding slots for which `_decoding_rows` was computed
        self._decoding_rows: AdapterRows | DeviceAdapters | None = None

    @classmethod
    def of(
        cls, config: EngineConfig, sites: Sites, dtype: torch.dtype, device: torch.device, *, max_seqs: int, rows: int
    ) -> AdapterBank:
        """Return the bank of a worker.  rows: maximum rows of a step.  The kernels must be loaded."""
        memory = int(config.lora_memory_gib * GIB)
        if device.type == "cpu":
            return cls(AdapterStore(packer_for(sites.sites, dtype).pack, memory, config.model), max_seqs)
        max_rank = config.lora_max_rank
        sizes = {"slots": config.lora_slots, "max_rank": max_rank, "max_rows": max(rows, max_seqs)}
        slots = DeviceSlots(sites.sites, **sizes, dtype=dtype, device=device)
        log.info(
            "%d LoRA slots of rank %d take %.2f GiB on the GPU",
            config.lora_slots,
            max_rank,
            slots.bytes / GIB,
        )
        return cls(AdapterStore(gpu_pack(sites.sites, dtype, max_rank), memory, config.model), max_seqs, slots)

    @property
    def device_rows(self) -> DeviceAdapters | None:
        """Return the GPU's buffers, which describe the last step with adapters; None on a CPU."""
        return None if self.device_slots is None else self.device_slots.rows

    def take(self, plan: StepPlan) -> None:
        """Apply a plan's loads, starts and forks.  Raises KeyError for an adapter that is not in host memory."""
        for slot in plan.freed_slots:
            self._put(slot, -1)
        for slot, adapter in plan.adapters:
            packed = self.store.packed(adapter)
            if self.device_slots is not None:
                self.device_slots.load(slot, packed)
            self._loaded[slot] = adapter
            self._decoding = None
        for start in plan.starts:
            self._put(start.slot, start.adapter)
        for fork in plan.forks:
            self._put(fork.slot, int(self._of_slot[fork.parent]))

    def _put(self, slot: int, adapter: int) -> None:
        """Assign an adapter slot to a batch slot; -1: the base model."""
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

    def rows(
        self,
        plan: StepPlan,
        decoding: Sequence[int],
        all_decoding: tuple[int, ...],
        staging: Staging,
        padded: tuple[int, int] | None = None,
    ) -> AdapterRows | DeviceAdapters | None:
        """Return the adapter rows of a step: first a row per `decoding` slot, then the rows of the plan's slices; None
        if no row has an adapter.  On a GPU `staging` holds the values that `apply` copies.

        all_decoding: slots of a step without slices; its rows are computed again only if it is another tuple object.
        padded: for a padded step, number of rows before the slices, and of all rows."""
        if not self._adapted:
            return None
        if plan.slices:
            self._decoding = None  # on a GPU this step overwrites the buffers of `_decoding_rows`
            sizes = [len(piece.token_ids) for piece in plan.slices]
            before = np.full(padded[0] if padded else len(decoding), -1, dtype=np.int32)
            before[: len(decoding)] = self._adapters_of(decoding)
            of_rows = np.concatenate(
                [before, np.repeat(self._adapters_of([piece.slot for piece in plan.slices]), sizes)]
            )
            return self._rows_of(of_rows, padded[1] if padded else len(self._of_slot), staging)
        if all_decoding is not self._decoding:
            of_rows = self._adapters_of(all_decoding)
            self._decoding_rows = self._rows_of(of_rows, len(self._of_slot), staging)
            self._decoding = all_decoding
        return self._decoding_rows

    def apply(self) -> None:
        """Copy the staged rows to the GPU's buffers; does nothing on a CPU."""
        if self.device_slots is not None:
            self.device_slots.apply()

    def _adapters_of(self, slots: Sequence[int]) -> Array:
        """Return the adapter slots of batch slots."""
        found: Array = self._of_slot[np.asarray(slots, dtype=np.int64)]
        return found

    def _rows_of(self, of_rows: Array, size: int, staging: Staging) -> AdapterRows | DeviceAdapters | None:
        """Return the adapter rows.  of_rows: adapter slot of each row, or -1.  size: maximum rows of a GPU's step."""
        if not (of_rows >= 0).any():
            return None
        if self.device_slots is None:
            return self._sorted(of_rows)
        wide = np.full(max(size, len(of_rows)), -1, dtype=np.int32)
        wide[: len(of_rows)] = of_rows
        self.device_slots.stage(wide, staging)
        return self.device_slots.rows

    def _sorted(self, of_rows: Array) -> AdapterRows:
        """Return rows with these adapter slots, sorted by adapter."""
        order = np.argsort(of_rows, kind="stable").astype(np.int32)
        order = order[np.count_nonzero(of_rows < 0) :]
        found, firsts = np.unique(of_rows[order], return_index=True)
        packed = [self.store.packed(self._loaded[slot]) for slot in found.tolist()]
        starts: Array = np.append(firsts, len(order)).astype(np.int32)
        return AdapterRows(
            [one.weights for one in packed],
            [one.table for one in packed],
            torch.from_numpy(order),
            torch.from_numpy(starts),
        )
