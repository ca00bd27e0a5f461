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
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from engine.wire import tokenlog
from engine.wire.manifest import Manifest
from engine.wire.messages import Abort, Delta, EngineLoad, Generate, TokenBatch
from engine.wire.scripts import (
    ADOPT,
    ATTACH,
    AUDIT,
    CANCEL,
    CLOSE,
    EXCHANGE,
    FLEET,
    KEEP,
    LOG,
    OPEN,
    OTHERS,
    PROMISE,
    QUARANTINED,
    REJOIN,
    RELEASE,
    SETTLE,
    SUBMIT,
    TWIN,
    Script,
)
from engine.wire.tokenlog import Said

log = logging.getLogger("quire.bus")
T = TypeVar("T")

PATIENCE_S = 2.0  # how long a gateway-side call, and open() on both sides, tries before it raises BusDown
REPLY_S = 5.0  # an engine's exchange takes a silent connection for dead after this, and tries on a new one
BACKOFF_S = (0.02, 1.0)  # first and longest pause between two tries; half of each is random
BLOCK_MS = 5_000  # a gateway's longest wait for the next batch, and an engine's for the bell, in one command
CONNECTIONS = 8  # a side's commands in flight at once; more wait their turn
AUDIT_S = 60  # how long what an audit found stays
AUDIT_POLL_S = 0.02
READ_COUNT = 256  # most stream entries in one read
PRIORITIES = (-100, 100)  # first and last class; lower goes earlier


class BusDown(Exception):
    """Redis cannot be reached or refuses writes; says which and for how long, in one line."""


class Fleet(msgspec.Struct, frozen=True):
    """What a gateway knows about the engines: those with a live lease, and the shared queue."""

    engines: list[EngineLoad]
    queued: int  # requests nobody has claimed yet
    queued_tokens: int  # their prompt tokens, times nothing: siblings share the prompt
    time_ms: int  # unix time of this reading
    room_tokens: int = 0  # prompt tokens the engines would still claim; one silent for STALE_MS has none
    tenants: dict[str, Turn] = {}  # those with something queued
    # The reader had not been heard of for long, so what it listened to may go elsewhere; or Redis has lost something.
    forgotten: bool = False
    oldest_ms: int = 0  # since the oldest in the queue was first queued
    quarantined: int = 0  # requests set aside because they killed their engines


class Turn(msgspec.Struct, frozen=True):
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
    tenants: dict[str, Turn]
    twin: Twin | None = None  # nothing was queued: this request came before, under the same idempotency key


class Once(msgspec.Struct, frozen=True):
    """An idempotency key: the first request to bring it is computed, every later one shares its answer."""

    key: str  # digest of the client's key and of whoever may use it
    body: str  # digest of all that must be equal for two requests to be the same


class Twin(msgspec.Struct, frozen=True):
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
    continuations: list[Said]


class Quarantined(msgspec.Struct, frozen=True):
    """A request that killed its engine too often."""

    request: Generate
    attempts: int  # engines that died while they held it, at the same token
    said: int  # its tokens in the log by then, all continuations together
    engine: str  # the last of them
    time_ms: int  # unix time of the verdict


class Terms(msgspec.Struct, frozen=True):
    """On which a refused request is told when to return."""

    pace: float  # prompt tokens that the engines start per second, > 0
    full_pace: float  # that they will start once as full as they are now, >= pace
    least_ms: int  # it can't be sooner
    most_ms: int  # nothing is promised later
    # Of the pace, for those who return, however many come for the first time: for the next to return, and at most_ms.
    least_shares: tuple[float, float]


class Claimed(msgspec.Struct, frozen=True):
    """What one exchange brought an engine."""

    generates: list[Generate]
    aborts: list[Abort]  # to be carried out after `generates` are accepted: they may concern each other
    # Requests another engine took over, or a client withdrew, after this engine's lease had lapsed: drop them without a
    # word, no Delta and no `finished`, for they are somebody else's now.  What this exchange said of them was dropped.
    lost: list[str] = []
    # For those of `generates` that an earlier engine has begun, by id: every continuation so far.  They go on from
    # there: the next Delta of one without a Finish has first == len(token_ids); one with a Finish says nothing more.
    resumed: dict[str, list[Said]] = {}
    audits: list[str] = []  # ids: audit the books, all of them, and say audited()


