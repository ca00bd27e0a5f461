"""Drafts never cost throughput: the controller in virtual time, on machines of several kinds, with noisy clocks.

    a step of n sequences and d drafts takes fixed + rows * row + (n + d) * each ms: rows is n + d, rounded up to a
    whole tile; one with drafts takes `once` more; the engine's clock is off by a factor

A text says how many positions have drafts, how long these are, and how often a token of one is right.  The controller
sees what an engine would show it.  What counts is true time: tokens per second over those of plain steps.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from quire.engine.core.plan import Draft
from quire.engine.core.policy.drafts import KNOWN, RECHECK, DraftController
from quire.engine.core.policy.step_cost import StepCostModel
from quire.engine.core.sequence import Sequence
from quire.engine.wire.messages import Generate, Sampling


class Machine(NamedTuple):
    """Milliseconds of a step."""

    fixed: float
    row: float
    tile: int = 1  # rows
    once: float = 0.0
    each: float = 0.0  # per row of a tile that is used

    def step(self, seqs: int, drafts: int) -> float:
        rows = -(-(seqs + drafts) // self.tile) * self.tile
        return self.fixed + rows * self.row + (seqs + drafts) * self.each + self.once * (drafts > 0)


class Text(NamedTuple):
    """What a drafter finds in it."""

    share: float  # positions with drafts over all
    length: int
    right: float  # probability that a token of a draft is right if those before it are
    match: int


MACHINES = {
    "weights from memory": Machine(20, 0.3),
    "a small model": Machine(10, 1),
    "bound by arithmetic": Machine(2, 2),
    "tiles of 16 rows": Machine(5, 2.3, 16, 3),
    "tiles of 32 rows": Machine(5, 2.3, 32, 5),
    "a GPU": Machine(8, 0.02),
}
PROSE, REWRITE = Text(0.15, 2, 0.3, 2), Text(1.0, 16, 0.92, 16)
MISLEADING = Text(0.4, 4, 0.15, 2)  # many drafts, nearly all of them wrong
PROMPT = 200  # tokens of a prompt
PROMPTS = 32  # steps after which a prompt arrives, also at a steady load
RAMP = [*range(1, 257), *range(256, 0, -1)]


def gain(
    machine: Machine,
    text: Text,
    loads: list[int],
    noise: float,
    *,
    seed: int = 7,
    delays_change: float = 1.0,
    later: float = 1.0,
    tile_tokens: int = 0,
) -> float:
    """Return tokens per second over those of plain steps, for a step of each of `loads` sequences.

    `delays_change`: the probability that a step is delayed by another factor than the one before: other work on a
    machine lasts for several steps of a real engine.  `later`: factor on the time of every step in the second half.
    `tile_tokens`: what the controller believes the tile of rows to be; 0: the machine's."""
    luck, costs = random.Random(seed), StepCostModel()
    control = DraftController(costs, tile_tokens or machine.tile)
    requests = [Generate(f"r{at}", "gw", [1], 10**6, Sampling(), 2**60) for at in range(max(loads))]
    seqs = [Sequence(request, 0, (at, 0), frozenset(), 10**6, [1]) for at, request in enumerate(requests)]
    spent = plain = 0.0
    delay = 1.0
    for at, count in enumerate(loads):
        if delays_change < 1 and luck.random() < delays_change:
            delay = luck.lognormvariate(0, noise)
        speed = later if at >= len(loads) // 2 else 1.0
        if at % PROMPTS == 0 or count != loads[at - 1]:
            prompt_s = PROMPT * (machine.row + machine.each) / 1000
            for prompt, seconds in ((0, 0.0), (PROMPT, prompt_s)):
                costs.record_step((machine.step(count, 0) / 1000 + seconds) * delay * speed, count, prompt)
        found = [
            (seq, Draft(at, [1] * text.length, text.match, 0))
            for at, seq in enumerate(seqs[:count])
            if text.match >= control.min_match(count) and luck.random() < text.share
        ]
        counts = control.choose(found, count, 512) if found else []
        tokens, alone, took = count, speed * machine.step(count, 0), speed * machine.step(count, sum(counts))
        for (seq, draft), computed in zip(found, counts, strict=True):
            accepted = 0
            while accepted < computed and luck.random() < text.right:
                accepted += 1
            if computed:
                control.learn(seq, draft, computed, accepted)
            tokens += accepted
        measured = took * (luck.lognormvariate(0, noise) if delays_change == 1 else delay) / 1000
        if any(counts):
            control.record(measured, count, sum(counts), tokens - count, 0.0)
        else:
            costs.record_step(measured, count, 0)
        spent, plain = spent + took, plain + alone * tokens / count
    return plain / spent


