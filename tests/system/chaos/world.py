"""What chaos happens to: machines with `quire serve` on one Redis, and bad networks before and behind them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.loadtest.server import FORKED_ENGINE
from tests.pace import Patience, patience
from tests.ports import free_port
from tests.system.chaos.proxy import Dial, Proxy
from tests.system.chaos.readers import Doors
from tests.system.processes import Process, ending, wait_until_ready

T = TypeVar("T")
GATEWAYS = 2  # in all
LIMIT_S = 90.0  # generous: the machine may be busy
POLL_S = 0.01


class Machine:
    """One `quire serve`: a supervisor with an engine and its gateways."""

    def __init__(self, folder: Path, name: str, checkpoint: Path, *options: str) -> None:
        self.name = name
        self.port = free_port()
        words = (str(checkpoint), f"--port={self.port}", "--served-name=tiny", *options)
        self.process = Process(folder / f"{name}.log", "serve", *words)

    def children(self, module: str) -> list[psutil.Process]:
        """Those running now that were started as `python -m MODULE`, the oldest first."""
        found = []
        for child in psutil.Process(self.process.popen.pid).children():
            with contextlib.suppress(psutil.Error):
                if module in child.cmdline() or (module, child.name()) == ("quire.engine", FORKED_ENGINE):
                    found.append(child)
        return sorted(found, key=lambda child: child.create_time())

    @property
    def listening(self) -> int:
        """How often one of its gateways has begun to."""
        return self.process.said().count(" listens on ")

    def starts(self) -> list[dict[str, float]]:
        """Of each start of its engine: the seconds that its parts took."""
        lines = [line for line in self.process.said().splitlines() if "started: " in line]
        return [
            {name: float(seconds) for name, seconds in re.findall(r"(\w+) ([\d.]+) s", line.partition("started: ")[2])}
            for line in lines
        ]


class Server:
    """One Redis server, called from a thread of its own: the server ends with the thread that started it."""

    def __init__(self, folder: Path, binary: Path | None = None) -> None:
        self._embedded = EmbeddedRedis(folder, binary)
        self._thread = ThreadPoolExecutor(1)
        self.url = self._embedded.url
        self.socket = self.url.removeprefix("unix://")

    async def start(self) -> None:
        await self._call(self._embedded.start)

    async def stop(self) -> None:
        await self._call(self._embedded.stop)

    def signal(self, number: signal.Signals) -> None:
        assert self._embedded.pid is not None
        os.kill(self._embedded.pid, number)

    async def info(self, section: str) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            with redis.Redis.from_url(self.url) as client:
                found: dict[str, Any] = client.info(section)
                return found

        return await self._call(ask)

    async def limit_memory(self, limit: int) -> None:
        """Bytes that it may have; 0: as many as it likes."""
        await self.command("CONFIG", "SET", "maxmemory", limit)

    async def replicate(self, port: int) -> None:
        """Become a replica of the server behind that port of this machine; 0: a master."""
        await self.command("REPLICAOF", *(("127.0.0.1", port) if port else ("NO", "ONE")))

    async def command(self, *words: str | int) -> None:
        def ask() -> None:
            with redis.Redis.from_url(self.url) as client:
                client.execute_command(*words)

        await self._call(ask)

    @property
    def running(self) -> bool:
        return self._embedded.pid is not None

    async def close(self) -> None:
        await self._call(self._embedded.close)
        self._thread.shutdown()

    async def _call(self, action: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, action)


class Pair:
    """A master and its replica, started once it is asked for, behind one name: `dial` leads to the master."""

    def __init__(self, nodes: Sequence[Server], links: Sequence[Proxy]) -> None:
        """`links`: a TCP port before each node's unix socket, for the other one to replicate from."""
        self._nodes, self._links = list(nodes), list(links)
        self._named = self._nodes[0]

    @property
    def master(self) -> Server:
        """The node that the name leads to."""
        return self._named

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self._named.socket)

    async def replica(self) -> Server:
        """The other node, in sync."""
        master, replica = self._sides()
        if not replica.running:
            await replica.start()
        await master.command("CONFIG", "SET", "repl-diskless-sync-delay", 0)
        for node, link in zip(self._nodes, self._links, strict=True):  # where FAILOVER finds the replica
            await node.command("CONFIG", "SET", "replica-announce-ip", "127.0.0.1")
            await node.command("CONFIG", "SET", "replica-announce-port", link.port)
        if (await replica.info("replication"))["role"] == "master":
            await replica.replicate(self._links[self._nodes.index(master)].port)
        give_up = time.monotonic() + patience(LIMIT_S)
        while (await replica.info("replication"))["master_link_status"] != "up":
            assert time.monotonic() < give_up, "the replica does not come into sync"
            await asyncio.sleep(POLL_S)
        return replica

    async def hand_over(self) -> None:
        """The master and its replica change places, without a loss; the name still leads to the old master."""
        master, replica = self._sides()[0], await self.replica()
        await master.command("FAILOVER")
        give_up = time.monotonic() + patience(LIMIT_S)
        while (await replica.info("replication"))["role"] != "master":
            assert time.monotonic() < give_up, "the replica does not take over"
            await asyncio.sleep(POLL_S)

    async def demote(self) -> None:
        """The master becomes a replica of the other node, which is a master already; the name still leads to it."""
        master, other = self._sides()
        await master.replicate(self._links[self._nodes.index(other)].port)

    def move(self) -> None:
        """From now on new connections lead to the other node; old ones stay where they are."""
        self._named = self._sides()[1]

    def _sides(self) -> tuple[Server, Server]:
        return self._named, next(node for node in self._nodes if node is not self._named)


