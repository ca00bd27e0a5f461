"""All-reduce of small and medium tensors over several GPUs, in one kernel of our own (csrc/cuda/ranks).

Each rank writes its part into the inboxes of the others over NVLink, and adds up the parts in its own inbox.  The
inboxes are torch's symmetric memory, which all ranks map; NVLink multicast is not used.  Parts are added in the same
order on all ranks, so that all get the same bits.  The kernel also adds the residual and computes the norm that
follows.
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
# Limits of the bytes that a rank sends to all others together.  Up to the first limit every 8 bytes contain the call
# number (words protocol), which doubles the bytes; above the second limit NCCL does the all-reduce.
MAX_WORDS_BYTES, MAX_BYTES = 256 << 10, 16 << 20
WORDS_SHARE, BLOCKS_SHARE = 16 << 10, 64 << 10  # maximum bytes sent per CTA; an inbox takes 96 MiB with two ranks
# Maximum difference from NCCL's result, relative to the largest value: both round bfloat16 once or twice.
MAX_DRIFT = 0.02


class OneShot:
    """The inboxes of all ranks, and the choice of the all-reduces that go through them.

    A process can create only one: torch counts the rendezvous of each process, and ranks whose counts differ would wait
    for each other forever."""

    made = False  # whether this process has created one

    def __init__(self, name: str, store: Any, rank: int, size: int, host: Any, multiprocessors: int) -> None:
        """Allocate an inbox on the current GPU and map the others' inboxes.

        name: of the group of ranks, unique in the process.  host: their gloo process group.  multiprocessors: minimum
        over the GPUs.  Raises RuntimeError if GPUs cannot write each other's memory."""
        OneShot.made = True
        self.name = name
        if size > ops.MAX_SUM_RANKS:
            raise RuntimeError(f"{size} ranks; the kernel takes {ops.MAX_SUM_RANKS}")
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
        torch.cuda.synchronize()  # before the other ranks, which wait in the next line, may write to it
        self.memory = c10d._SymmetricMemory.rendezvous(inbox, name)
        # Addresses of the memory that torch allocated for each rank; the inbox has the same offset in all of them.
        taken = [int(address) for address in self.memory.buffer_ptrs]
        addresses = [address + inbox.data_ptr() - taken[rank] for address in taken]
        calls = torch.zeros(ops.SUM_CTAS, dtype=torch.int32, device=device)
        self.inboxes = ops.Inboxes(inbox, addresses, calls, rank, WORDS_SHARE, blocks_share, multiprocessors)
        self.max_words_bytes, self.max_bytes = MAX_WORDS_BYTES // (size - 1), MAX_BYTES // (size - 1)

    def sends_words(self, rows: int, size: int, dtype: torch.dtype) -> bool:
        """Return whether parts of this shape, which `takes` accepts, are sent as words: the call number in every 8
        bytes."""
        few = rows * size * dtype.itemsize <= self.max_words_bytes
        return few and self.inboxes.takes(rows, size, dtype, words=True)

    def takes(self, rows: int, size: int, dtype: torch.dtype) -> bool:
        """Return whether the one-shot all-reduce takes parts [rows, size].  Equal on all ranks."""
        fits = rows * size * dtype.itemsize <= self.max_bytes
        return fits and (self.sends_words(rows, size, dtype) or self.inboxes.takes(rows, size, dtype, words=False))

    def all_reduce(self, part: Tensor) -> Tensor:
        """All-reduce the ranks' parts [..., size] in place; `part` is contiguous."""
        rows = part.view(-1, part.shape[-1])
        ops.rank_sum(rows, self.inboxes, words=self.sends_words(len(rows), rows.shape[1], part.dtype))
        return part

    def add(self, x: Tensor, part: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """All-reduce the parts [rows, size] and add the result to x in place.  Return x, and x after an RMS norm."""
        words = self.sends_words(len(part), part.shape[1], part.dtype)
        y, normed = ops.rank_sum(part, self.inboxes, words=words, plus=x, norm=norm, eps=eps)
        assert normed is not None
        return y, normed

    def wrong(self, reduce: Callable[[Tensor], Tensor]) -> str:
        """Return an error text with the numbers of rows whose results differ from those of `reduce`; empty: none do.

        All ranks must call this: it makes the same collective calls whatever their results are."""
        found = []
        try:
            for rows in (1, 32, 1, 200, 1):  # both protocols: words and blocks
                if not self._right(rows, reduce):
                    found.append(str(rows))
        except (RuntimeError, AttributeError, ValueError) as error:  # for example a library without this kernel
            return one_line(error)
        return f"its all-reduces of {', '.join(found)} rows are wrong" if found else ""

    def _right(self, rows: int, reduce: Callable[[Tensor], Tensor]) -> bool:
        part = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        wanted, summed = reduce(part.clone()).float(), self.all_reduce(part).float()
        return bool((summed - wanted).abs().max() <= MAX_DRIFT * wanted.abs().max())
