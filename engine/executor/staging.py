"""Staging of a step's inputs in pinned memory, sent to the device in one copy.

    host    | slots | edits | ids | positions | ...     pinned; one buffer per step in flight, and one to fill
               | send(): one asynchronous copy
    device  | slots | edits | ids | positions | ...     one buffer: stream order puts the next copy after all reads

A copy from pageable memory would wait until the device has finished all earlier steps.
On a CPU the device buffer is the host buffer, and nothing is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
ALIGN = 16  # bytes
TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


class Staging:
    """Staging buffers.  Call `begin_step`, `stage_array` per array, `send`; then the device may read the tensors."""

    def __init__(self, *, capacity: int, steps: int, device: torch.device) -> None:
        """`capacity` in bytes; `steps`: maximum steps in flight."""
        self._device = device
        self._here = device.type == "cpu"
        self._capacity = -(-capacity // ALIGN) * ALIGN
        count = 1 if self._here else steps + 1
        self._buffers = [
            torch.empty(self._capacity, dtype=torch.uint8, pin_memory=not self._here) for _ in range(count)
        ]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._copied = [torch.cuda.Event() for _ in range(0 if self._here else count)]
        self._there = self._buffers[0] if self._here else torch.empty_like(self._buffers[0], device=device)
        self._views = {kind: self._there.view(kind) for kind in TORCH.values()}
        self._current = 0
        self._end = 0

    def begin_step(self) -> None:
        """Start staging the next step.  Waits only for the last copy from this buffer, which was several steps ago."""
        self._current = (self._current + 1) % len(self._buffers)
        self._end = 0
        if not self._here:
            self._copied[self._current].synchronize()

    def stage_array(self, values: Array) -> Tensor:
        """Stage int32, int64 or float32 values.  Return the device tensor, same shape, that holds them after `send`."""
        kind = TORCH[values.dtype]
        start, size = self._end, values.nbytes
        if start + size > self._capacity:  # rare: for example block tables of many long prompts with cached prefixes
            giant = torch.from_numpy(values.copy())
            return giant if self._here else giant.pin_memory().to(self._device, non_blocking=True)
        self._end = -(-(start + size) // ALIGN) * ALIGN
        self._arrays[self._current][start : start + size].view(values.dtype)[:] = values.reshape(-1)
        first = start // values.itemsize
        there = self._views[kind][first : first + values.size]
        return there if values.ndim == 1 else there.view(values.shape)

    def send(self) -> None:
        """Copy everything staged since `begin_step` to the device: one asynchronous copy on the current stream."""
        if self._here or not self._end:
            return
        self._there[: self._end].copy_(self._buffers[self._current][: self._end], non_blocking=True)
        self._copied[self._current].record()
