"""Forced tokens: they are known before they are sampled, and no timing changes what a client gets."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine.core.blocks import AccountingError
from quire.engine.core.forced import MIN_JUMP
from quire.engine.core.limits import Totals
from quire.engine.core.policy.step_cost import PROBE
from tests.core import oracle
from tests.core.oracle import EOS, FORCED, foreseen, reference
from tests.core.rig import Rig

PROMPT = list(range(3, 16))


def answer(seed: int, new: int = 60, *, index: int = 0, ignore_eos: bool = True) -> list[int]:
    stops = frozenset() if ignore_eos else frozenset([EOS])
    return reference(PROMPT, seed, index, len(PROMPT) + new, stops)


def foreseen_seed(position: int, least: int) -> int:
    """A seed for which the oracle foresees so many tokens behind the one at an output position, none before."""
    for seed in range(20_000):
        said = PROMPT + answer(seed, position + 1)
        runs = [foreseen(said[: len(PROMPT) + at + 1]) for at in range(position + 1)]
        if runs[-1] >= least and not any(runs[:-1]):
            return seed
    raise AssertionError("no such seed")


@pytest.mark.parametrize("depth", [1, 2])
def test_forced_tokens_take_fewer_steps_than_tokens(depth: int) -> None:
    """The same text as without a grammar, in fewer steps; every token is delivered once, some of them together."""
    plain, forced = Rig(depth=depth), Rig(depth=depth)
    for seed in range(4):
        plain.add(PROMPT, 60, seed=seed, ignore_eos=True)
        forced.add(PROMPT, 60, seed=seed, ignore_eos=True, grammar=FORCED)
    plain.run()
    forced.run()
    assert forced.answers == plain.answers
    totals = forced.core.report.totals
    assert forced.executor.jumps
    assert totals.generated_tokens == 240
    assert totals.jumped_tokens < totals.forced_tokens < 240
    assert forced.core.step < plain.core.step
    assert plain.core.report.totals.forced_tokens == plain.core.report.totals.jumped_tokens == 0
    assert max(len(delta.token_ids) for delta in forced.deltas) > MIN_JUMP


def test_counts_begin_anew_when_the_prefix_warm_up_is_done() -> None:
    """It gives the report new totals, for metrics to count what clients asked for."""
    rig = Rig()
    rig.core.report.totals = Totals()
    rig.add(PROMPT, 60, seed=5, ignore_eos=True, grammar=FORCED)
    rig.run()
    assert 0 < rig.core.report.totals.jumped_tokens <= rig.core.report.totals.forced_tokens


def test_a_jump_saves_a_step_for_each_token_that_it_computes() -> None:
    """One sequence, one step in flight: steps and jumped tokens together are the tokens of the answer."""
    rig = Rig(depth=1)
    rig.add(PROMPT, 60, seed=5, ignore_eos=True, grammar=FORCED)
    rig.run()
    totals = rig.core.report.totals
    # Forced tokens at the end, and runs too short for a jump, are repeated by results or never sampled.
    assert rig.core.step + totals.jumped_tokens <= 60
    assert rig.executor.forward_tokens <= len(PROMPT) + 59


def test_a_step_in_flight_samples_the_first_forced_token() -> None:
    """With two steps in flight the first forced token is both forced and sampled: it is one token."""
    seed = foreseen_seed(0, 4)
    rig = Rig(depth=2)
    rig.add(PROMPT, 20, seed=seed, ignore_eos=True, grammar=FORCED)
    assert rig.submit()
    assert rig.submit()
    rig.commit()
    known = 1 + foreseen([*PROMPT, *answer(seed, 1)])
    assert rig.answers["r0", 0] == answer(seed, known)
    assert rig.submit()
    piece = rig.plans[-1].slices[0]
    assert (piece.start, piece.token_ids) == (len(PROMPT) + 1, answer(seed, known)[1:])
    rig.commit()
    assert rig.answers["r0", 0] == answer(seed, known)
    rig.run()


@pytest.mark.parametrize("new", range(1, 12))
def test_the_limit_ends_an_answer_among_forced_tokens(new: int) -> None:
    seed = foreseen_seed(0, 5)
    rig = Rig()
    rig.add(PROMPT, new, seed=seed, ignore_eos=True, grammar=FORCED)
    rig.run()
    assert rig.answers["r0", 0] == answer(seed, new)
    assert rig.finishes["r0", 0].reason == "length"


@pytest.mark.parametrize("at", range(6))
def test_a_stop_token_ends_an_answer_among_forced_tokens(at: int) -> None:
    seed = foreseen_seed(0, 6)
    text = answer(seed, 7)
    if text.index(text[at]) != at:
        pytest.skip("the token is there twice")
    rig = Rig()
    rig.add(PROMPT, 30, seed=seed, ignore_eos=True, grammar=FORCED, stop_token_ids=[text[at]])
    rig.run()
    assert rig.answers["r0", 0] == text[: at + 1]
    assert rig.finishes["r0", 0].reason == "stop"
    assert rig.core.report.totals.generated_tokens == at + 1


def test_each_sibling_jumps_by_itself() -> None:
    rig = Rig()
    rig.add(PROMPT, 50, n=3, seed=2, ignore_eos=True, grammar=FORCED)
    rig.run()
    assert rig.executor.jumps
    assert [rig.answers["r0", index] for index in range(3)] == [answer(2, 50, index=index) for index in range(3)]


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_sequences_keep_their_forced_tokens(preempt: str, depth: int) -> None:
    rig = Rig(blocks=24, preempt=preempt, host_blocks=40, depth=depth)  # type: ignore[arg-type]
    for seed in range(8):
        rig.add(PROMPT, 40, seed=seed, ignore_eos=True, grammar=FORCED)
    rig.run()
    totals = rig.core.report.totals
    assert totals.preemptions
    assert totals.jumped_tokens
    assert bool(totals.swap_preemptions) == (preempt == "swap")


def test_forced_tokens_that_arrive_while_a_sequence_waits_count_as_waiting() -> None:
    """It is preempted while the step is in flight that names them.  No request is claimed for the blocks they need."""
    seed = foreseen_seed(1, 6)
    rig = Rig(blocks=12, size=4, depth=2)
    rig.add(PROMPT, 20, seed=seed, ignore_eos=True, grammar=FORCED)
    rig.submit()
    rig.submit()
    rig.commit()
    [seq] = rig.core.live()
    rig.core.preemption.preempt(seq)
    before = rig.core.headroom.startable()[0]
    rig.commit()
    known = 2 + foreseen(PROMPT + answer(seed, 2))
    assert len(seq.tokens) == len(PROMPT) + known
    assert rig.core.waiting.tokens == seq.known
    assert rig.core.headroom.startable()[0] < before
    rig.run()


def test_an_engine_that_dies_among_forced_tokens_repeats_none() -> None:
    """At every step of an answer: what was sent stays, and the next engine sends the rest."""
    for steps in range(1, 8):
        rig = Rig()
        rig.add(PROMPT, 40, seed=3, ignore_eos=True, grammar=FORCED)
        rig.submit()
        for _ in range(steps):
            assert rig.submit()
            rig.commit()
        rig.crash()
        rig.run()
        assert rig.answers["r0", 0] == answer(3, 40)


def test_a_jump_takes_no_block_from_another_sequence() -> None:
    """With no block left a sequence decodes to the end of the block that it has, and no one is preempted for a jump."""
    seed = foreseen_seed(0, 6)
    rig = Rig(blocks=5, size=4, depth=1)
    rig.add(PROMPT, 7, seed=seed, ignore_eos=True, grammar=FORCED)  # 13 + 7 tokens take all 5 blocks
    rig.submit()
    rig.commit()
    taken = rig.pool.allocate(rig.pool.available)
    assert len(rig.answers["r0", 0]) == 7  # the rest was forced, up to the limit
    rig.pool.release(taken)
    rig.run()
    rig = Rig(blocks=6, size=4, depth=1)
    rig.add(PROMPT, 11, seed=seed, ignore_eos=True, grammar=FORCED)
    rig.submit()
    rig.commit()
    taken = rig.pool.allocate(rig.pool.available)
    rig.core.auditor.whole = lambda: None  # type: ignore[method-assign]  # the test holds blocks
    rig.submit()
    [piece] = rig.plans[-1].slices
    assert piece.start + len(piece.token_ids) == 16
    assert rig.core.report.totals.preemptions == 0
    rig.commit()
    rig.pool.release(taken)
    rig.run()


def test_the_prefix_cache_finds_what_a_jump_computed() -> None:
    """Every full block of an answer, also the one that a step in flight filled when the jump was planned."""
    for seed in range(12):
        rig = Rig(size=4)
        rig.add(PROMPT, 30, seed=seed, ignore_eos=True, grammar=FORCED)
        rig.run()
        said = (PROMPT + answer(seed, 30))[:-8]  # the last ones may have been forced, and never computed
        rig.add(said, 1)
        rig.run()
        assert rig.core.report.totals.cached_prompt_tokens == (len(said) - 1) // 4 * 4


def test_a_slot_that_samples_another_token_is_an_accounting_error() -> None:
    seed = foreseen_seed(0, 4)
    rig = Rig(depth=2)
    rig.add(PROMPT, 20, seed=seed, ignore_eos=True, grammar=FORCED)
    rig.submit()
    rig.submit()
    rig.commit()
    result = rig.executor.collect()
    result.tokens[0] += 1
    with pytest.raises(AccountingError, match="was forced"):
        rig.core.commit(result)


@pytest.mark.parametrize("mates", [0, 1])
def test_jumps_leave_steps_in_which_decoding_is_measured(mates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on the stretch of a decode step needs the time of one without slices: until then no prompt advances.

    Here every sequence with a grammar could jump in every step, `mates` have none."""
    monkeypatch.setattr(oracle, "foreseen", lambda context: 4)
    rig = Rig(blocks=1000, depth=1, step_tokens=256, chunk_tokens=256, itl_stretch=2.0)
    for seed in range(4):
        rig.add(PROMPT, 900, seed=seed, ignore_eos=True, grammar=FORCED if seed >= mates else "")

    def step() -> None:
        before = rig.executor.forward_tokens
        assert rig.submit()
        result = rig.executor.collect()
        seconds = 1e-3 + 1e-4 * (rig.executor.forward_tokens - before)
        rig.core.commit(msgspec.structs.replace(result, step_s=seconds))
        rig.collect_outputs()

    for _ in range(PROBE):
        step()
    assert rig.executor.jumps > PROBE
    late = rig.add([*PROMPT, 3], 5, seed=9, ignore_eos=True)
    for _ in range(len(PROMPT) + 4):
        step()
    assert rig.answers[late, 0]
