"""Drafts on a real model: every token, log-probability and reason is that of decoding one by one, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.config import EngineConfig
from quire.engine.core.plan import DRAFT_SOURCES
from quire.engine.core.policy.drafts import DraftController
from quire.engine.core.policy.jumps import JumpCosts
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.executor.drafter import OWN_TOKENS, SuffixDrafter
from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.loading import load
from quire.engine.executor.local import why_no_drafts
from quire.engine.executor.shapes import Shape, Shapes
from quire.engine.llm import LLM, Completion
from quire.engine.loop import build_scheduler
from quire.engine.wire.messages import Sampling
from tests.checkpoints import VOCAB
from tests.core.drafters import AllDrafts, GuessingDrafter
from tests.executor.driver import fail_next_step
from tests.executor.matchers import PERSON, PROMPT, choice, schema
from tests.matrix import examples

Checkpoint = Callable[[str], Path]
NEW = 40  # tokens of an answer


def open_llm(directory: Path, dtype: str = "float32", **options: Any) -> LLM:
    chosen: dict[str, Any] = {
        "drafts": "off",
        "deterministic": True,
        "kv_blocks": 256,
        "block_size": 8,
        "threads": 1,
        "max_model_len": 400,
    } | options
    config = EngineConfig(
        model=str(directory),
        dtype=dtype,  # type: ignore[arg-type]
        poison_free_blocks=True,
        check_accounting=True,
        **chosen,
    )
    return LLM.over(config, load(config))


def replaying(said: list[list[int]], right: int | None) -> GuessingDrafter:
    """Guesses earlier answers: `right` tokens of 6; None: 0 to 8 of 0 to 8, by the tokens known."""

    def guess(slot: int, known: list[int]) -> list[int]:
        after = next((one[len(known) :] for one in said if one[: len(known)] == known), [])
        luck = blake2b(repr(known).encode(), digest_size=2).digest()
        count, good = (luck[0] % 9, luck[1] % 9) if right is None else (6, right)
        after = [*after, *[0] * 9][:count]
        return [token if at < good else (token + 1) % VOCAB for at, token in enumerate(after)]

    return GuessingDrafter(guess)


def answers(done: list[Completion]) -> list[Any]:
    return [(one.token_ids, one.finish_reason, one.message) for each in done for one in each.outputs]


def run(
    llm: LLM, prompts: list[list[int]], samplings: list[Sampling], *, n: int = 1, new: int = NEW
) -> list[Completion]:
    done = [llm.submit(ids, each, max_new_tokens=new, n=n) for ids, each in zip(prompts, samplings, strict=True)]
    while llm.unfinished:
        llm.step()
    return done


def compare(
    llm: LLM, prompts: list[list[int]], samplings: list[Sampling], right: int | None, *, n: int = 1, new: int = NEW
) -> tuple[list[Completion], list[Completion], int]:
    """(answers without drafts, answers with drafts, drafts accepted)."""
    drafts, totals = llm.engine.core.drafts, llm.engine.core.report.totals
    plain = run(llm, prompts, samplings, n=n, new=new)
    before, steps = totals.accepted_drafts["own"], llm.engine.core.step
    said = [ids + one.token_ids for ids, each in zip(prompts, plain, strict=True) for one in each.outputs]
    drafts.drafter, drafts.policy = replaying(said, right), AllDrafts()
    try:
        drafted = run(llm, prompts, samplings, n=n, new=new)
    finally:
        drafts.reset()
        drafts.drafter = None
    assert answers(drafted) == answers(plain)
    assert llm.engine.core.step > steps
    return plain, drafted, totals.accepted_drafts["own"] - before


PROMPTS = [PROMPT, PROMPT[::-1], [*PROMPT, 5, 6], [9] * 17]
SAMPLINGS = [
    Sampling(temperature=0, ignore_eos=True),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.2, seed=2, top_p=0.9),
    Sampling(temperature=1, seed=3, top_k=20, logit_bias=[(7, 3.0)]),
]


@pytest.mark.parametrize(
    ("family", "dtype", "quantize"),
    [
        ("llama", "float32", "none"),
        ("llama", "bfloat16", "none"),
        ("qwen3", "float16", "none"),
        ("gemma2", "bfloat16", "none"),
        ("gpt2", "float32", "none"),
        ("llama", "bfloat16", "int8"),
        ("llama", "float32", "int4"),
    ],
)
def test_drafts_change_no_token(checkpoint: Checkpoint, family: str, dtype: str, quantize: str) -> None:
    """Any dtype and family: rows of a slice with drafts have the bits of rows computed one by one."""
    llm = open_llm(checkpoint(family), dtype, quantize=quantize)
    for right in (None, 6):
        *_, accepted = compare(llm, PROMPTS, SAMPLINGS, right, n=2)
        assert accepted > 0
    llm.close()


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Any:
    made = open_llm(checkpoint("llama"))
    yield made
    made.close()


def test_right_drafts_save_steps(llm: LLM) -> None:
    before = llm.engine.core.step
    run(llm, [PROMPT], [SAMPLINGS[0]])
    plain = llm.engine.core.step - before
    compare(llm, [PROMPT], [SAMPLINGS[0]], 6)
    assert llm.engine.core.step - before - 2 * plain <= -(-NEW // 7) + 3


def test_an_executor_that_runs_ahead_waits_for_the_tokens_before_drafts(llm: LLM) -> None:
    """As on a GPU: two steps in flight, but a step with drafts is alone."""
    before = llm.engine.core.step
    run(llm, PROMPTS, SAMPLINGS, n=2)
    plain = llm.engine.core.step - before
    llm.executor.depth = 2
    llm.engine.core.drafts.run_ahead = True
    try:
        for right in (None, 6):
            *_, accepted = compare(llm, PROMPTS, SAMPLINGS, right, n=2)
            assert accepted > 0
    finally:
        llm.executor.depth = 1
        llm.engine.core.drafts.run_ahead = False
    assert llm.engine.core.step - before < 5 * plain


@pytest.mark.parametrize("streams", [1, 4])
def test_a_size_with_a_sequence_for_each_token_has_the_same_tokens(llm: LLM, streams: int) -> None:
    """As on a GPU: attention takes each draft for a sequence, and more slots sample than there are.

    The size has no further tokens, which kernels of a CPU refuse."""
    batch, tokens = llm.executor._worker._batch, 7 * streams  # type: ignore[attr-defined]
    shape = Shape(0, tokens, tokens, tokens, tokens)
    batch.shapes = Shapes([shape])
    fitting: list[Shape] = []

    def padded(_: Shapes, exact: Shape) -> Shape:
        fitting.extend([exact] if exact.total == exact.tokens == tokens else [])
        return shape if exact in fitting else exact

    try:
        with mock.patch.object(Shapes, "padded", padded):
            *_, accepted = compare(llm, PROMPTS[:streams], SAMPLINGS[:streams], 4, new=20)
    finally:
        batch.shapes = Shapes()
    assert len(fitting) > 2
    assert accepted > 0


def test_a_prompt_step_of_the_size_of_one_with_drafts_samples_its_own_rows(llm: LLM) -> None:
    """As on a GPU, where prompts are padded to any size that fits: those with drafts have more logits than slots."""
    batch, padded = llm.executor._worker._batch, list[Shape]()  # type: ignore[attr-defined]

    def with_logits(_: Shapes, exact: Shape) -> Shape:
        padded.append(exact._replace(logits=exact.logits + 3))
        return padded[-1]

    plain = run(llm, PROMPTS, SAMPLINGS)
    try:
        with mock.patch.object(Shapes, "padded", with_logits):
            assert answers(run(llm, PROMPTS, SAMPLINGS)) == answers(plain)
    finally:
        batch.shapes = Shapes()
    assert padded


def test_a_preempted_answer_drafts_on(checkpoint: Checkpoint) -> None:
    """In a pool too small for all, some are preempted, others find no block for their drafts."""
    small = open_llm(
        checkpoint("llama"),
        kv_blocks=26,
        max_model_len=120,
        admission="threshold",
        admit_threshold=1.0,
        prefix_cache=False,
    )
    *_, accepted = compare(small, PROMPTS, SAMPLINGS, None)
    assert accepted > 0
    assert small.engine.core.report.totals.preemptions > 0
    small.close()


def test_a_failed_step_drops_its_drafts(llm: LLM) -> None:
    drafts = llm.engine.core.drafts
    (plain,) = run(llm, [PROMPT], [SAMPLINGS[1]])
    drafts.drafter, drafts.policy = replaying([PROMPT + plain.outputs[0].token_ids], 4), AllDrafts()
    done = llm.submit(PROMPT, SAMPLINGS[1], max_new_tokens=NEW)
    for _ in range(3):
        llm.step()
    fail_next_step(llm)
    while llm.unfinished:
        llm.step()
    drafts.drafter = None
    assert answers([done]) == answers([plain])


@pytest.mark.parametrize(
    "how", [{"temperature": 0.0}, {"seed": 3, "temperature": 0.7}, {"seed": 4, "temperature": 1.2}]
)
def test_each_position_of_a_draft_has_the_mask_of_its_grammar(llm: LLM, how: dict[str, Any]) -> None:
    """With jumps over forced tokens in between, and drafts that the grammar forbids."""
    samplings = [
        Sampling(grammar=schema(PERSON), **how),
        Sampling(grammar=choice("one two three", "one two four"), **how),
        Sampling(**how),
    ]
    for right in (None, 6):
        *_, accepted = compare(llm, PROMPTS[:3], samplings, right, n=2, new=120)
        assert accepted > 0


def test_a_grammar_without_a_search_for_forced_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers may have taken in tokens that the scheduler does not know of: drafts go over them as well."""
    monkeypatch.setattr(JumpCosts, "look_ahead", lambda *_: False)
    samplings = [Sampling(grammar=schema(PERSON), seed=seed, temperature=0.9) for seed in range(3)]
    *_, accepted = compare(llm, PROMPTS[:3], samplings, 6, new=120)
    assert accepted > 20


