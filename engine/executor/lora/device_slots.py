"""Adapter slots in a GPU's memory, and the buffers that list a step's rows by adapter.

    host memory (pinned) ──side stream──> weights, table of a slot     between steps: earlier steps end first, later
                                                                       ones wait for the copy
    rows of the step ─ sorted by slot, in tiles of up to 32 ─ staging ─> order, tiles, slot_of_row

All of these tensors are at fixed addresses, so CUDA graphs can read them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.engine.executor import ops
from quire.engine.executor.lora.layouts import GpuBlocks
from quire.engine.executor.lora.packing import PackedAdapter
from quire.engine.executor.lora.sites import Site
from quire.engine.executor.staging import Array, Staging


class DeviceSlots:
    """Owner of the adapter slots of one GPU.  Tests create it on a CPU, where copies are complete at once."""

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        slots: int,
        max_rank: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`max_rank`: maximum rank of an adapter; a slot has memory for it.  `max_rows`: maximum rows of a step."""
        columns = [[part.outputs for part in site.parts] for site in sites]
        layout = GpuBlocks(max_rank)
        elements = sum(layout.elements(site.inputs, sizes) for site, sizes in zip(sites, columns, strict=True))
        ranks = -(-max_rank // ops.LORA_RANKS) * ops.LORA_RANKS
        where: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.rows = ops.DeviceAdapters(
            weights=torch.zeros(slots, elements, dtype=dtype, device=device),
            table=torch.zeros(slots, len(sites), ops.LORA_FIELDS, dtype=torch.int64, device=device),
            order=torch.zeros(max_rows, **where),
            tiles=torch.full((ops.lora_tiles(max_rows, slots), 4), -1, **where),
            slot_of_row=torch.full((max_rows,), -1, **where),
            features=columns,
            ranks=[max(1, len(sizes)) * ranks for sizes in columns],
            steps=[-(-site.inputs // ops.LORA_INPUTS) for site in sites],
        )
        self._slots, self._device = slots, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copying: deque[tuple[torch.cuda.Event, PackedAdapter]] = deque()
        self._staged: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def bytes(self) -> int:
        """Return the device memory of all slots."""
        return self.rows.weights.nbytes + self.rows.table.nbytes

    def load(self, slot: int, packed: PackedAdapter) -> None:
        """Copy an adapter to a slot, in order with the current stream: steps launched before read the old adapter."""
        if self._stream is None:
            self._copy(slot, packed)
            return
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()  # its host memory may be freed
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            self._copy(slot, packed)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        computing.wait_event(copied)
        self._copying.append((copied, packed))

    def _copy(self, slot: int, packed: PackedAdapter) -> None:
        self.rows.weights[slot, : packed.weights.numel()].copy_(packed.weights, non_blocking=True)
        self.rows.table[slot].copy_(packed.table, non_blocking=True)

    def stage(self, slot_of_row: Array, staging: Staging) -> None:
        """Stage the rows of a step.  slot_of_row [rows] i32: -1: no adapter."""
        order, tiles = rows_by_slot(slot_of_row, self._slots)
        self._staged = (staging.stage_array(order), staging.stage_array(tiles), staging.stage_array(slot_of_row))

    def apply(self) -> None:
        """Copy the rows staged last to the buffers, unless that is done."""
        if self._staged is None:
            return
        for buffer, staged in zip((self.rows.order, self.rows.tiles, self.rows.slot_of_row), self._staged, strict=True):
            buffer[: len(staged)].copy_(staged)
        self._staged = None


def rows_by_slot(slot_of_row: Array, slots: int) -> tuple[Array, Array]:
    """Return all rows, those with an adapter first and sorted by slot, and the tiles [tiles, 4] of the sorted rows."""
    order = np.argsort(slot_of_row, kind="stable").astype(np.int32)
    order = np.roll(order, -int(np.count_nonzero(slot_of_row < 0)))  # base rows last
    tiles = np.full((ops.lora_tiles(len(slot_of_row), slots), 4), -1, dtype=np.int32)
    found, counts = np.unique(slot_of_row[slot_of_row >= 0], return_counts=True)
    first = at = 0
    for slot, count in zip(found.tolist(), counts.tolist(), strict=True):
        for begin in range(0, count, ops.LORA_TILE):
            tiles[at] = slot, first + begin, min(ops.LORA_TILE, count - begin), 0
            at += 1
        first += count
    return order, tiles
