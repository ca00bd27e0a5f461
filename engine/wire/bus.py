"""The two ends of the bus, next to each other: every command and retry.  What stands in Redis is in `keys.py`.

Durability is the server's: with `appendfsync everysec` a server crash loses nothing, a power cut up to a second.
Needs Redis 6.2 or later, or Valkey; nothing here is pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import random
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from engine.wire import token_log
from engine.wire.clock import RedisClock
from engine.wire.hot_prefix_store import Manifest
from engine.wire.messages import Abort, Delta, EngineLoad, Generate, TokenBatch
from engine.wire.redis_errors import Remedy, code_of, one_line, remedy
from engine.wire.scripts import (
    ADOPT,
    ATTACH,
    AUDIT,
    CANCEL,
    CLOSE,
    EXCHANGE,
    FIND_DUPLICATE,
    FLEET,
    KEEP,
    OPEN,
    OTHERS,
    PROMISE,
    QUARANTINED,
    READ_LOG,
    REJOIN,
    RELEASE,
    SETTLE,
    SUBMIT,
    Script,
)
from engine.wire.token_log import LoggedOutput
from engine.wire.withdrawals import Withdrawal, Withdrawals

log = logging.getLogger("quire.bus")
T = TypeVar("T")

PATIENCE_S = 2.0  # how long a gateway-side call, and open() on both sides, tries before it raises BusDown
PROBE_S = 0.2  # how long a probe for writes tries: the next one follows soon
REPLY_S = 3.0  # an engine's exchange takes a silent connection for dead after this, and tries on a new one
BACKOFF_S = (0.02, 1.0)  # first and longest pause between two tries; half of each is random
GIVE_UP_S = 30.0  # an endless try ends in BusDown once it has met one error for so long that time may never mend
BLOCK_MS = 5_000  # a gateway's longest wait for the next batch, and an engine's for the bell, in one command
CONNECTIONS = 8  # a side's commands in flight at once; more wait their turn
AUDIT_S = 60  # how long what an audit found stays
AUDIT_POLL_S = 0.02
READ_COUNT = 256  # most stream entries in one read
READ_DELTAS = 1000  # of a read, dealt with before others on the event loop get their turn
PRIORITIES = (-100, 100)  # first and last class; lower goes earlier


class BusDown(Exception):
    """Redis cannot be reached, refuses writes or refuses this process; says which and for how long, in one line."""


class Fleet(msgspec.Struct, frozen=True):
    """What a gateway knows about the engines: those with a live lease, and the shared queue."""

    engines: list[EngineLoad]
    queued: int  # requests nobody has claimed yet
    queued_tokens: int  # their prompt tokens, times nothing: siblings share the prompt
    time_ms: int  # unix time of this reading, on Redis' clock
    room_tokens: int = 0  # prompt tokens the engines would still claim; one silent for STALE_MS has none
    tenants: dict[str, TenantQueue] = {}  # those with something queued
    # The reader had not been heard of for long, so what it listened to may go elsewhere; or Redis has lost something,
    # or may have, for its data has a new history: it was restarted, or a replica promoted.
    forgotten: bool = False
    oldest_ms: int = 0  # since the oldest in the queue was first queued
    quarantined: int = 0  # requests set aside because they killed their engines
    # Unix time of each engine's last exchange, on the clock of `time_ms`.  The engine's bus thread keeps it fresh while
    # a step runs; EngineLoad.time_ms is the end of the last step.
    heard_ms: dict[str, int] = {}


class TenantQueue(msgspec.Struct, frozen=True):
    """How a tenant with something in the queue stands."""

    queued_tokens: int  # its prompt tokens nobody has claimed yet
    counter: float  # virtual tokens it was served: the smallest goes first
    weight: float


class Queue(msgspec.Struct, frozen=True):
    """The queue right after a submit."""

    accepted: bool  # False: nothing was queued, it would have been too much
    queued: int
    queued_tokens: int
    room_tokens: int
    tenants: dict[str, TenantQueue]
    twin: DuplicateRequest | None = None  # nothing was queued: this request came before, under the same idempotency key


class IdempotencyKey(msgspec.Struct, frozen=True):
    """An idempotency key: the first request to bring it is computed, every later one shares its answer."""

    key: str  # digest of the client's key and of whoever may use it
    body: str  # digest of all that must be equal for two requests to be the same


class DuplicateRequest(msgspec.Struct, frozen=True):
    """The request that came first under an idempotency key."""

    request_id: str  # of the first of its prompts
    same_body: bool


class Usage(msgspec.Struct, frozen=True):
    """What one request (a client's has one for each prompt) has cost and brought, all continuations together."""

    request_id: str
    tenant: str
    generated: int  # output tokens engines produced for it, as far as its log is kept
    delivered: int  # of them, those that went out to a client
    new: int  # of those, the ones nobody had counted before


class Attached(msgspec.Struct, frozen=True):
    """A request as its log has it."""

    record: bytes  # what submit() was given with it; empty but for the first of a client's prompts
    continuations: list[LoggedOutput]


class Quarantined(msgspec.Struct, frozen=True):
    """A request that killed its engine too often."""

    request: Generate
    attempts: int  # engines that died while they held it, at the same token
    said: int  # its tokens in the log by then, all continuations together
    engine: str  # the last of them
    time_ms: int  # unix time of the verdict


class RetryTerms(msgspec.Struct, frozen=True):
    """On which a refused request is told when to return."""

    pace: float  # prompt tokens that the engines start per second, > 0
    full_pace: float  # that they will start once as full as they are now, >= pace
    least_ms: int  # it can't be sooner
    most_ms: int  # nothing is promised later
    # Of the pace, for those who return, however many come for the first time: for the next to return, and at most_ms.
    least_shares: tuple[float, float]


class ExchangeReply(msgspec.Struct, frozen=True):
    """What one exchange brought an engine."""

    generates: list[Generate]
    aborts: list[Abort]  # to be carried out after `generates` are accepted: they may concern each other
    # Requests another engine took over, or a client withdrew, after this engine's lease had lapsed: drop them without a
    # word, no Delta and no `finished`, for they are somebody else's now.  What this exchange said of them was dropped.
    lost: list[str] = []
    # For those of `generates` that an earlier engine has begun, by id: every continuation so far.  They go on from
    # there: the next Delta of one without a Finish has first == len(token_ids); one with a Finish says nothing more.
    resumed: dict[str, list[LoggedOutput]] = {}
    audits: list[str] = []  # ids: audit the books, all of them, and say audited()


# --------------------------------------------------------------------------------------------------------- both ends
class _Link:
    """Connections to one Redis, and the only place that decides to try again."""

    def __init__(
        self, url: str, namespace: str, *, reply_s: float, returned: Callable[[], None] = lambda: None
    ) -> None:
        """`reply_s`: seconds of silence after which a connection counts as dead.  `returned` is called at the first
        success after an error of the kind RECONNECT: another server may have answered.  Raises BusDown: malformed URL.
        """
        self.prefix = f"{{{namespace}}}:"
        parts = urlsplit(url)
        self._name = f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
        try:
            # Retries are ours (redis-py would repeat what is not safe to repeat); protocol 2 keeps replies of one
            # shape over the supported versions of redis-py.
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
            raise BusDown(f"{self._name}: {error}") from None
        self.redis = aioredis.Redis.from_pool(self._pool)
        self._stale = False  # connections are to be given up for new ones before the next try
        self._away = False  # the last try that ended met an error of the kind RECONNECT
        self._returned = returned
        self._endless: set[asyncio.Timeout] = set()  # tries under way that have no deadline

    async def close(self) -> None:
        await self.redis.aclose()

    async def check(self) -> str:
        """Make sure that a server of a fitting version answers; the id of its data's history.  Raises BusDown."""
        info = await self.run(self.redis.info, PATIENCE_S)
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
            raise BusDown(f"Redis at {self._name} is version {version}; Quire needs 6.2 or later")
        if info.get("maxmemory_policy") != "noeviction":
            log.warning("Redis at %s may evict requests: set maxmemory-policy noeviction", self._name)
        return str(info.get("master_replid", ""))

    async def history(self) -> str:
        """The id of the data's history: a promoted replica and a restarted server have another one.  Raises BusDown
        after PATIENCE_S."""
        info = await self.run(partial(self.redis.info, "replication"), PATIENCE_S)
        return str(info.get("master_replid", ""))

    async def script(self, script: Script, *args: bytes | str | int, patience_s: float = PATIENCE_S) -> Any:
        """Run one script.  Raises BusDown when it did not succeed within `patience_s`; it may have run all the same."""

        async def once() -> Any:
            try:
                return await self.redis.evalsha(script.sha, 1, self.prefix, *args)
            except NoScriptError:  # a new or restarted server
                return await self.redis.eval(script.source, 1, self.prefix, *args)

        return await self.run(once, patience_s)

    def renew(self) -> None:
        """Give up every connection for a new one: the address may lead to another server by now.

        A try that waits without a deadline is broken off and made again; others end by themselves."""
        self._stale = True
        for limit in self._endless:
            interrupt(limit)

    async def run(self, command: Callable[[], Awaitable[T]], patience_s: float = math.inf) -> T:
        """Await command() until it succeeds, pausing longer each time.  It must be harmless when it runs twice.

        Raises BusDown after `patience_s` seconds; sooner if Redis refuses this process's credentials; without a
        limit, after GIVE_UP_S of one error that time may never mend.  What no try can mend comes through as it is.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        pause, longest = BACKOFF_S
        tries = 0
        doubt = _Doubt(self._name, GIVE_UP_S if patience_s == math.inf else patience_s)
        cause: Exception | None = None
        while True:
            try:
                result = await self._try(command, None if patience_s == math.inf else began + patience_s)
            except (RedisError, OSError) as error:
                mend = remedy(error)
                if mend is Remedy.NONE:
                    raise
                if mend is Remedy.RECONNECT:
                    self._stale = self._away = True
                if cause is None or not isinstance(error, TimeoutError):  # our patience ending says nothing of why
                    cause = error
                left = began + patience_s - clock()
                refused = mend is Remedy.OPERATOR and patience_s < math.inf
                if left <= 0 or refused or doubt.over(error, mend, clock()):
                    raise BusDown(
                        f"Redis at {self._name} did not serve us for {clock() - began:.1f} s: {one_line(cause)}"
                    ) from cause
                if tries == 1 and patience_s == math.inf:  # not on the first: a single broken connection is no news
                    log.warning("Redis at %s is away, trying on: %s", self._name, one_line(error))
            else:
                if tries > 1 and patience_s == math.inf:
                    log.warning("Redis at %s is back after %.1f s", self._name, clock() - began)
                if self._away:
                    self._away = False
                    self._returned()
                return result
            await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, longest)
            tries += 1

    async def _try(self, command: Callable[[], Awaitable[T]], until: float | None) -> T:
        """Await command() once, on new connections if the old ones were given up."""
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
        if task.cancelling() > cancels:  # redis-py loses a cancellation that comes while it connects
            raise asyncio.CancelledError
        return result


class _Doubt:
    """Bounds how long one error repeats that time may never mend: an unknown one, or refused credentials."""

    def __init__(self, name: str, limit_s: float) -> None:
        self._name, self._limit_s = name, limit_s
        self._code: str | None = None  # of the error that repeats
        self._since = 0.0

    def over(self, error: Exception, mend: Remedy, now: float) -> bool:
        if mend not in (Remedy.UNKNOWN, Remedy.OPERATOR):
            self._code = None
        elif self._code != code_of(error):
            self._code, self._since = code_of(error), now
            log.error("Redis at %s refuses a command, trying on: %s", self._name, one_line(error))
        return self._code is not None and now - self._since >= self._limit_s


class _Pool(aioredis.BlockingConnectionPool):
    async def drop_idle(self) -> None:
        """Close the connections that no command uses now.  Commands under way keep theirs: if it leads to the wrong
        server they fail on it, and it is idle before they are tried again."""
        for connection in list(self._available_connections):
            # Not the pool's own disconnect(): it waits, and a command could take the connection meanwhile.
            await connection.disconnect(nowait=True)


def interrupt(limit: asyncio.Timeout) -> None:
    """Have what this bounds raise TimeoutError now, unless it ends already."""
    with contextlib.suppress(RuntimeError):
        limit.reschedule(asyncio.get_running_loop().time())


# ------------------------------------------------------------------------------------------------------- the gateway
class GatewaySide:
    """One gateway's end.  All methods belong to one asyncio loop."""

    def __init__(
        self, url: str, gateway: str, *, namespace: str = "quire", retain_s: float = 60.0, grace_s: float = 30.0
    ) -> None:
        """`url`: redis://, rediss:// or unix://.  Connects to nothing yet.  Raises BusDown for a malformed URL.

        `retain_s`: how long the logs of its requests stay after their end.  `grace_s`: how long a request that no live
        gateway listens to waits for one to attach, before it is withdrawn."""
        self._gateway = gateway
        self._retain_ms, self._grace_ms = int(retain_s * 1000), int(grace_s * 1000)
        self.clock = RedisClock()  # set right by every fleet()
        # Blocking reads have their own connection: one that waits for seconds must not count as dead after two.
        self._reader = _Link(url, namespace, reply_s=2 * BLOCK_MS / 1000)
        self._link = _Link(url, namespace, reply_s=PATIENCE_S, returned=self._follow)
        self._history = ""  # of the data at the server, as of the last look
        self._doubtful = False  # another server may have answered since
        self._forgotten = False  # one has, and fleet() has not said so yet
        self._encode = msgspec.msgpack.Encoder().encode
        self._beats = 0
        self.rounds = 0  # reads of batches() whose entries, if any, were dealt with
        self._withdrawals = Withdrawals(self._send_withdrawals)

    async def open(self) -> None:
        """Connect, and check the server's version.  Raises BusDown.  The gateway's stream is made by engines.

        What an earlier process of this name had open is nobody's now: it waits for `grace_s` to be attached to."""
        self._history = await self._link.check()
        await self._link.script(ADOPT, self._gateway, self._grace_ms)

    async def close(self) -> None:
        """Disconnect.  Harmless when called twice.  Withdraw what is open first: it would be computed for nobody."""
        await self._withdrawals.close()
        await self._link.close()
        await self._reader.close()

    def _follow(self) -> None:
        """Another server may have answered.  A read that waits at one that was demoted would not notice."""
        self._doubtful = True
        self._reader.renew()

    async def _compare_histories(self) -> None:
        self._doubtful = False
        try:
            history = await self._link.history()
        except BusDown:
            self._doubtful = True
            raise
        self._forgotten = self._forgotten or history != self._history
        self._history = history

    async def submit(
        self,
        *requests: Generate,
        excess_tokens: int | None = None,
        record: bytes = b"",
        once: IdempotencyKey | None = None,
    ) -> Queue:
        """Queue the prompts of one client's request, durably, all or none, and ring the engines.

        They share gateway, tenant, weight, priority and deadline.  None is queued (`accepted` is False) when the prompt
        tokens in the queue, these included, would pass the room the engines report by more than `excess_tokens` (None:
        never), or when a request came before with the key of `once`: then `twin` says which, to be attached to.
        `record` is kept with the log of the first of them, as long as the log: see attach().  What was promised to who
        asks this is kept herewith.
        Raises BusDown after PATIENCE_S: not queued.  (If only the reply was lost it may be for a moment; it is
        withdrawn as soon as Redis is back.)
        """
        first = requests[0]
        words: list[bytes | str | int] = []
        for request in requests:
            words += (request.id, self._encode(request), len(request.token_ids), request.n)
        try:
            accepted, queued, room_tokens, turns, twin = await self._link.script(
                SUBMIT,
                first.gateway,
                first.tenant,
                repr(first.weight),
                first.priority,
                first.deadline_ms,
                "" if excess_tokens is None else excess_tokens,
                self._retain_ms,
                once.key if once is not None else "",
                once.body if once is not None else "",
                record,
                self._name(*requests),
                *words,
            )
        except BusDown:
            self._withdrawals.add(*((request.id, -1) for request in requests))
            raise
        tenants = _read_tenant_queues(*turns)
        return Queue(
            bool(accepted),
            queued,
            sum(turn.queued_tokens for turn in tenants.values()),
            room_tokens,
            tenants,
            _read_twin(twin, once),
        )

    async def promise(self, *requests: Generate, terms: RetryTerms, broken: bool = False) -> int | None:
        """When the prompts of one client's request, just refused, may come again: ms from now, whole seconds of them
        for a new promise, and the rest of an earlier one for who is too early.  0: it was promised this moment, so
        let it in, and if that can't be, ask again with `broken`, for a new promise.  None: so much is promised that its
        time would be past `terms.most_ms`.

        Raises BusDown after PATIENCE_S: nothing was promised, or (if only the reply was lost) for nobody.
        """
        first = requests[0]
        tokens = sum(len(request.token_ids) for request in requests)
        first_share, last_share = map(repr, terms.least_shares)
        paces = (repr(terms.pace), repr(terms.full_pace))
        words = (tokens, int(broken), *paces, terms.least_ms, terms.most_ms, first_share, last_share)
        pause = int(await self._link.script(PROMISE, self._name(*requests), first.tenant, repr(first.weight), *words))
        return None if pause < 0 else pause

    def _name(self, *requests: Generate) -> str:
        """By which a request is known when it returns: what it asks, not its id."""
        asked = (requests[0].tenant, [(r.token_ids, r.cache_salt, r.max_new_tokens, r.n) for r in requests])
        return hashlib.blake2b(self._encode(asked), digest_size=16).hexdigest()

    async def twin(self, once: IdempotencyKey) -> DuplicateRequest | None:
        """The request that came first under this key, as submit() would find it; None: it would be the first.

        Spares a retry the admission.  Raises BusDown after PATIENCE_S."""
        return _read_twin(await self._link.script(FIND_DUPLICATE, once.key), once)

    async def release(self, once: IdempotencyKey, request_id: str) -> None:
        """`request_id` is not to be the first under this key any longer: its answer is not to be had.  Raises BusDown
        after PATIENCE_S."""
        await self._link.script(RELEASE, once.key, request_id)

    async def attach(self, request_id: str, *, listen: bool = True) -> Attached | None:
        """Listen to a request of whatever gateway, from now on, and read all it has said; None: its log is not kept, or
        never was.

        Every Delta that is not in the reply comes through batches(), with two exceptions to be ready for: some may come
        a second time (see `first`), and after the attachment some are missing.  Then an empty Delta follows whose
        `first` lies beyond what is known: read the rest with log().  A request that is over is read all the same: it
        has a Finish for each continuation.  Without `listen` it is only read.  Raises BusDown after PATIENCE_S."""
        reply = await self._link.script(ATTACH, request_id, self._gateway if listen else "")
        if reply is None:
            return None
        record, found = reply
        return Attached(record, [token_log.read(*one) for one in found])

    async def log(self, request_id: str, index: int, first: int, count: int) -> LoggedOutput | None:
        """At most `count` tokens of what one continuation has said from output position `first` on; None as for
        attach().  The finish comes with its last token.  Raises BusDown after PATIENCE_S."""
        reply = await self._link.script(READ_LOG, request_id, index, first, count)
        if reply is None:
            return None
        return token_log.read(*reply)

    async def keep(self, request_ids: list[str]) -> None:
        """The logs of these requests, which are over, stay for another `retain_s`.  Raises BusDown after PATIENCE_S."""
        await self._link.script(KEEP, *request_ids)

    async def probe(self) -> None:
        """Write as a submit does: needs memory, and a server that takes writes.  Raises BusDown after PROBE_S."""
        key = f"{self._link.prefix}probe"
        await self._link.run(partial(self._link.redis.set, key, "", px=BLOCK_MS), PROBE_S)

    async def settle(self, delivered: list[tuple[str, str, list[int]]]) -> list[Usage]:
        """Enter in the ledger how many output tokens of each continuation went out to a client: (request id, tenant,
        counts).  Counts never fall, and settling the same twice counts it once.  Raises BusDown after PATIENCE_S."""
        words: list[bytes | str | int] = []
        for request_id, tenant, counts in delivered:
            words += (request_id, tenant, len(counts), *counts)
        found = await self._link.script(SETTLE, *words)
        return [Usage(one[0], one[1], *figures) for one, figures in zip(delivered, found, strict=True)]

    def withdraw(self, request_id: str, index: int = -1) -> None:
        """This gateway listens no more.  If nobody else does the request is withdrawn: an unclaimed one leaves the
        queue, a claimed one gets an Abort at its engine.  Idempotent.

        With an `index` that continuation is withdrawn, from whoever computes the request now or later.
        Never waits.  One task sends what was withdrawn; what does not reach Redis stays owed, and the next fleet()
        starts that task again.
        """
        self._withdrawals.add((request_id, index))
        self._withdrawals.wake()

    async def withdrawn(self) -> None:
        """Wait until Redis has every withdrawal, or PATIENCE_S without an answer from Redis.  Never raises BusDown."""
        await self._withdrawals.sent()

    async def cancel(self, request_id: str, index: int = -1) -> None:
        """withdraw() and withdrawn()."""
        self.withdraw(request_id, index)
        await self.withdrawn()

    async def _send_withdrawals(self, some: list[Withdrawal]) -> bool:
        try:
            await self._link.script(CANCEL, self._gateway, *(word for pair in some for word in pair))
        except BusDown:
            return False
        return True

    async def quarantined(self, drop: str = "") -> list[Quarantined]:
        """Requests set aside because they killed their engine, oldest first, after the one of id `drop` was deleted.
        Raises BusDown after PATIENCE_S."""
        decode = msgspec.msgpack.Decoder(Generate).decode
        return [
            Quarantined(decode(payload), int(attempts), int(said), engine.decode(), int(time_ms))
            for payload, attempts, said, engine, time_ms in await self._link.script(QUARANTINED, drop)
        ]

    async def audit(self, patience_s: float) -> dict[str, str | None]:
        """Have every engine audit the books of its blocks: by engine what is wrong, '' where nothing is, None where no
        answer came within `patience_s`.  Raises BusDown after PATIENCE_S."""
        name = uuid.uuid4().hex
        engines = [engine.decode() for engine in await self._link.script(AUDIT, name)]
        clock = asyncio.get_running_loop().time
        until, found = clock() + patience_s, dict[bytes, bytes]()
        read = partial(self._link.redis.hgetall, f"{self._link.prefix}audit:{name}")
        while len(found) < len(engines) and clock() < until:
            await asyncio.sleep(AUDIT_POLL_S)
            found = await self._link.run(cast("Callable[[], Awaitable[dict[bytes, bytes]]]", read), PATIENCE_S)
        return {name: said.decode() if (said := found.get(name.encode())) is not None else None for name in engines}

    async def batches(self) -> AsyncGenerator[TokenBatch, None]:
        """Every TokenBatch for this gateway, in order, for ever; reconnects by itself and loses none.

        Asking for the next batch says that those before it are dealt with: they may be trimmed.  Starts with the
        oldest one not trimmed, so a second call, or a restarted gateway of the same name, may see some again.
        """
        decode = msgspec.msgpack.Decoder(TokenBatch).decode
        stream = f"{self._link.prefix}out:{self._gateway}"
        done = ["0-0"]  # ids of entries that are dealt with; the first is of none

        async def trim_and_read() -> Any:
            # By their ids, and then from the start: after a failover the server's clock may be behind, and its newest
            # entry may sort before the last one read.  A demoted server, at which a read would wait for ever, refuses
            # to delete, even nothing.
            await self._reader.redis.xdel(stream, *done)
            return await self._reader.redis.xread({stream: "0-0"}, count=READ_COUNT, block=BLOCK_MS)

        while True:
            reply = await self._reader.run(trim_and_read)
            del done[1:]
            deltas = 0
            for _, entries in cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]", reply):
                for entry_id, fields in entries:
                    try:
                        batch = decode(fields[b"b"])
                    except (msgspec.MsgspecError, KeyError):  # what is missing in it is read from the log
                        log.exception("skipped an entry of %s that is no batch: %s", stream, entry_id.decode())
                    else:
                        deltas += len(batch.deltas)
                        yield batch
                    done.append(entry_id.decode())
                    if deltas >= READ_DELTAS:
                        deltas = 0
                        await asyncio.sleep(0)
            self.rounds += 1

    async def fleet(self) -> Fleet:
        """Read the fleet in one round trip, and put what engines with lapsed leases held back at the queue's head.

        Raises BusDown after PATIENCE_S.  Call it at least every second: it is what notices a dead engine or gateway,
        and what says that this gateway lives.
        """
        self._withdrawals.wake()
        if self._doubtful:
            await self._compare_histories()
        self._beats += 1
        sent = self.clock.ticks()
        reply = await self._link.script(FLEET, self._gateway, self._grace_ms, self._beats)
        loads, time_ms, queued, room_tokens, turns, known, oldest_ms, quarantined, heard = reply
        self.clock.sample(sent, time_ms)
        engines = [msgspec.msgpack.decode(load, type=EngineLoad) for load in loads]
        tenants = _read_tenant_queues(*turns)
        forgotten, self._forgotten = self._forgotten or not known, False
        return Fleet(
            engines,
            queued,
            sum(turn.queued_tokens for turn in tenants.values()),
            time_ms,
            room_tokens,
            tenants,
            forgotten,
            oldest_ms,
            quarantined,
            {load.engine: int(ms) for load, ms in zip(engines, heard, strict=True)},
        )


