"""Attention on a CPU, compared with this machine's memory and torch's own attention on contiguous tensors.

Times are the minimum of several rounds, to reduce the effect of other work on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from quire.engine.executor import ops

HEADS, KV_HEADS, BLOCK = 8, 4, 16


def best(run: Callable[[], object], seconds: float = 0.5) -> float:
    """Seconds of the fastest call."""
    run()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def paged(seqs: int, length: int, queries: int, dim: int, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """A call of paged_attention over blocks in random order, and the bytes of keys and values it must read."""
    per_seq = -(-length // BLOCK)
    tables = torch.randperm(seqs * per_seq).int().view(seqs, per_seq)
    k_cache = torch.randn(seqs * per_seq, KV_HEADS, BLOCK, dim).to(dtype)
    v_cache = torch.randn_like(k_cache)
    q = torch.randn(seqs * queries, HEADS, dim).to(dtype)
    out = torch.empty_like(q)
    rows = torch.arange(seqs).int()
    q_start = (torch.arange(seqs + 1) * queries).int()
    lens = torch.full((seqs,), length).int()
    size = 2 * seqs * length * KV_HEADS * dim * k_cache.element_size()
    return lambda: ops.paged_attention(q, k_cache, v_cache, tables, rows, q_start, lens, dim**-0.5, 0, 0.0, out), size


def contiguous(seqs: int, length: int, queries: int, dim: int, dtype: torch.dtype) -> Callable[[], object]:
    """scaled_dot_product_attention on contiguous tensors; all sequences have one length."""
    q = torch.randn(seqs, HEADS, queries, dim).to(dtype)
    k, v = (torch.randn(seqs, KV_HEADS, length, dim).to(dtype) for _ in range(2))
    causal = queries == length
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def rows(threads: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table.  `threads` 0: torch's default."""
    if threads:
        torch.set_num_threads(threads)
    big = torch.randint(0, 9, (64 << 20,))  # 512 MiB
    reads = big.nbytes / best(big.sum) / 1e9
    yield {"case": f"{torch.get_num_threads()} threads, memory reads", "gbps": reads}
    for dtype in (torch.bfloat16, torch.float32):
        for name, seqs, length, queries, dim in (
            ("decode", 64, 256, 1, 64),
            ("decode", 64, 2048, 1, 64),
            ("decode", 1, 8192, 1, 64),
            ("decode", 64, 2048, 1, 128),
            ("prefill", 8, 128, 128, 64),
            ("prefill", 1, 1024, 1024, 64),
            ("prefill", 1, 1024, 1024, 128),
        ):
            call, size = paged(seqs, length, queries, dim, dtype)
            ours, theirs = best(call), best(contiguous(seqs, length, queries, dim, dtype))
            row = {"case": f"{name} {seqs} x {length}, D {dim}, {str(dtype)[6:]}", "us": ours * 1e6}
            if name == "decode":
                row |= {"gbps": size / ours / 1e9, "of_ceiling": size / ours / 1e9 / reads}
            else:
                row |= {"tflops": 2 * seqs * HEADS * dim * length * (length + 1) / ours / 1e12}
            yield row | {"torch_us": theirs * 1e6}
