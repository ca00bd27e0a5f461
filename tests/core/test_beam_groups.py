"""Beam groups in the scheduler, over the oracle: its candidates depend on what the block tables really hold."""

from __future__ import annotations

import inspect
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from quire.engine.core.beam_groups import BeamGroup
from quire.engine.core.plan_builder import PlanBuilder
from quire.engine.core.sequence import Sequence, State
from quire.engine.wire.messages import CONSTRAINT, Beams, Finish
from tests.core.rig import Rig

PROMPT = [5, 6, 7, 8, 9, 10]


def step(rig: Rig, count: int = 1) -> None:
    for _ in range(count):
        rig.submit()
        rig.commit()


def held(rig: Rig) -> tuple[int, int]:
    """(blocks of the tables of all sequences, shared ones counted in each; the same, counted once)."""
    tables = [seq.table for seq in rig.core.live()]
    return sum(map(len, tables)), len(set(itertools.chain(*tables)))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_answers_are_those_of_a_search_on_contexts(width: int, depth: int) -> None:
    """With plain requests in the same batch, whose texts stay theirs."""
    rig = Rig(blocks=200, depth=depth, max_seqs=20)
    for early, penalty in itertools.product((True, False, "never"), (1.0, -1.0)):
        rig.add(PROMPT, 12, n=width, beams=Beams(width, penalty, early), stop_token_ids=[3])  # type: ignore[arg-type]
        rig.add(PROMPT, 20, seed=4)
        rig.run()
    assert {finish.reason for finish in rig.finishes.values()} <= {"stop", "length"}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("steps", [1, 4, 11])
def test_a_group_is_preempted_as_a_whole_and_finds_the_same_answers(steps: int, caching: bool) -> None:
    """After its return it holds no more blocks than before: what beams have in common is computed and kept once."""
    rig = Rig(blocks=60, caching=caching, depth=1)
    rig.add(PROMPT, 16, n=3, beams=Beams(4), ignore_eos=True)
    step(rig, steps)
    before, members = held(rig), list(rig.core.live())
    rig.core.preemption.preempt(members[2])
    assert {seq.state for seq in members} == {State.WAITING}
    assert held(rig) == (0, 0)
    assert len(rig.core.waiting) == 1
    assert rig.core.report.totals.preemptions == 1
    while rig.core.waiting or any(seq.known - seq.computed > 1 for seq in rig.core.live()):
        step(rig)
    assert held(rig)[1] <= before[1] + 4
    rig.run()
    assert len(rig.finishes) == 3


def test_groups_larger_than_the_pool_take_turns() -> None:
    """They do not fit together.  Both end with the answers of a search alone; the younger one is preempted."""
    rig = Rig(blocks=26, depth=1, max_seqs=16)
    for seed in range(3):
        rig.add([5 + seed] * 6, 22, n=2, beams=Beams(4), ignore_eos=True)
    rig.run()
    assert rig.core.report.totals.preemptions > 0
    assert {finish.reason for finish in rig.finishes.values()} == {"length"}


def test_a_step_copies_a_shared_last_block_for_all_beams_but_one() -> None:
    rig = Rig(depth=1)
    rig.add(PROMPT, 9, n=2, beams=Beams(4), ignore_eos=True)
    step(rig, 2)
    assert len(rig.plans[-1].copies) == 3
    assert len({source for source, _ in rig.plans[-1].copies}) == 1
    rig.run()
    assert all(len(plan.copies) <= 3 for plan in rig.plans)


def test_a_step_with_no_result_leaves_the_group_out_and_others_run_on() -> None:
    """With two steps in flight a group computes in every second plan, a plain sequence in each."""
    rig = Rig(depth=2)
    rig.add(PROMPT, 9, beams=Beams(2), ignore_eos=True)
    rig.add(PROMPT, 9, ignore_eos=True)
    rig.run()
    assert [len(plan.slices) for plan in rig.plans[1:7]] == [0, 2, 0, 2, 0, 2]
    assert len(rig.answers["r1", 0]) == 9


