"""Connections to Redis: retries, timeouts, and the check of the versions of wire format and keys.

    command ---> _attempt() ---> Redis
       ^            |
       |            v
    retry() <--- redis_errors.remedy(): wait, reconnect, ask the operator, or give up

Redis provides the durability: with `appendfsync everysec` a crash of the server loses nothing, and a power cut loses up
to a second.  Needs Redis 6.2 or later, or Valkey.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis.asyncio as aioredis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import MovedError, NoScriptError, RedisError, ResponseError

from quire.engine.common.addresses import host_and_port
from quire.engine.common.errors import OperatorError
from quire.engine.wire.layout import LAYOUT_VERSION, TOMBSTONE_MS
from quire.engine.wire.messages import WIRE_VERSION
from quire.engine.wire.nodes import Address, Nodes, has_hash_tag
from quire.engine.wire.redis_errors import Remedy, code_of, one_line, remedy
from quire.engine.wire.scripts import COMMANDS, MEET, Script

log = logging.getLogger("quire.bus")
T = TypeVar("T")

PATIENCE_S = 2.0  # seconds for which a gateway's call, and open() on both sides, retries before it raises BusDown
PROBE_S = 0.2  # seconds for which a write probe retries; the next probe follows soon
REPLY_S = 3.0  # seconds of silence after which an engine's sync gives up a connection and retries on a new one
BACKOFF_S = (0.02, 1.0)  # first and maximum pause between two attempts; half of each pause is random
GIVE_UP_S = 30.0  # a retry without a deadline raises BusDown after this time with one possibly permanent error
BLOCK_MS = 5_000  # maximum wait in one command: a gateway's for the next batch, and an engine's for a wake-up
HELD_UP_S = 0.25  # a deadline that is noticed this late means that the event loop itself was blocked
LOST = ("", "CLUSTERDOWN")  # error codes after which the link tries another node of the cluster; "": no reply
CONNECTIONS = 8  # maximum commands in flight per side; further commands wait


class BusDown(OperatorError):
    """Redis cannot be reached, refuses writes or refuses this process; the text has the cause and the duration."""


class VersionMismatch(BusDown):
    """Redis holds data of another version of Quire; the text names both versions."""


class Link:
    """Connections to one Redis, or to the cluster node that serves the namespace.  All retries happen here."""

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        reply_s: float,
        returned: Callable[[], None] = lambda: None,
        nodes: Nodes | None = None,
    ) -> None:
        """Create the link without connecting.  Raises BusDown for a malformed URL.

        A connection counts as dead after `reply_s` seconds of silence.  `returned` is called at the first success after
        an error with remedy RECONNECT, since another server may have answered.  `nodes`: the `nodes` of another link of
        this process to the same URL.
        """
        self._namespace = namespace
        self.prefix = f"{{{namespace}}}:"
        parts = urlsplit(url)
        self._url = f"{parts.scheme}://{host_and_port(parts.hostname or '', parts.port)}{parts.path}"
        try:
            # redis-py's own retries are off: it would repeat commands that are not safe to repeat.  With protocol 2 all
            # supported versions of redis-py return replies of the same shape.
            self._pool = _Pool.from_url(
                url,
                max_connections=CONNECTIONS,
                timeout=reply_s,
                socket_timeout=reply_s,
                socket_connect_timeout=reply_s,
                health_check_interval=30,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise BusDown(f"{self._url}: {error}") from None
        self.nodes = self._pool.nodes = nodes or Nodes(self._pool.connection_kwargs)
        self.redis = aioredis.Redis.from_pool(self._pool)
        self._stale = False  # the next attempt replaces all idle connections
        self._away = False  # whether the last attempt failed with an error of remedy RECONNECT
        self._returned = returned
        self._endless: set[asyncio.Timeout] = set()  # timeouts of running attempts without a deadline

    async def close(self) -> None:
        await self.redis.aclose()

    @property
    def _name(self) -> str:
        """The URL without its password, and the current cluster node if it is not the URL's."""
        at, seed = self.nodes.current, self.nodes.seed
        return self._url if at is None or at == seed else f"{self._url} (node {host_and_port(at.host, at.port)})"

    async def check(self) -> str:
        """Check the versions of the server, the layout and the wire; return the replication id of the server's data.

        Raises BusDown, or VersionMismatch when processes of another version use this namespace."""
        await self._check_commands()
        info = await self.retry(self.redis.info, PATIENCE_S)
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
            raise BusDown(f"Redis at {self._name} is version {version}; Quire needs 6.2 or later")
        if info.get("cluster_enabled"):
            await self._join_cluster()
        if info.get("maxmemory_policy") != "noeviction":
            log.warning("Redis at %s may evict requests: set maxmemory-policy noeviction", self._name)
        found = [int(number) for number in await self.run_script(MEET, LAYOUT_VERSION, WIRE_VERSION)]
        if found != [LAYOUT_VERSION, WIRE_VERSION]:
            raise VersionMismatch(
                f"Redis at {self._name} holds Redis layout {found[0]} and wire {found[1]}, this process has Redis "
                f"layout {LAYOUT_VERSION} and wire {WIRE_VERSION}: give it a namespace of its own, or drain the other "
                f"processes and delete the key {self.prefix}layout"
            )
        return await self.history()

    async def _check_commands(self) -> None:
        """Raise BusDown if the server lacks a needed command, because its configuration has `rename-command`."""
        ask: Callable[[], Awaitable[list[Any]]] = partial(self.redis.execute_command, "COMMAND INFO", *COMMANDS)

        async def once() -> list[Any]:
            try:
                return await ask()
            except ResponseError as error:
                if remedy(error) in (Remedy.OPERATOR, Remedy.NONE):  # COMMAND itself is forbidden: assume all exist
                    return list(COMMANDS)
                raise

        found = await self.retry(once, PATIENCE_S)
        if missing := [name for name, entry in zip(COMMANDS, found, strict=True) if not entry]:
            raise BusDown(f"Redis at {self._name} has no {', '.join(missing)}: take rename-command out of its settings")

    async def _join_cluster(self) -> None:
        """Read the cluster's nodes.  Raises BusDown if a cluster cannot serve this URL or namespace."""
        if not has_hash_tag(self._namespace):
            raise BusDown(
                f"Redis at {self._name} is a cluster, and keys of the namespace {self._namespace!r} lie in many of its "
                "slots: give a namespace that is not empty and does not begin with '}'"
            )
        if self.nodes.seed is None:
            raise BusDown(f"Redis at {self._name} is a node of a cluster: give the TCP address of a node")
        slots = await self.retry(partial(self.redis.execute_command, "CLUSTER SLOTS"), PATIENCE_S)
        self.nodes.learn(slots)

    async def history(self) -> str:
        """Return the data's replication id, which changes when a replica is promoted or the server restarts.

        Raises BusDown after PATIENCE_S."""

        async def once() -> Any:
            await self.redis.exists(f"{self.prefix}layout")  # follows a redirect; INFO alone is answered by any node
            return await self.redis.info("replication")

        info = await self.retry(once, PATIENCE_S)
        return str(info.get("master_replid", ""))

    async def run_script(self, script: Script, *args: bytes | str | int, patience_s: float = PATIENCE_S) -> Any:
        """Run one script and return its reply.

        Raises BusDown if no attempt succeeded within `patience_s` seconds; the script may have run nevertheless."""

        async def once() -> Any:
            try:
                return await self.redis.evalsha(script.sha, 1, self.prefix, *args)
            except NoScriptError:  # a new or restarted server
                return await self.redis.eval(script.source, 1, self.prefix, *args)

        return await self.retry(once, patience_s)

    def renew(self) -> None:
        """Replace every connection, because the address may lead to another server by now.

        Attempts without a deadline are interrupted and repeated.  Other attempts end by themselves."""
        self._stale = True
        for limit in self._endless:
            interrupt(limit)

    async def retry(self, command: Callable[[], Awaitable[T]], patience_s: float = math.inf) -> T:
        """Await command() until it succeeds, with growing pauses.  The command must be harmless when it runs twice.

        Raises BusDown after `patience_s` seconds in which this process ran, and at once if Redis refuses its
        credentials.  Without a limit it raises BusDown after GIVE_UP_S with one possibly permanent error.  An error
        that no further attempt can fix is raised as it is.
        """
        clock = asyncio.get_running_loop().time
        deadline = Deadline(clock, patience_s)
        pause, longest = BACKOFF_S
        tries = 0
        doubt = _Doubt(self._name, GIVE_UP_S if patience_s == math.inf else patience_s)
        cause: Exception | None = None
        while True:
            node = self.nodes.current
            try:
                result = await self._attempt(command, None if patience_s == math.inf else deadline.at)
            except (RedisError, OSError) as error:
                mend = remedy(error)
                if mend is Remedy.NONE:
                    raise
                if mend is Remedy.RECONNECT:
                    self._leave(node, error, renewed=isinstance(error, TimeoutError) and patience_s == math.inf)
                if cause is None or not isinstance(error, TimeoutError):  # the TimeoutError of our deadline is no cause
                    cause = error
                left = deadline.left()
                refused = mend is Remedy.OPERATOR and patience_s < math.inf
                if left <= 0 or refused or doubt.over(error, mend, clock()):
                    took_s = clock() - deadline.began
                    raise BusDown(
                        f"Redis at {self._name} did not serve us for {took_s:.1f} s: {one_line(cause)}"
                    ) from cause
                if tries == 1 and patience_s == math.inf:  # not at the first failure, since single connections break
                    log.warning("Redis at %s does not answer, retrying: %s", self._name, one_line(error))
            else:
                if tries > 1 and patience_s == math.inf:
                    log.warning("Redis at %s answers again after %.1f s", self._name, clock() - deadline.began)
                if self._away:
                    self._away = False
                    self._returned()
                return result
            await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, longest)
            tries += 1

    def _leave(self, node: Address | None, error: Exception, *, renewed: bool) -> None:
        """Use new connections from now on, in a cluster perhaps to another node.

        `error`: the error of an attempt at `node`.  `renewed`: renew() interrupted the attempt, so the node may be
        healthy."""
        self._stale = self._away = True
        if isinstance(error, MovedError):
            self.nodes.redirect(error)
        elif code_of(error) in LOST and not renewed:
            self.nodes.lost(node)

    async def _attempt(self, command: Callable[[], Awaitable[T]], until: float | None) -> T:
        """Await command() once, on new connections if the old ones are stale.  `until`: deadline, loop time."""
        if self._stale:
            self._stale = False
            await self._pool.drop_idle()
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        async with asyncio.timeout_at(until) as limit:
            if until is None:
                self._endless.add(limit)
            try:
                result = await command()
            finally:
                self._endless.discard(limit)
        if task.cancelling() > cancels:  # redis-py swallows a cancellation that arrives while it connects
            raise asyncio.CancelledError
        return result


