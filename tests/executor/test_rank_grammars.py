"""A request starts once all ranks have compiled its grammar, and no rank forgets one that is held."""

from __future__ import annotations

from multiprocessing import Pipe
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.engine.executor.ranks.rank_grammars import ASK, GrammarsOfRanks, RankGrammars
from tests.executor.test_grammar_store import Compiler, store_of, work
from tests.matrix import examples


class Ranks:
    """Three ranks in one process; `asked` counts the questions to the others."""

    def __init__(self, max_bytes: int = 0) -> None:
        self.stores = [store_of(Compiler(), max_bytes) for _ in range(3)]
        self.others = [(RankGrammars(store), Pipe()) for store in self.stores[1:]]
        self.asked = self.bytes = 0
        self.all = GrammarsOfRanks(self.stores[0], self.tell, self.ask)

    def tell(self, message: bytes) -> None:
        self.bytes += len(message)
        for rank, (_, theirs) in self.others:
            assert rank.obey(message, theirs)

    def ask(self, message: bytes) -> list[bytes]:
        self.asked += 1
        self.tell(message)
        return [ours.recv_bytes() for _, (ours, _) in self.others]


def test_a_grammar_is_ready_when_the_last_rank_has_it() -> None:
    ranks = Ranks()
    assert not ranks.all.hold("r", "g", "tenant", 2.0)
    for store in ranks.stores[1:]:
        work(store)
    assert ranks.all.finished() == []
    assert ranks.asked == 0  # rank 0 itself has it not
    ranks.stores[0].work()
    assert ranks.all.finished() == ["g"]
    assert ranks.all.finished() == []
    assert ranks.asked == 1
    assert ranks.all.hold("another", "g")
    slow = Ranks()
    slow.all.hold("r", "g")
    work(slow.stores[0])
    work(slow.stores[1])
    assert slow.all.finished() == []
    work(slow.stores[2])
    assert slow.all.finished() == ["g"]


def test_a_fault_is_ready_too() -> None:
    ranks = Ranks()
    ranks.all.hold("r", "bad")
    for store in ranks.stores:
        work(store)
    assert ranks.all.finished() == ["bad"]
    assert ranks.all.fault("bad") == "bad is at fault"


def test_a_thousand_requests_with_one_grammar_send_it_once() -> None:
    ranks, text = Ranks(), "g" * 65536
    for at in range(1000):
        ranks.all.hold(f"r{at}", text)
    assert ranks.bytes < 2 * 65536
    for store in ranks.stores:
        assert store.counts.held == 1


def test_other_commands_are_not_touched() -> None:
    rank, (_, theirs) = RankGrammars(store_of(Compiler())), Pipe()
    assert not rank.obey(b"X", theirs)
    assert not RankGrammars(None).obey(ASK, theirs)


class Machine(RuleBasedStateMachine):
    """Ranks compile at their own pace and evict at once what nothing holds."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = Ranks()
        self.holds: dict[str, str] = {}
        self.ready: set[str] = set()
        self.number = 0

    @rule(text=st.integers(0, 4))
    def hold(self, text: int) -> None:
        self.number += 1
        name, grammar = f"r{self.number}", f"g{text}"
        self.holds[name] = grammar
        ready = self.ranks.all.hold(name, grammar)
        assert ready == (grammar in self.ready)

    @rule(data=st.data())
    def release(self, data: Any) -> None:
        if self.holds:
            name = data.draw(st.sampled_from(sorted(self.holds)))
            grammar = self.holds.pop(name)
            self.ranks.all.release(name)
            if grammar not in self.holds.values():
                self.ready.discard(grammar)

    @rule(rank=st.integers(0, 2))
    def compile_one(self, rank: int) -> None:
        self.ranks.stores[rank].work()

    @rule()
    def learn(self) -> None:
        found = self.ranks.all.finished()
        assert len(set(found)) == len(found)
        assert not self.ready & set(found)
        self.ready |= set(found)

    @invariant()
    def every_rank_has_what_is_ready(self) -> None:
        for store in self.ranks.stores:
            assert store.counts.held == len(set(self.holds.values()))
            for grammar in self.ready:
                assert store.copy(grammar)

    def teardown(self) -> None:
        for store in self.ranks.stores:
            work(store)
        self.ready |= set(self.ranks.all.finished())
        assert self.ready == set(self.holds.values())
        for name in self.holds:
            self.ranks.all.release(name)
        assert all(not rank._texts for rank, _ in self.ranks.others)
        assert not self.ranks.all._keys
        assert not self.ranks.all._missing


TestRanks = Machine.TestCase
TestRanks.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