def test_groups_that_start_in_different_steps_step_together() -> None:
    """They would take turns otherwise, with two steps in flight, and every step would have half of the beams."""
    rig = Rig(depth=2, max_seqs=16)
    rig.add(PROMPT, 20, n=2, beams=Beams(4), ignore_eos=True)
    rig.submit()  # the prompt is in flight
    rig.add([PROMPT[0] + 1] * 6, 20, n=2, beams=Beams(4), ignore_eos=True)
    rig.run()
    assert len(rig.finishes) == 4
    assert sum(bool(plan.slices) for plan in rig.plans) <= 20 + 3


def test_cancel_and_deadline_free_everything_before_the_next_plan() -> None:
    rig = Rig(blocks=40, caching=False)
    cancelled = rig.add(PROMPT, 12, n=2, beams=Beams(3), ignore_eos=True)
    late = rig.add(PROMPT, 12, n=2, beams=Beams(3), ignore_eos=True, deadline=20)
    for _ in range(5):
        rig.submit()
        rig.commit()
    rig.submit()  # in flight
    rig.core.abort(cancelled)
    rig.collect_outputs()
    rig.now = 20
    rig.submit()
    assert rig.pool.available == rig.pool.total
    rig.run()
    # The tokens that all beams have computed are charged once, whatever ends the search.
    computed = rig.finishes[cancelled, 0].searched
    assert computed > 0
    assert computed % 3 == 0
    assert rig.finishes == {
        (cancelled, 0): Finish("cancelled", searched=computed),
        (cancelled, 1): Finish("cancelled"),
        (late, 0): Finish("deadline", searched=computed),
        (late, 1): Finish("deadline"),
    }


def test_one_answer_is_cancelled_and_the_others_are_found() -> None:
    rig = Rig()
    request = rig.add(PROMPT, 6, n=3, beams=Beams(3), ignore_eos=True)
    step(rig, 3)
    rig.core.abort(request, 1)
    rig.core.abort(request, 1)
    rig.run()
    assert [rig.finishes[request, index].reason for index in range(3)] == ["length", "cancelled", "length"]


@pytest.mark.parametrize("withdrawn", [False, True])
def test_all_tokens_of_all_beams_are_charged(withdrawn: bool) -> None:
    """Also after a preemption, whose tokens are computed again and not charged again."""
    rig = Rig()
    request = rig.add(PROMPT, 6, n=2, beams=Beams(4), ignore_eos=True)
    step(rig, 4)
    rig.core.preemption.preempt(rig.core.requests.unfinished(request)[1])
    if withdrawn:
        rig.core.abort(request, 0)
    rig.run()
    returned = sum(len(tokens) for (name, _), tokens in rig.answers.items() if name == request)
    assert returned == (6 if withdrawn else 12)
    searched = sum(rig.finishes[request, index].searched for index in range(2))
    assert searched + returned == rig.core.report.totals.generated_tokens == 4 * 6


@pytest.mark.parametrize("preempted", [False, True])
def test_a_finish_says_what_the_beams_shared(preempted: bool) -> None:
    rig = Rig()
    request = rig.add(PROMPT, 20, n=2, beams=Beams(4), ignore_eos=True)
    blocks: list[int] = []
    entries = 0
    while (request, 0) not in rig.finishes:
        rig.submit()
        group = rig.core.groups.of(request)
        assert isinstance(group, BeamGroup)
        if group.search.started and (group.leader.known - len(PROMPT)) in (2, 10, 18):
            tables = [seq.table for seq in group.beams]
            entries += sum(map(len, tables))
            blocks.append(len(set(itertools.chain(*tables))))
        rig.commit()
        if preempted and len(blocks) == 1:
            preempted = False
            rig.core.preemption.preempt(group.leader)
    assert len(blocks) == 3
    shared = 1 - sum(blocks) / entries
    assert 0 < shared < 1
    assert [rig.finishes[request, index].shared for index in range(2)] == [pytest.approx(shared)] * 2


