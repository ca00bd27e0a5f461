"""Which sizes have graphs, and which step takes which; capturing itself is tested on a GPU."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from quire.engine.executor.graphs import (
    Graphs,
    SecondUse,
    capture_all,
    draft_shapes,
    graph_sizes,
    memory_first,
    next_size,
    slice_shapes,
    urgent,
)
from quire.engine.executor.shapes import Shape, Shapes


@pytest.mark.parametrize("most", [1, 3, 40, 256, 1000, 1024])
def test_every_batch_has_a_rung_not_much_larger(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        size = next_size(sizes, count)
        assert size is not None
        assert count <= size < count + 64
        assert size - count <= max(7, count * 0.25)
    assert next_size(sizes, most + 1) is None
    assert sorted(urgent(sizes)) == sizes
    assert urgent(sizes)[0] == most


def test_steps_with_slices_fit_the_buffers() -> None:
    for shape in slice_shapes(256, 1024):
        assert shape.decodes + shape.slices <= 256
        assert shape.decodes + shape.tokens <= 1024
        assert shape.samples == shape.logits
    assert slice_shapes(2, 8) == []
    # However few slots there are, nearly all of them may decode together with a slice.
    assert max(shape.decodes for shape in slice_shapes(40, 256)) == 36


@pytest.mark.parametrize("decodes", [1, 15, 17, 65, 100, 193, 252])
@pytest.mark.parametrize("tokens", [1, 60, 200, 2000])
def test_a_step_with_slices_is_padded_to_the_fewest_tokens(decodes: int, tokens: int) -> None:
    """A few more decoding slots than a size has must not cost the largest size of slices."""
    shapes = slice_shapes(256, 8192)
    exact = Shape(decodes, tokens, 1, decodes + 1, decodes + 1)
    padded = Shapes(shapes).padded(exact)
    if padded == exact:
        assert not any(shape.holds(exact) for shape in shapes)
        return
    assert padded.holds(exact)
    assert padded.decodes + padded.tokens == min(
        shape.decodes + shape.tokens for shape in shapes if shape.decodes >= decodes and shape.tokens >= tokens
    )


def test_the_mixed_step_of_most_tokens_gives_the_others_their_memory() -> None:
    shapes = slice_shapes(256, 8192)
    order = [shape.decodes + shape.tokens for shape in memory_first(shapes)]
    assert order[0] == max(order)
    assert order[1:] == sorted(order[1:])
    assert sorted(memory_first(shapes)) == sorted(shapes)
    assert memory_first([]) == []


def test_running_out_of_time_keeps_what_was_captured() -> None:
    done = []
    assert capture_all([lambda i=i: done.append(i) for i in range(5)], 60) == 5  # type: ignore[misc]
    assert capture_all([lambda i=i: done.append(i) for i in range(5)], 0) == 1  # type: ignore[misc]
    assert done == [0, 1, 2, 3, 4, 0]


def test_launches_are_recorded_at_their_second_use_and_one_size_a_step() -> None:
    second = SecondUse()
    assert not second.due(1, "model 8", "greedy 8")
    assert not second.due(2, "model 16", "greedy 16")
    assert second.due(3, "model 8", "greedy 8")
    assert not second.due(3, "model 16", "greedy 16"), "one recording a step"
    assert not second.due(4, "model 8", "general 8"), "one of the two has not run yet"
    assert second.due(5, "model 8", "general 8")
    assert second.due(6, "model 16", "greedy 16")


@pytest.mark.parametrize(("max_seqs", "step_tokens"), [(8, 64), (40, 256), (256, 2048), (1024, 8192)])
def test_steps_with_drafts_find_a_shape(max_seqs: int, step_tokens: int) -> None:
    """1 to 64 sequences with 1, 3 or 7 drafts, and others: padded to at most twice the tokens, and 16 more."""
    shapes = Shapes(draft_shapes(max_seqs, step_tokens))
    for shape in shapes:
        assert shape.decodes + shape.slices == shape.samples <= max_seqs
        assert shape.logits == shape.total <= step_tokens
    for slices in (1, 2, 5, 8, 33, 64):
        for drafts in (1, 3, 7):
            for decodes in (0, 3, 30, 100, 190):
                tokens = slices * (1 + drafts)
                if slices + decodes > max_seqs or tokens + decodes > min(step_tokens, 512):
                    continue
                exact = Shape(decodes, tokens, slices, slices + decodes, tokens + decodes)
                padded = shapes.padded(exact)
                if padded not in shapes:
                    # Too few slots or tokens are left for the next larger size.
                    assert 2 * (tokens + decodes) + 16 > min(max_seqs, step_tokens) - 64
                else:
                    assert padded.total <= 2 * exact.total + 16


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_graph_is_captured(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection may free CUDA graphs of a closed worker, which a running capture does not survive."""
    graph, enabled = MagicMock(), list[tuple[bool, bool]]()

    def launches(key: int) -> None:
        captured = graph.capture_begin.called
        enabled.append((captured, gc.isenabled()))
        if fails and captured:
            raise RuntimeError("not captured")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    graphs = Graphs(launches, SimpleNamespace(pool=None, stream=MagicMock()))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        graphs.capture(8)
    assert enabled == [(False, True), (True, False)]
    assert gc.isenabled()
    assert graph.capture_end.called
    assert (8 in graphs) is not fails
