"""Fair eviction: a tenant that floods the prefix cache evicts its own blocks, and one tenant alone sees plain LRU."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.core.blocks import BlockPool
from quire.engine.core.limits import Limits
from quire.engine.core.policy import eviction
from quire.engine.core.policy.eviction import ROUNDS, FairEviction
from quire.engine.core.scheduler import Scheduler
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.wire.messages import Generate, Sampling
from tests.core.rig import FAR
from tests.matrix import examples

SIZE = 16  # tokens of a block


def least_recently_used(self: FairEviction, idle: OrderedDict[int, None], digests: list[bytes | None]) -> int:
    """The eviction before: one order for all tenants."""
    return next(iter(idle))


class Cache:
    """A pool that requests use one at a time: each looks its prompt up, computes the rest and ends."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.pool.note_evicted = True

    def ask(self, tenant: str, prompt: int, blocks: int, weight: float = 1.0) -> tuple[int, list[bytes]]:
        """Return the blocks found, and the digests evicted."""
        digests = [f"{tenant} {prompt} {i}".encode() for i in range(blocks)]
        table = self.pool.lookup(digests)
        hits = len(table)
        self.pool.acquire_prefix(table, tenant, weight)
        table += self.pool.allocate(blocks - hits)
        evicted, self.pool.evicted = self.pool.evicted, []
        for block, digest in zip(table[hits:], digests[hits:], strict=True):
            self.pool.seal(block, digest, tenant, weight)
        self.pool.release(table)
        self.pool.check([])
        return hits, evicted