class Deadline:
    """The deadline of a command's attempts.  If this process was blocked meanwhile, the deadline is extended once."""

    def __init__(self, clock: Callable[[], float], patience_s: float) -> None:
        self._clock, self._patience_s = clock, patience_s
        self.began = clock()
        self.at = self.began + patience_s
        self._extended = False

    def left(self) -> float:
        """Return the seconds until the deadline.

        Extends the deadline once if it is noticed late, unless Redis would forget the outcome of a submit before the
        new deadline."""
        now = self._clock()
        late = now - self.at > HELD_UP_S
        if late and not self._extended and now - self.began + self._patience_s < TOMBSTONE_MS / 1000:
            self._extended = True
            self.at = now + self._patience_s
        return self.at - now


class _Doubt:
    """Bounds how long a possibly permanent error may repeat: an unknown error, or refused credentials."""

    def __init__(self, name: str, limit_s: float) -> None:
        self._name, self._limit_s = name, limit_s
        self._code: str | None = None  # code of the repeated error
        self._since = 0.0

    def over(self, error: Exception, mend: Remedy, now: float) -> bool:
        """Record an error at time `now`, seconds; return whether the same error has repeated for the limit."""
        if mend not in (Remedy.UNKNOWN, Remedy.OPERATOR):
            self._code = None
        elif self._code != code_of(error):
            self._code, self._since = code_of(error), now
            log.error("Redis at %s refuses a command, retrying: %s", self._name, one_line(error))
        return self._code is not None and now - self._since >= self._limit_s


