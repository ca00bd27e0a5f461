"""One rank of test_cuda_rank_sum_gpus.py: `python -m tests.kernels.rank_sum_process SCENE RANK MEETING`.

Prints a line if the scene succeeds.  Both ranks make all parts from seeds, so each checks its sums."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.engine.executor import ops
from quire.engine.executor.ranks.one_shot import OneShot
from quire.engine.executor.ranks.ranks import Ranks

SIZE, EPS = 2, 1e-5
SCENES: dict[str, Callable[[Ranks, OneShot], None]] = {}


def scene(run: Callable[[Ranks, OneShot], None]) -> Callable[[Ranks, OneShot], None]:
    SCENES[run.__name__] = run
    return run


def numbers(seed: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device="cuda").to(dtype)


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """Sum of the parts in this order, in float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@scene
def sizes(ranks: Ranks, sums: OneShot) -> None:
    """All sizes, dtypes and protocols, with residual and norm, interleaved with NCCL."""
    drawn = random.Random(5)
    for turn in range(300):
        dtype = drawn.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        width = drawn.choice([64, 1024, 4096, 8192])
        rows = drawn.choice([1, 1, 2, 8, 32, 33, 130, 256, 500, 1000, 1024])
        words, fused = drawn.random() < 0.5, drawn.random() < 0.5
        if not sums.inboxes.takes(rows, width, dtype, words=words):
            continue
        parts = [numbers(3 * turn + rank, rows, width, dtype) for rank in range(SIZE)]
        own = parts[ranks.rank].clone()
        if not fused:
            found, _ = ops.rank_sum(own, sums.inboxes, words=words)
            assert torch.equal(found, in_order(parts)), f"call {turn}: {rows} rows of {width}, words {words}"
            continue
        x, norm = numbers(3 * turn + 2, rows, width, dtype), numbers(turn, 1, width, dtype)[0]
        wanted = in_order([*parts, x])
        found, normed = ops.rank_sum(own, sums.inboxes, words=words, plus=x, norm=norm, eps=EPS)
        assert found is x
        assert normed is not None
        assert torch.equal(found, wanted), f"call {turn}: {rows} rows of {width}, words {words}, added"
        after = ops.rms_norm(wanted, norm, EPS)
        torch.testing.assert_close(normed.float(), after.float(), rtol=8 * torch.finfo(dtype).eps, atol=1e-6)
    large = torch.ones(16384, 4096, device="cuda", dtype=torch.bfloat16)
    assert not sums.takes(16384, 4096, torch.bfloat16)
    assert (ranks.all_reduce(large) == SIZE).all()


class Checked:
    """All-reduces of changing parts, checked on the device, also in a graph."""

    def __init__(self, ranks: Ranks, rows: int, width: int = 4096) -> None:
        self._ranks = ranks
        self._bases = [(numbers(rows + rank, rows, width, torch.float32).abs() * 3).floor() for rank in range(SIZE)]
        self._x = (numbers(7 + rows, rows, width, torch.float32) * 3).round()
        self._norm = torch.ones(width, device="cuda", dtype=torch.bfloat16)
        self._counter = torch.zeros((), device="cuda")
        self.wrong = torch.zeros((), device="cuda", dtype=torch.int64)

    def call(self) -> None:
        """Two all-reduces, the second with residual and norm; values are small integers, exact in bfloat16."""
        self._counter.add_(1)
        parts = [torch.remainder(base + self._counter, 8) for base in self._bases]
        total = parts[0] + parts[1]
        own = parts[self._ranks.rank].bfloat16()
        found = self._ranks.all_reduce(own.clone())
        self.wrong.add_((found.float() != total).sum())
        x, normed = self._ranks.add_and_norm(self._x.bfloat16(), own, self._norm, EPS)
        self.wrong.add_((x.float() != total + self._x).sum())
        after = ops.rms_norm(x, self._norm, EPS)
        self.wrong.add_(((normed.float() - after.float()).abs() > 0.02 * after.float().abs() + 1e-3).sum())


@scene
def graphs(ranks: Ranks, sums: OneShot) -> None:
    """Thousands of all-reduces in graphs of several sizes and in eager calls, in the same order on both ranks."""
    checked = [Checked(ranks, rows) for rows in (1, 8, 65, 256, 1000, 3)]
    for each in checked:
        each.call()
    torch.cuda.synchronize()
    made = []
    for each in checked[:-1]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(6):
                each.call()
        made.append(graph)
    drawn = random.Random(3)
    for turn in range(600):
        which = drawn.randrange(len(checked))
        if which < len(made):
            made[which].replay()
        else:
            checked[-1].call()
        if turn % 50 == 49:
            torch.cuda.synchronize()
    assert [int(each.wrong) for each in checked] == [0] * len(checked)


@scene
def delays(ranks: Ranks, sums: OneShot) -> None:
    """Delays of up to milliseconds on either rank, on the GPU or on the host."""
    checked = [Checked(ranks, rows) for rows in (1, 40, 300)]
    common, own = random.Random(4), random.Random(100 + ranks.rank)
    for _ in range(400):
        if own.random() < 0.3:
            torch.cuda._sleep(own.randrange(3_000_000))
        if own.random() < 0.1:
            time.sleep(own.random() / 100)
        checked[common.randrange(3)].call()
    assert [int(each.wrong) for each in checked] == [0] * 3


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    name, rank, meeting = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    library = os.environ.get("QUIRE_KERNELS")
    ops.load(library=Path(library) if library else None)
    ranks = Ranks.join(rank, SIZE, meeting, "cuda", 60.0)
    sums = ranks.one_shot
    assert sums is not None, "the ranks do not use the kernel; why is in the log above"
    began = time.monotonic()
    SCENES[name](ranks, sums)
    torch.cuda.synchronize()
    ranks.barrier()
    print(f"{name} of rank {rank}: {time.monotonic() - began:.1f} s", flush=True)
    os._exit(0)  # skips the destructors of the process groups


if __name__ == "__main__":
    try:
        with torch.inference_mode():
            main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly exit might wait for the other rank
