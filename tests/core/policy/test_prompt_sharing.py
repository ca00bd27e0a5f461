"""A short prompt does not wait for a long one, and the long one keeps four fifths of its pace."""

from __future__ import annotations

import pytest

from quire.engine.core.policy.prompt_budget import SHORT_SHARE
from tests.core.oracle import VOCAB
from tests.core.rig import Rig

STEP, LONG, SHORT = 64, 900, 20


def rig() -> Rig:
    return Rig(blocks=2000, max_seqs=32, step_tokens=STEP, chunk_tokens=STEP, depth=1, caching=False)


def prompt(seed: int, tokens: int) -> list[int]:
    return [2 + (seed * 31 + at * 7) % (VOCAB - 2) for at in range(tokens)]


def turn(rig: Rig) -> None:
    rig.submit()
    rig.commit()


def steps_to_first_token(rig: Rig, name: str) -> int:
    for step in range(1, 100):
        turn(rig)
        if rig.answers[name, 0]:
            return step
    raise AssertionError("no token")


@pytest.mark.parametrize("tokens", [1, SHORT, 60])
def test_a_short_prompt_starts_behind_a_long_one(tokens: int) -> None:
    r = rig()
    r.add(prompt(1, LONG), 4)
    turn(r)
    short = r.add(prompt(2, tokens), 4)
    share = int(SHORT_SHARE * STEP)
    assert steps_to_first_token(r, short) <= -(-tokens // (share - 1)) + 1
    r.run()


def test_short_prompts_take_a_fifth_of_a_long_one_s_pace_at_most() -> None:
    alone = rig()
    steps_alone = steps_to_first_token(alone, alone.add(prompt(1, LONG), 1))
    r = rig()
    long, steps = r.add(prompt(1, LONG), 1), 0
    while not r.answers[long, 0]:
        r.add(prompt(100 + steps, SHORT), 1)
        turn(r)
        steps += 1
    assert steps <= steps_alone / (1 - SHORT_SHARE) + 2
    r.run()


def test_a_long_prompt_takes_what_short_ones_leave() -> None:
    """Alone it has every token of each step."""
    r = rig()
    assert steps_to_first_token(r, r.add(prompt(1, LONG), 1)) == -(-LONG // STEP)


def test_long_prompts_keep_their_order_and_let_a_short_one_by() -> None:
    r = rig()
    first, second = r.add(prompt(1, LONG), 1), r.add(prompt(2, LONG), 1)
    turn(r)
    turn(r)
    short = r.add(prompt(3, 10), 1)
    assert steps_to_first_token(r, short) <= 2
    steps_to_first_token(r, first)
    assert not r.answers[second, 0]
    r.run()
