"""A gateway's side of the bus: queue requests, receive their tokens, read the fleet and the logs.

submit() ---> queue in Redis ---> engines claim
batches() <--- the gateway's token channel <--- one message per step of an engine
fleet()   <--- loads, free capacity, tenant queues; cleans up after dead gateways and engines
attach(), log() <--- the token log, for a gateway that has missed tokens
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from quire.engine.wire import link, token_log, token_messages
from quire.engine.wire.adapter_list import AdapterList
from quire.engine.wire.clock import RedisClock
from quire.engine.wire.fleet_pages import FleetPage, FleetPages
from quire.engine.wire.link import BusDown, Link
from quire.engine.wire.messages import Generate, TokenBatch
from quire.engine.wire.operations import Operations
from quire.engine.wire.pool_state_store import PoolStateStore
from quire.engine.wire.prefixes import with_adapter
from quire.engine.wire.quotas import QuotaStore
from quire.engine.wire.records import (
    LANES,
    Attached,
    DuplicateRequest,
    Fleet,
    IdempotencyKey,
    LaneQueue,
    Place,
    Queue,
    QueueBounds,
    TenantQueue,
    Usage,
)
from quire.engine.wire.response_store import ResponseStore
from quire.engine.wire.scripts import (
    ADOPT,
    ATTACH,
    CANCEL,
    FIND_DUPLICATE,
    FLEET,
    KEEP,
    PLACES,
    READ_LOG,
    RELEASE,
    SETTLE,
    SUBMIT,
)
from quire.engine.wire.subscription import Subscription
from quire.engine.wire.token_log import LoggedOutput
from quire.engine.wire.withdrawals import FOR_ALL, UNREAD, Withdrawal, Withdrawals

log = logging.getLogger("quire.bus")

PLACES_COUNT = 1000  # maximum requests per script that reads queue positions
KEEP_COUNT = 1000  # maximum requests per script that extends the lifetime of logs
NO_BOUNDS = QueueBounds()
READ_DELTAS = 1000  # Deltas and messages after which other tasks of the event loop run


class GatewaySide:
    """One gateway's side of the bus.  Call all methods on one asyncio loop."""

    def __init__(
        self, url: str, gateway: str, *, namespace: str = "quire", retain_s: float = 60.0, grace_s: float = 30.0
    ) -> None:
        """Create the gateway's side without connecting.  Raises BusDown for a malformed URL.

        `url`: redis://, rediss:// or unix://.  `retain_s`: how long the logs of its requests stay after their end.
        `grace_s`: how long a request without a live gateway waits for another gateway before it is withdrawn."""
        self._gateway = gateway
        self._retain_ms, self._grace_ms = int(retain_s * 1000), int(grace_s * 1000)
        self.clock = RedisClock()  # every fleet() adds a sample
        self._link = Link(url, namespace, reply_s=link.PATIENCE_S, returned=self._on_reconnect)
        # A separate connection for tokens: it may be silent for seconds, and must not count as dead after two.
        self._reader = Link(url, namespace, reply_s=2 * link.BLOCK_MS / 1000, nodes=self._link.nodes)
        self.quotas = QuotaStore(self._link.run_script)
        self.responses = ResponseStore(self._link.run_script)
        self.adapters = AdapterList(self._link.run_script)
        self.pool_states = PoolStateStore(self._link)
        self.operations = Operations(self._link)
        self._history = ""  # replication id of the server's data at the last check
        self._doubtful = False  # another server may have answered since the last check
        # Redis' data has another history, or tokens may have been missed, and fleet() has not reported this yet.
        self._forgotten = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._beats = 0
        self._engines = FleetPages()
        channel = f"{self._link.prefix}tokens:{token_messages.channel_of(gateway)}"
        self._tokens = Subscription(self._reader, channel, self._on_missed)
        self._undealt: TokenBatch | None = None  # batch that the caller of batches() has not processed yet
        self.rounds = 0  # number of reads by batches(); a read counts when its batch, if any, was processed
        self._withdrawals = Withdrawals(self._send_withdrawals)

    async def open(self) -> None:
        """Connect, check versions, and subscribe to the gateway's tokens.  Raises BusDown.

        Requests of an earlier process of this name have no listener; they wait `grace_s` for a gateway to attach."""
        self._history = await self._link.check()
        await self._tokens.open()
        await self._link.run_script(ADOPT, self._gateway, self._grace_ms)

    async def close(self) -> None:
        """Disconnect.  Harmless when called twice.

        Withdraw open requests first; otherwise engines compute them although no client waits."""
        await self._withdrawals.close()
        await self._tokens.close()
        await self._link.close()
        await self._reader.close()

    def _on_reconnect(self) -> None:
        """Check the data's history and subscribe again: another server may answer now.

        A subscription at a demoted server would silently receive nothing."""
        self._doubtful = True
        self._tokens.renew()

    def _on_missed(self) -> None:
        self._forgotten = True

    async def _compare_histories(self) -> None:
        self._doubtful = False
        try:
            history = await self._link.history()
        except BusDown:
            self._doubtful = True
            raise
        self._forgotten = self._forgotten or history != self._history
        self._history = history

    # ------------------------------------------------------------------------------------------------ new requests
    async def submit(
        self,
        *requests: Generate,
        bounds: QueueBounds = NO_BOUNDS,
        record: bytes = b"",
        idempotency_key: IdempotencyKey | None = None,
    ) -> Queue:
        """Queue the prompts of one client's request durably, all or none, and wake engines.

        The prompts share gateway, tenant, weight, priority, deadline and lane.  In three cases nothing is queued (the
        reply has no `lane`):
          * neither lane has free capacity within `bounds`;
          * a lane has, but the maximum of waiting requests or bytes is reached: `full`;
          * an earlier request has the same `idempotency_key`: `duplicate` names it, for attach().
        `record` is stored with the log of the first prompt, and attach() returns it.

        Raises BusDown after PATIENCE_S; the request is then not queued.  If only the reply was lost, it may be queued
        for a moment: it is withdrawn as soon as Redis answers again, unless attach() comes first.
        """
        first = requests[0]
        words: list[bytes | str | int] = []
        for request in requests:
            words += (request.id, self._encode(request), len(request.token_ids), request.n)
            words.append(with_adapter(request.prefixes, request.adapter))
        try:
            outcome, ahead, free_tokens, state, duplicate = await self._link.run_script(
                SUBMIT,
                first.gateway,
                first.tenant,
                repr(first.weight),
                first.priority,
                first.deadline_ms,
                self._retain_ms,
                idempotency_key.key if idempotency_key is not None else "",
                idempotency_key.body if idempotency_key is not None else "",
                record,
                first.id,
                *msgspec.structs.astuple(bounds),
                *words,
            )
        except BusDown:
            self._withdrawals.add(*((request.id, -1) for request in requests))
            raise
        on_time, late, tenants = _read_queue_state(state)
        joined = outcome.decode()
        return Queue(
            on_time.requests + late.requests,
            on_time.tokens + late.tokens,
            free_tokens,
            tenants,
            on_time,
            late,
            joined if joined in LANES else None,
            ahead,
            joined == "full",
            _read_duplicate(duplicate, idempotency_key),
        )

    async def places(self, request_ids: Sequence[str]) -> dict[str, Place]:
        """Return the queue positions of these requests; requests that do not wait are left out.

        Runs one script per PLACES_COUNT requests.  Raises BusDown after PATIENCE_S."""
        found: dict[str, Place] = {}
        for at in range(0, len(request_ids), PLACES_COUNT):
            some = request_ids[at : at + PLACES_COUNT]
            for request_id, (lane, ahead) in zip(some, await self._link.run_script(PLACES, *some), strict=True):
                if lane:
                    found[request_id] = Place(lane.decode(), ahead)
        return found

    async def find_duplicate(self, key: IdempotencyKey) -> DuplicateRequest | None:
        """Return the first request with this idempotency key, as submit() would; None: there is none.

        A client's retry of such a request skips admission.  Raises BusDown after PATIENCE_S."""
        return _read_duplicate(await self._link.run_script(FIND_DUPLICATE, key.key), key)

    async def release(self, key: IdempotencyKey, request_id: str) -> None:
        """Free an idempotency key if it belongs to `request_id`, whose answer cannot be read any more.

        Raises BusDown after PATIENCE_S."""
        await self._link.run_script(RELEASE, key.key, request_id)

    # ----------------------------------------------------------------------------------------------- the token log
    async def attach(self, request_id: str, *, listen: bool = True) -> Attached | None:
        """Listen to a request of any gateway from now on, and read its log; None: the log does not exist any more.

        Every Delta that is not in the reply arrives through batches(), with two exceptions.  Some Deltas arrive twice
        (compare `first`).  If some are missing after the attachment, an empty Delta follows whose `first` lies beyond
        the tokens received so far, and log() returns the missing tokens.  For a finished request, each choice has a
        Finish.  Without `listen` the log is only read.  Raises BusDown after PATIENCE_S."""
        if listen:
            await self._withdrawals.revoke(request_id)
        reply = await self._link.run_script(ATTACH, request_id, self._gateway if listen else "")
        if reply is None:
            return None
        record, found = reply
        return Attached(record, [token_log.read(*one) for one in found])

    async def log(self, request_id: str, index: int, first: int, count: int) -> LoggedOutput | None:
        """Return at most `count` tokens of one choice, from output position `first` on; None: the log is gone.

        The Finish is returned with the last token.  Raises BusDown after PATIENCE_S."""
        reply = await self._link.run_script(READ_LOG, request_id, index, first, count)
        if reply is None:
            return None
        return token_log.read(*reply)

    async def keep(self, request_ids: list[str]) -> None:
        """Keep the logs of these finished requests for another `retain_s`.  Raises BusDown after PATIENCE_S."""
        for at in range(0, len(request_ids), KEEP_COUNT):
            await self._link.run_script(KEEP, *request_ids[at : at + KEEP_COUNT])

    async def settle(self, delivered: list[tuple[str, str, list[int]]]) -> list[Usage]:
        """Record in the usage ledger how many output tokens of each choice were sent to a client.

        `delivered`: (request id, tenant, tokens sent per choice).  Counts never decrease, and repeated calls count
        once.  Raises BusDown after PATIENCE_S."""
        words: list[bytes | str | int] = []
        for request_id, tenant, counts in delivered:
            words += (request_id, tenant, len(counts), *counts)
        found = await self._link.run_script(SETTLE, *words)
        return [Usage(one[0], one[1], *counted) for one, counted in zip(delivered, found, strict=True)]

    # ------------------------------------------------------------------------------------------------- withdrawals
    def withdraw(self, request_id: str, index: int = UNREAD) -> None:
        """Stop listening to a request, and end it if no other gateway listens.

        A waiting request leaves the queue; for a claimed request, its engine gets an Abort.  With an `index`, only
        this choice ends, at the engine that computes the request now or later.  Idempotent.

        Never waits.  One task sends all withdrawals.  Withdrawals that do not reach Redis are kept, and the next
        fleet() starts that task again.
        """
        self._withdrawals.add((request_id, index))
        self._withdrawals.wake()

    async def cancel_for_all(self, request_ids: list[str]) -> None:
        """Cancel requests even if other gateways listen; all listeners get the Finish.  Idempotent.

        Returns when Redis has the cancellations, or after PATIENCE_S; then they are sent later, as in withdraw()."""
        self._withdrawals.add(*((request_id, FOR_ALL) for request_id in request_ids))
        self._withdrawals.wake()
        await self._withdrawals.sent()

    async def withdrawn(self) -> None:
        """Wait until Redis has every withdrawal, or for PATIENCE_S without an answer.  Never raises BusDown."""
        await self._withdrawals.sent()

    async def cancel(self, request_id: str, index: int = -1) -> None:
        """Run withdraw(), then withdrawn()."""
        self.withdraw(request_id, index)
        await self.withdrawn()

    async def _send_withdrawals(self, some: list[Withdrawal]) -> bool:
        try:
            await self._link.run_script(CANCEL, self._gateway, *(word for pair in some for word in pair))
        except BusDown:
            return False
        return True

    async def batches(self) -> AsyncGenerator[TokenBatch, None]:
        """Iterate over every TokenBatch for this gateway, in order, forever.

        When the caller takes the next batch, the previous one counts as processed.  A second call begins with the batch
        that was not processed.  Batches sent while the connection is down are missed: the next fleet() then has
        `forgotten` set, and attach() reads the missing tokens from the logs."""
        work = 0
        while True:
            if work >= READ_DELTAS:
                work = 0
                await asyncio.sleep(0)
            if self._undealt is None:
                work += 1
                message = await self._tokens.next()
                if message is not None:
                    self._undealt = self._decode_tokens(message)
            if self._undealt is not None:
                work += len(self._undealt.deltas)
                yield self._undealt
                self._undealt = None
            self.rounds += 1

    def _decode_tokens(self, message: bytes) -> TokenBatch | None:
        try:
            return token_messages.decode(message, self._gateway)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            log.exception("skipped a message of %s, which is no token message", self._link.prefix)
            self._on_missed()
            return None

    async def fleet(self) -> Fleet:
        """Read the loads of all engines and the queue; requeue the requests of engines whose lease has lapsed.

        One round trip returns the loads that have changed since the last reading, of at most READING_ENGINES engines.
        With more engines, a load may be up to PASS_MS old; the first reading reads all engines.  Call it at least every
        second: it detects dead engines and gateways, and it is this gateway's heartbeat.
        Raises BusDown after PATIENCE_S.
        """
        self._withdrawals.wake()
        if self._doubtful:
            await self._compare_histories()
        if self._forgotten:
            self._engines.start_afresh()
        while True:
            time_ms, free_tokens, state, quarantined = await self._read_page()
            if self._engines.complete(time_ms):
                break
        on_time, late, tenants = _read_queue_state(state)
        forgotten, self._forgotten = self._forgotten, False
        return Fleet(
            self._engines.loads(),
            on_time.requests + late.requests,
            on_time.tokens + late.tokens,
            time_ms,
            free_tokens,
            tenants,
            forgotten,
            quarantined,
            self._engines.exchanged_ms(),
            on_time,
            late,
        )

    async def _read_page(self) -> tuple[int, int, list[Any], int]:
        """Read one page of the engines, and the queue.

        Returns (unix ms, free capacity in prompt tokens, queue state, number of quarantined requests)."""
        self._beats += 1
        sent = self.clock.ticks()
        reply = await self._link.run_script(
            FLEET, self._gateway, self._grace_ms, self._beats, *self._engines.position()
        )
        leases, time_ms, free_tokens, state, known, quarantined, following, engines, last_change = reply
        self.clock.sample(sent, time_ms)
        self._forgotten = self._forgotten or not known
        self._engines.record(FleetPage(leases, following, engines, last_change, bool(known), time_ms))
        return time_ms, free_tokens, state, quarantined


def _read_queue_state(state: list[Any]) -> tuple[LaneQueue, LaneQueue, dict[str, TenantQueue]]:
    """Return (on-time lane, late lane, tenants of the reply).  `state`: the reply of `queue_state` in queue.lua."""
    lanes: list[LaneQueue] = []
    tenants: dict[str, TenantQueue] = {}
    for lane, (requests, total, oldest_ms, waiting, scored, tokens, weights) in zip(LANES, state, strict=True):
        lanes.append(LaneQueue(requests, total, max(0, oldest_ms), waiting))
        for name, counter, in_lane, weight in zip(scored[::2], scored[1::2], tokens, weights, strict=True):
            known, queued = tenants.get(name.decode()), int(in_lane or 0)  # None: Redis has evicted it
            tenants[name.decode()] = TenantQueue(
                queued + (known.queued_tokens if known is not None else 0),
                float(counter),
                float(weight or 1),
                queued if lane == "late" else 0,
            )
    return lanes[0], lanes[1], tenants


def _read_duplicate(found: list[bytes | None], key: IdempotencyKey | None) -> DuplicateRequest | None:
    if key is None or not found or found[0] is None or found[1] is None:
        return None
    return DuplicateRequest(found[0].decode(), found[1].decode() == key.body)
