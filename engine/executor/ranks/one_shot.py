"""The sum of small and medium tensors of several GPUs, in one kernel of our own (csrc/cuda/ranks).

Each rank writes its part into the inboxes of the others over NVLink, and adds up what arrives in its own.  The inboxes
are torch's symmetric memory, which all ranks map; NVLink multicast is not used.  Parts are added in the same order on
all ranks, so that all get the same bits.  The kernel also adds the residual and computes the norm that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from quire.engine.executor import ops
from quire.engine.executor.errors import one_line

c10d: Any = _distributed_c10d
# Bytes of its part that a rank sends, to all others together.  Up to the first border every 8 bytes carry the number of
# the call, which doubles what travels; beyond the second NCCL sums.
MOST_WORDS_BYTES, MOST_BYTES = 256 << 10, 16 << 20
WORDS_SHARE, BLOCKS_SHARE = 16 << 10, 64 << 10  # bytes that a CTA sends at most; an inbox takes 96 MiB with two ranks
# How far the kernel's sum may be from NCCL's, as a share of the largest: both round bfloat16 once or twice.
MOST_DRIFT = 0.02


class OneShot:
    """The inboxes of all ranks, and which sums go through them.

    A process can have one only: torch numbers its meetings for the whole process, so those of a second one would wait
    for ranks that count from another number."""

    made = False  # whether this process has, or had, one

    def __init__(self, name: str, store: Any, rank: int, size: int, host: Any, multiprocessors: int) -> None:
        """Take an inbox on the current GPU and map the others'.

        name: of the group of ranks, unique in the process.  host: their process group of the CPU.  multiprocessors: of
        the smallest GPU.  Raises RuntimeError where GPUs cannot write each other's memory."""
        OneShot.made = True
        self.name = name
        if size > ops.MOST_SUM_RANKS:
            raise RuntimeError(f"{size} ranks; the kernel takes {ops.MOST_SUM_RANKS}")
        # torch finds the group by its name, and keeps no reference.
        self._group = c10d.ProcessGroup(store, rank, size)
        self._group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, host)
        self._group._set_group_name(name)
        c10d._register_process_group(name, self._group)
        c10d._SymmetricMemory.set_group_info(name, rank, size, store)
        device = torch.device("cuda", torch.cuda.current_device())
        blocks_share = max(BLOCKS_SHARE // (size - 1) // 16 * 16, WORDS_SHARE)
        bytes_ = ops.Inboxes.bytes_of(size, WORDS_SHARE, blocks_share)
        inbox = c10d._SymmetricMemory.empty_strided_p2p([bytes_], [1], torch.uint8, device, name)
        inbox.zero_()
        torch.cuda.synchronize()  # before the other ranks, which wait in the next line, may write it
        self.memory = c10d._SymmetricMemory.rendezvous(inbox, name)
        # Addresses of what torch took for each rank, in which the inbox has the same place.
        taken = [int(address) for address in self.memory.buffer_ptrs]
        addresses = [address + inbox.data_ptr() - taken[rank] for address in taken]
        calls = torch.zeros(ops.SUM_CTAS, dtype=torch.int32, device=device)
        self.inboxes = ops.Inboxes(inbox, addresses, calls, rank, WORDS_SHARE, blocks_share, multiprocessors)
        self.most_words_bytes, self.most_bytes = MOST_WORDS_BYTES // (size - 1), MOST_BYTES // (size - 1)

    def sends_words(self, rows: int, size: int, dtype: torch.dtype) -> bool:
        """Return whether parts of this shape, which `takes` takes, travel with the call's number in every 8 bytes."""
        few = rows * size * dtype.itemsize <= self.most_words_bytes
        return few and self.inboxes.takes(rows, size, dtype, words=True)

    def takes(self, rows: int, size: int, dtype: torch.dtype) -> bool:
        """Return whether parts [rows, size] can be summed here.  The same on all ranks."""
        fits = rows * size * dtype.itemsize <= self.most_bytes
        return fits and (self.sends_words(rows, size, dtype) or self.inboxes.takes(rows, size, dtype, words=False))

    def all_reduce(self, part: Tensor) -> Tensor:
        """All-reduce the ranks' parts [..., size] in place; `part` is contiguous."""
        rows = part.view(-1, part.shape[-1])
        ops.rank_sum(rows, self.inboxes, words=self.sends_words(len(rows), rows.shape[1], part.dtype))
        return part

    def add(self, x: Tensor, part: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """All-reduce the parts [rows, size] and add them to x in place.  Return x, and x after an RMS norm."""
        words = self.sends_words(len(part), part.shape[1], part.dtype)
        y, normed = ops.rank_sum(part, self.inboxes, words=words, plus=x, norm=norm, eps=eps)
        assert normed is not None
        return y, normed

    def wrong(self, reduce: Callable[[Tensor], Tensor]) -> str:
        """Return which sums differ from those of `reduce`; empty: none.

        All ranks must call this, and each makes all calls whatever it finds."""
        found = []
        try:
            for rows in (1, 32, 1, 200, 1):  # sent in both ways
                if not self._right(rows, reduce):
                    found.append(str(rows))
        except (RuntimeError, AttributeError, ValueError) as error:  # for example kernels without this one
            return one_line(error)
        return f"its sums of {', '.join(found)} rows are wrong" if found else ""

    def _right(self, rows: int, reduce: Callable[[Tensor], Tensor]) -> bool:
        part = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        wanted, summed = reduce(part.clone()).float(), self.all_reduce(part).float()
        return bool((summed - wanted).abs().max() <= MOST_DRIFT * wanted.abs().max())
