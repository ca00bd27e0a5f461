"""Tenants take turns, whatever they have added."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.common.fair_list import FairList


def drained(work: FairList[str]) -> list[str]:
    found = []
    while (key := work.pop()) is not None:
        found.append(key)
    return found


def test_one_after_two_hundred_of_another_tenant_is_next_but_one() -> None:
    work = FairList[str]()
    for at in range(200):
        work.add("loud", f"l{at}")
    for _ in range(50):
        work.pop()
    work.add("small", "s")
    assert "s" in (work.pop(), work.pop())
    assert len(work) == 149


def test_a_tenant_gains_nothing_by_leaving_and_coming_back() -> None:
    work, turns = FairList[str](), 40
    for at in range(turns):
        work.add("steady", f"a{at}")
    found = []
    for at in range(turns):
        work.add("hasty", f"b{at}")  # never more than one at once
        found.append(work.pop() or "")
        if found[-1][0] == "a":
            work.discard("hasty", f"b{at}")
    assert sum(name[0] == "a" for name in found) >= turns // 2 - 1


def test_weights_are_shares_of_turns() -> None:
    work = FairList[str]()
    for at in range(90):
        work.add("heavy", f"h{at}", 3.0)
        work.add("light", f"l{at}", 1.0)
    first = [work.pop() or "" for _ in range(80)]
    assert abs(sum(name[0] == "h" for name in first) - 60) <= 1


def test_each_tenant_is_first_come_first_served() -> None:
    work = FairList[str]()
    for name in ("a1", "b1", "a2", "b2", "a1"):
        work.add(name[0], name)
    work.discard("a", "nothing")
    assert drained(work) == ["a1", "b1", "a2", "b2"]
    assert work.pop() is None


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 5), st.integers(0, 30)),
    st.tuples(st.just("discard"), st.integers(0, 5), st.integers(0, 30)),
    st.tuples(st.just("pop"), st.just(0), st.just(0)),
)


@given(st.lists(OPERATIONS, max_size=200))
def test_no_tenant_waits_for_two_turns_of_another(steps: list[tuple[str, int, int]]) -> None:
    """With equal weights: between two turns of a tenant that always has work, no other has more than two."""
    work, expected = FairList[tuple[int, int]](), set[tuple[int, int]]()
    since: dict[int, dict[int, int]] = {}  # tenant with work -> turns of others since it last had one, or joined
    for what, tenant, key in steps:
        if what == "add":
            work.add(str(tenant), (tenant, key))
            expected.add((tenant, key))
            since.setdefault(tenant, {})
        elif what == "discard":
            work.discard(str(tenant), (tenant, key))
            expected.discard((tenant, key))
            if not any(other == tenant for other, _ in expected):
                since.pop(tenant, None)
        elif (found := work.pop()) is not None:
            expected.remove(found)
            for other, turns in since.items():
                if other != found[0]:
                    turns[found[0]] = turns.get(found[0], 0) + 1
                    assert turns[found[0]] <= 2
            since.pop(found[0])
            if any(other == found[0] for other, _ in expected):
                since[found[0]] = {}
        else:
            assert not expected
        assert len(work) == len(expected)
    assert sorted(iter(work.pop, None)) == sorted(expected)
