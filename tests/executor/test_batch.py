"""Plans against the tensors they become; pages of a block table written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from quire.engine.core.plan import Fork, Sampler, Slice, Start, StepPlan
from quire.engine.executor import ops
from quire.engine.executor.batch import Batch
from quire.engine.executor.kv_cache import KVShape, allocate
from quire.engine.executor.shapes import Shape, Shapes
from quire.engine.executor.staged_plan import Page, blank
from quire.engine.executor.staging import Staging
from quire.engine.executor.step_tensors import StepTensors
from quire.engine.wire.messages import Sampling

SAMPLER = Sampler(Sampling(temperature=0), 3, [])


CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    ops.load()


WINDOWS = range(32, 52), range(52, 60)  # block ids of two window groups; full layers have 32 blocks


def batch(windows: Sequence[range] = ()) -> Batch:
    caches = allocate([KVShape(1, 64)], 32, 8, torch.float32, CPU)
    staging = Staging(capacity=1 << 16, steps=2, device=CPU)
    sizes: dict[str, Any] = {"max_seqs": 6, "max_model_len": 40, "step_tokens": 20, "block_size": 8}
    return Batch(caches=caches, staging=staging, windows=windows, **sizes)


def begun(b: Batch, plan: StepPlan) -> StepTensors:
    staged = b.stage(plan)
    b.apply(staged)
    if staged.mixed:
        return b.mixed_step(staged.mixed)
    step = b.decode_step(len(b.decoding_slots))
    b.gather(step)
    return step


def finish(b: Batch, step: StepTensors, tokens: list[int]) -> None:
    assert len(tokens) == len(step.sample_slots)
    b.finish(torch.tensor(tokens))


def test_a_prompt_then_decode_then_growth() -> None:
    b = batch()
    tokens = list(range(100, 107))
    step = begun(b, StepPlan(1, starts=[Start(2, [9])], slices=[Slice(2, 0, tokens, SAMPLER)]))
    assert step.input_ids.tolist() == [tokens]
    assert step.position_ids.tolist() == [list(range(7))]
    assert step.kv_indices.tolist() == list(range(72, 79))
    assert (step.rows.tolist(), step.q_start.tolist(), step.lens.tolist()) == ([2], [0, 7], [7])
    assert step.logits_at is not None
    assert (step.logits_at.tolist(), b.decoding_slots, step.known.tolist()) == ([6], (2,), [7])
    finish(b, step, [55])
    step = begun(b, StepPlan(2))  # nothing named: slot 2 decodes
    assert (step.input_ids.tolist(), step.position_ids.tolist()) == ([[55]], [[7]])
    assert (step.kv_indices.tolist(), step.lens.tolist(), step.known.tolist()) == ([79], [8], [8])
    assert step.logits_at is None
    finish(b, step, [56])
    step = begun(b, StepPlan(3, edits=[(2, 1, 4)]))
    assert (step.input_ids.tolist(), step.kv_indices.tolist(), step.lens.tolist()) == ([[56]], [32], [9])
    finish(b, step, [57])
    begun(b, StepPlan(4, freed_slots=[2]))
    assert b.decoding_slots == ()


def test_chunks_join_slots_that_decode() -> None:
    b = batch()
    finish(b, begun(b, StepPlan(1, starts=[Start(0, [1])], slices=[Slice(0, 0, [7, 7, 7], SAMPLER)])), [8])
    starts, slices = [Start(1, [2, 3]), Start(5, [6])], [Slice(1, 0, [10, 11]), Slice(5, 4, [20, 21], SAMPLER)]
    step = begun(b, StepPlan(2, starts=starts, slices=slices))
    assert step.input_ids.tolist() == [[8, 10, 11, 20, 21]]
    assert step.position_ids.tolist() == [[3, 0, 1, 4, 5]]
    assert step.kv_indices.tolist() == [11, 16, 17, 52, 53]
    assert (step.rows.tolist(), step.q_start.tolist()) == ([0, 1, 5], [0, 1, 3, 5])
    assert step.lens.tolist() == [4, 2, 6]
    assert step.logits_at is not None
    assert step.logits_at.tolist() == [0, 4]  # slot 1 is not through its prompt
    assert (b.decoding_slots, step.known.tolist()) == ((0, 5), [4, 6])
    finish(b, step, [30, 31])
    step = begun(b, StepPlan(3, slices=[Slice(1, 2, [12], SAMPLER)]))
    assert step.input_ids.tolist() == [[30, 31, 12]]
    assert b.decoding_slots == (0, 5, 1)
    finish(b, step, [40, 41, 42])
    assert begun(b, StepPlan(4)).input_ids.tolist() == [[40, 41, 42]]


def test_steady_steps_share_what_does_not_change() -> None:
    b = batch()
    finish(b, begun(b, StepPlan(1, starts=[Start(0, [1])], slices=[Slice(0, 0, [7], SAMPLER)])), [8])
    one, slots = begun(b, StepPlan(2)), b.decoding_slots
    finish(b, one, [9])
    two = begun(b, StepPlan(3))
    assert b.decoding_slots is slots
    for name in ("input_ids", "position_ids", "kv_indices", "rows", "lens", "tables"):  # a captured graph reads these
        assert getattr(one, name).data_ptr() == getattr(two, name).data_ptr()


def test_forks_read_their_parents_logits() -> None:
    b = batch()
    plan = StepPlan(
        1,
        starts=[Start(0, [1]), Start(1, [2])],
        slices=[Slice(0, 0, [5, 6], SAMPLER), Slice(1, 0, [7], SAMPLER)],
        forks=[Fork(2, 1, [2], SAMPLER), Fork(3, 0, [1], SAMPLER)],
    )
    step = begun(b, plan)
    assert step.logits_at is not None
    assert (b.decoding_slots, step.logits_at.tolist()) == ((0, 1, 2, 3), [1, 2, 2, 1])
    assert step.known.tolist() == [2, 1, 1, 2]
    finish(b, step, [50, 51, 52, 53])
    step = begun(b, StepPlan(2, edits=[(2, 0, 8), (3, 0, 9)]))
    assert (step.input_ids.tolist(), step.kv_indices.tolist()) == ([[50, 51, 52, 53]], [10, 17, 65, 74])


def test_targets_come_with_their_logits() -> None:
    b = batch()
    slices = [Slice(0, 0, [5, 6, 7], SAMPLER, [6, 7, 8], 2), Slice(1, 0, [5, 6, 7], SAMPLER, [6, 7], 1)]
    step = begun(b, StepPlan(1, starts=[Start(0, [1]), Start(1, [2])], slices=slices))
    assert step.logits_at is not None
    assert step.logits_at.tolist() == [2, 5]
    asked = [(t.slot, t.at.tolist(), t.ids.tolist(), t.top) for t in step.targets]
    assert asked == [(0, [0, 1, 2], [6, 7, 8], 2), (1, [3, 4], [6, 7], 1)]


def test_a_freed_slot_starts_afresh() -> None:
    b = batch()
    finish(b, begun(b, StepPlan(1, starts=[Start(0, [1])], slices=[Slice(0, 0, [7], SAMPLER)])), [8])
    plan = StepPlan(2, freed_slots=[0], starts=[Start(0, [3])], slices=[Slice(0, 0, [4, 5], SAMPLER)])
    step = begun(b, plan)
    assert (step.input_ids.tolist(), step.kv_indices.tolist()) == ([[4, 5]], [24, 25])


def test_plans_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="a step of 21 tokens in 1 sequences, the buffers hold 20 in 6"):
        begun(batch(), StepPlan(1, starts=[Start(0, [1, 2, 3])], slices=[Slice(0, 0, [1] * 21)]))
    with pytest.raises(ValueError, match="slot 3: a table of 6 blocks, the device copy holds 5"):
        begun(batch(), StepPlan(1, starts=[Start(3, [1] * 6)]))


def test_a_shape_with_as_many_slices_as_tokens_makes_each_token_a_sequence() -> None:
    """Drafts in a step of 4 tokens: attention takes them one by one, sampling takes them as slices."""
    b = batch()
    b.shapes = Shapes([Shape(1, 4, 4, 5, 5)])
    begin = StepPlan(1, starts=[Start(0, [1])], slices=[Slice(0, 0, [7, 7, 7], SAMPLER)])
    finish(b, begun(b, begin), [8, 0, 0, 0, 0])
    step = begun(b, StepPlan(2, slices=[Slice(0, 3, [8, 9, 9], drafts=2)]))
    assert step.decodes == 5
    assert step.rows.tolist() == [0, 0, 0, 0, 0]
    assert step.lens.tolist() == [0, 4, 5, 6, 0]
    assert step.q_start.tolist() == [0, 1, 2, 3, 4, 4]
    assert step.kv_indices.tolist() == [-1, 11, 12, 13, -1]
    assert step.logits_at is not None
    assert (step.logits_at.tolist()[:3], step.known.tolist()[:1]) == ([1, 2, 3], [6])
    assert (b.decoding_slots, step.sample_slots.tolist()[:1]) == ((0,), [0])


def test_shapes_are_found_by_their_tokens() -> None:
    small, wide, large = Shape(0, 4, 4, 4, 4), Shape(4, 4, 4, 8, 8), Shape(0, 16, 8, 8, 16)
    shapes = Shapes([large, wide, small, wide])
    assert list(shapes) == [small, wide, large]
    assert shapes.padded(Shape(0, 3, 1, 1, 3)) == small
    assert shapes.padded(Shape(1, 3, 1, 2, 4)) == wide
    assert shapes.padded(Shape(0, 9, 8, 8, 9)) == large
    assert shapes.padded(Shape(1, 9, 8, 8, 9)) == Shape(1, 9, 8, 8, 9)
    assert [shapes.is_split(shape) for shape in (small, large, Shape(0, 3, 3, 3, 3))] == [True, False, False]


def test_padding_has_no_effect() -> None:
    """What a captured graph computes: the same step in a larger shape."""
    b = batch()
    b.shapes = Shapes([Shape(2, 8, 3, 5, 5)])
    finish(b, begun(b, StepPlan(1, starts=[Start(0, [1])], slices=[Slice(0, 0, [7, 7, 7], SAMPLER)])), [8, 0, 0, 0, 0])
    starts, slices = [Start(1, [2, 3]), Start(5, [6])], [Slice(1, 0, [10, 11]), Slice(5, 4, [20, 21], SAMPLER)]
    step = begun(b, StepPlan(2, starts=starts, slices=slices))
    assert step.decodes == 2
    assert step.input_ids.tolist() == [[8, 0, 10, 11, 20, 21, 0, 0, 0, 0]]
    assert step.position_ids.tolist() == [[3, 0, 0, 1, 4, 5, 0, 0, 0, 0]]
    assert step.kv_indices.tolist() == [11, -1, 16, 17, 52, 53, -1, -1, -1, -1]
    assert (step.rows.tolist(), step.lens.tolist()) == ([0, 0, 1, 5, 0], [4, 0, 2, 6, 0])
    assert step.q_start.tolist() == [0, 1, 2, 4, 6, 6]
    assert step.logits_at is not None
    assert (step.logits_at.tolist(), step.known.tolist()) == ([0, 5, 0, 0, 0], [4, 6, 4, 4, 4])
    assert (b.decoding_slots, step.sample_slots.tolist()) == ((0, 5), [0, 5, -1, -1, -1])


# ------------------------------------------------------------------------------------------------------- window groups


def kv_indices(step: StepTensors) -> list[list[int]]:
    return [place.kv_indices.tolist() for place in step.places]


def test_each_window_group_has_its_own_tables_and_indices() -> None:
    """Slot 1 decodes at position 8 while slot 4 computes positions 14 to 17; block ids show the group of an edit."""
    b = batch(WINDOWS)
    edits = [(1, 0, 33), (1, 0, 52)]
    finish(b, begun(b, StepPlan(1, starts=[Start(1, [7])], slices=[Slice(1, 0, [9] * 8, SAMPLER)], edits=edits)), [8])
    edits = [(1, 1, 4), (1, 1, 40), (1, 1, 53), (4, 1, 50), (4, 2, 51), (4, 1, 58), (4, 2, 59)]
    plan = StepPlan(2, starts=[Start(4, [1, 2, 3])], slices=[Slice(4, 14, [1, 2, 3, 4], SAMPLER)], edits=edits)
    step = begun(b, plan)
    assert kv_indices(step) == [[32, 22, 23, 24, 25], [64, 150, 151, 152, 153], [8, 54, 55, 56, 57]]
    assert [place.tables[4, 1:3].tolist() for place in step.places] == [[2, 3], [18, 19], [6, 7]]
    assert (step.position_ids.tolist(), step.lens.tolist()) == ([[8, 14, 15, 16, 17]], [9, 18])
    finish(b, step, [10, 11])
    step = begun(b, StepPlan(3))
    assert kv_indices(step) == [[33, 26], [65, 154], [9, 58]]
    assert step.position_ids.tolist() == [[9, 18]]


def test_padded_steps_find_the_indices_of_every_group_at_one_address() -> None:
    """A captured graph reads the same addresses again; padding stores no key in any group."""
    b = batch(WINDOWS)
    b.shapes = Shapes([Shape(2, 8, 3, 5, 5)])
    idle = b.mixed_step(b.idle_step(Shape(2, 8, 3, 5, 5)))
    assert kv_indices(idle) == [[-1] * 10] * 3
    addresses = [place.kv_indices.data_ptr() for place in idle.places]
    for count in (3, 5):
        edits = [(0, 0, 33), (0, 0, 52)]
        plan = StepPlan(count, starts=[Start(0, [1])], slices=[Slice(0, 0, [7] * count, SAMPLER)], edits=edits)
        step = begun(b, plan)
        padding = [-1] * (8 - count)
        assert kv_indices(step) == [[-1, -1, *range(at, at + count), *padding] for at in (8, 8, 0)]
        assert [place.kv_indices.data_ptr() for place in step.places] == addresses
        finish(b, step, [5, 0, 0, 0, 0])
        begun(b, StepPlan(count + 100, freed_slots=[0]))
    first = b.decode_step(4)
    b.gather(first)
    assert kv_indices(first) == [[-1] * 4] * 3
    again = [place.kv_indices.data_ptr() for place in b.decode_step(4).places]
    assert again == [place.kv_indices.data_ptr() for place in first.places]


def test_models_of_one_kind_of_layers_stage_the_same_bytes() -> None:
    """A page without window groups has no bytes for them, and a step computes indices once."""
    shape = Shape(2, 8, 3, 5, 5)
    memory, page = blank(shape, 0)
    assert page.windows.shape == (0, 10)
    assert sum(np.asarray(part).nbytes for part in page) <= memory.nbytes <= Page.words(shape, 0) * 8
    assert Page.words(shape, 2) - Page.words(shape, 0) == 2 * 10
    b = batch()
    step = begun(b, StepPlan(1, starts=[Start(0, [1])], slices=[Slice(0, 0, [7, 7, 7], SAMPLER)]))
    assert len(step.places) == 1
    assert step.windows == ()