def test_each_accepted_draft_has_its_log_probabilities(llm: LLM) -> None:
    samplings = [
        Sampling(temperature=0.8, seed=1, logprobs=3),
        Sampling(temperature=0, logprobs=0, grammar=schema(PERSON)),
        Sampling(temperature=0, logprobs=2, logprob_token_ids=[4, 9]),
        Sampling(temperature=1, seed=2),
    ]
    plain, drafted, accepted = compare(llm, PROMPTS, samplings, None, new=60)
    assert accepted > 0
    for before, after in zip(plain, drafted, strict=True):
        want, got = before.outputs[0].logprobs or [], after.outputs[0].logprobs or []
        assert len(got) == len(want) == (0 if before is plain[3] else len(before.outputs[0].token_ids))
        for one, other in zip(want, got, strict=True):
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert other.logprob == pytest.approx(one.logprob, abs=1e-5)
            assert [value for _, value in other.top] == pytest.approx([value for _, value in one.top], abs=1e-5)


def test_the_scripted_executor_accepts_what_its_text_has() -> None:
    info = ModelInfo("scripted", "scripted", VOCAB, 400, [0], 0)
    config = EngineConfig(step_tokens=512, max_seqs=8, admission="threshold", admit_threshold=1.0)
    plain = LLM.over(config, ScriptedExecutor(info, 256))
    want = run(plain, [[5] * 9], [Sampling(seed=3)])
    executor = ScriptedExecutor(info, 256)
    executor.depth = 1
    drafting = LLM.over(config, executor)
    core = drafting.engine.core
    core.drafts.drafter, core.drafts.policy = replaying([[5] * 9 + want[0].outputs[0].token_ids], 3), AllDrafts()
    assert answers(run(drafting, [[5] * 9], [Sampling(seed=3)])) == answers(want)
    assert core.report.totals.accepted_drafts["own"] > 0
    assert core.step < plain.engine.core.step
    assert build_scheduler(config, executor).drafts.drafter is None


