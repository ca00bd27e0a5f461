"""All-reduce over the ranks of a model, one GPU each: NCCL, torch over symmetric memory, and our kernel.

    python -m quire.loadtest kernels --only sums     needs a machine with two GPUs that does nothing else

Each rank is a process, and all make the same calls.  A call sums [rows, 4096] in bfloat16; times are per call in
a CUDA graph of 40, the median of 15 replays on rank 0.  The limits in engine/executor/ranks/one_shot.py come from this
table.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from quire.engine.executor import ops
from quire.engine.executor.ranks.ranks import Ranks
from quire.loadtest import machine

c10d: Any = _distributed_c10d
RANKS, WIDTH, EPS = 2, 4096, 1e-5
ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
CALLS, REPLAYS = 40, 15
LIMIT_S = 120
MAX_ROWS_OF_TORCH = 512  # 4 MiB: torch's kernels are for small tensors
# Up to 1 MiB "then norm" is torch's one-shot all-reduce and a norm, beyond it NCCL and a norm.
MAX_ROWS_OF_ONE_SHOT = 128


def rows() -> Iterator[dict[str, Any]]:
    """Start the ranks; yield one row of the table per size, as rank 0 measures it."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "quire.loadtest.kernels.sums"]
        ranks = [
            subprocess.Popen(
                [*words, str(rank), f"{folder}/meeting"],
                cwd=machine.ROOT,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                yield json.loads(line)
            if any(rank.wait() for rank in ranks):
                raise RuntimeError("a rank failed; its error is printed above")
        finally:
            for rank in ranks:
                rank.kill()


def call_us(ranks: Ranks, call: Callable[[], object]) -> float:
    """Return the time per call.  The number of calls is fixed, because all ranks must make the same calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(CALLS):
            call()
        graph.capture_end()
        ranks.barrier()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        for event in events[:-1]:
            event.record()
            graph.replay()
        events[-1].record()
        stream.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) * 1e3 / CALLS


def nccl(ranks: Ranks, part: Tensor) -> Tensor:
    """All-reduce by NCCL, for any size."""
    kept, ranks.one_shot = ranks.one_shot, None
    try:
        return ranks.all_reduce(part)
    finally:
        ranks.one_shot = kept


def then_norm(summed: Callable[[], object], part: Tensor, norm: Tensor) -> Tensor:
    """All-reduce, then the norm in a separate kernel."""
    summed()
    return ops.rms_norm(part, norm, EPS)


def measure(ranks: Ranks) -> Iterator[dict[str, Any]]:
    """Yield one row per size."""
    sums = ranks.one_shot
    assert sums is not None, "these GPUs do not use our kernel; the log has the reason"
    device, dtype = torch.device("cuda", ranks.rank), torch.bfloat16
    # torch's kernels require their input in symmetric memory, as our kernel does.
    shared = c10d._SymmetricMemory.empty_strided_p2p([MAX_ROWS_OF_TORCH * WIDTH], [1], dtype, device, sums.name)
    memory = c10d._SymmetricMemory.rendezvous(shared, sums.name)
    shared.zero_()
    norm = torch.ones(WIDTH, dtype=dtype, device=device)
    for count in ROWS:
        part = torch.zeros(count, WIDTH, dtype=dtype, device=device)  # sums of sums stay zero
        x = torch.ones_like(part)
        times: dict[str, Callable[[], object]] = {"nccl_us": partial(nccl, ranks, part)}
        if count <= MAX_ROWS_OF_TORCH:
            buffer = shared[: count * WIDTH].view(count, WIDTH)
            times["torch_one_us"] = partial(ops.torch_rank_sum, buffer, part, sums.name, two_shot=False)
            times["torch_two_us"] = partial(ops.torch_rank_sum, buffer, part, sums.name, two_shot=True)
        for words in (True, False):
            if sums.inboxes.takes(count, WIDTH, dtype, words=words):
                name = "words_us" if words else "blocks_us"
                times[name] = partial(ops.rank_sum, part, sums.inboxes, words=words)
        summed = times["torch_one_us" if count <= MAX_ROWS_OF_ONE_SHOT else "nccl_us"]
        times["before_us"] = partial(then_norm, summed, part, norm)
        if sums.takes(count, WIDTH, dtype):
            times["fused_us"] = partial(sums.add, x, part, norm, EPS)
        row: dict[str, Any] = {"case": f"{count} rows, {count * WIDTH * 2 >> 10} KiB"}
        for name, call in times.items():
            row[name] = call_us(ranks, call)
        yield row
    del memory


def main() -> None:
    """Run one rank."""
    rank, meeting = int(sys.argv[1]), Path(sys.argv[2])
    ops.load()
    signal.alarm(LIMIT_S)  # a rank waiting for a failed one would never end
    ranks = Ranks.join(rank, RANKS, meeting, "cuda", 60.0)
    with torch.inference_mode():
        for row in measure(ranks):
            if ranks.first:
                print(json.dumps(row), flush=True)
    torch.cuda.synchronize()
    ranks.barrier()
    sys.stdout.flush()
    os._exit(0)  # skips the process groups' destructors, which may wait for each other


if __name__ == "__main__":
    main()
