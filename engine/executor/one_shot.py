"""The sum of small tensors of several GPUs, in one kernel of our own (csrc/cuda/ranks).

Each rank writes its part into the inboxes of the others over NVLink, and adds up what arrives in its own.  The inboxes
are torch's symmetric memory, which all ranks map; NVLink multicast is not used.  Parts are added in the same order on
all ranks, so that all get the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from engine.executor import ops
from engine.executor.errors import one_line

log = logging.getLogger(__name__)
c10d: Any = _distributed_c10d
MOST_BYTES = 1 << 20  # of two ranks: with more, each sends and reads more
ALIGN = 16  # bytes; the kernel takes multiples
# How far the kernel's sum may be from NCCL's, as a share of the largest: both round bfloat16 once or twice.
MOST_DRIFT = 0.02


class OneShot:
    """The inboxes of all ranks.

    A process can have one only: torch numbers its meetings for the whole process, so those of a second one would wait
    for ranks that count from another number."""

    made = False  # whether this process has, or had, one

    def __init__(self, name: str, store: Any, rank: int, size: int, host: Any) -> None:
        """Take an inbox on the current GPU and map the others'.

        name: of the group of ranks, unique in the process.  host: their process group of the CPU.
        Raises RuntimeError where GPUs cannot write each other's memory."""
        OneShot.made = True
        self._rank = rank
        # torch finds the group by its name, and keeps no reference.
        self._group = c10d.ProcessGroup(store, rank, size)
        self._group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, host)
        self._group._set_group_name(name)
        c10d._register_process_group(name, self._group)
        c10d._SymmetricMemory.set_group_info(name, rank, size, store)
        unit = ops.SUM_CTAS * ops.SUM_SHARE
        self.most_bytes = max(MOST_BYTES * 2 // size // unit, 1) * unit
        device = torch.device("cuda", torch.cuda.current_device())
        bytes_ = ops.one_shot_inbox_bytes(size, self.most_bytes)
        inbox = c10d._SymmetricMemory.empty_strided_p2p([bytes_], [1], torch.uint8, device, name)
        inbox.zero_()
        torch.cuda.synchronize()  # before the other ranks, which wait in the next line, may write it
        self._inbox, self.memory = inbox, c10d._SymmetricMemory.rendezvous(inbox, name)
        addresses = [int(address) for address in self.memory.buffer_ptrs]  # of what torch took for each rank
        self._inboxes = [address + inbox.data_ptr() - addresses[rank] for address in addresses]
        self._calls = torch.zeros(ops.SUM_CTAS, dtype=torch.int32, device=device)

    def takes(self, part: Tensor) -> bool:
        """Return whether the sum of tensors like this one can be computed here.  The same on all ranks."""
        size = part.numel() * part.element_size()
        return 0 < size <= self.most_bytes and size % ALIGN == 0 and part.is_contiguous() and part.dtype in DTYPES

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, in place of this one."""
        return ops.one_shot_sum(part, self._inboxes, self._calls, self._rank, self.most_bytes)

    @classmethod
    def tried(
        cls, name: str, store: Any, rank: int, size: int, host: Any, reduce: Callable[[Tensor], Tensor]
    ) -> tuple[Self | None, str]:
        """Return one whose sums are right, or None and why not.  reduce: sums all ranks' tensors by other means."""
        try:
            made = cls(name, store, rank, size, host)
            for rows in (1, 32, 1):
                part = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
                wanted, found = reduce(part.clone()).float(), made.all_reduce(part).float()
                if not ((found - wanted).abs().max() <= MOST_DRIFT * wanted.abs().max()):
                    return None, "its sums are wrong"
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:  # no peer access, or another torch
            return None, one_line(error)
        return made, ""


DTYPES = {torch.bfloat16, torch.float16, torch.float32}  # of the kernel
