"""A process that stood still for longer than its patience does not take Redis for away."""

from __future__ import annotations

import asyncio
import time

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire import link
from quire.engine.wire.layout import TOMBSTONE_MS
from quire.engine.wire.link import BusDown
from tests.wire.sides import Bus, generate


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 8])
async def test_a_command_in_flight_while_the_process_stands_still_is_answered(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """After so many turns of the event loop a command waits for a connection, for a write or for its reply."""
    monkeypatch.setattr(link, "PATIENCE_S", 0.5)
    monkeypatch.setitem(link.Link.run_script.__kwdefaults__ or {}, "patience_s", 0.5)
    gateway = await bus.gateway()
    submitting = asyncio.create_task(gateway.submit(generate("a")))
    for _ in range(turns):
        await asyncio.sleep(0)
    time.sleep(1.0 + link.HELD_UP_S)  # noqa: ASYNC251  (the machine pauses)
    assert (await submitting).accepted
    assert (await gateway.fleet()).queued == 1


async def test_a_redis_that_is_away_as_well_is_reported_once_it_was_asked_again(
    own_server: EmbeddedRedis, own_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(link.Link.run_script.__kwdefaults__ or {}, "patience_s", 0.5)
    gateway = await own_bus.gateway()
    own_server.stop()
    submitting = asyncio.create_task(gateway.submit(generate("a")))
    await asyncio.sleep(0.1)
    time.sleep(1.0 + link.HELD_UP_S)  # noqa: ASYNC251
    with pytest.raises(BusDown):
        await submitting


def test_the_deadline_of_a_command_is_set_again_once_and_only_within_the_memory_of_a_submit() -> None:
    now = 100.0
    deadline = link.Deadline(lambda: now, 2.0)
    assert deadline.left() == 2.0
    now += 2.0 + link.HELD_UP_S / 2
    assert deadline.left() < 0  # it just ran out
    now += 3.0
    assert deadline.left() == 2.0  # a process that sees it so late stood still
    now += 5.0
    assert deadline.left() < 0
    now = 100.0
    other = link.Deadline(lambda: now, 2.0)
    now += TOMBSTONE_MS / 1000 - 1.0
    assert other.left() < 0  # by the end of another try the first one's outcome would be forgotten
