"""What the ranks of one engine exchange while they compute.  One rank: nothing, and nothing is started.

    on the device   all_reduce       the sum of all ranks' parts, after a product whose input is divided
                    gather_columns   the ranks' columns next to each other: logits
    on the host     least, barrier   decisions that every rank must take alike

torch.distributed carries both: NCCL between GPUs, gloo between CPUs and for what the host decides.  An own all-reduce
for small tensors would be chosen here; no other module names a collective.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Self, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

Result = TypeVar("Result")
# The same function: torch 2.13 has a new name for it, and warns of the old one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Ranks of an engine share a host, so nothing has to listen on another interface.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class Ranks:
    """One rank's view of all ranks.  Every rank must make the same calls in the same order, with equal shapes."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """`join` makes those of several ranks."""
        self.rank, self.size = rank, size

    @classmethod
    def join(cls, rank: int, size: int, meeting: Path, kind: str, timeout_s: float) -> Self:
        """Meet the other ranks.  Blocks until all are here.

        meeting    a file that does not exist before; all ranks name the same
        kind       device of the model, "cpu" or "cuda"; rank i uses the i-th visible GPU
        timeout_s  seconds that a rank waits for another one in an exchange

        Raises RuntimeError when the others do not arrive, or where this process has already joined others."""
        if dist.is_initialized():
            raise RuntimeError("this process already has an executor of several ranks: close it first")
        for name, interface in LOOPBACK.items():
            os.environ.setdefault(name, interface)
        device = None
        if kind == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo" if device is None else "cpu:gloo,cuda:nccl",
            store=dist.FileStore(str(meeting), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
        return cls(rank, size)

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' `part`, in its place.  All ranks get the same bits."""
        if self.size > 1:
            dist.all_reduce(part)
        return part

    def gather_columns(self, part: Tensor) -> Tensor:
        """Return all ranks' columns in the order of ranks: [..., C] -> [..., size * C]."""
        if self.size == 1 or not part.numel():
            return part.new_empty(*part.shape[:-1], self.size * part.shape[-1]) if self.size > 1 else part
        gathered = part.new_empty(self.size, *part.shape)
        all_gather(gathered.view(-1), part.contiguous().view(-1))
        return gathered.movedim(0, -2).reshape(*part.shape[:-1], -1)

    def copy_from_first(self, tensor: Tensor) -> None:
        """Overwrite `tensor` with rank 0's."""
        if self.size > 1:
            dist.broadcast(tensor, 0)

    def least(self, value: int) -> int:
        """Return the smallest of the ranks' values.  On the host; waits for all ranks."""
        if self.size > 1:
            shared = torch.tensor(value, dtype=torch.int64)
            dist.all_reduce(shared, dist.ReduceOp.MIN)
            value = int(shared)
        return value

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.least(0)

    def first_then_others(self, run: Callable[[], Result]) -> Result:
        """Return what `run` returns here.  Rank 0 runs first, so that the others find what it leaves in a cache."""
        result = run() if self.first else None
        self.barrier()
        return run() if result is None else result

    def abort(self) -> None:
        """End an exchange that waits for a rank which is lost, from another thread.  No exchange works afterwards.

        gloo ends by itself when the lost process does; NCCL's kernels wait forever."""
        if self.size > 1 and dist.is_initialized() and torch.cuda.is_available():
            with contextlib.suppress(RuntimeError, ValueError):
                dist.distributed_c10d._abort_process_group()

    def leave(self) -> None:
        """Let go of the others.  Harmless when called twice."""
        if self.size > 1 and dist.is_initialized():
            with contextlib.suppress(RuntimeError, ValueError):  # of ranks that are lost
                dist.destroy_process_group()


ALONE = Ranks()