# --------------------------------------------------------------------------------------------------------- both ends
class _Link:
    """Connections to one Redis, and the only place that decides to try again."""

    def __init__(self, url: str, namespace: str, *, reply_s: float) -> None:
        """`reply_s`: seconds of silence after which a connection counts as dead.  Raises BusDown: malformed URL."""
        self.prefix = f"{{{namespace}}}:"
        parts = urlsplit(url)
        self._name = f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
        try:
            # Retries are ours (redis-py would repeat what is not safe to repeat); protocol 2 keeps replies of one
            # shape over the supported versions of redis-py.
            pool = aioredis.BlockingConnectionPool.from_url(
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
        self.redis = aioredis.Redis.from_pool(pool)

    async def close(self) -> None:
        await self.redis.aclose()

    async def check(self) -> None:
        """Make sure that a server of a fitting version answers.  Raises BusDown."""
        info = await self.run(self.redis.info, PATIENCE_S)
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
            raise BusDown(f"Redis at {self._name} is version {version}; Quire needs 6.2 or later")
        if info.get("maxmemory_policy") != "noeviction":
            log.warning("Redis at %s may evict requests: set maxmemory-policy noeviction", self._name)

    async def script(self, script: Script, *args: bytes | str | int, patience_s: float = PATIENCE_S) -> Any:
        """Run one script.  Raises BusDown when it did not succeed within `patience_s`; it may have run all the same."""

        async def once() -> Any:
            try:
                return await self.redis.evalsha(script.sha, 1, self.prefix, *args)
            except NoScriptError:  # a new or restarted server
                return await self.redis.eval(script.source, 1, self.prefix, *args)

        return await self.run(once, patience_s)

    async def run(self, command: Callable[[], Awaitable[T]], patience_s: float = math.inf) -> T:
        """Await command() until it succeeds, pausing longer each time.  It must be harmless when it runs twice.

        Raises BusDown after `patience_s` seconds.  Errors that another try can't mend come through as they are.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        pause, longest = BACKOFF_S
        tries = 0
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        cause: Exception | None = None
        while True:
            try:
                async with asyncio.timeout_at(None if patience_s == math.inf else began + patience_s):
                    result = await command()
                if task.cancelling() > cancels:  # redis-py loses a cancellation that comes while it connects
                    raise asyncio.CancelledError
            except (RedisConnectionError, RedisTimeoutError, ResponseError, OSError) as error:
                if isinstance(error, ResponseError) and not _refuses(error):
                    raise
                if cause is None or not isinstance(error, TimeoutError):  # our patience ending says nothing of why
                    cause = error
                left = began + patience_s - clock()
                if left <= 0:
                    raise BusDown(
                        f"Redis at {self._name} did not serve us for {clock() - began:.1f} s: {_one_line(cause)}"
                    ) from cause
                if tries == 1 and patience_s == math.inf:  # not on the first: a single broken connection is no news
                    log.warning("Redis at %s is away, trying on: %s", self._name, _one_line(error))
            else:
                if tries > 1 and patience_s == math.inf:
                    log.warning("Redis at %s is back after %.1f s", self._name, clock() - began)
                return result
            await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, longest)
            tries += 1


def _refuses(error: ResponseError) -> bool:
    """A healthy connection to a server that cannot do it now: full, loading, failing over, or its disk is failing.

    Looks into the text because Redis 6.2 wraps an error inside a script into a general one.
    """
    return any(word in str(error) for word in ("OOM ", "MISCONF", "READONLY", "LOADING", "MASTERDOWN", "BUSY "))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or ("no answer" if isinstance(error, TimeoutError) else type(error).__name__)


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
        self._link = _Link(url, namespace, reply_s=PATIENCE_S)
        # Blocking reads have their own connection: one that waits for seconds must not count as dead after two.
        self._reader = _Link(url, namespace, reply_s=2 * BLOCK_MS / 1000)
        self._encode = msgspec.msgpack.Encoder().encode
        self._beats = 0
        self._owed: set[tuple[str, int]] = set()  # withdrawals that have not reached Redis yet: (id, index or -1)

    async def open(self) -> None:
        """Connect, and check the server's version.  Raises BusDown.  The gateway's stream is made by engines.

        What an earlier process of this name had open is nobody's now: it waits for `grace_s` to be attached to."""
        await self._link.check()
        await self._link.script(ADOPT, self._gateway, self._grace_ms)

    async def close(self) -> None:
        """Disconnect.  Harmless when called twice.  Withdraw what is open first: it would be computed for nobody."""
        await self._link.close()
        await self._reader.close()

    async def submit(
        self, *requests: Generate, excess_tokens: int | None = None, record: bytes = b"", once: Once | None = None
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
            self._owed.update((request.id, -1) for request in requests)
            raise
        tenants = _read_turns(*turns)
        return Queue(
            bool(accepted),
            queued,
            sum(turn.queued_tokens for turn in tenants.values()),
            room_tokens,
            tenants,
            _read_twin(twin, once),
        )

    async def promise(self, *requests: Generate, terms: Terms, broken: bool = False) -> int | None:
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

    async def twin(self, once: Once) -> Twin | None:
        """The request that came first under this key, as submit() would find it; None: it would be the first.

        Spares a retry the admission.  Raises BusDown after PATIENCE_S."""
        return _read_twin(await self._link.script(TWIN, once.key), once)

    async def release(self, once: Once, request_id: str) -> None:
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
        return Attached(record, [tokenlog.read(*one) for one in found])

    async def log(self, request_id: str, index: int, first: int, count: int) -> Said | None:
        """At most `count` tokens of what one continuation has said from output position `first` on; None as for
        attach().  The finish comes with its last token.  Raises BusDown after PATIENCE_S."""
        reply = await self._link.script(LOG, request_id, index, first, count)
        if reply is None:
            return None
        return tokenlog.read(*reply)

    async def keep(self, request_ids: list[str]) -> None:
        """The logs of these requests, which are over, stay for another `retain_s`.  Raises BusDown after PATIENCE_S."""
        await self._link.script(KEEP, *request_ids)

    async def settle(self, delivered: list[tuple[str, str, list[int]]]) -> list[Usage]:
        """Enter in the ledger how many output tokens of each continuation went out to a client: (request id, tenant,
        counts).  Counts never fall, and settling the same twice counts it once.  Raises BusDown after PATIENCE_S."""
        words: list[bytes | str | int] = []
        for request_id, tenant, counts in delivered:
            words += (request_id, tenant, len(counts), *counts)
        found = await self._link.script(SETTLE, *words)
        return [Usage(one[0], one[1], *figures) for one, figures in zip(delivered, found, strict=True)]

    async def cancel(self, request_id: str, index: int = -1) -> None:
        """This gateway listens no more.  If nobody else does the request is withdrawn: an unclaimed one leaves the
        queue, a claimed one gets an Abort at its engine.  Idempotent.

        With an `index` that continuation is withdrawn, from whoever computes the request now or later.
        Never raises BusDown: a withdrawal that does not get through in PATIENCE_S goes along with the next fleet().
        """
        self._owed.add((request_id, index))
        with contextlib.suppress(BusDown):
            await self._withdraw()

    async def _withdraw(self) -> None:
        if owed := list(self._owed):
            await self._link.script(CANCEL, self._gateway, *(word for pair in owed for word in pair))
            self._owed.difference_update(owed)

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

    async def batches(self) -> AsyncIterator[TokenBatch]:
        """Every TokenBatch for this gateway, in order, for ever; reconnects by itself and loses none.

        Asking for the next batch says that those before it are dealt with: they may be trimmed.  Starts with the
        oldest one not trimmed, so a second call, or a restarted gateway of the same name, may see some again.
        """
        decode = msgspec.msgpack.Decoder(TokenBatch).decode
        stream = f"{self._link.prefix}out:{self._gateway}"
        last = "0-0"
        while True:
            reply = await self._reader.run(
                partial(self._reader.redis.xread, {stream: last}, count=READ_COUNT, block=BLOCK_MS)
            )
            for _, entries in cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]", reply):
                for entry_id, fields in entries:
                    yield decode(fields[b"b"])
                    last = entry_id.decode()
            if reply:
                time_ms, _, count = last.partition("-")
                following = f"{time_ms}-{int(count) + 1}"
                await self._reader.run(partial(self._reader.redis.xtrim, stream, minid=following, approximate=False))

    async def fleet(self) -> Fleet:
        """Read the fleet in one round trip, and put what engines with lapsed leases held back at the queue's head.

        Raises BusDown after PATIENCE_S.  Call it at least every second: it is what notices a dead engine or gateway,
        and what says that this gateway lives.
        """
        await self._withdraw()
        self._beats += 1
        reply = await self._link.script(FLEET, self._gateway, self._grace_ms, self._beats)
        loads, time_ms, queued, room_tokens, turns, known, oldest_ms, quarantined = reply
        tenants = _read_turns(*turns)
        return Fleet(
            [msgspec.msgpack.decode(load, type=EngineLoad) for load in loads],
            queued,
            sum(turn.queued_tokens for turn in tenants.values()),
            time_ms,
            room_tokens,
            tenants,
            not known,
            oldest_ms,
            quarantined,
        )


def _read_turns(scored: list[bytes], tokens: list[bytes], weights: list[bytes]) -> dict[str, Turn]:
    names, counters = scored[::2], scored[1::2]
    return {
        name.decode(): Turn(int(queued), float(counter), float(weight))
        for name, counter, queued, weight in zip(names, counters, tokens, weights, strict=True)
    }


def _read_twin(found: list[bytes | None], once: Once | None) -> Twin | None:
    if once is None or not found or found[0] is None or found[1] is None:
        return None
    return Twin(found[0].decode(), found[1].decode() == once.body)


# -------------------------------------------------------------------------------------------------------- the engine
class EngineSide:
    """One engine's end.  All methods belong to one asyncio loop (the loop's I/O thread)."""

    def __init__(self, url: str, engine: str, *, namespace: str = "quire", lease_ms: int = 5000) -> None:
        """`url`: redis://, rediss:// or unix://.  Connects to nothing yet.  Raises BusDown for a malformed URL."""
        self._engine = engine
        self._lease_ms = lease_ms
        self._link = _Link(url, namespace, reply_s=REPLY_S)
        self._bell = self._link.redis.pubsub()
        self.manifest = Manifest(self._link.script, engine)
        self._session = uuid.uuid4().hex  # tells this process from an earlier one of the same name
        self._seq = 0
        self.queue_share = 0.0  # requests nobody had claimed after the last exchange, over the engines that could
        self._epoch = "0"  # of the lease; another one at Redis means that it lapsed
        self._registered = False
        self._tenants: dict[str, str] = {}  # what it holds, as far as it knows: id -> who pays for its tokens
        self._journal = tokenlog.Journal()
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
    ) -> Claimed:
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
        works, orders, queued, engines = reply
        self.queue_share = queued / max(1, engines)
        claimed = Claimed([], [], lost)
        for payload, listeners, outputs in works:
            request = self._decode(payload)
            claimed.generates.append(request)
            self._tenants[request.id] = request.tenant
            if listeners.decode() != request.gateway:
                self._route(request.id, listeners.decode())
            so_far = [tokenlog.read(tokens, finish) for tokens, finish in outputs]
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
                *self._sent(batches, tail=not logged.whole),
                patience_s=math.inf,
            )
        except ResponseError as error:
            raise self._superseded(error) from None
        if reply is not None:
            self._journal.entered(logged)
        return reply

    def _sent(self, batches: list[tuple[str, TokenBatch]], *, tail: bool) -> list[bytes | str | int]:
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
        try:
            await self._bell.get_message(timeout=BLOCK_MS / 1000)
            while await self._bell.get_message(timeout=0) is not None:
                pass  # a burst of rings is one
        except (RedisConnectionError, RedisTimeoutError, OSError):
            await self._link.run(self._listen)

    async def _listen(self) -> None:
        await self._bell.aclose()  # type: ignore[no-untyped-call]  # a half-broken subscription is not worth mending
        await self._bell.subscribe(f"{self._link.prefix}bell", f"{self._link.prefix}bell:{self._engine}")
