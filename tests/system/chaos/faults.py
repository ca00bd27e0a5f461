"""What can go wrong, and a seeded order for it.  Each fault is a function of a World that returns once it is over."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil
import redis

from tests.pace import paced_ms
from tests.system.chaos.proxy import Proxy
from tests.system.chaos.world import Machine, World, until

LEASE_MS = paced_ms(1000)  # leases of the engines here
FROZEN_S = (1.2 * LEASE_MS / 1000, 2.5 * LEASE_MS / 1000)  # longer than a lease
GATEWAY_DEAD_S = 5.5  # a gateway without a heartbeat for 5 s is considered dead
AWAY_S = (0.2, 2.5)  # how long Redis or a network is away; a gateway's patience is 2 s
DELAY_S = (0.02, 0.3)  # delay of each block on a slow network
DEMOTED_S = (3.0, 3.5)  # longer than a gateway's patience
DISCARD = 9  # a port of this machine that nothing listens on
MOVED_S = 1.5  # from a promotion to the move of the name, at most
LAGGING_S = 0.1  # two masters, one of which has the clients


class Missed(Exception):
    """The fault could not be brought about: what it aims at is not there at the moment."""


@dataclass(frozen=True)
class Fault:
    """One entry of the schedule."""

    kind: str
    machine: int
    dice: float  # 0..1: how long, or which of two

    def seconds(self, bounds: tuple[float, float]) -> float:
        return bounds[0] + self.dice * (bounds[1] - bounds[0])


def oldest(machine: Machine, module: str) -> psutil.Process:
    found = machine.children(module)
    if not found:
        raise Missed
    return found[0]


async def kill_engine(world: World, fault: Fault) -> None:
    """SIGKILL; over when its supervisor has another one up."""
    machine = world.machines[fault.machine]
    starts = len(machine.starts())
    oldest(machine, "quire.engine").kill()
    await until(lambda: len(machine.starts()) > starts)


async def kill_gateway(world: World, fault: Fault) -> None:
    """SIGKILL; over at once, for its clients go elsewhere."""
    found = world.machines[fault.machine].children("quire.service.app")
    if not found:
        raise Missed
    gateway = found[int(fault.dice * len(found)) % len(found)]
    world.doors.gateways_ending += 1
    gateway.kill()
    world.doors.gateway_kills += 1
    await until(lambda: not gateway.is_running())
    world.doors.gateway_kills += 1  # streams that it still accepted meanwhile have ended with it
    world.doors.gateways_ending -= 1


@contextlib.contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


async def freeze_engine(world: World, fault: Fault) -> None:
    """SIGSTOP, until others must take it for dead; it wakes with what it was about to write."""
    with frozen(oldest(world.machines[fault.machine], "quire.engine")):
        await asyncio.sleep(LEASE_MS / 1000 + fault.seconds((0.2, 1.5)))


async def freeze_gateway(world: World, fault: Fault) -> None:
    with frozen(oldest(world.machines[fault.machine], "quire.service.app")):
        await asyncio.sleep(GATEWAY_DEAD_S)


async def restart_redis(world: World, fault: Fault) -> None:
    await world.redis.stop()
    await asyncio.sleep(fault.seconds(AWAY_S))
    await world.redis.start()


async def command(world: World, *words: str) -> None:
    """A command to Redis.  Raises Missed if another fault of the same round has stopped it."""
    try:
        await world.redis.command(*words)
    except redis.ConnectionError as error:
        raise Missed from error


async def flush_scripts(world: World, fault: Fault) -> None:
    """Redis forgets all scripts: SCRIPT FLUSH."""
    await command(world, "SCRIPT", "FLUSH")


async def kill_connections(world: World, fault: Fault) -> None:
    """Redis closes the connections of subscribers, or all others: CLIENT KILL."""
    await command(world, "CLIENT", "KILL", "TYPE", "pubsub" if fault.dice < 0.5 else "normal")


async def freeze_redis(world: World, fault: Fault) -> None:
    """Its connections stay open and nothing answers."""
    world.redis.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.seconds(AWAY_S))
    finally:
        world.redis.signal(signal.SIGCONT)


async def fill_redis(world: World, fault: Fault) -> None:
    """It has twice the memory that it may have."""
    await world.redis.limit_memory(int((await world.redis.info("memory"))["used_memory"]) // 2)
    try:
        await asyncio.sleep(fault.seconds(AWAY_S))
    finally:
        await world.redis.limit_memory(0)


async def demote_redis(world: World, fault: Fault) -> None:
    """The master becomes a replica of nothing, and a master again: what a failover that is taken back looks like."""
    await world.redis.replicate(DISCARD)
    try:
        await asyncio.sleep(fault.seconds(DEMOTED_S))
    finally:
        await world.redis.replicate(0)


async def failover(world: World, fault: Fault) -> None:
    """A replica is promoted and the name moves to it.  The old master is killed, or else it is demoted: its connections
    stay open, it takes writes for a moment longer, which are lost, and its replies to the rest are refusals."""
    pair, old = world.pair, world.redis
    with world.doors.failing_over():
        new = await pair.replica()
        if fault.dice < 0.5:
            old.signal(signal.SIGKILL)
            await asyncio.sleep(2 * fault.dice * MOVED_S)
            await new.replicate(0)
        else:
            await new.replicate(0)
            await asyncio.sleep(LAGGING_S)
            await pair.demote()
            await asyncio.sleep((2 * fault.dice - 1) * MOVED_S)
        pair.move()


async def hand_over(world: World, fault: Fault) -> None:
    """The command FAILOVER: the master holds writes back, waits for its replica and changes places with it.  The name
    moves later; until then the old master refuses all writes."""
    with world.doors.failing_over():
        await world.pair.hand_over()
        await asyncio.sleep(fault.dice * MOVED_S)
        world.pair.move()


async def cut(proxies: Sequence[Proxy], seconds: float) -> None:
    """Every connection breaks, and no new one can be made for a while."""
    for proxy in proxies:
        proxy.down = True
        proxy.cut()
    await asyncio.sleep(seconds)
    for proxy in proxies:
        proxy.down = False


async def delay(proxies: Sequence[Proxy], delay_s: float, seconds: float) -> None:
    for proxy in proxies:
        proxy.delay_s = delay_s
    await asyncio.sleep(seconds)
    for proxy in proxies:
        proxy.delay_s = 0.0


async def cut_clients(world: World, fault: Fault) -> None:
    await cut(world.front, fault.seconds((0.0, 0.5)))


async def cut_redis(world: World, fault: Fault) -> None:
    await cut([world.bus], fault.seconds(AWAY_S))


async def delay_clients(world: World, fault: Fault) -> None:
    await delay(world.front, fault.seconds(DELAY_S), 1.0)


async def delay_redis(world: World, fault: Fault) -> None:
    await delay([world.bus], fault.seconds(DELAY_S), 1.0)


KINDS: dict[str, Callable[[World, Fault], Awaitable[None]]] = {
    "kill engine": kill_engine,
    "kill gateway": kill_gateway,
    "freeze engine": freeze_engine,
    "freeze gateway": freeze_gateway,
    "restart redis": restart_redis,
    "freeze redis": freeze_redis,
    "flush scripts": flush_scripts,
    "kill connections": kill_connections,
    "fill redis": fill_redis,
    "demote redis": demote_redis,
    "failover": failover,
    "hand over redis": hand_over,
    "cut redis": cut_redis,
    "delay redis": delay_redis,
    "cut clients": cut_clients,
    "delay clients": delay_clients,
}


# One at a time: the next would not find it there.
ON_THE_SERVER = {"restart redis", "freeze redis", "fill redis", "demote redis", "failover", "hand over redis"}


def schedule(kinds: Sequence[str], seed: int, machines: int) -> Iterator[list[Fault]]:
    """For ever: rounds of one fault, and one in five of two at once.  Every kind comes once before any comes again."""
    rng = random.Random(seed)
    bag: list[str] = []

    def draw() -> Fault:
        if not bag:
            bag.extend(rng.sample(kinds, len(kinds)))
        return Fault(bag.pop(), rng.randrange(machines), rng.random())

    while True:
        first = draw()
        two = bag and rng.random() < 0.2 and not {first.kind, bag[-1]} <= ON_THE_SERVER
        yield [first, draw()] if two else [first]
