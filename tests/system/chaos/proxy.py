"""A TCP proxy that can be cut and slowed down: the bad network between two of ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Self

BLOCK = 1 << 16  # bytes forwarded at a time

Dial = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Proxy:
    """Forwards connections to `port` on 127.0.0.1 to whatever `dial` opens.  `async with` it."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._ends: set[asyncio.StreamWriter] = set()  # both ends of every connection
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.delay_s = 0.0  # delay of every block, in both directions
        self.down = False  # new connections are closed as soon as they are made

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Break every connection, at both ends and at once; what was on its way is gone."""
        for end in self._ends:
            end.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._join(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far: asyncio.StreamWriter | None = None
        self._ends.add(writer)
        try:
            if not self.down:
                far_reader, far = await self._dial()
                self._ends.add(far)
                await asyncio.gather(self._pump(reader, far), self._pump(far_reader, writer))
        except OSError:
            pass  # one end is gone: so is the other
        finally:
            for end in (writer, far):
                if end is not None:
                    self._ends.discard(end)
                    end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(BLOCK):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(block)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()
