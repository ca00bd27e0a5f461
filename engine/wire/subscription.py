"""A gateway's subscription to its token channel.

Redis keeps no messages for a disconnected subscriber.  So after a new subscription some messages may be missing:
`missed` is called, and the gateway reads the missing tokens from the token logs.
"""

from __future__ import annotations

from collections.abc import Callable

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import TimeoutError as RedisTimeout

from quire.engine.wire import link
from quire.engine.wire.link import Link

MESSAGE = b"message"


class Subscription:
    """The messages of one channel, over a dedicated connection.  Call all methods on one asyncio loop."""

    def __init__(self, to: Link, channel: str, missed: Callable[[], None]) -> None:
        """Create the subscription without connecting.  `to`: a link that nothing else uses."""
        self._link, self._channel, self._missed = to, channel, missed
        self._connection: AbstractConnection | None = None
        self._stale = False  # the connection may lead to a server that was demoted to a replica
        self._asked = False  # a PING is in flight, to check that the server is alive
        self._began = False  # a subscription has been confirmed before

    async def open(self) -> None:
        """Subscribe.  Raises BusDown after PATIENCE_S."""
        await self._link.retry(self._subscribe, link.PATIENCE_S)

    async def close(self) -> None:
        """Unsubscribe.  Harmless when called twice."""
        await self._drop()

    def renew(self) -> None:
        """Subscribe again on a new connection, because the address may lead to another server by now."""
        self._stale = True
        self._link.renew()

    async def next(self) -> bytes | None:
        """Return the next message; None: no message for BLOCK_MS.  Retries while Redis is unreachable."""
        return await self._link.retry(self._next)

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._link.redis.connection_pool.release(connection)

    async def _subscribe(self) -> AbstractConnection:
        await self._drop()
        self._stale = self._asked = False
        pool = self._link.redis.connection_pool
        connection: AbstractConnection = await pool.get_connection()  # type: ignore[no-untyped-call]
        self._connection = connection
        try:
            await connection.send_command("SUBSCRIBE", self._channel)
            await connection.read_response()
        except BaseException:
            self._stale = True  # Redis may have refused the SUBSCRIBE, and this connection would get no message
            raise
        if self._began:
            self._missed()
        self._began = True
        return connection

    async def _next(self) -> bytes | None:
        connection = self._connection
        if connection is None or self._stale:
            connection = await self._subscribe()
        try:
            reply = await connection.read_response(timeout=link.BLOCK_MS / 1000)
        except BaseException:
            self._stale = True  # redis-py has closed the connection
            raise
        if reply is not None:
            self._asked = False
            return reply[2] if reply[0] == MESSAGE else None
        if self._asked:
            self._stale = True
            raise RedisTimeout("no reply to a PING")
        await connection.send_command("PING", check_health=False)  # a health check would consume a message as its reply
        self._asked = True
        return None
