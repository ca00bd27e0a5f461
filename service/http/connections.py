"""Connections of the API's port: their number and their silence are bounded.

aiohttp has no timeout for a request's head and no limit of connections.  So each connection gets a `Connection` in
front of aiohttp's protocol.  It passes everything on, and closes a connection that is silent for too long:

    accepted --header_timeout_s--> head complete --> request (the body has its own timeout) --> answered
                                        ^--header_timeout_s-- first byte of the next <--keepalive_s--'

At `max_connections` a new connection replaces the one that has been idle for longest.  If every connection has a
request, RESERVE more are accepted for probes only (`PROBES`).  Otherwise a full gateway
would look like a dead one.
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
RESERVE = 64  # connections for probes, when every other one has a request
OTHER_FILES = 128  # open files besides clients: Redis, logs, libraries, listening sockets
READ_BYTES = 16 * 1024  # read from one socket before others are served: tiny chunks cost aiohttp 4 microseconds each
BACKLOG = 1024  # connections that the kernel keeps until they are accepted
ACCEPT = 64  # accepted in one turn of the event loop: one takes 0.1 ms


class Connection(asyncio.Protocol):
    """One client connection, in front of aiohttp's protocol."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self._all, self._inner = connections, inner
        self._timer: asyncio.TimerHandle | None = None
        self._begun = True  # a request is expected or has begun to arrive: its head has header_timeout_s
        self._entered = False  # counted, and passed to aiohttp
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
        """Stop the timer: the head of a request is complete."""
        self._begun = True
        self._stop_waiting()
        self._all.idle.pop(self, None)

    def end_request(self) -> None:
        """Start the idle timer: the request is answered, and another may follow."""
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
        """`open_files`: how many files the process may have open."""
        self.config = config
        self.limit = max(1, min(config.max_connections, open_files - OTHER_FILES - RESERVE))
        self.idle: dict[Connection, None] = {}  # connections without a request, the longest idle first
        self._by_transport: dict[asyncio.BaseTransport, Connection] = {}
        self._server: asyncio.Server | None = None
        self._socket = ""  # path of the Unix socket that this process listens at; "" for a port

    def __len__(self) -> int:
        return len(self._by_transport)

    async def listen(self, server: web.Server, host: str, port: int) -> int:
        """Accept connections, and return the port; other processes may listen there, too.  Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self, server()), host, port, backlog=ACCEPT, reuse_port=True
        )
        _keep_more(self._server)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def listen_at(self, server: web.Server, path: str) -> None:
        """Accept connections at a Unix socket; one that a dead process left there is replaced.  Raises OSError.

        Its user and, where the umask allows it, its group can connect; other users cannot."""
        loop = asyncio.get_running_loop()
        before = os.umask(0o077)  # strict also for what another thread may create meanwhile
        os.umask(before | 0o007)
        try:
            self._server = await loop.create_unix_server(lambda: Connection(self, server()), path, backlog=ACCEPT)
        finally:
            os.umask(before)
        _keep_more(self._server)
        self._socket = path

    def stop_listening(self) -> None:
        """Accept no more connections; those that are open stay."""
        if self._server is not None:
            self._server.close()
        if self._socket:
            Path(self._socket).unlink(missing_ok=True)
            self._socket = ""

    def of(self, request: web.BaseRequest) -> Connection | None:
        """Return the connection of a request; None when it is closed, or is not one of these."""
        return self._by_transport.get(request.transport) if request.transport is not None else None

    def check(self, request: web.BaseRequest, path: str) -> None:
        """Raise Refusal(503) for a request on a connection of the reserve, unless its `path` is a probe's."""
        found = self.of(request)
        if found is not None and found.probes_only and path not in PROBES:
            message = f"this gateway has {self.limit} connections at a time"
            raise limit_refusal("connections", message, self.limit, retry_after_s=1.0)

    def enter(self, one: Connection) -> bool:
        """Count a new connection.  Returns False when there is no free capacity for it."""
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
        """Forget a connection that is closed."""
        self.idle.pop(one, None)
        if one.transport is not None:
            self._by_transport.pop(one.transport, None)


def _keep_more(server: asyncio.Server) -> None:
    """Let the kernel keep BACKLOG connections: asyncio accepts its own `backlog` of them in one turn of the loop."""
    for listening in server.sockets:
        with contextlib.closing(socket.fromfd(listening.fileno(), listening.family, listening.type)) as same:
            same.listen(BACKLOG)