def test_a_group_that_waits_counts_the_blocks_of_its_beams() -> None:
    """What the engine would claim is less by them, so a gateway does not fill the pool twice."""
    room = []
    for beams in (None, Beams(4)):
        rig = Rig(blocks=64)
        rig.add(PROMPT, 40, ignore_eos=True)
        step(rig, 2)
        rig.add(PROMPT, 20, n=1, beams=beams, ignore_eos=True)
        room.append(rig.core.headroom.startable()[0])
        rig.run()
        rig.core.waiting.check()
    assert room[0] - room[1] == 3 * rig.pool.block_size


def test_a_group_of_an_earlier_engine_begins_again_and_sends_what_was_not_sent() -> None:
    rig = Rig()
    rig.add(PROMPT, 6, n=3, beams=Beams(3), ignore_eos=True)
    want = dict(rig.answers)
    rig.run()
    want = {key: list(tokens) for key, tokens in rig.answers.items()}
    rig.start()
    rig.over.clear()
    rig.milestones.clear()
    del rig.finishes["r0", 0], rig.answers["r0", 0]
    rig.core.accept(rig.requests["r0"], [[], None, None])
    rig.run()
    assert rig.answers == want


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"beams": Beams(9), "n": 1}, "the beam width is 9; it must be 1 (n) to 8 (slots) here"),
        ({"beams": Beams(2), "n": 3}, "the beam width is 2; it must be 3 (n) to 8 (slots) here"),
        ({"beams": Beams(8), "new": 60}, "8 beams of 66 tokens, prompt included, take 129 blocks; this engine has 64"),
        ({"beams": Beams(2, 1000.0)}, "length_penalty is 1000.0; it must be -5 to 5"),
        ({"beams": Beams(2, math.nan)}, "length_penalty is nan; it must be -5 to 5"),
        ({"beams": Beams(2), "presence_penalty": 1.5}, "presence_penalty 1.5 cannot be combined with beam search"),
        ({"beams": Beams(2), "prompt_logprobs": 0}, "prompt_logprobs 0 cannot be combined with beam search"),
    ],
)
def test_refusals_name_limit_and_value(request_: dict[str, Any], message: str) -> None:
    rig = Rig()
    name = rig.add(PROMPT, request_.pop("new", 4), **request_)
    assert [rig.finishes[name, i] for i in range(rig.requests[name].n)] == [
        Finish("error", message=message, code=CONSTRAINT) for _ in range(rig.requests[name].n)
    ]


def never_private(self: PlanBuilder, seq: Sequence, index: int) -> bool:
    return True


def forgets_moves(self: BeamGroup, seq: Sequence) -> tuple[bool, list[tuple[int, int]]]:
    return seq.index in self._moved and self._moved.pop(seq.index) is None, []


@pytest.mark.parametrize(
    ("owner", "name", "mutation"),
    [(PlanBuilder, "_make_private", never_private), (BeamGroup, "take_moves", forgets_moves)],
)
def test_the_oracle_catches_a_missing_copy_and_a_missing_edit(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, mutation: Any
) -> None:
    monkeypatch.setattr(owner, name, mutation)
    rig = Rig(depth=1)
    rig.add(PROMPT, 12, n=4, beams=Beams(4), ignore_eos=True)
    with pytest.raises(AssertionError):
        rig.run()


@pytest.mark.parametrize(
    "name", ["scheduler", "batch", "plan_builder", "preemption", "open_requests", "sequence_group"]
)
def test_parts_of_the_scheduler_know_no_kind_of_group(name: str) -> None:
    """A new kind is an entry in `groups.KINDS`, and no branch elsewhere."""
    assert "beam" not in Path(inspect.getfile(PlanBuilder)).with_name(f"{name}.py").read_text().lower()
