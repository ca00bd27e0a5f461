"""Launches per step of the kernels that block tables need: one per layer, for any batch.

Counted by torch's profiler in steps without CUDA graphs, which launch what a graph replays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from quire.engine.llm import LLM
from quire.engine.observers.turn_record import TurnRecord
from quire.engine.wire.messages import Beams
from tests.executor.test_gpu import GREEDY, llm, words

pytestmark = pytest.mark.gpu
LAYERS = 2  # the llama of tests/checkpoints.py
WRITE, DECODE, COPY = "rope_kv_write_kernel", "decode_kernel", "block_copy_kernel"
PREFILL = ("sm90::kernel", "mma::prefill_kernel")


@pytest.fixture
def engine(checkpoint: Callable[[str], Path]) -> LLM:
    return llm(checkpoint("llama"), graph_seconds=0.0, step_tokens=128)


def launched(engine: LLM, until: Callable[[], bool] = lambda: True, most: int = 50) -> Counter[str]:
    """Run one step, or steps until `until()`, and return how often each kernel was launched meanwhile."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(most):
            engine.step()
            if until():
                break
        torch.cuda.synchronize()
    return Counter(event.name for event in found.events() or [] if event.device_type == DeviceType.CUDA)


class Plans:
    """An observer that keeps how many prompt tokens the last plan had."""

    prompt_tokens = 0

    def observe(self, record: TurnRecord) -> None:
        self.prompt_tokens = sum(len(piece.token_ids) for piece in record.plan.slices) if record.plan else 0


def times(kernels: Counter[str], *names: str) -> int:
    return sum(count for kernel, count in kernels.items() if any(name in kernel for name in names))


def test_a_decode_step_writes_once_and_attends_once_a_layer(engine: LLM) -> None:
    """17 sequences of very different lengths: one launch for all of them."""
    for i in range(17):
        engine.submit(words(1 + 11 * i), GREEDY, max_new_tokens=200)
    plans = Plans()
    engine.engine.observers.append(plans)
    while engine.engine.core.running < 17 or plans.prompt_tokens:
        engine.step()
    kernels = launched(engine)
    assert times(kernels, WRITE) == LAYERS, kernels
    assert times(kernels, DECODE) == LAYERS, kernels
    assert times(kernels, *PREFILL) == 0, kernels
    engine.cancel()
    engine.close()


def test_a_step_with_chunks_writes_once_a_layer(engine: LLM) -> None:
    """Decoding rows and chunks of several prompts: one launch of the write for both, one of attention for each kind."""
    for i in range(9):
        engine.submit(words(20 + i), GREEDY, max_new_tokens=200)
    for _ in range(6):
        engine.step()
    for i in range(3):
        engine.submit(words(35, i), GREEDY, max_new_tokens=5)
    kernels = launched(engine)
    assert times(kernels, WRITE) == LAYERS, kernels
    assert times(kernels, DECODE) == LAYERS, kernels
    assert times(kernels, *PREFILL) == LAYERS, kernels
    engine.cancel()
    engine.close()


def test_a_step_of_beams_is_a_decode_step(engine: LLM) -> None:
    """Beams with forced tokens, in one step with decoding sequences, need no further launch."""
    for i in range(3):
        engine.submit(words(20 + i), GREEDY, max_new_tokens=200)
    engine.submit(words(21, 5), GREEDY, max_new_tokens=100, beams=Beams(6))
    for _ in range(12):
        engine.step()
    plans = Plans()
    engine.engine.observers.append(plans)
    seen = False
    for _ in range(6):
        kernels = launched(engine)
        assert times(kernels, WRITE) == times(kernels, DECODE) == LAYERS, kernels
        assert times(kernels, *PREFILL) == 0, kernels
        seen = seen or plans.prompt_tokens == 6
    assert seen
    engine.cancel()
    engine.close()


def test_all_copies_of_a_step_are_one_launch(engine: LLM) -> None:
    """Three prompts fork into five sequences each, whose last block is shared until they write: 12 copies."""
    for i in range(3):
        engine.submit(words(21, i), GREEDY, max_new_tokens=40, n=5)
    totals = engine.engine.core.report.totals
    kernels = launched(engine, until=lambda: totals.copied_blocks > 0)
    for _ in range(2):
        kernels += launched(engine)
    assert totals.copied_blocks == 12
    assert times(kernels, COPY) == 1, kernels
    engine.cancel()
    engine.close()
