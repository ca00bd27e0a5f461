"""Checkpoints of recurrent state: where they are kept, which prefix is found, and what happens without a slot."""

from __future__ import annotations

import random
from itertools import count

import pytest

from quire.engine.core.blocks import AccountingError, DoubleFree, Leak
from quire.engine.core.policy.state_eviction import StateEviction
from quire.engine.core.state_pool import Checkpoint, StatePool
from quire.engine.wire.messages import Beams
from tests.core.oracle import VOCAB
from tests.core.rig import BAD_SEED, Rig


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=count)


def rig(**options: object) -> Rig:
    shape = {"blocks": 256, "size": 4, "checkpoints": 64, "step_tokens": 512, "chunk_tokens": 512, "depth": 1}
    return Rig(**(shape | options))  # type: ignore[arg-type]


def cached(rig: Rig, prompt: list[int], *, new: int = 1, anchors: list[int] | None = None, **sampling: object) -> int:
    """Run a request alone.  Returns the prompt tokens that it found."""
    before = rig.core.report.totals.cached_prompt_tokens
    rig.add(prompt, new, anchors=anchors, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    rig.run()
    return rig.core.report.totals.cached_prompt_tokens - before


@pytest.mark.parametrize("depth", [1, 2])
def test_a_hit_needs_blocks_and_a_checkpoint(depth: int) -> None:
    """The first prompt keeps its state at the turn's end.  Another prompt that leaves it there begins from it."""
    one = rig(depth=depth)
    shared = tokens(42, 0)
    assert cached(one, shared + tokens(9, 1), anchors=[42]) == 0
    assert cached(one, shared + tokens(9, 2)) == 40  # the last full block before the anchor
    one.states.forget_all()
    assert cached(one, shared + tokens(9, 3)) == 0  # the blocks are there, no state is


@pytest.mark.parametrize("offset", range(0, 128, 9))
def test_prefixes_around_a_checkpoint_give_the_same_text(offset: int) -> None:
    """A prompt that leaves the chain `offset` tokens behind a checkpoint, or before the next one."""
    one = rig(chunk_tokens=7)
    base = tokens(200, 0)
    cached(one, base, anchors=[64])
    found = cached(one, base[: 64 + offset] + tokens(20, offset + 1), new=9)
    stops = [64, 128]  # the anchor, and the step of long prompts
    assert found == max(stop for stop in stops if stop <= 64 + offset)


def test_a_junction_is_kept_by_the_first_prompt_that_leaves_there() -> None:
    """Position 40 is no anchor.  The second prompt shares its blocks only, the third one its state too."""
    one = rig()
    shared = tokens(43, 0)
    assert cached(one, shared + tokens(30, 1)) == 0
    assert cached(one, shared + tokens(30, 2)) == 0
    assert cached(one, shared + tokens(30, 3)) == 40


def test_long_prompts_keep_a_state_every_128_tokens_while_most_places_are_free() -> None:
    one = rig(blocks=800, step_tokens=4096, chunk_tokens=4096)
    prompt = tokens(1300, 0)
    cached(one, prompt)
    assert sorted(each.position for each in one.states._cached.values()) == list(range(128, 1300, 128))
    full = rig(blocks=2000, step_tokens=4096, chunk_tokens=4096, checkpoints=4)
    cached(full, prompt)  # takes all of them: 3 for one in 1,024 tokens would have sufficed
    assert full.states.cached == 4
    evicted = full.states.counts.evicted
    cached(full, tokens(3000, 1))
    assert full.states.counts.evicted == evicted  # no place was free, so none was taken for length alone


def test_the_next_turn_begins_behind_the_answer() -> None:
    """The checkpoint that moves along an answer stands at its last full block."""
    one = rig()
    prompt = tokens(20, 0)
    cached(one, prompt, new=27, seed=3)
    answer = one.answers["r0", 0]
    assert len(answer) == 27
    assert cached(one, prompt + answer + tokens(6, 1)) == 44  # 46 tokens were computed: the last one only sampled
    assert one.states.cached < 6  # one per sequence, not one per block


def test_preemption_computes_again_from_the_nearest_checkpoint() -> None:
    one = rig(blocks=14, caching=True, admission="none", max_seqs=3, checkpoints=8)
    for i in range(3):
        one.add(tokens(9, i), 20, ignore_eos=True, seed=i)
    one.run()
    totals = one.core.report.totals
    assert totals.preemptions > 0
    assert totals.swap_preemptions == 0


@pytest.mark.parametrize("checkpoints", [0, 8])
def test_a_paused_sequence_keeps_its_state_or_is_preempted(checkpoints: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In mode forecast sequences pause without a slot; without a place for the state they give up their blocks."""
    one = rig(admission="forecast", max_seqs=8, checkpoints=checkpoints, caching=False)
    asked = count()
    monkeypatch.setattr(one.core.admission, "may_grow", lambda seq: next(asked) % 3 != 1)
    for i in range(4):
        one.add(tokens(5, i), 30, seed=i, ignore_eos=True)
    one.run()
    totals = one.core.report.totals
    assert (totals.pauses > 0, totals.preemptions > 0) == (checkpoints > 0, checkpoints == 0)


def test_choices_of_a_request_copy_the_state_of_the_prompt() -> None:
    one = rig()
    one.add(tokens(21, 0), 15, n=3, ignore_eos=True)
    one.run()
    assert len({tuple(one.answers["r0", index]) for index in range(3)}) == 3


def test_beams_are_refused_by_name() -> None:
    one = rig()
    one.add(tokens(5, 0), 4, n=2, beams=Beams(2, 1.0, True))
    assert one.finishes["r0", 0].reason == "error"
    assert "recurrent state" in one.finishes["r0", 0].message


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("depth", "checkpoints", "admission"), [(1, 3, "none"), (2, 9, "forecast"), (1, 40, "threshold")]
)
def test_random_loads_give_the_text_of_the_reference(depth: int, checkpoints: int, admission: str, seed: int) -> None:
    """Shared prefixes, choices, failed steps, aborts and a crash; states and blocks are checked after each plan."""
    draw = random.Random(seed)
    shape = {"blocks": 40, "max_seqs": 5, "step_tokens": 40, "chunk_tokens": 9, "bad": 2}
    one = rig(**shape, depth=depth, checkpoints=checkpoints, admission=admission)
    prefixes = [tokens(30, 1), tokens(17, 2), tokens(3, 3)]
    for turn in range(60):
        if draw.random() < 0.4:
            prompt = draw.choice(prefixes) + tokens(draw.randint(1, 14), draw.randint(0, 5))
            seed_of_request = draw.choice([0, 1, 2, 3, BAD_SEED])
            anchors = sorted(draw.sample(range(1, len(prompt)), k=min(2, len(prompt) - 1)))
            one.add(prompt, draw.randint(1, 20), n=draw.randint(1, 2), seed=seed_of_request, anchors=anchors)
        if draw.random() < 0.05 and one.requests:
            one.core.abort(draw.choice(list(one.requests)))
            one.collect_outputs()
        if len(one.executor.plans) < one.executor.depth:
            one.submit()
        if one.executor.plans and draw.random() < 0.8:
            one.commit()
        if turn == 40:
            one.crash()
    one.run()


def test_a_failed_step_leaves_no_checkpoint_behind() -> None:
    one = rig(bad=0)
    prompt = tokens(40, 0)
    one.add(prompt, 4, seed=BAD_SEED, anchors=[20])
    one.submit()
    assert one.states.cached == 1
    assert one.commit() is None
    assert one.states.cached == 0


def test_models_without_state_keep_their_plans() -> None:
    one, two = Rig(depth=1), Rig(depth=1)
    one.add(tokens(40, 0), 8, anchors=[7, 20])
    two.add(tokens(40, 0), 8)
    one.run()
    two.run()
    assert one.plans == two.plans


def test_eviction_weighs_recency_and_saved_work() -> None:
    """A system prompt that was found stays; a step of a long prompt that saves little goes, though it is younger."""
    system = Checkpoint(b"system", 2048, 2048, 1, used=9)
    turn = Checkpoint(b"turn", 2348, 300, 1, used=8)
    step = Checkpoint(b"step", 128, 128, 1, used=7)
    old = Checkpoint(b"old", 3000, 1800, 1, used=1)
    choose = StateEviction().choose
    assert choose([(0, system), (1, turn), (2, step)]) == 2
    assert choose([(0, system), (1, turn), (3, old)]) == 3
    assert choose([]) == -1


def test_the_audit_finds_a_state_that_is_owned_twice_or_never() -> None:
    pool = StatePool(3)
    place = pool.take()
    pool.hold(place)
    pool.check([place])
    with pytest.raises(Leak, match=f"states \\[{place}\\] are held by no sequence"):
        pool.check([])
    with pytest.raises(DoubleFree):
        pool.check([place, place])
    pool.release(place)
    with pytest.raises(DoubleFree, match="released more often"):
        pool.release(place)
    pool.issue()
    pool.check([])
    pool._free.append(place)
    with pytest.raises(AccountingError, match="are accounted for"):
        pool.check([])


def test_a_state_that_the_plan_reads_is_not_overwritten_by_it() -> None:
    pool = StatePool(1)
    place = pool.take()
    pool.write(place, b"a", 4, 4, 1)
    assert pool.find(b"a") == -1  # until the plan that writes it is out
    pool.issue()
    assert pool.find(b"a") == place
    pool.pin(place)
    assert pool.take() == -1
    pool.issue()
    assert pool.take() == place
    assert pool.find(b"a") == -1
