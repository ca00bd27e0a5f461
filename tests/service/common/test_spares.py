"""The fork server of `quire serve`, and the spares that it forks: real processes, a scripted executor."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil
import pytest

from quire.engine.common import child_python
from quire.engine.process.fork_server import ENGINE_NAME
from quire.service.common.spares import ForkedProcess, Spares
from tests.pace import patience, until

WORDS = ["--executor=scripted", "--redis-url=redis://127.0.0.1:1/0"]  # a spare that takes over fails: no Redis
# At a low priority an import takes minutes on a busy machine.
CODE = "import sys; from quire.engine.process import fork_server, standby\n"
CODE += "standby.NICE = 0; {}; sys.exit(fork_server.main(WORDS))"
CODE = CODE.replace("WORDS", "sys.argv[1:]")
SERVER = ["-c", CODE.format("pass"), *WORDS]
HANG_S = 100.0  # bound of a hang


async def soon(event: Awaitable[ForkedProcess | None]) -> ForkedProcess | None:
    return await asyncio.wait_for(event, patience(HANG_S))


@asynccontextmanager
async def made(words: list[str]) -> AsyncIterator[Spares]:
    spares = Spares(words, child_python.environment())
    try:
        yield spares
    finally:
        before = descendants()
        await asyncio.wait_for(spares.close(), patience(HANG_S))
        assert not [one for one in before if one.is_running()]


def descendants() -> list[psutil.Process]:
    """The fork servers and the spares of this process."""
    return [one for one in psutil.Process().children() if one.name().startswith("quire-")]


async def test_each_spare_is_forked_by_one_server_and_is_a_child_of_the_supervisor() -> None:
    async with made(SERVER) as spares:
        assert await soon(spares.promote()) is None  # none was prepared
        await spares.prepare()
        server = spares._server
        first = await soon(spares.promote())  # waits for the imports, in a hurry
        await spares.prepare()
        await spares.prepare()  # has no effect: one is being forked
        second = await soon(spares.promote())
        assert first is not None
        assert second is not None
        assert spares._server is server
        for one in (first, second):
            # Each takes over and ends, because the port of its Redis is closed.
            assert await asyncio.wait_for(one.wait(), patience(HANG_S)) == 2
            assert one.returncode == 2
            one.send_signal(signal.SIGKILL)  # has no effect


async def test_a_spare_that_died_is_replaced() -> None:
    async with made(SERVER) as spares:
        await spares.prepare()
        assert spares._spare is not None
        spare = await soon(asyncio.shield(spares._spare))
        assert spare is not None
        process = psutil.Process(spare.pid)
        await until(lambda: process.name() == ENGINE_NAME, HANG_S)
        assert (process.ppid(), os.getpgid(spare.pid)) == (os.getpid(), spare.pid)
        spare.send_signal(signal.SIGKILL)
        assert await spare.wait() == -signal.SIGKILL
        assert await soon(spares.promote()) is None
        await spares.prepare()
        other = await soon(spares.promote())
        assert other is not None
        assert await asyncio.wait_for(other.wait(), patience(HANG_S)) == 2


@pytest.mark.parametrize("end", [Spares.stop, lambda spares: spares._server.send_signal(signal.SIGTERM)])
async def test_a_fork_server_that_ends_before_it_forks_leaves_no_spare(end: Callable[[Spares], None]) -> None:
    async with made(["-c", "import time; time.sleep(1000)"]) as spares:
        await spares.prepare()
        promoting = asyncio.create_task(spares.promote())
        await asyncio.sleep(0)
        end(spares)
        assert await soon(promoting) is None
        assert spares._server is not None
        await spares._server.wait()
        first = spares._server
        await spares.prepare()  # starts another
        assert spares._server is not first


async def test_a_spare_that_lost_something_in_the_fork_starts_as_a_new_interpreter() -> None:
    code = CODE.format("fork_server.can_call_cuda = lambda _: False")
    async with made(["-c", code, *WORDS]) as spares:
        await spares.prepare()
        assert spares._spare is not None
        spare = await soon(asyncio.shield(spares._spare))
        assert spare is not None
        process = psutil.Process(spare.pid)
        wanted = ["-m", "quire.engine", *WORDS, "--standby"]
        await until(lambda: process.cmdline()[-len(wanted) :] == wanted, HANG_S)
        taken = await soon(spares.promote())
        assert taken is spare
        assert await asyncio.wait_for(spare.wait(), patience(HANG_S)) == 2