def _read_tenant_queues(scored: list[bytes], tokens: list[bytes], weights: list[bytes]) -> dict[str, TenantQueue]:
    names, counters = scored[::2], scored[1::2]
    return {
        name.decode(): TenantQueue(int(queued), float(counter), float(weight))
        for name, counter, queued, weight in zip(names, counters, tokens, weights, strict=True)
    }


def _read_twin(found: list[bytes | None], once: IdempotencyKey | None) -> DuplicateRequest | None:
    if once is None or not found or found[0] is None or found[1] is None:
        return None
    return DuplicateRequest(found[0].decode(), found[1].decode() == once.body)


# -------------------------------------------------------------------------------------------------------- the engine
class EngineSide:
    """One engine's end.  All methods belong to one asyncio loop (the loop's I/O thread)."""

    def __init__(self, url: str, engine: str, *, namespace: str = "quire", lease_ms: int = 5000) -> None:
        """`url`: redis://, rediss:// or unix://.  Connects to nothing yet.  Raises BusDown for a malformed URL."""
        self._engine = engine
        self._lease_ms = lease_ms
        self._link = _Link(url, namespace, reply_s=REPLY_S, returned=self._rehang)
        self.clock = RedisClock()  # set right by every exchange()
        self._bell = self._link.redis.pubsub()
        self._bell_stale = False  # it may hang at a server that was demoted
        self._ringing: asyncio.Timeout | None = None  # of the wait for it, while there is one
        self.manifest = Manifest(self._link.script, engine)
        self._session = uuid.uuid4().hex  # tells this process from an earlier one of the same name
        self._seq = 0
        self.queue_share = 0.0  # requests nobody had claimed after the last exchange, over the engines that could
        self._epoch = "0"  # of the lease; another one at Redis means that it lapsed
        self._registered = False
        self._tenants: dict[str, str] = {}  # what it holds, as far as it knows: id -> who pays for its tokens
        self._journal = token_log.Journal()
        self._routes: dict[str, list[str]] = {}  # id -> who listens, where that is not the request's own gateway alone
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Generate).decode

    async def open(self) -> None:
        """Connect; what an earlier process of this name still held goes back to the queue's head.  Raises BusDown.

        The engine counts as one of the fleet from its first exchange on.
        """
        await self._link.check()
        self._epoch = (await self._link.script(OPEN, self._engine, self._session)).decode()
        self._registered = True
        await self._link.run(self._listen, PATIENCE_S)

    async def close(self, *, died: bool = False) -> None:
        """Give the lease up; whatever is still held goes back to the queue's head.  Never raises BusDown: while Redis
        is away the lease lapses by itself, to the same effect.

        `died`: the engine failed, so an attempt is counted for each request it holds, as at a lapse."""
        if self._registered:
            self._registered = False
            with contextlib.suppress(BusDown):
                await self._link.script(CLOSE, self._engine, self._session, int(died))
        await self._bell.aclose()  # type: ignore[no-untyped-call]
        await self._link.close()

    async def exchange(
        self,
        batches: list[tuple[str, TokenBatch]],
        finished: list[str],
        load: EngineLoad,
        room_tokens: int,
        room_requests: int,
    ) -> ExchangeReply:
        """One round trip: append each (gateway, batch) to its stream and its tokens to the log, forget `finished`
        requests, renew the lease with `load`, charge the tenants for the batches' tokens, claim in the queue's order
        while prompts fit `room_tokens` and `room_requests` (0 claims none) and at most a fair share of the queue (all
        of it over the number of engines, rounded up), and take the aborts waiting here.  Nothing past its deadline is
        claimed: its gateway hears so.  Retries with backoff while Redis is away, never loses or repeats a batch.

        If the lease has lapsed since the last exchange, or Redis has lost what it had acknowledged, what this engine
        holds no more is left out (see `lost`), and what those logs lack is sent once more.

        Raises BusDown only when a newer process opened the bus under this engine's name.  One at a time; cancelling
        it leaves open what it did, and only close() may follow.
        """
        lost: list[str] = []
        self._journal.add(batches, finished)
        while (reply := await self._send(batches, finished, load, room_tokens, room_requests)) is None:
            gone = set(await self._rejoin(load))
            lost += gone
            batches = [
                (
                    gateway,
                    msgspec.structs.replace(batch, deltas=[delta for delta in batch.deltas if delta.id not in gone]),
                )
                for gateway, batch in batches
            ]
            finished = [request_id for request_id in finished if request_id not in gone]
        self._forget(finished)
        works, orders, queued, engines, _ = reply
        self.queue_share = queued / max(1, engines)
        claimed = ExchangeReply([], [], lost)
        for payload, listeners, outputs in works:
            request = self._decode(payload)
            claimed.generates.append(request)
            self._tenants[request.id] = request.tenant
            if listeners.decode() != request.gateway:
                self._route(request.id, listeners.decode())
            so_far = [token_log.read(tokens, finish) for tokens, finish in outputs]
            self._journal.hold(request.id, [len(said.token_ids) for said in so_far])
            if any(said.token_ids or said.finish for said in so_far):
                claimed.resumed[request.id] = so_far
        for order in orders:
            request_id, _, what = order.decode().partition(" ")
            if what.startswith(">"):
                self._route(request_id, what[1:])
            elif what == "?":
                claimed.audits.append(request_id)
            else:
                claimed.aborts.append(Abort(request_id, index=int(what or -1)))
        return claimed

    async def _send(
        self,
        batches: list[tuple[str, TokenBatch]],
        finished: list[str],
        load: EngineLoad,
        room_tokens: int,
        room_requests: int,
    ) -> Any:
        """One exchange with a number of its own; Redis' reply."""
        self._seq += 1
        produced: dict[str, int] = {}
        for _, batch in batches:
            for delta in batch.deltas:
                if (tenant := self._tenants.get(delta.id)) is not None:
                    produced[tenant] = produced.get(tenant, 0) + len(delta.token_ids)
        logged = self._journal.due(batches)
        words = self._sent(batches, tail=not logged.whole)
        sent = self.clock.ticks()
        try:
            reply = await self._link.script(
                EXCHANGE,
                self._engine,
                self._session,
                self._seq,
                self._epoch,
                self._lease_ms,
                self._encode(load),
                room_tokens,
                room_requests,
                self._encode(finished),
                self._encode(produced),
                self._encode(logged.pieces),
                logged.tokens,
                int(logged.whole),
                len(logged.extras),
                *(word for extra in logged.extras for word in extra),
                *words,
                patience_s=math.inf,
            )
        except ResponseError as error:
            raise self._superseded(error) from None
        if reply is not None:
            tail_bytes = sum(len(one) for lasting, one in zip(words[1::3], words[2::3], strict=True) if lasting)
            self._journal.entered(logged, tail_bytes)
            self.clock.sample(sent, reply[4])
        return reply

    def _sent(self, batches: list[tuple[str, TokenBatch]], *, tail: bool) -> list[Any]:
        """(gateway, 1 if it is for the tail, batch) ...: each Delta to all who listen now, and once to the tail."""
        routed = self._routed(batches)
        if routed is batches:
            return [word for gateway, batch in batches for word in (gateway, int(tail), self._encode(batch))]
        words = [word for gateway, batch in routed for word in (gateway, 0, self._encode(batch))]
        return words + [word for _, batch in batches if tail for word in ("", 1, self._encode(batch))]

    async def _rejoin(self, load: EngineLoad) -> list[str]:
        """Find out what this engine still holds, and how much of it stands in the logs; the ids of what it does not."""
        lost: list[str] = []
        while True:
            try:
                epoch, held = await self._link.script(
                    REJOIN,
                    self._engine,
                    self._session,
                    self._seq,
                    self._lease_ms,
                    self._encode(load),
                    *self._tenants,
                    patience_s=math.inf,
                )
            except ResponseError as error:
                raise self._superseded(error) from None
            self._epoch = epoch.decode()
            known: set[str] = set()
            for request_id, listeners, lengths in held:
                # A log that lacks even what it had at the claim is not to be mended from here: without a word for it
                # in the next round the request goes back to the queue.
                if self._journal.rewind(request_id.decode(), lengths):
                    known.add(request_id.decode())
                    self._route(request_id.decode(), listeners.decode())
            gone = [request_id for request_id in self._tenants if request_id not in known]
            self._forget(gone)
            lost += gone
            if len(known) == len(held):
                return lost

    def _superseded(self, error: ResponseError) -> Exception:
        if "SUPERSEDED" in str(error):
            return BusDown(f"engine id {self._engine!r} is in use by a newer process")
        return error

    def _forget(self, ids: list[str]) -> None:
        for request_id in ids:
            self._tenants.pop(request_id, None)
            self._routes.pop(request_id, None)
        self._journal.forget(ids)

    def _route(self, request_id: str, listeners: str) -> None:
        if request_id in self._tenants:
            self._routes[request_id] = listeners.split("\n") if listeners else []

    def _routed(self, batches: list[tuple[str, TokenBatch]]) -> list[tuple[str, TokenBatch]]:
        """The same batches by who listens now."""
        if not self._routes:
            return batches
        deltas: dict[str, list[Delta]] = {}
        for gateway, batch in batches:
            for delta in batch.deltas:
                for listener in self._routes.get(delta.id, (gateway,)):
                    deltas.setdefault(listener, []).append(delta)
        _, some = batches[0] if batches else ("", None)
        return (
            [(gateway, msgspec.structs.replace(some, deltas=said)) for gateway, said in deltas.items()] if some else []
        )

    async def audited(self, name: str, finding: str) -> None:
        """Answer the audit of that name: what is wrong, or ''.  Raises BusDown after PATIENCE_S."""
        key = f"{self._link.prefix}audit:{name}"

        async def answer() -> None:
            async with self._link.redis.pipeline() as pipe:
                pipe.hset(key, self._engine, finding)
                pipe.expire(key, AUDIT_S)
                await pipe.execute()

        await self._link.run(answer, PATIENCE_S)

    async def others(self) -> list[EngineLoad]:
        """The other engines with a live lease.  Raises BusDown after PATIENCE_S."""
        loads = await self._link.script(OTHERS, self._engine)
        return [msgspec.msgpack.decode(load, type=EngineLoad) for load in loads]

    async def bell(self) -> None:
        """Return when there may be something to claim or an abort to take; spurious returns are fine.

        They happen after a reconnect and every BLOCK_MS at the latest.  A ring between two calls is not lost.
        """
        if not self._bell_stale:
            try:
                async with asyncio.timeout(None) as self._ringing:
                    await self._bell.get_message(timeout=BLOCK_MS / 1000)
                    while await self._bell.get_message(timeout=0) is not None:
                        pass  # a burst of rings is one
                return
            except (RedisError, OSError):
                pass
            finally:
                self._ringing = None
        self._bell_stale = False
        await self._link.run(self._listen)

    def _rehang(self) -> None:
        """Subscribe on a new connection, now."""
        self._bell_stale = True
        if self._ringing is not None:
            interrupt(self._ringing)

    async def _listen(self) -> None:
        await self._bell.aclose()  # type: ignore[no-untyped-call]  # a half-broken subscription is not worth mending
        await self._bell.subscribe(f"{self._link.prefix}bell", f"{self._link.prefix}bell:{self._engine}")