# ----------------------------------------------------------------------------------------------------- the drafter


def reference(own: list[int], texts: list[list[int]], least: int) -> tuple[int, list[list[int]]]:
    """(longest match of 2 to 24 tokens, what follows each place with it) by comparing every place."""
    best, after = 0, list[list[int]]()
    for text in texts:
        for end in range(1, len(text)):
            match = 0
            while match < min(24, end + 1, len(own)) and text[end - match] == own[-1 - match]:
                match += 1
            if match > best:
                best, after = match, []
            if match == best and match >= max(2, least):
                after.append(text[end + 1 :])
    return best if after else 0, after


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.lists(st.integers(0, 3), max_size=20))
def test_drafts_follow_the_longest_match(prompt: list[int], answer: list[int]) -> None:
    """In the own text: the first draft follows a place of the longest match, and no draft is longer than it."""
    drafter = SuffixDrafter(4)
    drafter.begin(1, "a", [*prompt, *answer[:1]], len(prompt), [])
    own = [*prompt, *answer[:1]]
    for token in [*answer[1:], None]:
        found = drafter.find([], [], 2) if token is None else drafter.find([1], [token], 2)
        own += [] if token is None else [token]
        if token is None and len(answer) > 1:
            continue  # nothing has changed
        match, after = reference(own, [own[:-1]], 2)
        assert len(found) == (match > 0)
        for draft in found:
            assert (draft.slot, draft.match, draft.source) == (1, match, 0)
            assert 1 <= len(draft.tokens) <= match
            firsts = [(one or own[-1:])[0] for one in after]  # the newest place is the end itself
            assert draft.tokens[0] in firsts
    drafter.close()


