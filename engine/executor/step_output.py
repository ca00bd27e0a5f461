"""Outputs of steps: sampled tokens on the device, their pinned copies on the host, and the time that each step took.

device   one StepOutput: each step writes it ── copy ──┐
host     StepOutput of step N | of step N+1 | ...  <───┘   one for each step in flight, and one that is being read
"""

from __future__ import annotations

import time

import torch
from torch import Tensor


class Stopwatch:
    """Measures a step's time on its device, and waits for its end.  On a CPU the step has ended when `stop` is
    called."""

    def __init__(self, gpu: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if gpu else []
        self._began = self._ended = 0.0

    def start(self) -> None:
        if self._events:
            self._events[0].record()
        else:
            self._began = time.perf_counter()

    def stop(self) -> None:
        if self._events:
            self._events[1].record()
        else:
            self._ended = time.perf_counter()

    def wait(self) -> float:
        """Wait for the work queued before `stop`.  Returns the seconds since the device reached `start`."""
        if not self._events:
            return self._ended - self._began
        self._events[1].synchronize()
        seconds: float = self._events[0].elapsed_time(self._events[1]) / 1000
        return seconds


class StepOutput:
    """Tokens and outcomes of a step's slots, in their order, as views of one buffer, so that one copy moves both."""

    def __init__(self, buffer: Tensor, count: int) -> None:
        self.all = buffer  # [9 * count] u8
        self.tokens = buffer[: 8 * count].view(torch.int64)  # [count]
        self.outcomes = buffer[8 * count :]  # [count] u8, values of engine/executor/sampling.py

    @classmethod
    def allocate(cls, count: int, *, device: torch.device | str = "cpu", pinned: bool = False) -> StepOutput:
        """Return an output of zeros.  pinned: in pinned memory, to which a GPU copies asynchronously."""
        return cls(torch.zeros(9 * count, dtype=torch.uint8, device=device, pin_memory=pinned), count)


class StepOutputs:
    """The output on the device, and a ring of host copies, each with a clock."""

    def __init__(self, max_seqs: int, device: torch.device, depth: int) -> None:
        """`depth`: maximum steps in flight."""
        gpu = device.type == "cuda"
        self.device = StepOutput.allocate(max_seqs, device=device)
        self._host = [StepOutput.allocate(max_seqs, pinned=gpu) for _ in range(depth + 1)]
        self._clocks = [Stopwatch(gpu) for _ in self._host]
        self._current = 0

    def start(self) -> None:
        """Start the clock of a new step."""
        self._clocks[self._next()].start()

    def copy(self) -> tuple[StepOutput, Stopwatch]:
        """Launch the copy of the device's output to the host, and stop the step's clock."""
        at = self._current = self._next()
        self._host[at].all.copy_(self.device.all, non_blocking=True)
        self._clocks[at].stop()
        return self._host[at], self._clocks[at]

    def _next(self) -> int:
        return (self._current + 1) % len(self._host)
