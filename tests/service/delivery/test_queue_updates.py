"""Places of thousands of waiting requests are read and updated in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from quire.engine.wire.records import Fleet, LaneQueue, Place
from quire.service.delivery import queue_updates
from quire.service.delivery.queue_updates import QueueUpdates, Waiting
from tests.service.fakes import a_load


class Bus:
    """Redis: every request waits in the late lane, at the place that its id names."""

    async def places(self, request_ids: Sequence[str]) -> dict[str, Place]:
        await asyncio.sleep(0)
        return {one: Place("late", int(one)) for one in request_ids}


class Waiter:
    """An open request that counts its announcements of this turn of the loop."""

    turn = longest = 0

    def __init__(self) -> None:
        self.waiting: Waiting | None = Waiting("late", -1, None)

    def announce(self) -> None:
        if not Waiter.turn:
            asyncio.get_running_loop().call_soon(self.end_turn)
        Waiter.turn += 1
        Waiter.longest = max(Waiter.longest, Waiter.turn)

    @staticmethod
    def end_turn() -> None:
        Waiter.turn = 0


async def test_a_turn_of_the_loop_updates_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_updates, "BATCH", 10)
    monkeypatch.setattr(queue_updates, "UPDATE_S", -1.0)
    fleet = Fleet([a_load()], 95, 950, 0, late=LaneQueue(95, 950, 0, 1))
    updates = QueueUpdates(Bus(), lambda: fleet)  # type: ignore[arg-type]
    waiters = [Waiter() for _ in range(95)]
    for at, waiter in enumerate(waiters):
        updates.add(str(at), waiter)
    await updates.refresh(0)
    assert [waiter.waiting.ahead for waiter in waiters if waiter.waiting is not None] == list(range(95))
    assert Waiter.longest == 10
