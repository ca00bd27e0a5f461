"""Connections of the API's port: limits on their number and on the silence of a client.

aiohttp has no timeout for a request's headers and no limit of connections.  So a `Connection` stands in front of
aiohttp's protocol.  It passes all calls on, and closes the connection if the client is silent for too long:

    accepted --header_timeout_s--> headers complete --> request (the body has its own timeout) --> answered
                                        ^--header_timeout_s-- first byte of the next request <--keepalive_s--'

At `max_connections`, a new connection replaces the connection that has been idle for the longest time.  If every
connection has a request, RESERVE further connections are accepted for probes (`PROBES`).  Otherwise an orchestrator
would consider a full gateway dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import cast

from aiohttp import web

from quire.service.common.refusal import limit_refusal
from quire.service.config import GatewayConfig

PROBES = ("/ping", "/health", "/v1/health", "/healthz", "/ready", "/metrics")
RESERVE = 64  # number of further connections for probes while all connections have a request
OTHER_FILES = 128  # open files besides connections: Redis, logs, libraries, listening sockets
READ_BYTES = 16 * 1024  # maximum bytes per read of one socket; aiohttp takes 4 us for each tiny HTTP chunk
BACKLOG = 1024  # connections that the kernel queues until they are accepted
ACCEPT = 64  # maximum connections accepted in one turn of the event loop, 0.1 ms each


class Connection(asyncio.Protocol):
    """One client connection, in front of aiohttp's protocol."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self._all, self._inner = connections, inner
        self._timer: asyncio.TimerHandle | None = None
        self._begun = True  # headers are awaited or arriving; they must be complete within header_timeout_s
        self._entered = False  # True once the connection is counted and passed to aiohttp
        self.probes_only = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._entered = self._all.enter(self)
        if not self._entered:
            self.transport.abort()
            return
        if hasattr(self.transport, "max_size"):
            self.transport.max_size = READ_BYTES
        self._inner.connection_made(transport)
        self._wait(self._all.config.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        if not self._begun:  # the first bytes of the next request
            self._begun = True
            self._wait(self._all.config.header_timeout_s)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._all.leave(self)
        if self._entered:
            self._inner.connection_lost(exc)

    def begin_request(self) -> None:
        """Stop the timer, since the headers of a request are complete."""
        self._begun = True
        self._stop_waiting()
        self._all.idle.pop(self, None)

    def end_request(self) -> None:
        """Start the idle timer, since the request is answered and another may follow."""
        if self.transport is not None and not self.transport.is_closing():
            self._begun = False
            self._all.idle[self] = None
            self._wait(self._all.config.keepalive_s)

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Connections:
    """All client connections of a gateway."""

    def __init__(self, config: GatewayConfig, open_files: int) -> None:
        """`open_files`: maximum number of open files of this process."""
        self.config = config
        self.limit = max(1, min(config.max_connections, open_files - OTHER_FILES - RESERVE))
        self.idle: dict[Connection, None] = {}  # connections without a request, ordered by idle time, longest first
        self._by_transport: dict[asyncio.BaseTransport, Connection] = {}
        self._server: asyncio.Server | None = None
        self._socket = ""  # path of the Unix socket that this process listens at; "" for a port

    def __len__(self) -> int:
        return len(self._by_transport)

    async def listen(self, server: web.Server, host: str, port: int) -> int:
        """Accept connections on a TCP port, which other processes may share (SO_REUSEPORT).  Returns the port.

        Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self, server()), host, port, backlog=ACCEPT, reuse_port=True
        )
        _keep_more(self._server)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def listen_at(self, server: web.Server, path: str) -> None:
        """Accept connections on a Unix socket.  A socket file left by a dead process is replaced.  Raises OSError.

        The owner of the socket can connect, and its group if the umask allows that; other users cannot."""
        loop = asyncio.get_running_loop()
        before = os.umask(0o077)  # only to read the umask; strict, since another thread may create a file meanwhile
        os.umask(before | 0o007)
        try:
            self._server = await loop.create_unix_server(lambda: Connection(self, server()), path, backlog=ACCEPT)
        finally:
            os.umask(before)
        _keep_more(self._server)
        self._socket = path

    def stop_listening(self) -> None:
        """Accept no more connections; open connections stay."""
        if self._server is not None:
            self._server.close()
        if self._socket:
            Path(self._socket).unlink(missing_ok=True)
            self._socket = ""

    def of(self, request: web.BaseRequest) -> Connection | None:
        """Return the connection of a request; None if it is closed or belongs to another server."""
        return self._by_transport.get(request.transport) if request.transport is not None else None

    def check(self, request: web.BaseRequest, path: str) -> None:
        """Raise Refusal(503) if the request came on a reserved connection and its `path` is not in PROBES."""
        found = self.of(request)
        if found is not None and found.probes_only and path not in PROBES:
            message = f"this gateway has {self.limit} connections at a time"
            raise limit_refusal("connections", message, self.limit, retry_after_s=1.0)

    def enter(self, one: Connection) -> bool:
        """Count a new connection.  Returns False if all connections, the reserve included, are in use."""
        assert one.transport is not None
        if len(self) >= self.limit:
            longest = next(iter(self.idle), None)
            if longest is not None:
                self.leave(longest)
                longest.abort()
            elif len(self) < self.limit + RESERVE:
                one.probes_only = True
            else:
                return False
        self._by_transport[one.transport] = one
        self.idle[one] = None
        return True

    def leave(self, one: Connection) -> None:
        """Remove a closed connection."""
        self.idle.pop(one, None)
        if one.transport is not None:
            self._by_transport.pop(one.transport, None)


def _keep_more(server: asyncio.Server) -> None:
    """Raise the kernel's backlog to BACKLOG.

    asyncio also accepts `backlog` connections in one turn, so the value passed to asyncio must be smaller."""
    for listening in server.sockets:
        with contextlib.closing(socket.fromfd(listening.fileno(), listening.family, listening.type)) as same:
            same.listen(BACKLOG)
