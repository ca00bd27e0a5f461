"""What a step brings to the device, gathered in pinned memory and sent in one copy.

    host    | slots | edits | ids | positions | ...     pinned; one such buffer for each step in flight, and one to fill
               | send(): one asynchronous copy
    device  | slots | edits | ids | positions | ...     one buffer: stream order keeps the next copy behind its readers

A copy from ordinary memory would wait until the device is done with every step before: that is what this avoids.
On a CPU both are the same memory and nothing is copied.
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
    """Call `begin_step`, `stage_array` as often as needed, `send`.  Then the device may read the staged tensors."""

    def __init__(self, *, capacity: int, steps: int, device: torch.device) -> None:
        """`capacity` in bytes; `steps` how many may be in flight."""
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
        """Start the next step's collection.  Waits only for the copy of a step that ended long ago."""
        self._current = (self._current + 1) % len(self._buffers)
        self._end = 0
        if not self._here:
            self._copied[self._current].synchronize()

    def stage_array(self, values: Array) -> Tensor:
        """Where these int32, int64 or float32 values will be on the device after `send`; same shape."""
        kind = TORCH[values.dtype]
        start, size = self._end, values.nbytes
        if start + size > self._capacity:  # a rare giant, say the cached prefixes of many long prompts at once
            giant = torch.from_numpy(values.copy())
            return giant if self._here else giant.pin_memory().to(self._device, non_blocking=True)
        self._end = -(-(start + size) // ALIGN) * ALIGN
        self._arrays[self._current][start : start + size].view(values.dtype)[:] = values.reshape(-1)
        first = start // values.itemsize
        there = self._views[kind][first : first + values.size]
        return there if values.ndim == 1 else there.view(values.shape)

    def send(self) -> None:
        """One asynchronous copy of everything staged since `begin_step`, on the current stream."""
        if self._here or not self._end:
            return
        self._there[: self._end].copy_(self._buffers[self._current][: self._end], non_blocking=True)
        self._copied[self._current].record()