class World:
    """Redis behind one proxy, machines behind it, and before each machine a proxy for clients with a bad network."""

    def __init__(self, pair: Pair, bus: Proxy, machines: list[Machine], front: list[Proxy]) -> None:
        self.pair, self.bus, self.machines, self.front = pair, bus, machines, front
        self.doors = Doors(
            near=[f"http://127.0.0.1:{machine.port}" for machine in machines],
            far=[f"http://127.0.0.1:{proxy.port}" for proxy in front],
        )

    @property
    def redis(self) -> Server:
        """The master."""
        return self.pair.master


@contextlib.asynccontextmanager
async def world(
    folder: Path, checkpoint: Path, options: Sequence[str], *, machines: int, binary: Path | None = None
) -> AsyncIterator[World]:
    """Up and ready.  `options` are for each `quire serve`; `binary` is the program of the Redis servers.  A machine
    whose supervisor ended by itself fails it."""
    nodes = [Server(folder / name, binary) for name in ("redis", "redis2")]
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            stack.push_async_callback(node.close)
        await nodes[0].start()
        dials = [functools.partial(asyncio.open_unix_connection, node.socket) for node in nodes]
        pair = Pair(nodes, [await stack.enter_async_context(Proxy(to)) for to in dials])
        bus = await stack.enter_async_context(Proxy(pair.dial))
        shared = [f"--redis-url=redis://127.0.0.1:{bus.port}/0", f"--gateways={GATEWAYS // machines}", *options]
        processes = contextlib.ExitStack()
        stack.push_async_callback(asyncio.to_thread, processes.close)  # they need the proxy to the end
        started = processes.enter_context(ending([]))
        run = [Machine(folder, f"machine{i}", checkpoint, *shared) for i in range(machines)]
        started += [machine.process for machine in run]
        front = [await stack.enter_async_context(Proxy(dial(machine.port))) for machine in run]
        made = World(pair, bus, run, front)
        for machine, url in zip(run, made.doors.near, strict=True):
            await asyncio.to_thread(wait_until_ready, url, LIMIT_S, gateways=GATEWAYS // machines)
            assert await until(lambda machine=machine: machine.listening == GATEWAYS // machines)  # type: ignore[misc]
        yield made
        for machine in run:
            assert machine.process.popen.poll() is None, machine.process.said()


def dial(port: int) -> Dial:
    return functools.partial(asyncio.open_connection, "127.0.0.1", port)


async def until(holds: Callable[[], bool], seconds: float = LIMIT_S) -> bool:
    """Wait for it; False when it did not come in time."""
    bound = Patience(seconds)
    while not holds():
        if not bound.lasts():
            return False
        await asyncio.sleep(POLL_S)
    return True
