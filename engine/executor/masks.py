"""Token masks for the sampling kernels: one row per slot, at a fixed address.

    constraints.fill ──> host [max_seqs, ceil(V / 32)] i32 ── send, on a separate stream ──> device, same shape
                         pinned memory                        while the model runs             (CPU: the host's memory)

The host may write the masks of step N+1 once step N is collected: by then sampling has read the masks of step N.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

# Two copies are merged if at most this many unneeded rows lie between them.  A copy takes 5 us on the host; 8 rows of
# 151,936 tokens take 3 us on the bus.
GAP = 8


class Masks:
    """The masks of all slots, on the host and on one device."""

    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device) -> None:
        gpu = device.type == "cuda"
        self._host = torch.zeros(max_seqs, -(-vocab_size // 32), dtype=torch.int32, pin_memory=gpu)
        self._device = self._host.to(device)  # on a CPU this is self._host
        self._stream = torch.cuda.Stream(device) if gpu else None

    @property
    def host(self) -> npt.NDArray[np.int32]:
        """Host memory, written by constraints.py: [max_seqs, ceil(V / 32)]; bit t % 32 of word t / 32 allows token
        t."""
        rows: npt.NDArray[np.int32] = self._host.numpy()
        return rows

    def address(self, slot: int) -> int:
        """Return the device address of a slot's mask."""
        return self._device[slot].data_ptr()

    def send(self, slots: Iterable[int]) -> None:
        """Copy the rows of these slots to the device, for later launches.  The host does not wait."""
        if self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            for first, end in runs(sorted(slots), GAP):
                self._device[first:end].copy_(self._host[first:end], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)


def runs(numbers: list[int], gap: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, end) that cover ascending integers.  Ranges less than `gap` apart are merged."""
    if not numbers:
        return
    first = last = numbers[0]
    for number in numbers[1:]:
        if number - last > gap:
            yield first, last + 1
            first = number
        last = number
    yield first, last + 1
