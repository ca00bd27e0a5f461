"""Plans against the tensors they become; pages of a block table written by hand."""

from __future__ import annotations

import pytest
import torch

from engine.core.plan import Fork, Sampler, Slice, Start, StepPlan
from engine.executor.batch import Batch, StepTensors
from engine.executor.kv_cache import KVShape, allocate
from engine.wire.messages import Sampling

SAMPLER = Sampler(Sampling(temperature=0), 3, [])


def batch() -> Batch:
    caches = allocate([KVShape(1, 64)], 32, 8, torch.float32, torch.device("cpu"))
    return Batch(max_seqs=6, max_model_len=40, step_tokens=20, block_size=8, caches=caches)


def begun(b: Batch, plan: StepPlan) -> StepTensors:
    step = b.begin(plan)
    assert step is not None
    return step


def test_a_prompt_then_decode_then_growth() -> None:
    b = batch()
    tokens = list(range(100, 107))
    step = begun(b, StepPlan(1, starts=[Start(2, [9])], slices=[Slice(2, 0, tokens, SAMPLER)]))
    assert step.input_ids.tolist() == [tokens]
    assert step.position_ids.tolist() == [list(range(7))]
    assert step.slots.tolist() == list(range(72, 79))
    assert (step.rows.tolist(), step.q_start.tolist(), step.lens.tolist()) == ([2], [0, 7], [7])
    assert step.logits_at is not None
    assert (step.logits_at.tolist(), step.sample_rows, step.known.tolist()) == ([6], (2,), [7])
    b.finish(step, torch.tensor([55]))
    step = begun(b, StepPlan(2))  # nothing named: row 2 decodes
    assert (step.input_ids.tolist(), step.position_ids.tolist()) == ([[55]], [[7]])
    assert (step.slots.tolist(), step.lens.tolist(), step.known.tolist()) == ([79], [8], [8])
    assert step.logits_at is None
    b.finish(step, torch.tensor([56]))
    step = begun(b, StepPlan(3, edits=[(2, 1, 4)]))
    assert (step.input_ids.tolist(), step.slots.tolist(), step.lens.tolist()) == ([[56]], [32], [9])
    b.finish(step, torch.tensor([57]))
    assert b.begin(StepPlan(4, freed_rows=[2])) is None


def test_chunks_join_rows_that_decode() -> None:
    b = batch()
    b.finish(begun(b, StepPlan(1, starts=[Start(0, [1])], slices=[Slice(0, 0, [7, 7, 7], SAMPLER)])), torch.tensor([8]))
    starts, slices = [Start(1, [2, 3]), Start(5, [6])], [Slice(1, 0, [10, 11]), Slice(5, 4, [20, 21], SAMPLER)]
    step = begun(b, StepPlan(2, starts=starts, slices=slices))
    assert step.input_ids.tolist() == [[8, 10, 11, 20, 21]]
    assert step.position_ids.tolist() == [[3, 0, 1, 4, 5]]
    assert step.slots.tolist() == [11, 16, 17, 52, 53]
    assert (step.rows.tolist(), step.q_start.tolist()) == ([0, 1, 5], [0, 1, 3, 5])
    assert step.lens.tolist() == [4, 2, 6]
    assert step.logits_at is not None
    assert step.logits_at.tolist() == [0, 4]  # row 1 is not through its prompt
    assert (step.sample_rows, step.sample_at, step.known.tolist()) == ((0, 5), None, [4, 6])
    b.finish(step, torch.tensor([30, 31]))
    step = begun(b, StepPlan(3, slices=[Slice(1, 2, [12], SAMPLER)]))
    assert step.input_ids.tolist() == [[30, 31, 12]]
    assert step.sample_rows == (0, 5, 1)
    b.finish(step, torch.tensor([40, 41, 42]))
    assert begun(b, StepPlan(4)).input_ids.tolist() == [[40, 41, 42]]


def test_steady_steps_share_what_does_not_change() -> None:
    b = batch()
    b.finish(begun(b, StepPlan(1, starts=[Start(0, [1])], slices=[Slice(0, 0, [7], SAMPLER)])), torch.tensor([8]))
    one = begun(b, StepPlan(2))
    b.finish(one, torch.tensor([9]))
    two = begun(b, StepPlan(3))
    assert one.sample_rows is two.sample_rows
    for name in ("input_ids", "position_ids", "slots", "rows", "lens", "tables"):  # a captured graph reads these
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
    assert step.sample_at is not None
    assert (step.sample_rows, step.sample_at.tolist()) == ((0, 1, 2, 3), [0, 1, 1, 0])
    assert step.known.tolist() == [2, 1, 1, 2]
    b.finish(step, torch.tensor([50, 51, 52, 53]))
    step = begun(b, StepPlan(2, edits=[(2, 0, 8), (3, 0, 9)]))
    assert (step.input_ids.tolist(), step.slots.tolist()) == ([[50, 51, 52, 53]], [10, 17, 65, 74])


def test_targets_come_with_their_logits() -> None:
    b = batch()
    slices = [Slice(0, 0, [5, 6, 7], SAMPLER, [6, 7, 8], 2), Slice(1, 0, [5, 6, 7], SAMPLER, [6, 7], 1)]
    step = begun(b, StepPlan(1, starts=[Start(0, [1]), Start(1, [2])], slices=slices))
    assert step.logits_at is not None
    assert step.sample_at is not None
    assert step.logits_at.tolist() == [0, 1, 2, 3, 4, 5]
    assert step.sample_at.tolist() == [2, 5]
    assert [(t.row, t.at, t.ids, t.top) for t in step.targets] == [(0, 0, [6, 7, 8], 2), (1, 3, [6, 7], 1)]


def test_a_freed_row_starts_afresh() -> None:
    b = batch()
    b.finish(begun(b, StepPlan(1, starts=[Start(0, [1])], slices=[Slice(0, 0, [7], SAMPLER)])), torch.tensor([8]))
    plan = StepPlan(2, freed_rows=[0], starts=[Start(0, [3])], slices=[Slice(0, 0, [4, 5], SAMPLER)])
    step = begun(b, plan)
    assert (step.input_ids.tolist(), step.slots.tolist()) == ([[4, 5]], [24, 25])


def test_plans_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="a step of 21 tokens in 1 rows, the buffers hold 20 in 6"):
        batch().begin(StepPlan(1, starts=[Start(0, [1, 2, 3])], slices=[Slice(0, 0, [1] * 21)]))
    with pytest.raises(ValueError, match="row 3: a table of 6 blocks, the mirror holds 5"):
        batch().begin(StepPlan(1, starts=[Start(3, [1] * 6)]))
