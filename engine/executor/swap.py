"""KV blocks of all layers to the host's memory and back, while the GPU computes.

    out    caches --block_gather--> staging --copy engine--> host       blocks are free after the gather
    back   caches <--block_scatter-- staging <--copy engine-- host

Everything runs on a stream of its own.  Why the detour through `staging`, in device memory: a kernel that reads or
writes the host's memory itself is as fast, but takes room and bandwidth on the chip for as long as the bus is busy, and
one copy for each block and layer reaches a fifth of the bus (csrc/README.md has the table).

Nobody decides here what to swap: see PagedAttention (SOSP 2023, section 4.5) for why one would.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.executor import ops
from engine.executor.kv_cache import Caches


class Out(NamedTuple):
    """How far a copy to the host is."""

    read: torch.cuda.Event  # the blocks were read: soon, if they fit the staging buffer
    done: torch.cuda.Event  # the host has them


class Swap:
    """Moves blocks for one stream of computation: the one that is current when `out` and `back` are called."""

    def __init__(self, caches: Caches, *, at_once: int = 32) -> None:
        """`at_once`: blocks that the staging buffer holds.  More are moved in turns."""
        self._caches = [tensor for cache in caches for tensor in (cache.k, cache.v)]
        first = self._caches[0]
        self._device = first.device
        shape = (at_once, len(self._caches), first[0].numel() * first.element_size())
        self._staging = torch.empty(shape, dtype=torch.uint8, device=self._device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def host_buffer(self, blocks: int) -> Tensor:
        """Room for so many blocks in the host's memory, [blocks, caches, bytes of a block] uint8; pinned for a GPU."""
        return torch.empty(blocks, *self._staging.shape[1:], dtype=torch.uint8, pin_memory=self._stream is not None)

    def out(self, blocks: list[int], host: Tensor) -> Out | None:
        """Copy blocks, as what was launched so far leaves them, to `host` [len(blocks), ...].

        None: it is done already.  Else nothing may write the blocks before `read`, or read `host` before `done`.
        """
        if self._stream is None:
            ops.block_gather(self._caches, torch.tensor(blocks, dtype=torch.int64), host)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # they may still be written
        with torch.cuda.stream(self._stream):
            ids = self._on_device(blocks)
            read = self._now()
            for part in self._parts(len(blocks)):
                staged = self._staging[: part.stop - part.start]
                ops.block_gather(self._caches, ids[part], staged)
                read = self._now()
                host[part].copy_(staged, non_blocking=True)
            return Out(read, self._now())

    def back(self, host: Tensor, blocks: list[int]) -> torch.cuda.Event | None:
        """Copy `host` [len(blocks), ...] into blocks that nothing launched later touches before the event returned.

        None: they are there already.  `host` must stay as it is until the event.
        """
        if self._stream is None:
            ops.block_scatter(host, torch.tensor(blocks, dtype=torch.int64), self._caches)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # their old content may still be read
        with torch.cuda.stream(self._stream):
            ids = self._on_device(blocks)
            for part in self._parts(len(blocks)):
                staged = self._staging[: part.stop - part.start]
                staged.copy_(host[part], non_blocking=True)
                ops.block_scatter(staged, ids[part], self._caches)
            return self._now()

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _parts(self, count: int) -> list[slice]:
        size = len(self._staging)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def _on_device(self, blocks: list[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)
