"""GPU timing of calls, and the GPU's bandwidth and FLOP ceilings, measured in the same run."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

Call = Callable[[], object]
BEYOND_L2 = 256 << 20  # bytes read between two uses of a buffer, so that it leaves L2
GRAPH_US = 400  # minimum time of a graph in us; shorter ones would include the host's launch time


@dataclass(frozen=True)
class Ceilings:
    """Ceilings: the 100 % of every table."""

    copy_gbps: float  # device to device, bytes read and written
    sum_gbps: float  # torch.sum
    read_gbps: float  # GB/s of the fastest read-only kernel
    matmul_8192_tflops: float  # bf16, random data
    matmul_4096_tflops: float

    def floor_us(self, read: float, flops: float = 0.0) -> float:
        """Minimum time for these bytes (read or written) and bf16 FLOPs."""
        return max(read / self.read_gbps / 1e3, flops / self.matmul_8192_tflops / 1e6)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def sets_for(size: int, most: int = 128) -> int:
    """Number of alternating buffer sets of `size` bytes, so that none stays in L2."""
    return min(most, max(1, math.ceil(BEYOND_L2 / max(1, size))))


def graph_us(calls: Sequence[Call], *, seconds: float = 0.04) -> float:
    """Median microseconds of one call, from replays of a CUDA graph of `calls`, each with its own buffers."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()  # compiles, chooses algorithms
        once = elapsed_us(calls) / len(calls)
        rounds = max(1, math.ceil(GRAPH_US / max(1.0, once) / len(calls)))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for _ in range(rounds):
            for call in calls:
                call()
        graph.capture_end()
        graph.replay()
        replays = max(5, min(40, int(seconds * 1e6 / (once * rounds * len(calls)))))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        # The GPU waits while the host queues everything, so that no replay waits for the host.
        torch.cuda._sleep(4_000_000)
        for event in events[:-1]:
            event.record()
            graph.replay()
        events[-1].record()
        stream.synchronize()
    times = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]
    return statistics.median(times) / (rounds * len(calls))


def elapsed_us(calls: Sequence[Call]) -> float:
    """Microseconds of all calls, launched one by one: for long calls, or calls that behave differently in a graph."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_000_000)
    start.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def measure_ceilings(big: Tensor) -> Ceilings:
    """Measure the ceilings.  `big`: a few GB of random bfloat16."""
    half = big.numel() // 2
    source, target = big[:half], big[half:].clone()
    # Not in a CUDA graph, where copies are slower.
    copy = min(elapsed_us([lambda: target.copy_(source)]) for _ in range(10))
    total = torch.empty((), dtype=torch.float32, device=big.device)
    added = graph_us([lambda: torch.sum(big, dim=0, dtype=torch.float32, out=total)], seconds=0.1)
    gbps = big.nbytes / 1e3
    return Ceilings(
        copy_gbps=2 * source.nbytes / copy / 1e3,
        sum_gbps=gbps / added,
        read_gbps=gbps / min(added, _best_reader_us(big)),
        matmul_8192_tflops=_matmul_tflops(8192),
        matmul_4096_tflops=_matmul_tflops(4096),
    )


def _best_reader_us(big: Tensor) -> float:
    try:
        from quire.loadtest.kernels import reader
    except ImportError:  # without Triton, torch.sum is the fastest reader
        return math.inf
    return min(graph_us([call], seconds=0.1) for call in reader.variants(big))


def _matmul_tflops(size: int) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / graph_us([lambda: torch.matmul(a, b, out=out)], seconds=0.1) / 1e6
