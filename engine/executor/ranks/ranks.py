"""Collectives between the ranks of one engine.  With one rank nothing is sent, and nothing is started.

    on the device   all_reduce       the sum of all ranks' parts, after a row-parallel GEMM; on a CPU in rank order, so
                                     that no sum depends on the batch
                    add_and_norm     all_reduce, added to the residual, and the norm after it
                    gather_columns   the ranks' columns side by side: logits
                    all_max_on_device    maximum of each value: the argmax of vocab-parallel logits
    on the host     all_min, barrier decisions that every rank must take alike
                    all_max          maximum of each value: scales of rows whose columns are sharded

torch.distributed implements the collectives: NCCL between GPUs, gloo between CPUs and for decisions of the host.
All-reduces of up to a few MiB between GPUs use `one_shot.py` if it works.  No other module names a collective.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from quire.engine.executor.errors import one_line
from quire.engine.executor.ranks.one_shot import OneShot

log = logging.getLogger(__name__)
c10d: Any = _distributed_c10d  # its type stubs are incomplete

Result = TypeVar("Result")


class Ranks:
    """One rank's view of all ranks.  Every rank must make the same calls in the same order, with equal shapes."""

    def __init__(self, rank: int = 0, size: int = 1, host: Any = None, device: Any = None) -> None:
        """`host`, `device`: process groups for tensors on the host and on the model's device; `join` makes them.

        They are not torch.distributed's global groups, so a process may have several executors."""
        self.rank, self.size = rank, size
        self._host, self._device = host, device
        self.one_shot: OneShot | None = None

    @classmethod
    def join(cls, rank: int, size: int, meeting: Path, kind: str, timeout_s: float) -> Self:
        """Join the rendezvous of all ranks.  Blocks until all have joined.

        meeting    path of a file that does not exist yet, equal on all ranks
        kind       device of the model, "cpu" or "cuda"; rank i uses the i-th visible GPU
        timeout_s  seconds that a rank waits for another one in a collective

        Raises RuntimeError when the others do not arrive."""
        store = c10d.FileStore(str(meeting), size)  # a file, not a port to which anyone could connect
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        # Ranks of an engine share a host, so nothing has to listen on another interface.
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        host = c10d.ProcessGroupGloo(c10d.PrefixStore("host", store), rank, size, options)
        if kind != "cuda":
            return cls(rank, size, host, host)
        ranks = cls(rank, size, host, cls._nccl(store, rank, size, timeout_s))
        ranks._use_one_shot(c10d.PrefixStore("one shot", store), str(meeting))
        return ranks

    def _use_one_shot(self, store: Any, name: str) -> None:
        """All-reduce tensors of up to a few MiB by our own kernel, if it works on all ranks."""
        if not self.all_min(not OneShot.made):
            log.info("all-reduces go through NCCL: another executor of this process owns the one-shot all-reduce")
            return
        multiprocessors = self.all_min(torch.cuda.get_device_properties(self.rank).multi_processor_count)
        one_shot, reason = None, ""
        try:
            one_shot = OneShot(name, store, self.rank, self.size, self._host, multiprocessors)
        except (RuntimeError, AttributeError, TypeError) as error:  # no peer access, or another version of torch
            reason = one_line(error)
        if self.all_min(one_shot is not None):  # else a kernel would wait for a rank that never launches it
            assert one_shot is not None
            reason = one_shot.wrong(self.all_reduce)
            if self.all_min(not reason):
                self.one_shot = one_shot
                return
        log.warning(
            "falling back to NCCL all-reduce, which is slower up to a few MiB: %s",
            reason or "another rank cannot use the one-shot kernel",
        )

    @staticmethod
    def _nccl(store: Any, rank: int, size: int, timeout_s: float) -> Any:
        torch.cuda.set_device(rank)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return c10d.ProcessGroupNCCL(c10d.PrefixStore("device", store), rank, size, options)

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def all_reduce(self, part: Tensor) -> Tensor:
        """All-reduce `part`, perhaps in place.  All ranks get the same bits."""
        if part.is_cuda and part.is_contiguous() and self._sums_here(part.shape, part.dtype):
            assert self.one_shot is not None
            return self.one_shot.all_reduce(part)
        if self.size > 1 and not part.is_cuda:
            return self._sum_in_order(part)
        if self.size > 1:
            options = c10d.AllreduceOptions()
            options.asyncOp = False  # run on the stream that computes
            _finish(self._device.allreduce([part], options))
        return part

    def _sums_here(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether our own kernel reduces contiguous tensors of this shape.  Equal on all ranks."""
        if self.one_shot is None or not shape:
            return False
        return self.one_shot.takes(math.prod(shape[:-1]), shape[-1], dtype)

    def fuses_norm(self, rows: int, size: int, dtype: torch.dtype) -> bool:
        """Return whether `add_and_norm` supports parts [rows, size].  Equal on all ranks."""
        return self._sums_here((rows, size), dtype)

    def add_and_norm(self, x: Tensor, part: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """All-reduce the parts and add the result to x in place.  Return x, and x after an RMS norm.  See `fuses_norm`.

        x [rows, size] is equal on all ranks.  All ranks get the same bits."""
        assert self.one_shot is not None
        return self.one_shot.add(x, part, norm, eps)

    def _sum_in_order(self, part: Tensor) -> Tensor:
        """Return the sum of the ranks' parts, added in rank order, so that a row's bits do not depend on its position.

        gloo's own all-reduce adds each share of a tensor in another order, so a row's bits would depend on the
        batch."""
        gathered = self._gather(part)
        for rank in range(1, self.size):
            gathered[0] += gathered[rank]
        return gathered[0]

    def _gather(self, part: Tensor) -> Tensor:
        """Return all ranks' parts: [size, ...]."""
        gathered = part.new_empty(self.size, *part.shape)
        if part.numel():
            options = c10d.AllgatherOptions()
            options.asyncOp = False
            _finish(self._device._allgather_base(gathered.view(-1), part.contiguous().view(-1), options))
        return gathered

    def gather_columns(self, part: Tensor, columns: int, out: Tensor | None = None) -> Tensor:
        """Return the first `columns` of all ranks' columns, in the order of ranks: [..., C] -> [..., columns].

        columns: at most size * C.  out [..., columns]: buffer of the result, with any strides."""
        gathered = part[None] if self.size == 1 else self._gather(part)
        if out is None:
            out = part.new_empty(*part.shape[:-1], columns)
        each = part.shape[-1]
        for rank, theirs in enumerate(gathered):  # one pass over the values, because logits are large
            place = out[..., rank * each : (rank + 1) * each]
            place.copy_(theirs[..., : place.shape[-1]])
        return out

    def all_max_on_device(self, values: Tensor) -> None:
        """Replace each value, on the device, with the maximum over the ranks."""
        if self.size > 1:
            options = c10d.AllreduceOptions()
            options.reduceOp, options.asyncOp = c10d.ReduceOp.MAX, False
            _finish(self._device.allreduce([values], options))

    def copy_from_first(self, tensor: Tensor) -> None:
        """Overwrite `tensor`, which is contiguous, with rank 0's."""
        if self.size > 1:
            options = c10d.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            group = self._device if tensor.is_cuda else self._host
            _finish(group.broadcast([tensor], options))

    def all_min(self, value: int) -> int:
        """Return the minimum of the ranks' values.  On the host; waits for all ranks."""
        if self.size > 1:
            shared = torch.tensor([value], dtype=torch.int64)
            options = c10d.AllreduceOptions()
            options.reduceOp = c10d.ReduceOp.MIN
            _finish(self._host.allreduce([shared], options))
            value = int(shared)
        return value

    def all_max(self, values: Tensor) -> Tensor:
        """Return the maximum of the ranks' values, element by element.  On the host; waits for all ranks."""
        if self.size == 1:
            return values
        shared = values.to("cpu", copy=True)
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MAX
        _finish(self._host.allreduce([shared], options))
        return shared.to(values.device)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_min(0)

    def first_then_others(self, run: Callable[[], Result]) -> Result:
        """Return the result of `run`.  Rank 0 runs first, so that the other ranks find its files in a cache."""
        result = run() if self.first else None
        self.barrier()
        return run() if result is None else result

    def abort(self) -> None:
        """End a collective that waits for a lost rank; called on another thread.  No collective works afterwards.

        gloo ends by itself when the lost process does; NCCL's kernels wait forever."""
        for group in self._groups():
            with contextlib.suppress(RuntimeError):
                group.abort()

    def leave(self) -> None:
        """Shut down the process groups.  Harmless when called twice."""
        for group in self._groups():
            with contextlib.suppress(RuntimeError):  # raised if a rank is lost
                group.shutdown()
        self._host = self._device = self.one_shot = None

    def _groups(self) -> list[Any]:
        groups = [self._device, self._host] if self._device is not self._host else [self._host]
        return [group for group in groups if group is not None]


def _finish(work: Any) -> None:
    """Wait for a collective on a CPU; on a GPU let the current stream wait for it."""
    if work is not None:
        work.wait()


ALONE = Ranks()