def test_answers_of_an_owner_are_found_by_that_owner_alone() -> None:
    drafter = SuffixDrafter(4)
    drafter.begin(0, "a", [1, 2, 10, 11, 12, 13], 2, [])
    drafter.end(0, keep=True)
    for slot, owner in ((1, "a"), (2, "b")):
        drafter.begin(slot, owner, [5, 6, 10, 11], 3, [])
    (draft,) = drafter.find([], [], 2)
    assert (draft.slot, draft.tokens, draft.match, draft.source) == (1, [12, 13], 2, 1)
    drafter.begin(3, "a", [5, 6, 13, 99], 3, [])
    assert drafter.find([], [], 2) == []
    assert drafter.find([1], [12], 2)[0].tokens == [13]  # the text ends with the answer
    assert drafter.find([1], [13], 4) == []
    drafter.close()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), min_size=4, max_size=24))
@settings(max_examples=examples(30), deadline=None)
def test_drafts_never_come_from_the_answers_of_another_owner(requests: list[tuple[int, int, bool]]) -> None:
    """All owners ask the same and say the same, but for a token that only one of them uses."""
    drafter, tenant = SuffixDrafter(4), DRAFT_SOURCES.index("tenant")
    said: set[int] = set()
    running: dict[int, int] = {}
    for owner, slot, keep in requests:
        if slot in running:
            drafter.end(slot, keep=keep)
            said |= {running.pop(slot)} if keep else set()
        drafter.begin(slot, f"owner {owner}", [5, 6, 7, 8], 4, [])
        running[slot] = owner
        found = {one.slot: one for one in drafter.find([], [], 2)}
        assert all(one.source == tenant and one.tokens[0] == 100 + running[at] for at, one in found.items())
        assert (slot in found) == (owner in said)
        drafter.extend(slot, [5, 6, 7, 8, 5, 6, 7, 8, 100 + owner, 5, 6])
        drafter.find([], [], 2)
    drafter.close()


def test_an_answer_that_was_cut_short_is_not_kept() -> None:
    drafter = SuffixDrafter(2)
    drafter.begin(0, "a", [1, 2, 10, 11, 12, 13], 2, [])
    drafter.end(0, keep=False)
    drafter.begin(1, "a", [5, 6, 10, 11], 3, [])
    assert drafter.find([0, 1], [3, 12], 2) == []
    drafter.close()


def test_a_prediction_is_followed_from_its_beginning_and_found_again_behind_a_change() -> None:
    drafter = SuffixDrafter(2)
    predicted = list(range(20, 60))
    drafter.begin(0, "a", [1, 2, 20], 2, predicted)
    (draft,) = drafter.find([], [], 2)
    assert (draft.tokens, draft.source) == (list(range(21, 45)), 2)
    assert drafter.find([0], [7], 2) == []
    assert drafter.find([0], [30], 2) == []
    (draft,) = drafter.find([0], [31], 2)
    assert (draft.tokens, draft.match, draft.source) == ([32, 33], 2, 2)
    drafter.close()


