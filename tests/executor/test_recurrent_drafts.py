"""Drafts on models with recurrent layers: refused drafts leave no trace in a sequence's state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.engine.core.plan import Slice, StepPlan
from quire.engine.core.policy.drafts import DraftController
from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.models.recurrent.families import FAMILIES
from quire.engine.executor.models.recurrent.rollback import Rollback
from quire.engine.executor.models.recurrent.states import States
from quire.engine.llm import LLM
from quire.engine.wire.messages import FOREVER_MS, Generate, Sampling
from tests.executor.driver import answer, fail_next_step
from tests.executor.matchers import PROMPT
from tests.executor.test_drafts import NEW, PROMPTS, SAMPLINGS, answers, compare, open_llm, run

Tiny = Callable[[str], Path]
KINDS = ("lfm2", "qwen3_5_text", "bamba")  # one of each kind of layer
MEMORY: dict[str, Any] = {"state_memory_gib": 64 / 1024, "max_seqs": 8}
TWO = [(7, 60.0), (8, 60.0)]  # text that repeats itself, so that there is something to draft


def open_recurrent(directory: Path, dtype: str = "float32", **options: Any) -> LLM:
    """An engine that can draft and has no drafter yet.

    Not --deterministic, for which layers of tiny models are too narrow: float32 has no near-ties here."""
    options = {"deterministic": False} | options
    llm = open_llm(directory, dtype, **({"drafts": "on"} | MEMORY | options))
    llm.engine.core.drafts.drafter = None
    return llm


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_drafts_change_no_token_of_a_recurrent_model(family: str, tiny: Tiny) -> None:
    llm = open_recurrent(tiny(family))
    for right in (None, 6):
        *_, accepted = compare(llm, PROMPTS, SAMPLINGS, right, n=2)
        assert accepted > 0
    llm.close()


def test_drafts_change_no_token_of_a_recurrent_model_in_bfloat16(tiny: Tiny) -> None:
    llm = open_recurrent(tiny("lfm2"), "bfloat16", deterministic=True)
    *_, accepted = compare(llm, PROMPTS, SAMPLINGS, None, n=2)
    assert accepted > 0
    llm.close()


@pytest.mark.parametrize("family", KINDS)
def test_a_preempted_recurrent_answer_drafts_on(family: str, tiny: Tiny) -> None:
    """In a pool too small for all, with prefix hits at checkpoints that drafting sequences leave."""
    small = open_recurrent(
        tiny(family), kv_blocks=20, max_model_len=120, admission="threshold", admit_threshold=1.0, max_seqs=6
    )
    *_, accepted = compare(small, PROMPTS, SAMPLINGS, None)
    assert accepted > 0
    assert small.engine.core.report.totals.preemptions > 0
    small.engine.core.auditor.whole()
    small.close()


def test_checkpoints_of_a_drafting_sequence_are_those_of_its_tokens(tiny: Tiny) -> None:
    """A second turn begins after the first answer, with the state that drafts were rolled back to."""
    drafting, fresh = open_recurrent(tiny("qwen3_5_text")), open_recurrent(tiny("qwen3_5_text"), prefix_cache=False)
    sampling = Sampling(temperature=0, ignore_eos=True)
    (plain,), *_ = compare(drafting, [PROMPT], [sampling], None, new=80)
    said = PROMPT + plain.outputs[0].token_ids
    totals = drafting.engine.core.report.totals
    before = totals.cached_prompt_tokens
    second = [*said, 5, 9, 11]
    assert answers(run(drafting, [second], [sampling])) == answers(run(fresh, [second], [sampling]))
    assert totals.cached_prompt_tokens - before > len(PROMPT)
    for llm in (drafting, fresh):
        llm.close()


def test_a_killed_engines_recurrent_answer_resumes_and_drafts_on(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed at each position; the engine that takes over drafts with its own drafter."""
    directory, sampling = tiny("qwen3_5_text"), Sampling(seed=3, logit_bias=TWO)
    options = MEMORY | {"deterministic": False}
    plain, other = open_llm(directory, **options), open_llm(directory, drafts="on", **options)
    want = answer(plain, Generate("first", "g", PROMPT, NEW, sampling, FOREVER_MS))
    monkeypatch.setattr(DraftController, "choose", lambda _, drafts, *__: [len(one.tokens) for _, one in drafts])
    for kept in range(1, NEW, 7):
        request = Generate(f"again {kept}", "g", PROMPT, NEW, sampling, FOREVER_MS)
        assert want[:kept] + answer(other, request, [want[:kept]]) == want
    assert sum(other.engine.core.report.totals.accepted_drafts.values()) > 0
    for llm in (plain, other):
        llm.close()


def test_a_failed_step_leaves_no_rollback_behind(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(tiny("lfm2"), drafts="on", **MEMORY)
    sampling = Sampling(seed=3, logit_bias=TWO)
    monkeypatch.setattr(DraftController, "choose", lambda _, drafts, *__: [len(one.tokens) for _, one in drafts])
    want = answers(run(llm, [PROMPT], [sampling]))
    done = llm.submit(PROMPT, sampling, max_new_tokens=NEW)
    while not llm.engine.core.report.totals.accepted_drafts["own"]:
        llm.step()
    fail_next_step(llm)
    while llm.unfinished:
        llm.step()
    assert answers([done]) == want
    llm.close()


def test_the_drafts_of_a_step_are_limited_by_the_states_to_roll_back_to(tiny: Tiny) -> None:
    llm = open_recurrent(tiny("qwen3_5_text"), state_memory_gib=2 / 1024)
    assert 0 < llm.executor.info.draft_tokens < 6 * len(PROMPTS)
    *_, accepted = compare(llm, PROMPTS, SAMPLINGS, 6)
    assert accepted > 0
    llm.close()
    with pytest.raises(ModelLoadError, match="no recurrent state is left to roll back to: raise state_memory_gib"):
        open_recurrent(tiny("qwen3_5_text"), state_memory_gib=0.6 / 1024)


def test_a_model_without_drafts_sets_no_states_aside(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[States] = []
    monkeypatch.setattr(States, "report", lambda states, _: made.append(states))
    open_llm(tiny("lfm2"), **MEMORY).close()
    assert [states.rollback.places for states in made] == [0]


def test_a_rollback_restores_the_state_after_the_last_accepted_draft() -> None:
    """Two slices share the states; one of them keeps all of its drafts."""
    rollback = Rollback(slots=4, checkpoints=10, places=5)
    slices = [Slice(2, 30, [1, 2, 3, 4], drafts=3), Slice(0, 7, [5, 6]), Slice(1, 9, [7, 8, 9], drafts=2)]
    plan = rollback.prepare(StepPlan(1, slices=slices))
    assert [piece.keep for piece in plan.slices] == [[(31, 10), (32, 11), (33, 12)], [], [(10, 13), (11, 14)]]
    assert rollback.copies({2: 1, 1: 2}) == [(4 + 11, 2)]
    assert rollback.copies({2: 0, 1: 1}) == [(4 + 10, 2), (4 + 14, 1)]
    plain = StepPlan(2, slices=slices[1:2])
    assert rollback.prepare(plain) is plain
    with pytest.raises(ValueError, match="6 drafts in a step, at most 5 can be rolled back"):
        rollback.prepare(StepPlan(3, slices=[*slices[:1], Slice(1, 9, [7, 8, 9, 9], drafts=3)]))
