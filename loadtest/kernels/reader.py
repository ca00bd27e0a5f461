"""Read-only Triton kernel: the bandwidth ceiling for memory-bound kernels."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

Call = Callable[[], object]


@triton.jit
def _read(source, sink, size, BLOCK: tl.constexpr, UNROLL: tl.constexpr):  # type: ignore[no-untyped-def]
    step = tl.num_programs(0).to(tl.int64) * BLOCK * UNROLL
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK * UNROLL, size, step):
        for part in tl.static_range(UNROLL):
            at = start + part * BLOCK + tl.arange(0, BLOCK)
            total += tl.load(source + at, mask=at < size, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(sink + tl.program_id(0), tl.sum(total))


def variants(big: Tensor) -> list[Call]:
    """Calls that read all of `big`, in several launch shapes; the fastest counts."""
    sink = big.new_empty(1 << 16).float()

    def call(programs: int, block: int, unroll: int, warps: int) -> Call:
        return lambda: _read[(programs,)](big, sink, big.numel(), BLOCK=block, UNROLL=unroll, num_warps=warps)

    shapes = [(132 * 4, 4096, 4, 8), (132 * 8, 4096, 4, 4), (132 * 16, 2048, 4, 4), (132 * 32, 4096, 2, 8)]
    return [call(*shape) for shape in shapes]