class _Pool(aioredis.BlockingConnectionPool):
    """Connections to one server.  Waiting commands get a connection first in, first out.

    redis-py's own pool lets new commands overtake waiting commands, so in a burst one command could wait for seconds.
    """

    nodes: Nodes  # set by the Link that owns this pool

    def __init__(self, max_connections: int, **options: Any) -> None:
        super().__init__(max_connections, **options)
        self._places = asyncio.Semaphore(max_connections)  # first in, first out
        self._held = set[AbstractConnection]()  # connections in use; each has acquired the semaphore once

    async def get_connection(self, *_: Any, **__: Any) -> AbstractConnection:
        """Return a connection.  Raises redis' ConnectionError if none is free for `timeout` seconds."""
        try:
            async with asyncio.timeout(self.timeout):
                await self._places.acquire()
        except TimeoutError:
            raise NoConnection("No connection available.") from None
        try:
            connection: AbstractConnection = await super().get_connection()  # type: ignore[no-untyped-call]
        except BaseException:
            self._places.release()
            raise
        self._held.add(connection)
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        try:
            await super().release(connection)
        finally:
            if connection in self._held:
                self._held.remove(connection)
                self._places.release()

    async def ensure_connection(self, connection: AbstractConnection) -> None:
        """Move the connection to the current node if it leads elsewhere, then check it as redis-py does."""
        at = self.nodes.current
        if at is not None and isinstance(connection, aioredis.Connection) and at != (connection.host, connection.port):
            await connection.disconnect(nowait=True)
            connection.host, connection.port = at
        await super().ensure_connection(connection)

    async def drop_idle(self) -> None:
        """Close the idle connections.

        Running commands keep their connections.  If one leads to the wrong server, its command fails, and the
        connection is idle and closed before the retry."""
        for connection in list(self._available_connections):
            # Not the pool's own disconnect(): it waits, and meanwhile a command could take the connection.
            await connection.disconnect(nowait=True)


def interrupt(limit: asyncio.Timeout) -> None:
    """End the block under this timeout with TimeoutError now, unless it has ended."""
    with contextlib.suppress(RuntimeError):
        limit.reschedule(asyncio.get_running_loop().time())
