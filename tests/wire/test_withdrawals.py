"""Many streams end at once: withdrawals go out in bounded scripts, each id once, and none is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.link import BusDown, Link
from quire.engine.wire.records import IdempotencyKey
from quire.engine.wire.scripts import CANCEL, SUBMIT, Script
from quire.engine.wire.withdrawals import SCRIPT_COUNT, Withdrawal, Withdrawals
from tests.wire.sides import Bus, generate


def scripts(gateway: GatewaySide) -> list[list[str]]:
    """The ids of each CANCEL script that the gateway sends from now on."""
    sent: list[list[str]] = []
    original = gateway._link.run_script

    async def script(one: Script, *args: Any, **options: Any) -> Any:
        if one is CANCEL:
            sent.append([str(word) for word in args[1::2]])
        return await original(one, *args, **options)

    gateway._link.run_script = script  # type: ignore[method-assign, assignment]
    return sent


async def test_streams_that_end_at_once_are_withdrawn_once_each_in_bounded_scripts(bus: Bus) -> None:
    gateway = await bus.gateway()
    names = [f"r{at}" for at in range(1000)]
    for at in range(0, len(names), 50):
        await gateway.submit(*map(generate, names[at : at + 50]))
    sent = scripts(gateway)
    await asyncio.gather(*map(gateway.cancel, names))
    assert (await gateway.fleet()).queued == 0
    assert sorted(name for some in sent for name in some) == sorted(names)
    assert max(map(len, sent)) <= SCRIPT_COUNT
    assert len(sent) <= len(names) // SCRIPT_COUNT + 2  # the first few scripts may be small


async def test_what_does_not_reach_redis_stays_owed_and_goes_with_the_next_fleet(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Link.run_script.__kwdefaults__ or {}, "patience_s", 0.1)
    gateway = await bus.gateway()
    await gateway.submit(generate("a"))
    original = gateway._link.run_script

    async def script(one: Script, *args: Any, **options: Any) -> Any:
        if one is CANCEL:
            raise BusDown("gone")
        return await original(one, *args, **options)

    gateway._link.run_script = script  # type: ignore[method-assign, assignment]
    await gateway.cancel("a")
    gateway.withdraw("b")
    await gateway.withdrawn()
    with redis.Redis.from_url(bus.url) as client:
        assert client.hlen(f"{{{bus.namespace}}}:waiting") == 1
    gateway._link.run_script = original  # type: ignore[method-assign]
    await gateway.fleet()
    await gateway.withdrawn()
    assert (await gateway.fleet()).queued == 0


@pytest.mark.parametrize("sending", [False, True])
async def test_a_request_whose_client_is_back_is_not_withdrawn(bus: Bus, sending: bool) -> None:
    """The reply to a submit is lost.  The client repeats the request with its Idempotency-Key, and gets this answer."""
    gateway, key = await bus.gateway(), IdempotencyKey("key", "body")
    original, paused = gateway._link.run_script, asyncio.Event()

    async def script(one: Script, *args: Any, **options: Any) -> Any:
        if one is CANCEL:
            await paused.wait()
            raise BusDown("gone")
        reply = await original(one, *args, **options)
        if one is SUBMIT:
            raise BusDown("gone")
        return reply

    gateway._link.run_script = script  # type: ignore[method-assign, assignment]
    with pytest.raises(BusDown):
        await gateway.submit(generate("a"), idempotency_key=key)
    if sending:
        await gateway.fleet()
        await asyncio.sleep(0)
    paused.set()
    duplicate = await gateway.find_duplicate(key)
    assert duplicate is not None
    attached = asyncio.create_task(gateway.attach(duplicate.request_id))
    gateway._link.run_script = original if not sending else script  # type: ignore[method-assign, assignment]
    found = await attached
    assert found is not None
    assert [one.finish for one in found.choices] == [None]
    gateway._link.run_script = original  # type: ignore[method-assign]
    await gateway.fleet()
    await gateway.withdrawn()
    assert (await gateway.fleet()).queued == 1
    await gateway.cancel("a")
    assert (await gateway.fleet()).queued == 0


async def test_one_sender_takes_what_comes_meanwhile_and_what_fails_is_not_forgotten() -> None:
    sent: list[list[Withdrawal]] = []
    answers: Iterator[bool | Exception] = iter([True, False, KeyError("a bug"), True, True])

    async def send(some: list[Withdrawal]) -> bool:
        sent.append(some)
        await asyncio.sleep(0)
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    owed = Withdrawals(send)
    owed.add(("a", -1))
    assert len(owed) == 1
    owed.wake()
    await asyncio.sleep(0)
    for name in "bc":  # while the first is under way
        owed.add((name, 0))
        owed.wake()
    await owed.sent()
    assert sent == [[("a", -1)], [("b", 0), ("c", 0)]]  # the second was refused
    for _ in range(2):  # the first of these fails
        owed.wake()
        await owed.sent()
    assert sent[2:] == [[("b", 0), ("c", 0)]] * 2
    assert len(owed) == 0
    owed.wake()
    await owed.close()
    assert len(sent) == 4
