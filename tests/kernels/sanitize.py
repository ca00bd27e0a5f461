"""Attention on a GPU over a small grid of shapes, for compute-sanitizer.

    compute-sanitizer --tool memcheck  python -m tests.kernels.sanitize
    compute-sanitizer --tool racecheck python -m tests.kernels.sanitize

Every tensor has its own allocation, so that memcheck sees an access past its end.  Results are checked too.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from quire.engine.executor import ops
from tests.kernels.paged import error, make_batch, reference

# Decodes, chunks, padding, and a chunk after a prefix long enough for split-KV.
LENS = [1, 65, 0, 200, 7, 100, 0, 2100]
QUERIES = [1, 1, 1, 1, 7, 40, 2, 3]
SHAPES = [(4, 2, 64), (5, 1, 80), (8, 2, 96), (8, 2, 128), (4, 2, 192), (2, 2, 256)]
BLOCK_SIZES = [8, 16, 32, 64]
WINDOWS = [(0, 0.0), (50, 20.0)]


def main() -> None:
    library = os.environ.get("QUIRE_KERNELS")
    ops.load(library=Path(library) if library else None)
    sizes = zip(SHAPES, itertools.cycle(BLOCK_SIZES))
    for ((heads, kv_heads, dim), block_size), e4m3, (window, soft_cap) in itertools.product(
        sizes, (False, True), WINDOWS
    ):
        shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size}
        dtype = torch.float16 if window else torch.bfloat16
        batch = make_batch(LENS, QUERIES, **shape, dtype=dtype, e4m3=e4m3)
        out = batch.to("cuda").attend(window, soft_cap, decodes=4)
        wrong = error(out, reference(batch, window, soft_cap))
        print(
            f"{heads}/{kv_heads} D {dim} block {block_size} e4m3 {e4m3} window {window}: error {wrong:.1e}", flush=True
        )
        assert wrong < 1e-2


if __name__ == "__main__":
    main()