def quiet_hit_rate(blocks: int, quiet: int, prompts: int, flood: int, turns: int = 8) -> float:
    """Hit rate of a tenant that sends one prompt again and again, `prompts` of a flooding tenant in between, after the
    first two turns.  Through the scheduler; tenants have salts of their own, as gateways give them."""
    info = ModelInfo("scripted", "scripted", 1000, 4096, [0], 0)
    limits = Limits(4, 4096, 4096, 4096, 1000, 1.0, frozenset([0]), "scripted")
    core, executor, ids = Scheduler(BlockPool(blocks, SIZE), limits), ScriptedExecutor(info, blocks), count()

    def send(tenant: str, first: int, blocks: int) -> int:
        """Return the prompt tokens that the cache had."""
        tokens = [first % 999 + 1, first // 999 + 1] + [7] * (blocks * SIZE - 1)
        core.accept(Generate(f"r{next(ids)}", "gw", tokens, 1, Sampling(), FAR, f"tenant {tenant} ", tenant=tenant))
        [seq] = core.live()
        while not core.idle:
            plan = core.plan(0)
            if plan is not None:
                executor.submit(plan)
                core.commit(executor.collect())
            core.outputs()
        core.auditor.whole()
        return seq.cached_tokens

    hits, numbers = 0, count(1)
    for turn in range(turns):
        found = send("quiet", 0, quiet)
        hits += found if turn >= 2 else 0
        for _ in range(prompts):
            send("flood", next(numbers), flood)
    return hits / ((turns - 2) * quiet * SIZE)


@pytest.mark.parametrize("prompts", [16, 40])
def test_a_flood_of_prompts_does_not_evict_the_prefixes_of_others(
    prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 blocks; a tenant uses 100 of them again and again, another sends 800 or 2,000 blocks in between."""
    assert quiet_hit_rate(512, 100, prompts, 50) == 1.0
    monkeypatch.setattr(FairEviction, "choose", least_recently_used)
    assert quiet_hit_rate(512, 100, prompts, 50) == 0.0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8)), max_size=80))
@settings(max_examples=examples(50), deadline=None)
def test_one_tenant_alone_sees_plain_lru(requests: list[tuple[int, int]]) -> None:
    cache, order = Cache(24), OrderedDict[bytes, None]()
    for prompt, blocks in requests:
        hits, evicted = cache.ask("", prompt, blocks)
        digests = [f" {prompt} {i}".encode() for i in range(blocks)]
        assert hits == next((i for i, digest in enumerate(digests) if digest not in order), blocks)
        for digest in digests[:hits]:
            del order[digest]
        assert evicted == list(order)[: len(evicted)]  # in this order
        for digest in evicted:
            del order[digest]
        order.update(dict.fromkeys(reversed(digests)))


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.integers(1, 6)), max_size=60),
    st.sampled_from([1.0, 3.0]),
)
@settings(max_examples=examples(50), deadline=None)
def test_no_warm_block_below_its_share_goes_while_others_could(
    requests: list[tuple[str, int, int]], weight: float
) -> None:
    """Checked at each eviction, by counts of the test's own.  The accounting is checked after each request."""
    cache, weights = Cache(20), {"a": weight, "b": 1.0, "c": 1.0}
    policy = cache.pool._eviction
    owner: dict[int, str] = {}
    choose = policy.choose

    def warm(block: int) -> bool:
        counts = {tenant: sum(1 for b in owner.values() if b == tenant) for tenant in set(owner.values())}
        share = weights[owner[block]] * sum(counts.values()) / sum(weights[tenant] for tenant in counts)
        return counts[owner[block]] < share - 1e-9 and bool(policy._used_again[block])

    def checked(idle: OrderedDict[int, None], digests: list[bytes | None]) -> int:
        rounds = {block: policy._rounds[block] for block in idle}
        block = choose(idle, digests)
        if warm(block) and rounds[block] < ROUNDS:
            assert all(warm(other) for other in idle)
        del owner[block]
        return block

    policy.choose = checked  # type: ignore[method-assign]
    for tenant, prompt, blocks in requests:
        cache.ask(tenant, prompt, blocks, weights[tenant])
        owner |= {block: policy._of[block] for block, digest in enumerate(cache.pool._digest) if digest is not None}


def test_what_a_tenant_left_behind_is_evicted_in_the_end() -> None:
    cache = Cache(64)
    for _ in range(2):
        cache.ask("left", 0, 16)
    gone, numbers = list[bytes](), count()
    for _ in range((ROUNDS + 2) * 64 // 8):
        gone += [digest for digest in cache.ask("busy", next(numbers), 8)[1] if digest.startswith(b"left")]
    assert len(gone) == 16


def test_the_share_goes_by_weight() -> None:
    """40 of 64 blocks are within the share of weight 3 against weight 1, and beyond that of weight 3 against 3."""
    kept = []
    for other in (1.0, 3.0):
        cache, numbers = Cache(64), count()
        for _ in range(2):
            cache.ask("heavy", 0, 40, 3.0)
        for _ in range(40):
            cache.ask("flood", next(numbers), 8, other)
        kept.append(cache.ask("heavy", 0, 40, 3.0)[0])
    assert kept[0] == 40 > kept[1]


def test_a_block_of_the_warm_up_counts_for_the_tenant_that_finds_it() -> None:
    """The warm-up computes with a salt and no tenant."""
    pool = BlockPool(8, SIZE)
    table = pool.allocate(2)
    for block, digest in zip(table, (b"1", b"2"), strict=True):
        pool.seal(block, digest)
    pool.release(table)
    pool.acquire_prefix(pool.lookup([b"1", b"2"]), "acme", 2.0)
    pool.check([table])
    assert {tenant: owner.count for tenant, owner in pool._eviction._tenants.items()} == {"acme": 2}
    assert pool._eviction._weight == 2.0


def test_memory_and_the_work_of_one_eviction_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "MAX_MOVES", 8)
    cache, moves = Cache(96), list[int]()
    for _ in range(2):
        for tenant in range(6):
            cache.ask(f"warm {tenant}", 0, 8)
    held = cache.pool.allocate(48)  # a busy tenant's running sequences: only warm blocks are idle
    for number, block in enumerate(held):
        cache.pool.seal(block, f"busy {number}".encode(), "busy")
    policy = cache.pool._eviction
    choose = policy.choose

    def counted(idle: Any, digests: Any) -> int:
        before = sum(policy._rounds)
        block = choose(idle, digests)
        moves.append(sum(policy._rounds) - before)
        return block

    policy.choose = counted  # type: ignore[method-assign]
    for number in range(200):
        table = cache.pool.allocate(4)
        for at, block in enumerate(table):
            cache.pool.seal(block, f"{number} {at}".encode(), f"tenant {number % 20}")
        cache.pool.release(table)
        cache.pool.check([held])
    assert max(moves) == 8
    assert len(policy._evicted) <= 96 // 4


def test_a_steady_decode_step_costs_the_policy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call per block that fills up, and none in the steps between."""
    info = ModelInfo("scripted", "scripted", 1000, 4096, [0], 0)
    limits = Limits(8, 4096, 4096, 4096, 1000, 1.0, frozenset([0]), "scripted")
    core, executor = Scheduler(BlockPool(512, SIZE), limits), ScriptedExecutor(info, 512)
    for i in range(8):
        core.accept(Generate(f"r{i}", "gw", [i + 1] * SIZE, 400, Sampling(ignore_eos=True), FAR, tenant=f"t{i % 2}"))
    calls: list[str] = []
    for name in ("cached", "uncached", "found", "choose"):
        method = getattr(FairEviction, name)

        def counted(*args: Any, name: str = name, method: Any = method) -> Any:
            calls.append(name)
            return method(*args)

        monkeypatch.setattr(FairEviction, name, counted)
    steps: list[int] = []
    for _ in range(2 + 4 * SIZE):
        plan = core.plan(0)
        assert plan is not None
        executor.submit(plan)
        core.commit(executor.collect())
        core.outputs()
        steps.append(len(calls))
        calls.clear()
    assert sorted(steps[2:]) == [0] * (4 * SIZE - 4) + [8] * 4
