"""Adapter slots: a sequence waits for a slot, nothing else waits, and an adapter in use stays."""

from __future__ import annotations

import random

import pytest

from quire.engine.core.blocks import root_digest
from quire.engine.core.policy.adapters import PATIENCE
from tests.core.rig import Rig

PROMPT = list(range(3, 12))


def started(rig: Rig) -> list[str]:
    """Ids of the requests that have started, in order."""
    return [name for (name, _), events in rig.milestones.items() if "started" in events]


def test_without_adapters_a_plan_names_none() -> None:
    """The plans of a scheduler that could serve adapters are those of one that cannot, byte for byte."""
    plain, able = Rig(), Rig(adapter_slots=8)
    for rig in (plain, able):
        for seed in range(12):
            rig.add(PROMPT[: 3 + seed % 5], 20, seed=seed, n=1 + seed % 2)
        rig.run()
    assert able.plans == plain.plans
    assert not any(plan.adapters or any(start.adapter >= 0 for start in plan.starts) for plan in able.plans)


def test_an_engine_without_slots_refuses_by_name() -> None:
    rig = Rig()
    name = rig.add(PROMPT, 4, adapter="a@1")
    assert "takes no LoRA adapters" in rig.finishes[name, 0].message


def test_a_sequence_waits_for_a_slot_and_those_behind_it_start() -> None:
    rig = Rig(adapter_slots=1, depth=1)
    first, second = rig.add(PROMPT, 30, adapter="a@1", ignore_eos=True), rig.add(PROMPT, 4, adapter="b@2")
    behind, same = rig.add(PROMPT, 4), rig.add(PROMPT[1:], 4, adapter="a@1")
    for _ in range(10):
        rig.submit()
        rig.commit()
    assert first in started(rig)
    assert second not in started(rig)
    assert (behind, 0) in rig.finishes
    assert (same, 0) in rig.finishes
    assert rig.core.claims.pending == 0  # what waits for a slot is no reason to claim less
    rig.run()
    assert (second, 0) in rig.finishes


def test_the_adapter_used_longest_ago_is_replaced() -> None:
    rig = Rig(adapter_slots=2)
    for adapter in ("a@1", "b@2", "a@1", "c@3", "a@1"):
        rig.add(PROMPT, 3, adapter=adapter)
        rig.run()
    loads = [load for plan in rig.plans for load in plan.adapters]
    assert loads == [(0, "a@1"), (1, "b@2"), (1, "c@3")]


def test_a_sequence_is_overtaken_a_bounded_number_of_times() -> None:
    """Sequences of the adapter in the only slot arrive without end; another adapter gets it nevertheless."""
    rig = Rig(adapter_slots=1, max_seqs=4, depth=1, blocks=256)
    for seed in range(2):
        rig.add(PROMPT, 6, adapter="hot@1", seed=seed, ignore_eos=True)
    rig.submit()
    rig.commit()
    cold = rig.add(PROMPT, 3, adapter="cold@2")
    starts = 0
    while (cold, 0) not in rig.finishes:
        rig.add(PROMPT, 6, adapter="hot@1", seed=starts, ignore_eos=True)
        starts += 1
        rig.submit()
        rig.commit()
        assert starts < 3 * PATIENCE
    assert starts > PATIENCE // 2
    rig.run()


def test_an_ended_request_is_no_longer_waited_for() -> None:
    """If the sequence that waited too long is cancelled, the others start as before."""
    rig = Rig(adapter_slots=1, max_seqs=4, depth=1, blocks=256)
    rig.add(PROMPT, 6, adapter="hot@1", ignore_eos=True)
    rig.submit()
    rig.commit()
    cold = rig.add(PROMPT, 3, adapter="cold@2")
    for turn in range(PATIENCE):
        rig.add(PROMPT, 6, adapter="hot@1", seed=turn, ignore_eos=True)
    while rig.core.adapters._overtaken.get("cold@2", 0) < PATIENCE:
        rig.submit()
        rig.commit()
        if not rig.core.waiting or rig.core.adapters._overtaken.get("cold@2", 0) >= PATIENCE - 1:
            rig.add(PROMPT, 6, adapter="hot@1", ignore_eos=True)
    rig.core.abort(cold)
    rig.add(PROMPT, 6, adapter="hot@1", seed=9)
    rig.run()
    assert not any(adapter == "cold@2" for plan in rig.plans for _, adapter in plan.adapters)


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_keeps_every_adapter_in_its_slot(seed: int) -> None:
    """Preemption, swap, forks, cancelled requests, failed steps and a crash, with more adapters than slots.

    The rig checks after each plan that every sequence in the batch has its own adapter, and every text at the end."""
    rng = random.Random(seed)
    rig = Rig(
        blocks=40,
        adapter_slots=2,
        admission="none",
        preempt=("recompute", "swap")[seed % 2],
        host_blocks=40 * (seed % 2),
        depth=1 + seed % 2,
        chunk_tokens=5,
    )
    for turn in range(60):
        if rng.random() < 0.6:
            prompt = [rng.randrange(3, 60) for _ in range(rng.randrange(2, 30))]
            name = rng.choice(["", "a@1", "b@2", "c@3", "d@4"])
            tenant = rng.choice(["", "loud", "quiet"])
            rig.add(prompt, rng.randrange(1, 25), seed=turn, n=rng.randrange(1, 3), adapter=name, tenant=tenant)
        if (len(rig.executor.plans) == rig.executor.depth or not rig.submit()) and rig.executor.plans:
            rig.commit()
        if rng.random() < 0.05 and rig.requests:
            rig.core.abort(rng.choice(list(rig.requests)))
            rig.collect_outputs()
        if turn == 30:
            rig.crash() if seed % 3 == 0 else rig.fail()
    rig.run()
    assert any(plan.adapters for plan in rig.plans)


def test_a_prefix_is_shared_only_under_the_same_adapter() -> None:
    rig = Rig(adapter_slots=4, depth=1)
    cached = []
    for adapter in ("", "a@1", "b@2", "alias@1", ""):
        name = rig.add(PROMPT, 2, adapter=adapter)
        rig.run()
        cached.append(next(d.cached_tokens for d in rig.deltas if d.id == name and d.first == 0))
    assert cached == [0, 0, 0, 8, 8]  # the alias names the same files


def test_the_root_of_the_base_model_is_what_it_was() -> None:
    """Warm caches, hot prefixes and other engines agree on it.  No salt gives the root of an adapter."""
    assert root_digest("f", "s", "") == root_digest("f", "s")
    roots = {root_digest("f", "s"), root_digest("f", "s", "1"), root_digest("f", "s1"), root_digest("f", "1", "s")}
    assert len(roots) == 4
