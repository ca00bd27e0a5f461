"""Forced swaps through scheduler, worker and kernels: every byte returns, and the text is that of a run without
swaps."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.executor.local import LocalExecutor
from quire.engine.llm import LLM
from tests.checkpoints import VOCAB


class Witness:
    """Hashes keys and values of each block before it is swapped out and after it is swapped in."""

    def __init__(self, executor: LocalExecutor) -> None:
        assert executor._worker is not None
        self.executor, self.swap = executor, executor._worker.swap
        self.away: dict[int, bytes] = {}  # host block -> content of the block that was copied there
        self.returned = 0
        self._out, self._back = self.swap.out, self.swap.back
        self.swap.out, self.swap.back = self.out, self.back  # type: ignore[method-assign]

    def content(self, block: int) -> bytes:
        assert self.executor._worker is not None
        for shapes in self.executor._worker.kv.shapes:  # ids of each group of layers follow those before it
            if block < len(shapes[0][0]):
                break
            block -= len(shapes[0][0])
        parts = [cache[block].contiguous().view(torch.uint8).numpy() for group in shapes for cache in group]
        return blake2b(b"".join(part.tobytes() for part in parts)).digest()

    def out(self, pairs: list[tuple[int, int]]) -> None:
        self.away.update((there, self.content(block)) for block, there in pairs)
        self._out(pairs)

    def back(self, pairs: list[tuple[int, int]]) -> None:
        self._back(pairs)
        for there, block in pairs:
            assert self.content(block) == self.away.pop(there)
            self.returned += block < self.executor.blocks  # those of window layers come in addition


@pytest.mark.parametrize("kv_dtype", ["auto", "e4m3"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_byte_comes_back(
    checkpoint: Callable[[str], Path], kv_dtype: Literal["auto", "e4m3"], caching: bool, depth: int
) -> None:
    """Greedy and sampled, siblings included.  Freed blocks are NaN, so a block that was not copied shows.

    `depth` 2: planned ahead, as on a GPU."""
    rng = random.Random(1)
    prompts = [rng.choices(range(3, VOCAB), k=rng.randrange(20, 60)) for _ in range(8)]

    def answers(**options: Any) -> tuple[LLM, Witness, list[list[int]]]:
        config = EngineConfig(
            model=str(checkpoint("llama")),
            dtype="float32",
            threads=1,
            block_size=8,
            max_model_len=160,
            max_seqs=8,
            step_tokens=64,
            kv_dtype=kv_dtype,
            prefix_cache=caching,
            admission="threshold",
            admit_threshold=1.0,
            poison_free_blocks=True,
            check_accounting=True,
            **options,
        )
        executor = LocalExecutor(config)
        executor.depth = depth
        witness = Witness(executor)
        llm = LLM.over(config, executor)
        done = llm.generate(prompts, max_new_tokens=50, n=2)
        return llm, witness, [output.token_ids for each in done for output in each.outputs]

    calm, _, wanted = answers(kv_blocks=400)
    assert calm.engine.core.report.totals.preemptions == 0
    crowded, witness, got = answers(kv_blocks=36, preempt="swap")
    totals = crowded.engine.core.report.totals
    assert got == wanted
    assert totals.swap_preemptions == totals.preemptions > 0
    assert witness.returned == totals.swapped_in_blocks > 0
    assert totals.recomputed_tokens == 0
    assert crowded.engine.core.step_cost.swap_bytes_per_s > 0
    assert crowded.engine.core.swapping.host.available == crowded.executor.host_blocks == 72


def test_no_memory_set_aside_means_recompute(checkpoint: Callable[[str], Path]) -> None:
    cases: list[dict[str, Any]] = [{"swap_memory_gib": 0.0}, {"preempt": "recompute"}]
    for options in cases:
        config = EngineConfig(model=str(checkpoint("llama")), kv_blocks=80, threads=1, **options)
        executor = LocalExecutor(config)
        assert executor.host_blocks == 0
        assert executor.swap_bytes_per_s == 0
        executor.close()