def test_a_long_text_forgets_its_beginning() -> None:
    drafter = SuffixDrafter(1)
    drafter.begin(0, "a", [*range(100, 110), *range(1000, 1000 + OWN_TOKENS), 5], 1, [])
    for token in (102, 103, 1100 + OWN_TOKENS // 2):
        assert drafter.find([0], [token], 2) == []
    assert drafter.find([0], [1101 + OWN_TOKENS // 2], 2)[0].match == 2
    drafter.close()


def test_drafts_of_the_drafter_change_no_token_and_find_repetitions(checkpoint: Checkpoint) -> None:
    """As an engine runs: the controller decides, and every answer equals that of an engine without drafts."""
    plain, drafting = open_llm(checkpoint("llama")), open_llm(checkpoint("llama"), drafts="on")
    assert plain.engine.core.drafts.drafter is None
    two_tokens = [
        Sampling(seed=seed, logit_bias=[(7, 60.0), (8, 60.0)]) for seed in range(4)
    ]  # text that repeats itself
    core = drafting.engine.core
    assert isinstance(core.drafts.drafter, SuffixDrafter)
    with mock.patch.object(DraftController, "choose", lambda _, drafts, *__: [len(one.tokens) for _, one in drafts]):
        for samplings in (SAMPLINGS, SAMPLINGS, two_tokens):
            want = answers(run(plain, PROMPTS, samplings, n=2, new=80))
            assert answers(run(drafting, PROMPTS, samplings, n=2, new=80)) == want
    assert answers(run(drafting, PROMPTS, SAMPLINGS)) == answers(run(plain, PROMPTS, SAMPLINGS))
    accepted = core.report.totals.accepted_drafts
    assert accepted["own"] > 0, core.report.totals
    assert accepted["tenant"] > 0, core.report.totals
    for llm in (plain, drafting):
        llm.close()


@pytest.mark.parametrize(
    ("ranks", "kind", "rollbacks", "why"),
    [
        (2, "cpu", None, "tensor_parallel is 2"),
        (1, "cpu", 0, "no recurrent state is left to roll back to"),
        (1, "cuda", 0, "recurrent layers draft on a CPU only"),
    ],
)
def test_what_cannot_draft_is_refused_by_name(ranks: int, kind: str, rollbacks: int | None, why: str) -> None:
    assert why in why_no_drafts(EngineConfig(drafts="auto", tensor_parallel=ranks), kind, rollbacks)
    with pytest.raises(ModelLoadError, match=why):
        why_no_drafts(EngineConfig(drafts="on", tensor_parallel=ranks), kind, rollbacks)
    assert not why_no_drafts(EngineConfig(drafts="on"), kind)
    assert not why_no_drafts(EngineConfig(drafts="on"), "cpu", 4)


def test_drafts_are_on_where_they_change_no_text() -> None:
    assert not why_no_drafts(EngineConfig(drafts="auto"), "cpu")
    assert "GPU" in why_no_drafts(EngineConfig(drafts="auto"), "cuda")
    assert "in the last bits" in why_no_drafts(EngineConfig(drafts="auto"), "cpu", dependence="in the last bits")
    assert not why_no_drafts(EngineConfig(drafts="on"), "cuda", dependence="in the last bits")
    assert "--drafts is off" in why_no_drafts(EngineConfig(drafts="off"), "cpu")


@pytest.mark.parametrize(
    ("drafts", "line"), [("auto", "on, computed when they save time"), ("off", "off, because --drafts is off")]
)
def test_the_start_log_says_whether_an_engine_drafts_and_why_not(
    checkpoint: Checkpoint, drafts: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        open_llm(checkpoint("llama"), drafts=drafts).close()
    assert f"speculative decoding: {line}" in caplog.messages


def test_drafts_are_counted_by_the_tiles_of_the_models_kernels(llm: LLM) -> None:
    policy = build_scheduler(llm.config, llm.executor).drafts.policy
    assert isinstance(policy, DraftController)
    assert policy._tile_tokens == llm.executor.info.tile_tokens > 1
