"""Drafts: right, wrong or right up to some place, they change no text, and every block and token is accounted for."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from quire.engine.core.blocks import AccountingError
from quire.engine.core.drafts import may_draft
from quire.engine.core.plan import DRAFT_SOURCES, StepResult
from quire.engine.core.policy.drafts import DraftController
from quire.engine.core.sequence import State
from quire.engine.wire.messages import Beams, Generate, Sampling
from quire.loadtest.studies.baselines import MODES
from tests.core.drafters import GuessingDrafter
from tests.core.machine import SchedulerMachine
from tests.core.oracle import EOS, FORCED, VOCAB, next_token, reference
from tests.core.rig import FAR, Rig
from tests.core.test_layer_groups import WindowMachine
from tests.matrix import examples

PROMPT = list(range(3, 16))


def guesser(rig_of: list[Rig], right: int | None = None, length: int = 6) -> GuessingDrafter:
    """A drafter of the rig in the list: `right` tokens as the reference continues, then others; None: at random."""

    def guess(slot: int, known: list[int]) -> list[int]:
        seq = rig_of[0].core.batch.slots.occupants[slot]
        assert seq is not None
        if seq.slot != slot:
            return []  # it has ended at its length
        assert seq.tokens == known, "the drafter follows other tokens"
        luck = blake2b(repr(known).encode(), digest_size=2, salt=b"drafts").digest()
        count, good = (luck[0] % 9, luck[1] % 10) if right is None else (length, right)
        context = list(known)
        for _ in range(count):
            token = next_token(context, seq.request.sampling.seed, seq.index)
            context.append(token if len(context) < len(known) + good else (token + 1) % VOCAB)
        return context[len(known) :]

    return GuessingDrafter(guess)


def drafting_rig(right: int | None = None, *, length: int = 6, depth: int = 1, **options: Any) -> Rig:
    holder: list[Rig] = []
    rig = Rig(depth=depth, drafter=guesser(holder, right, length), **options)
    holder.append(rig)
    return rig


class DraftingMachine(SchedulerMachine):
    """The same runs with drafts, most of them with the result of each step in before the next is planned."""

    def equip(self) -> None:
        self.rig._drafter = guesser([self.rig])
        self.rig.start()

    @rule(steps=st.integers(1, 12))
    def steps_one_by_one(self, steps: int) -> None:
        for _ in range(steps):
            while self.rig.executor.plans:
                self.rig.commit()
            self.rig.now += 1
            self.rig.submit()


TestDraftingMachine = DraftingMachine.TestCase
TestDraftingMachine.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


class DraftingWindowMachine(WindowMachine):
    """The same with windows: none releases a block that a token after refused drafts sees."""

    equip = DraftingMachine.equip
    steps_one_by_one = DraftingMachine.steps_one_by_one


TestDraftingWindowMachine = DraftingWindowMachine.TestCase
TestDraftingWindowMachine.settings = settings(max_examples=examples(25), stateful_step_count=40, deadline=None)


class DraftingStateMachine(DraftingMachine):
    """The same with recurrent state: refused drafts leave none of it behind, in slots, checkpoints and paused
    sequences."""

    refused = "not supported for models with recurrent state"  # beams

    @initialize(checkpoints=st.sampled_from([0, 3, 40]), admission=st.sampled_from(MODES), caching=st.booleans())
    def choose(self, checkpoints: int, admission: str, caching: bool) -> None:
        sizes: dict[str, Any] = {"blocks": 18, "size": 4, "max_seqs": 5, "step_tokens": 16, "chunk_tokens": 7}
        self.rig = Rig(**sizes, admission=admission, caching=caching, checkpoints=checkpoints, bad=2)
        self.equip()


TestDraftingStateMachine = DraftingStateMachine.TestCase
TestDraftingStateMachine.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


class HeadMachine(DraftingStateMachine):
    """The same with a draft head, whose guesses are right or wrong."""

    def equip(self) -> None:
        super().equip()
        self.rig.executor.head = True


TestHeadMachine = HeadMachine.TestCase
TestHeadMachine.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


def test_guesses_of_a_draft_head_save_steps_and_change_no_text() -> None:
    """Rig.run compares every answer with the reference."""
    plain, guessing = Rig(200, depth=1), Rig(200, depth=1, drafter=GuessingDrafter(lambda *_: []))
    guessing.executor.head = True
    for rig in (plain, guessing):
        rig.add(PROMPT, 61, ignore_eos=True)
        rig.run()
    totals = guessing.core.report.totals
    assert totals.drafted_tokens["head"] == guessing.executor.drafted > totals.accepted_drafts["head"] > 10
    assert guessing.core.step <= plain.core.step - totals.accepted_drafts["head"] + 2


@pytest.mark.parametrize("right", [0, 1, 3, 6])
@pytest.mark.parametrize("caching", [True, False])
def test_the_text_is_that_of_plain_decoding_whatever_the_drafts(right: int, caching: bool) -> None:
    """Rig.run compares every answer with the reference.  The steps that drafts save are counted."""
    plain, drafting = Rig(200, depth=1, caching=caching), drafting_rig(right, blocks=200, caching=caching)
    for rig in (plain, drafting):
        for seed in range(4):
            rig.add(PROMPT, 61, seed=seed, ignore_eos=True, n=1 + seed % 2)
        rig.run()
    assert drafting.answers == plain.answers
    assert drafting.executor.drafted > 0
    totals = drafting.core.report.totals
    assert totals.generated_tokens == plain.core.report.totals.generated_tokens
    assert totals.drafted_tokens == {"own": drafting.executor.drafted, "tenant": 0, "prediction": 0, "head": 0}
    assert (totals.accepted_drafts["own"] == 0) == (right == 0)
    # A step gives the accepted drafts and one token more; the first token comes from the prompt's step.
    assert drafting.core.step - plain.core.step <= 0 if right == 0 else drafting.core.step <= 60 // (right + 1) + 12


def test_drafts_that_a_step_leaves_out_are_counted() -> None:
    rig = drafting_rig(3, length=6, step_tokens=12, max_seqs=8)
    for seed in range(4):
        rig.add(PROMPT, 30, seed=seed, ignore_eos=True)
    rig.run()
    assert rig.core.report.totals.refused_drafts > 0
    assert sum(rig.core.report.totals.drafted_tokens.values()) == rig.executor.drafted


def test_a_stop_token_among_accepted_drafts_ends_the_answer_there() -> None:
    rig = drafting_rig(6)
    for seed in range(30):
        rig.add(PROMPT, 200, seed=seed)
    rig.run()
    ends = [finish.reason for finish in rig.finishes.values()]
    assert "stop" in ends
    for key, said in rig.answers.items():
        assert EOS not in said[:-1], key


def test_no_plan_is_made_while_a_step_with_drafts_is_in_flight() -> None:
    """With two steps in flight lengths would not be known: the executor waits, and the text is the same."""
    rig = drafting_rig(3, depth=2)
    rig.add(PROMPT, 40, seed=1, ignore_eos=True)
    for _ in range(200):
        while rig.executor.plans:  # so that the last tokens are known
            rig.commit()
        if not rig.submit():
            break
        if any(piece.drafts for piece in rig.plans[-1].slices):
            assert not rig.submit()
            assert rig.core.batch.verifying
    rig.run()
    assert rig.executor.drafted > 0


@pytest.mark.parametrize("right", [0, 3, 6])
def test_an_executor_that_runs_ahead_drafts_when_the_last_tokens_are_known(right: int) -> None:
    """Two steps in flight, without drafts.  If drafts pay, the scheduler makes no plan before the last result."""
    rig = drafting_rig(right, depth=2)
    rig.core.drafts.run_ahead = True
    for seed in range(3):
        rig.add(PROMPT, 61, seed=seed, ignore_eos=True)
    plain = Rig(depth=2)
    for seed in range(3):
        plain.add(PROMPT, 61, seed=seed, ignore_eos=True)
    for each in (rig, plain):
        each.run()
    assert rig.answers == plain.answers
    assert rig.executor.drafted > 0
    assert rig.core.step <= plain.core.step if right == 0 else rig.core.step <= 60 // (right + 1) + 12


def test_a_step_has_no_more_drafts_than_the_executor_takes() -> None:
    rig = drafting_rig(6)
    rig.core.drafts.max_drafts = 5
    for seed in range(4):
        rig.add(PROMPT, 40, seed=seed, ignore_eos=True)
    rig.run()
    counts = [sum(piece.drafts for piece in plan.slices) for plan in rig.plans]
    assert max(counts) == 5


def test_drafts_take_no_block_from_another_sequence() -> None:
    """In a full pool they are shorter or none, and blocks of refused drafts are free before the next plan."""
    rig = drafting_rig(1, length=6, blocks=16, size=4, admission="none")
    for seed in range(3):
        rig.add(PROMPT, 30, seed=seed, ignore_eos=True)
    while rig.submit():
        rig.commit()
        for seq in rig.core.live():
            if seq.state is State.DECODING:
                assert len(seq.table) <= -(-(seq.computed_before(rig.core.step + 1) + 1) // 4)
    rig.run()
    plain = Rig(depth=1, blocks=16, size=4, admission="none")
    for seed in range(3):
        plain.add(PROMPT, 30, seed=seed, ignore_eos=True)
    plain.run()
    assert rig.core.report.totals.preemptions <= plain.core.report.totals.preemptions


def test_the_drafter_forgets_a_sequence_that_is_preempted() -> None:
    """It finds drafts for the sequences that hold slots alone, and takes a preempted one up again when it returns."""
    rig = drafting_rig(1, length=6, blocks=16, size=4, admission="none")
    for seed in range(3):
        rig.add(PROMPT, 30, seed=seed, ignore_eos=True)
    drafter = rig.core.drafts.drafter
    assert isinstance(drafter, GuessingDrafter)
    while rig.submit():
        assert drafter.known.keys() <= {seq.slot for seq in rig.core.live()}
        rig.commit()
    assert rig.core.report.totals.preemptions > 0
    assert len(drafter.kept) == 3


def test_an_answer_that_ends_at_its_length_is_kept_by_an_executor_that_runs_ahead() -> None:
    rig = drafting_rig(0, depth=2)
    rig.core.drafts.run_ahead = True
    rig.add(PROMPT, 9, seed=1, ignore_eos=True)
    rig.run()
    drafter = rig.core.drafts.drafter
    assert isinstance(drafter, GuessingDrafter)
    assert len(drafter.kept) == 1
    assert not drafter.known


def test_a_refused_token_is_never_found_in_the_prefix_cache() -> None:
    """A second request with the text of the refused drafts has to compute it."""
    rig = drafting_rig(0, length=8, size=4, max_seqs=4)
    rig.add(PROMPT, 30, seed=1, ignore_eos=True)
    rig.run()
    said = rig.answers["r0", 0]
    rig.add(PROMPT + said[:8], 12, seed=1, ignore_eos=True)
    rig.add(PROMPT + [(token + 1) % VOCAB for token in said[:8]], 12, seed=1, ignore_eos=True)
    rig.run()
    cached = {delta.id: delta.cached_tokens for delta in rig.deltas if delta.first == 0}
    assert cached == {"r0": 0, "r1": 20, "r2": 12}


def test_drafts_jumps_and_failed_steps_agree() -> None:
    rig = drafting_rig(None, bad=5)
    for seed in range(8):
        rig.add(PROMPT, 60, seed=seed, ignore_eos=True, grammar=FORCED if seed % 2 else "")
    rig.run()
    assert rig.executor.drafted > 0
    assert rig.executor.jumps > 0


def test_drafts_are_void_when_a_step_fails() -> None:
    rig = drafting_rig(4)
    rig.add(PROMPT, 40, seed=1, ignore_eos=True)
    while not (rig.plans and any(piece.drafts for piece in rig.plans[-1].slices)):
        if rig.executor.plans:
            rig.commit()
        rig.submit()
    rig.fail()
    rig.run()
    assert rig.core.report.totals.recomputed_tokens > 0


def test_a_result_with_more_accepted_than_computed_is_an_accounting_error() -> None:
    rig = drafting_rig(4, length=4)
    rig.add(PROMPT, 40, seed=1, ignore_eos=True)
    while not (rig.plans and any(piece.drafts for piece in rig.plans[-1].slices)):
        if rig.executor.plans:
            rig.commit()
        rig.submit()
    (piece,) = rig.plans[-1].slices
    for count in (-1, piece.drafts + 1):
        with pytest.raises(AccountingError, match="drafts accepted"):
            rig.core.drafts.accepted(piece.slot, count)
    with pytest.raises(AccountingError, match="0 computed"):
        rig.core.drafts.accepted(piece.slot + 1, 0)
    assert isinstance(rig.executor.collect(), StepResult)


@pytest.mark.parametrize("right", [0, 2, 6])
def test_drafts_from_a_prediction_are_counted_for_each_choice(right: int) -> None:
    """What is accepted is in the answer, also where a stop token cuts it; the last delta and the Finish agree."""
    rig = drafting_rig(right)
    drafter = rig.core.drafts.drafter
    assert isinstance(drafter, GuessingDrafter)
    drafter.source = DRAFT_SOURCES.index("prediction")
    for seed in range(12):
        rig.add(PROMPT, 40, seed=seed)
    rig.run()
    assert "stop" in {finish.reason for finish in rig.finishes.values()}
    totals, accepted, computed = rig.core.report.totals, 0, 0
    for key, finish in rig.finishes.items():
        counts = [one.predictions for one in rig.deltas if (one.id, one.index) == key and one.predictions is not None]
        assert counts == sorted(counts)
        assert (counts[-1] if counts else None) == finish.predictions
        if finish.predictions is not None:
            assert finish.predictions[0] < len(rig.answers[key])
            accepted, computed = accepted + finish.predictions[0], computed + sum(finish.predictions)
    assert computed == totals.drafted_tokens["prediction"] == rig.executor.drafted > 0
    assert (accepted == 0) == (right == 0)
    assert accepted <= totals.accepted_drafts["prediction"]


def test_drafts_from_known_text_are_no_prediction() -> None:
    rig = drafting_rig(3)
    rig.add(PROMPT, 40, seed=1)
    rig.run()
    assert rig.core.report.totals.drafted_tokens["own"] > 0
    assert all(one.predictions is None for one in rig.deltas)


def test_what_a_tenant_said_is_kept_apart_by_salt_and_adapter() -> None:
    rig = drafting_rig(2)
    for tenant, salt in (("a", ""), ("a", "x"), ("b", "")):
        rig.add(PROMPT, 9, seed=1, ignore_eos=True, tenant=tenant, salt=salt)
    rig.add(PROMPT, 9, seed=1, ignore_eos=True, tenant="c", deadline=3)
    rig.now = 2
    rig.submit()
    rig.commit()
    rig.now = 4
    rig.run()
    drafter = rig.core.drafts.drafter
    assert isinstance(drafter, GuessingDrafter)
    assert sorted(owner for owner, _ in drafter.kept) == ["a\0\0", "a\0x\0", "b\0\0"]  # not of the one cut short


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"bad_words": [[3]]},
        {"allowed_token_ids": [1, 2]},
        {"min_tokens": 3},
    ],
)
def test_what_keeps_marks_of_the_next_position_drafts_nothing(settings: dict[str, object]) -> None:
    def request(sampling: Sampling, beams: Beams | None = None) -> Generate:
        return Generate("r", "gw", [1], 5, sampling, FAR, beams=beams)

    assert may_draft(request(Sampling(temperature=0.7, grammar="{}", logprobs=3, logit_bias=[(3, 1.0)])))
    assert not may_draft(request(Sampling(**settings)))  # type: ignore[arg-type]
    assert not may_draft(request(Sampling(), Beams(2)))


def test_without_a_drafter_the_plans_are_as_before() -> None:
    rig = Rig(depth=1)
    rig.add(PROMPT, 40, seed=1, ignore_eos=True)
    rig.run()
    assert not any(piece.drafts for plan in rig.plans for piece in plan.slices)
    assert [len(plan.slices) for plan in rig.plans] == [1] + [0] * 39
    assert isinstance(DraftController(rig.step_cost), DraftController)
    assert rig.answers["r0", 0] == reference(PROMPT, 1, 0, len(PROMPT) + 40, frozenset())