@pytest.mark.parametrize("noise", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("name", MACHINES)
def test_no_load_is_slower_on_prose(name: str, noise: float) -> None:
    for count, steps in ((1, 200), (8, 200), (64, 200), (256, 120)):
        assert gain(MACHINES[name], PROSE, [count] * steps, noise) >= 0.98, count
    assert gain(MACHINES[name], PROSE, RAMP[::2], noise) >= 0.98


@pytest.mark.parametrize("name", ["bound by arithmetic", "tiles of 16 rows", "tiles of 32 rows"])
def test_delays_that_last_for_several_steps_hide_no_cost(name: str) -> None:
    """A neighbour that comes or goes changes the time of a step by more than drafts do."""
    for loads in ([256] * 64, RAMP[::4]):
        each = [gain(MACHINES[name], PROSE, loads, 0.25, seed=seed, delays_change=0.15) for seed in range(3)]
        assert sum(each) / len(each) >= 0.98, loads[0]


@pytest.mark.parametrize("name", ["tiles of 16 rows", "tiles of 32 rows"])
def test_what_drafts_save_in_small_steps_they_do_not_lose_in_large_ones(name: str) -> None:
    loads = [1] * 100 + [256] * 24
    each = [gain(MACHINES[name], PROSE, loads, 0.25, seed=seed, delays_change=0.15) for seed in range(4)]
    assert min(each) >= 0.98


@pytest.mark.parametrize("name", MACHINES)
def test_no_load_is_slower_where_nearly_all_drafts_are_wrong(name: str) -> None:
    for count in (1, 8, 64):
        assert gain(MACHINES[name], MISLEADING, [count] * 200, 0.3) >= 0.98, count


@pytest.mark.parametrize("name", ["a small model", "bound by arithmetic", "tiles of 16 rows", "tiles of 32 rows"])
def test_right_drafts_that_take_longer_than_they_save_cost_no_throughput(name: str) -> None:
    """A draft takes as long as the token that it saves, or longer."""
    assert gain(MACHINES[name], REWRITE, [64] * 200, 0.3) >= 0.98


@pytest.mark.parametrize(("noise", "least"), [(0.05, 1.8), (0.3, 1.5)])
def test_rewriting_gains_where_a_step_has_time_for_drafts(noise: float, least: float) -> None:
    for name in ("weights from memory", "a GPU"):
        for count in (1, 8):
            assert gain(MACHINES[name], REWRITE, [count] * 300, noise) >= least, (name, count)


def test_a_load_with_drafts_in_every_step_still_measures_steps_without() -> None:
    """Else the time without drafts would never be known, or would be that of another hour."""
    machine, control = MACHINES["bound by arithmetic"], DraftController(costs := StepCostModel())
    (seq,) = [Sequence(Generate("r", "gw", [1], 99, Sampling(), 2**60), 0, (0, 0), frozenset(), 99, [1])]
    found, plain = [(seq, Draft(0, [1] * 4, 16, 0))], 0
    assert control.choose(found, 64, 100) == [0]
    for _ in range(300):
        (count,) = control.choose(found, 64, 100)
        if count:
            control.learn(seq, found[0][1], count, count)
            control.record(machine.step(64, 0) / 1000, 64, count, count, 0.0)
        else:
            plain += 1
            costs.record_step(machine.step(64, 0) / 1000, 64, 0)
    assert 3 <= plain <= 300 // RECHECK + KNOWN + 3
