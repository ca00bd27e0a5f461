"""Each constraint is checked once for all requests that wait; tenants take turns; a check that no request waits for is
dropped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from quire.service.grammar.grammar import Compiled, Constraint
from quire.service.grammar.grammar_checks import THREADS, GrammarChecks
from quire.service.grammar.grammar_errors import NotServed

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


class Checker:
    """Stands for `compile_grammar`: each call waits until `permit` lets one end."""

    def __init__(self) -> None:
        self.values: list[str] = []  # in the order in which their checks began
        self._permits = threading.Semaphore(0)
        self._began = threading.Condition()

    def __call__(self, constraint: Constraint) -> Compiled:
        with self._began:
            self.values.append(constraint.value)
            self._began.notify_all()
        self._permits.acquire()
        if constraint.value.startswith("bad"):
            raise NotServed(constraint.param, "it is bad")
        return Compiled(f"grammar of {constraint.value}")

    def wait(self, count: int) -> None:
        """Wait until so many checks have begun."""
        with self._began:
            self._began.wait_for(lambda: len(self.values) >= count)

    def permit(self, count: int) -> None:
        self._permits.release(count)


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checker]:
    made = Checker()
    monkeypatch.setattr("quire.service.grammar.grammar_checks.compile_grammar", made)
    yield made
    made.permit(10_000)


def regex(value: str) -> Constraint:
    return Constraint("s", "regex", value)


async def begun(checker: Checker, count: int) -> None:
    await asyncio.to_thread(checker.wait, count)


async def test_a_known_schema_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, constraint = GrammarChecks(), Constraint("s", "json", OBJECT)
    first = await checks.compile(constraint)
    monkeypatch.setattr("quire.service.grammar.grammar_checks.compile_grammar", None)
    assert await checks.compile(Constraint("s", "json", dict(OBJECT))) == first


async def test_a_thousand_at_once_are_checked_once(checker: Checker) -> None:
    checks = GrammarChecks()
    work = [asyncio.ensure_future(checks.compile(regex("a"), f"t{at % 5}")) for at in range(1000)]
    await begun(checker, 1)
    checker.permit(1)
    assert set(await asyncio.gather(*work)) == {Compiled("grammar of a")}
    assert checker.values == ["a"]


@pytest.mark.parametrize("count", [257, 1024])
async def test_any_number_of_different_ones_is_checked_once_each(checker: Checker, count: int) -> None:
    checks = GrammarChecks(kept_bytes=0)
    work = [asyncio.ensure_future(checks.compile(regex(f"a{at}"))) for at in range(count)]
    checker.permit(count)
    assert await asyncio.gather(*work) == [Compiled(f"grammar of a{at}") for at in range(count)]
    assert sorted(checker.values) == sorted(f"a{at}" for at in range(count))


async def test_a_small_one_beside_two_hundred_heavy_ones_is_next(checker: Checker) -> None:
    checks = GrammarChecks()
    heavy = [asyncio.ensure_future(checks.compile(regex(f"heavy{at}"), "loud")) for at in range(200)]
    await begun(checker, THREADS)
    checker.permit(20)
    await begun(checker, 20 + THREADS)
    small = asyncio.ensure_future(checks.compile(regex("small"), "quiet"))
    await asyncio.sleep(0)
    checker.permit(1)
    await begun(checker, 21 + THREADS)
    checker.permit(1)
    await begun(checker, 22 + THREADS)
    assert "small" in checker.values[20 + THREADS :]
    checker.permit(300)
    assert await small == Compiled("grammar of small")
    await asyncio.gather(*heavy)


async def test_what_every_client_has_left_is_not_checked(checker: Checker) -> None:
    checks = GrammarChecks()
    work = [asyncio.ensure_future(checks.compile(regex(f"a{at}"), f"t{at % 3}")) for at in range(50)]
    stays = asyncio.ensure_future(checks.compile(regex("a7"), "another"))
    await begun(checker, THREADS)
    for one in work:
        one.cancel()
    checker.permit(100)
    assert await stays == Compiled("grammar of a7")
    for at in range(THREADS):  # those that were under way end after it
        await checks.compile(regex(checker.values[at]))
    assert sorted(checker.values) == sorted([*checker.values[:THREADS], "a7"])
    assert not checks._checks
    assert not checks._waiting


async def test_a_refusal_reaches_all_who_wait(checker: Checker) -> None:
    checks = GrammarChecks()
    work = [asyncio.ensure_future(checks.compile(regex("bad"))) for _ in range(5)]
    checker.permit(2)
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [NotServed] * 5
    assert checker.values == ["bad"]
    with pytest.raises(NotServed):
        await checks.compile(regex("bad"))


async def test_what_is_kept_is_bounded_in_bytes(checker: Checker) -> None:
    checks = GrammarChecks(kept_bytes=10_000)
    checker.permit(1000)
    for at in range(100):
        await checks.compile(regex(f"{at}" + "x" * 400))
        assert checks._kept_bytes == sum(len(key) + len(one.grammar) for key, one in checks._kept.items()) <= 10_000
    await checks.compile(regex("y" * 20_000))
    assert checks._kept_bytes <= 10_000
    count = len(checker.values)
    await checks.compile(regex("99" + "x" * 400))
    assert len(checker.values) == count + 1  # the large one made all others leave, itself too
