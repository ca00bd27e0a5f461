"""BlockPool against a shadow model, and the rules that concern it alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from quire.engine.core.blocks import AccountingError, BlockPool, OutOfBlocks, chain_digest, root_digest
from tests.core.machine import SchedulerMachine
from tests.core.rig import Rig
from tests.matrix import examples


def chain(tokens: list[int], size: int, fingerprint: str = "model", salt: str = "") -> list[bytes]:
    digests, parent = [], root_digest(fingerprint, salt)
    for i in range(0, len(tokens) - size + 1, size):
        parent = chain_digest(parent, tokens[i : i + size])
        digests.append(parent)
    return digests


class PoolMachine(RuleBasedStateMachine):
    """Tables start, grow, fork and end in any order; a model of plain sets predicts every answer of the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 4, note_discarded=True)
        self.tables: list[list[int]] = []
        self.sealed: dict[bytes, int] = {}  # shadow of the index
        self.content = 0

    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        if count > 12 - len(self.held()):
            before = self.pool.available
            with pytest.raises(OutOfBlocks, match=f"{count} blocks requested, {before} of 12"):
                self.pool.allocate(count)
            assert self.pool.available == before
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & self.held()
        self.sealed = {d: b for d, b in self.sealed.items() if b not in blocks}
        self.tables.append(blocks)

    @rule(count=st.integers(1, 6))
    def allocate_run(self, count: int) -> None:
        """The lowest run of blocks that are neither held nor cached, or nothing."""
        busy = self.held() | set(self.sealed.values())
        runs = (range(first, first + count) for first in range(13 - count))
        want = next((list(run) for run in runs if not busy & set(run)), None)
        assert self.pool.has_run(count) == (want is not None)
        if want is None:
            with pytest.raises(OutOfBlocks, match=f"{count} consecutive blocks requested, {12 - len(busy)} of 12 free"):
                self.pool.allocate_run(count)
            return
        assert self.pool.allocate_run(count) == want
        self.tables.append(want)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.acquire(table)
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held())))
        self.content += 1
        digest = chain_digest(b"", [self.content])
        self.pool.seal(block, digest)
        if block not in self.sealed.values():
            self.sealed[digest] = block

    @precondition(lambda self: self.sealed)
    @rule(data=st.data())
    def seal_a_twin(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.sealed)))
        for block in self.held() - set(self.sealed.values()):
            self.pool.seal(block, digest)  # the first one keeps the name

    @precondition(lambda self: self.sealed)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.sealed)))
        found = self.pool.lookup([digest])
        assert found == [self.sealed[digest]]
        self.pool.acquire(found)
        self.tables.append(found)

    @precondition(lambda self: self.sealed)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.sealed)))
        self.pool.forget([self.sealed.pop(digest)])

    @invariant()
    def books_balance(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.available == 12 - len(self.held())
        assert self.pool.idle == len(set(self.sealed.values()) - self.held())
        for digest, block in self.sealed.items():
            assert self.pool.lookup([digest]) == [block]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_blocks_on_demand() -> None:
    """A sequence holds the blocks of its computed tokens: 300 take 19 blocks of 16, 15 positions at most stay free."""
    for prompt, blocks in ((300, 19), (17, 2), (16, 1)):
        rig = Rig(blocks=32, size=16, step_tokens=512, chunk_tokens=512, depth=1)
        rig.add([1] * prompt, 40, ignore_eos=True)
        [seq] = rig.core.live()
        for decoded in range(39):
            rig.submit()
            assert len(seq.table) == -(-(prompt + decoded) // 16)
            assert decoded or len(seq.table) == blocks
            filled, allocated = rig.core.occupancy.used_positions()
            assert filled == prompt + decoded
            assert allocated - filled <= 15
            rig.commit()


def test_first_finishing_sibling_does_not_free_what_others_use() -> None:
    """Beams share a prompt; one ends first.  Freeing its blocks outright gave the others silent garbage."""
    pool = BlockPool(4, 16, note_discarded=True)
    prompt = pool.allocate(2)
    for _ in range(2):
        pool.acquire(prompt)
    pool.release(prompt)
    assert pool.available == 2
    assert pool.discarded == []
    assert not set(pool.allocate(2)) & set(prompt)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.check([prompt, prompt, [b for b in range(4) if b not in prompt]])


def test_check_catches_a_missing_decrement_and_a_double_free() -> None:
    pool = BlockPool(4, 16)
    table = pool.allocate(2)
    with pytest.raises(AccountingError, match=f"block {min(table)} has a reference count of 1, but is in 0 tables"):
        pool.check([])
    pool.release(table)
    with pytest.raises(AccountingError, match="released more often"):
        pool.release(table)


def test_eviction_is_least_recently_used_and_eats_a_prefix_from_its_tail() -> None:
    pool = BlockPool(4, 2)
    old, new = chain([1, 2, 3, 4], 2), chain([5, 6, 7, 8], 2)
    for digests in (old, new):
        table = pool.allocate(2)
        for block, digest in zip(table, digests, strict=True):
            pool.seal(block, digest)
        pool.release(table)
    hit = pool.lookup(old)
    pool.acquire(hit)
    pool.release(hit)  # now `new` is the older one
    pool.allocate(1)
    assert len(pool.lookup(new)) == 1
    assert len(pool.lookup(old)) == 2
    pool.allocate(1)
    assert pool.lookup(new) == []
    assert len(pool.lookup(old)) == 2


def test_no_hit_under_another_model_or_salt() -> None:
    """The namespace is (fingerprint, salt), and neither can be shifted into the other."""
    tokens = list(range(8))
    mine = chain(tokens, 4)
    assert mine[-1] != chain(tokens, 4, fingerprint="other")[-1]
    assert mine[-1] != chain(tokens, 4, salt="tenant")[-1]
    assert chain(tokens, 4, "ab", "c") != chain(tokens, 4, "a", "bc")
    assert mine[1] != chain([9, *tokens[1:]], 4)[1]  # equal block, different past


def test_caching_off_keeps_nothing() -> None:
    pool = BlockPool(4, 2, caching=False)
    table = pool.allocate(1)
    pool.seal(table[0], b"digest")
    pool.release(table)
    assert pool.lookup([b"digest"]) == []
    assert pool.idle == 0


def freed_outright(self: BlockPool, table: list[int]) -> None:
    """The bug that gave siblings silent garbage: the first to finish frees a block that others still use."""
    for block in reversed(table):
        self._refs[block] = 0
        if self._digest[block] is None:
            self._discard(block)
        else:
            self._idle[block] = None


def never_counted_down(self: BlockPool, table: list[int]) -> None:
    """The other way round: a leak."""


@pytest.mark.parametrize("broken", [freed_outright, never_counted_down])
@pytest.mark.parametrize("machine", [PoolMachine, SchedulerMachine])
def test_the_property_tests_see_a_broken_decrement(
    machine: type[RuleBasedStateMachine], broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The property tests themselves under test: with BlockPool.release broken they must fail."""
    monkeypatch.setattr(BlockPool, "release", broken)
    search = settings(max_examples=150, stateful_step_count=40, deadline=None, database=None, phases=[Phase.generate])
    with pytest.raises((AssertionError, AccountingError, KeyError)):
        run_state_machine_as_test(machine, settings=search)
