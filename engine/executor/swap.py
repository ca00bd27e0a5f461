"""KV swap: copies blocks of all layers to host memory and back, overlapped with computation.

    out    caches --block_gather--> staging --copy engine--> host       blocks are free after the gather
    back   caches <--block_scatter-- staging <--copy engine-- host

All copies run on a separate stream.  Blocks pass through `staging`, a buffer in device memory, because both
alternatives are worse (docs/notes/kernels/layers.md has the table).  A kernel that accesses host memory itself is as
fast, but occupies multiprocessors while the bus is busy.  One copy per block and layer reaches a fifth of the bus
bandwidth.

The scheduler decides what to swap, and `engine/core/policy/step_cost.py` predicts whether swapping is faster than
recomputing (PagedAttention, SOSP 2023, section 4.5).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from quire.engine.executor import ops
from quire.engine.executor.kv_cache import Caches, by_shape


class Swap:
    """Swaps blocks in order with one compute stream: the current stream at the calls of `out` and `back`.

    The copies take effect in stream order: earlier launches see the state before, later launches the state after.  The
    stream waits until swapped-in blocks have arrived, and until swapped-out blocks have been read.  A swap of more
    blocks than the staging buffer holds takes several rounds; the stream then waits for all rounds but the last."""

    def __init__(
        self, caches: Caches, host_blocks: int, *, at_once: int = 32, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Allocate the host memory, pinned for a GPU.  `at_once`: capacity of the staging buffer in blocks; more are
        moved in rounds.  `stream`: the stream of the copies; None: a new one."""
        self._groups = by_shape(caches)
        first = self._groups[0][0]
        self._device, self._blocks = first.device, len(first)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = stream or torch.cuda.Stream(self._device)
        staged = min(at_once, host_blocks) if self._stream else 0
        shapes = [(len(group), group[0][0].numel() * group[0].element_size()) for group in self._groups]
        self._staging = [torch.empty(staged, *shape, dtype=torch.uint8, device=self._device) for shape in shapes]
        # Per shape of caches: [host blocks, caches, bytes per block and cache].  On a CPU pages are allocated when
        # first written.
        pinned = self._stream is not None
        self.host = [torch.empty(host_blocks, *shape, dtype=torch.uint8, pin_memory=pinned) for shape in shapes]
        self._at_once, self.host_blocks = max(1, staged), host_blocks
        self.window_host_blocks: list[int] = []  # only GroupedSwap has window groups
        self._block_bytes = sum(count * size for count, size in shapes)
        self._moving: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()  # bytes, begin, end
        self._moved, self._seconds = 0, 0.0  # bytes and seconds of copies since the last call of `moved`

    def out(self, pairs: list[tuple[int, int]]) -> torch.cuda.Event | None:
        """Copy block -> host block for each pair.  Returns the event of completion; None: already complete."""
        begun = time.perf_counter()
        if self._stream is None:
            for blocks, host in runs([block for block, _ in pairs], [there for _, there in pairs]):
                ids = torch.tensor(blocks, dtype=torch.int64)
                for group, memory in zip(self._groups, self.host, strict=True):
                    ops.block_gather(group, ids, memory[host])
            self._count(len(pairs), begun)
            return None
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)  # earlier launches may still write the blocks
        with torch.cuda.stream(self._stream):
            begin = self._now()
            read = begin
            for part in self._parts(pairs):
                blocks, there = [block for block, _ in part], [host for _, host in part]
                ids = self._on_device(blocks)
                for group, staged in zip(self._groups, self._staging, strict=True):
                    ops.block_gather(group, ids, staged[: len(part)])
                read = self._now()
                for places, host in runs(list(range(len(part))), there):
                    for memory, staged in zip(self.host, self._staging, strict=True):
                        memory[host].copy_(staged[places[0] : places[-1] + 1], non_blocking=True)
            end = self._now()
        computing.wait_event(read)  # from here on the blocks' next owner may write them
        self._moving.append((len(pairs), begin, end))
        return end

    def back(self, pairs: list[tuple[int, int]]) -> None:
        """Copy host block -> block for each pair.  Blocks must be distinct."""
        begun = time.perf_counter()
        if self._stream is None:
            for blocks, host in runs([block for _, block in pairs], [there for there, _ in pairs]):
                ids = torch.tensor(blocks, dtype=torch.int64)
                for group, memory in zip(self._groups, self.host, strict=True):
                    ops.block_scatter(memory[host], ids, group)
            self._count(len(pairs), begun)
            return
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)  # earlier launches may still read the blocks
        with torch.cuda.stream(self._stream):
            begin = self._now()
            for part in self._parts(pairs):
                blocks, there = [block for _, block in part], [host for host, _ in part]
                for places, host in runs(list(range(len(part))), there):
                    for memory, staged in zip(self.host, self._staging, strict=True):
                        staged[places[0] : places[-1] + 1].copy_(memory[host], non_blocking=True)
                ids = self._on_device(blocks)
                for group, staged in zip(self._groups, self._staging, strict=True):
                    ops.block_scatter(staged[: len(part)], ids, group)
            end = self._now()
        computing.wait_event(end)
        self._moving.append((len(pairs), begin, end))

    def moved(self) -> tuple[int, float]:
        """Return (bytes, seconds) of the copies completed since the last call.  Never waits."""
        while self._moving and self._moving[0][2].query():
            count, begin, end = self._moving.popleft()
            self._moved += count * self._block_bytes
            self._seconds += begin.elapsed_time(end) / 1e3
        moved, self._moved, self._seconds = (self._moved, self._seconds), 0, 0.0
        return moved

    def measure(self) -> float:
        """Return the measured bandwidth of swaps in bytes/s.  Device blocks keep their contents; host blocks are
        overwritten."""
        count = min(32, self.host_blocks, self._blocks)
        if not count:
            return 0.0
        blocks = random.Random(0).sample(range(self._blocks), count)
        best = 0.0
        for _ in range(4):  # the first round allocates pages
            begun = time.perf_counter()
            self.out([(block, at) for at, block in enumerate(blocks)])
            self.back([(at, block) for at, block in enumerate(blocks)])
            if self._stream is not None:
                self._stream.synchronize()
            best = max(best, 2 * count * self._block_bytes / (time.perf_counter() - begun))
        self.moved()
        return best

    def _count(self, blocks: int, begun: float) -> None:
        self._moved += blocks * self._block_bytes
        self._seconds += time.perf_counter() - begun

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _parts(self, pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        size = self._at_once
        return (pairs[start : start + size] for start in range(0, len(pairs), size))

    def _on_device(self, blocks: list[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)


def runs(blocks: list[int], host: list[int]) -> Iterator[tuple[list[int], slice]]:
    """Split pairs (block, host block) into runs of consecutive host blocks; yield (blocks, slice of host blocks)."""
    start = 0
    for at in range(1, len(host) + 1):
        if at == len(host) or host[at] != host[at - 1] + 1:
            yield blocks[start:at], slice(host[start], host[at - 1] + 1)
            start = at
