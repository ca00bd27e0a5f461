"""Graphs recorded while requests are served, after a takeover: which, when, and that they change no token.

On a CPU, with graphs that remember what to run and run it when replayed.  Like real ones they hold addresses, not
tensors.  What a real device does while it records is for tests/executor/test_gpu.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.executor import loading, local, ops, step_graphs
from quire.engine.executor.graphs import Graphs, graph_sizes, slice_shapes
from quire.engine.llm import LLM
from quire.engine.wire.messages import Sampling
from tests.checkpoints import VOCAB

Checkpoint = Callable[[str], Path]
MAX_SEQS, STEP_TOKENS = 24, 256


class Replayed(Graphs[Any]):
    """A graph that is run again launch by launch."""

    recorded: list[tuple[Any, bool]]  # every capture: its key, and whether it ran first

    def capture(self, key: Any, *, run: bool = True) -> None:
        if run:
            self._run(key)
        self._graphs[key] = None  # type: ignore[assignment]
        self.recorded.append((key, run))

    def replay(self, key: Any) -> None:
        assert key in self._graphs
        self._run(key)


def llm(checkpoint: Path) -> LLM:
    config = msgspec.convert(
        {
            "model": str(checkpoint),
            "threads": 1,
            "kv_blocks": 400,
            "max_seqs": MAX_SEQS,
            "step_tokens": STEP_TOKENS,
            "itl_stretch": 0.0,
            "check_accounting": True,
        },
        EngineConfig,
    )
    return LLM.over(config, loading.load(config))


@pytest.fixture
def taken_over(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An engine that has put its graphs off."""
    monkeypatch.setattr(step_graphs, "Graphs", Replayed)
    monkeypatch.setattr(step_graphs, "Where", object)
    monkeypatch.setattr(Replayed, "recorded", [], raising=False)
    attention: Callable[..., None] = ops.paged_attention

    def without_padding(q: Any, *rest: Any, **options: Any) -> None:
        """The CPU's kernel takes no padding behind the last slice."""
        *middle, out = rest
        total = int(middle[4][-1])
        out[total:] = 0
        attention(q[:total], *middle, out[:total], **options)

    monkeypatch.setattr(ops, "paged_attention", without_padding)
    engine = llm(checkpoint("gpt2"))
    assert isinstance(engine.executor, local.LocalExecutor)
    made = engine.executor._worker
    assert made is not None
    made._graphs = step_graphs.StepGraphs(
        made._launches,
        made._batch,
        torch.zeros(MAX_SEQS, VOCAB),
        sizes=graph_sizes(MAX_SEQS),
        shapes=slice_shapes(MAX_SEQS, STEP_TOKENS),
        seconds=made._config.graph_seconds,
    )
    made._graphs.postpone()
    return engine


def words(count: int, seed: int) -> list[int]:
    return random.Random(f"{count} {seed}").choices(range(3, VOCAB), k=count)


def round_of(engine: LLM, seed: int) -> list[list[int]]:
    """Prompts with a common beginning, some greedy, some not, of many lengths: sequences start and end."""
    prompts = [words(40, 0) + words(1 + 9 * i % 70, seed + i) for i in range(14)]
    counts = [3 + 5 * i % 30 for i in range(14)]
    greedy, sampled = Sampling(temperature=0.0, ignore_eos=True), Sampling(temperature=0.9, seed=5, ignore_eos=True)
    samplings = [sampled if seed % 2 and i % 3 == 0 else greedy for i in range(14)]
    answers = engine.generate(prompts, samplings, max_new_tokens=counts)
    return [answer.outputs[0].token_ids for answer in answers]


def test_graphs_of_a_takeover_change_no_token(checkpoint: Checkpoint, taken_over: LLM) -> None:
    usual = llm(checkpoint("gpt2"))
    wanted = [round_of(usual, seed) for seed in range(4)]
    assert round_of(taken_over, 0) == wanted[0]
    in_service = list(Replayed.recorded)
    assert in_service
    assert not any(ran for _, ran in in_service), "nothing is run for the sake of a graph while requests are here"
    assert isinstance(taken_over.executor, local.LocalExecutor)
    assert taken_over.executor._worker is not None
    [cache] = taken_over.executor._worker.kv.shapes[0]
    before = [tensor.clone() for tensor in cache]
    for _ in range(9):
        assert taken_over.executor.catch_up()
    assert all(map(torch.equal, cache, before)), "rows that ended wrote where others find a prefix"
    assert round_of(taken_over, 1) == wanted[1]
    while taken_over.executor.catch_up():
        pass
    captured = len(Replayed.recorded)
    keys = [(len(str(key)), key) for key, _ in Replayed.recorded]
    assert max(keys.count(key) for key in keys) <= 3, "each once: model, greedy, general"
    assert round_of(taken_over, 2) == wanted[2]
    assert round_of(taken_over, 3) == wanted[3]
    assert len(Replayed.recorded) == captured
    assert not taken_over.executor.catch_up()


def test_a_model_that_cannot_be_recorded_goes_on_without(
    checkpoint: Checkpoint, taken_over: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Replayed, "capture", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    usual = llm(checkpoint("gpt2"))
    assert round_of(taken_over, 0) == round_of(usual, 0)
    assert not taken_over.executor.catch_up()
    assert round_of(taken_over, 1) == round_of(usual, 1)
    assert caplog.text.count("cannot be recorded") == 1
