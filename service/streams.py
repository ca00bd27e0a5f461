"""Open requests: a mailbox for each continuation, one reader task for all of them, deadlines, and the one way out.

    bus.batches() --> one reader --> mailbox (merged) --> the request's own handler --> text --> socket
                                          ^ a slow client's tokens wait here (see `mailbox.py`)

A request of this gateway begins in `Streams.open`.  `Streams.join` listens to one that runs already, here or at another
gateway, or is over: a client that has come back, or its retry.  So an order (one prompt of a request) can have several
readers here, and lives until the last one leaves; if its client may come back, `resume_s` longer.

Every cancel takes one way, `Streams.withdraw`.  Whoever leaves early, for whatever reason (client gone, deadline,
error), comes to it through `Streams._leave`; a choice that met its stop string while others go on, through
`OpenRequest.end`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from engine.wire.bus import BusDown, DuplicateRequest, Fleet, GatewaySide, IdempotencyKey, Queue
from engine.wire.clock import steady_ms
from engine.wire.messages import Delta, EngineLoad, Finish, Generate, TokenBatch
from engine.wire.token_log import LoggedOutput
from service.admission import Overloaded
from service.api import Refusal
from service.config import GatewayConfig
from service.mailbox import Backlog, Mailbox
from service.metrics import Telemetry
from service.pacing import Pacer, Timer
from service.supervision import Supervisor, Task

log = logging.getLogger("quire.gateway")
T = TypeVar("T")

ATTEMPTS = 5  # to decide and queue before others did; each works on the reading that the one before brought
# A reading, and whether the client was told to come now -> the excess for GatewaySide.submit; raises Refusal, or
# Overloaded: then a promise of when to return is made on its terms.
Admit = Callable[[Fleet, bool], int]

SETTLE_S = 10.0  # after an order was withdrawn, its engine's last word is waited for so long
SETTLE_COUNT = 100  # orders that are written to the ledger at once
DELIVER_COUNT = 1000  # deltas dealt with in one turn of the event loop, which takes up to 10 ms
ATTACH_COUNT = 64  # orders whose logs are asked for at once, after Redis may have lost something
RESEND_S = 10.0  # after Redis has lost tokens, their engine's next exchange is waited for so long
FORGOTTEN = Finish("error", message="Redis has lost this request: send it again")


class HandedOver(ConnectionError):
    """This gateway must go, and another one will answer on: the reader knows how to come back."""


class Before(Exception):
    """Nothing was queued: a request with the same idempotency key came first."""

    def __init__(self, twin: DuplicateRequest) -> None:
        super().__init__(twin.request_id)
        self.twin = twin


class Order:
    """One prompt of a request as this gateway knows it: who reads it here, and what its engine still does for it."""

    __slots__ = ("delivered", "id", "n", "readers", "running", "tenant", "timer", "unfinished")

    def __init__(self, order_id: str, n: int, tenant: str) -> None:
        self.id, self.n, self.tenant = order_id, n, tenant
        self.readers: list[tuple[OpenRequest, int]] = []  # and which of the reader's prompts it is
        self.unfinished = set(range(n))  # continuations whose Finish has not come
        self.running = set(range(n))  # those of them that nobody has told an engine to stop
        self.delivered = [0] * n  # output tokens of each that went out to a client, by the reader that is furthest
        self.timer: Timer | None = None  # runs while it has no reader

    def ended(self, index: int) -> None:
        """An engine has said its last word on a continuation."""
        self.unfinished.discard(index)
        self.running.discard(index)

    def put(self, delta: Delta) -> None:
        if not 0 <= delta.index < self.n:
            log.error("delta for continuation %d of %d ignored", delta.index, self.n)
            return
        if delta.finish is not None:
            self.ended(delta.index)
        for reader, prompt in self.readers:
            reader.put(prompt, delta)


class OpenRequest:
    """One client's request while it is being answered.  Iterate for the mailboxes that changed since the last turn;
    an empty list means that nothing came for `heartbeat_s`.  The iteration ends when every choice was `end`ed.
    Raises HandedOver when this gateway must go and the client may come back elsewhere."""

    def __init__(self, streams: Streams, orders: list[Order], *, resumable: bool) -> None:
        """`resumable`: its client may lose the connection and come back."""
        self._streams, self.orders, self.resumable = streams, orders, resumable
        self.loop = asyncio.get_running_loop()
        self._n = orders[0].n
        self.mailboxes = [Mailbox(choice, streams.backlog) for choice in range(len(orders) * self._n)]
        self.delivered = [0] * len(self.mailboxes)  # output tokens of each choice that its client was sent, in all
        self._unfinished = len(self.mailboxes)
        self._changed: dict[Mailbox, None] = {}  # in the order in which they changed
        self._given: list[Mailbox] = []  # in the last turn
        self._wake: asyncio.Future[None] | None = None
        self._nudged = False  # `_wake` is done, or will be in one of the loop's next turns
        self._moved = False
        self._last_news = self.loop.time()
        self._timers: list[Timer] = []

    def start(self, deadline: float, heartbeat_s: float) -> None:
        """`deadline` in the event loop's time."""
        self._heartbeat_s = heartbeat_s
        self._timers = [
            self._streams.pacer.call_at(deadline, self.end_all, Finish("deadline")),
            self._streams.pacer.call_at(self.loop.time() + heartbeat_s, self._beat),
        ]

    @property
    def started(self) -> bool:
        """Redis has had it."""
        return bool(self._timers)

    def sent(self, tokens: list[int]) -> None:
        """So many tokens of each choice have gone out, those included that the client came with."""
        self.delivered = tokens.copy()

    def stop(self) -> None:
        """Its reader is gone: nothing waits for it any more."""
        for timer in self._timers:
            timer.cancel()
        for mailbox in self.mailboxes:
            mailbox.closed = True
            mailbox.take()

    def __aiter__(self) -> OpenRequest:
        return self

    async def __anext__(self) -> list[Mailbox]:
        if not self._unfinished:
            raise StopAsyncIteration
        for mailbox in self._given:
            if mailbox.behind and not mailbox.closed:
                self._changed[mailbox] = None
        if not self._changed and not self._moved:
            self._nudged = False
            self._wake = self.loop.create_future()
            await self._wake
            self._wake = None
        if self._moved:
            raise HandedOver("this gateway is shutting down")
        changed, self._changed = list(self._changed), {}
        for mailbox in changed:
            if mailbox.behind:
                await self._streams.refill(self.orders[mailbox.choice // self._n].id, mailbox, mailbox.choice % self._n)
        self._given = changed
        return changed

    def put(self, prompt: int, delta: Delta) -> None:
        """From the reader task: file a delta and wake the handler."""
        mailbox = self.mailboxes[prompt * self._n + delta.index]
        if mailbox.put(delta):
            self._notify(mailbox)

    def resume(self, prompt: int, said: list[LoggedOutput], had: Sequence[int]) -> None:
        """Begin one prompt's choices after the tokens its client has had of them."""
        for index, (continuation, count) in enumerate(zip(said, had, strict=True)):
            mailbox = self.mailboxes[prompt * self._n + index]
            mailbox.resume(continuation, count)
            self.delivered[mailbox.choice] = count
            if mailbox.ended or mailbox.next > mailbox.at:
                self._notify(mailbox)

    def _notify(self, mailbox: Mailbox) -> None:
        self._last_news = self.loop.time()
        self._changed[mailbox] = None
        self._nudge()

    def _nudge(self) -> None:
        if self._wake is not None and not self._nudged:
            self._nudged = True
            self._streams.pacer.run(self._rouse)

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def end(self, choice: int) -> None:
        """The handler has all it wants of this choice.  An engine that still computes it is told to stop."""
        mailbox = self.mailboxes[choice]
        if mailbox.closed:
            return
        mailbox.closed = True
        mailbox.take()
        self._changed.pop(mailbox, None)
        self._unfinished -= 1
        prompt, index = divmod(choice, self._n)
        self._streams.stop_one(self.orders[prompt], index)

    def end_all(self, finish: Finish) -> None:
        """End every continuation that still runs: its deadline passed, or this gateway must go."""
        for mailbox in self.mailboxes:
            if not (mailbox.ended or mailbox.closed):
                mailbox.fail(finish)
                self._notify(mailbox)

    def hand_over(self) -> None:
        self._moved = True
        self._nudge()

    def _beat(self) -> None:
        """One timer a request, re-armed lazily, so that a heartbeat costs tokens nothing."""
        silent = self.loop.time() - self._last_news
        if silent >= self._heartbeat_s:
            self._last_news = self.loop.time()
            silent = 0.0
            self._nudge()
        due = self.loop.time() + self._heartbeat_s - silent
        self._timers[1] = self._streams.pacer.call_at(due, self._beat)


class Streams:
    """Every open request of this gateway, and its view of the engines."""

    def __init__(self, bus: GatewaySide, config: GatewayConfig, telemetry: Telemetry) -> None:
        self._bus, self._config, self._telemetry = bus, config, telemetry
        self.backlog = Backlog(config.backlog_mib * 2**20)
        self.pacer = Pacer()  # for whatever may concern every open request at once
        self._orders: dict[str, Order] = {}
        self._reading = 0  # orders that have a reader
        self._leaving = False  # this gateway goes: what is resumable waits at Redis for another one
        self._kept = 0.0  # when logs were last kept from going, in the event loop's time
        self._settled: list[Order] = []  # to be written to the ledger with the next reading
        self._looks = 0  # at the fleet, so far
        self.supervisor = Supervisor(
            Task("the token reader", self._read, lambda: self._bus.rounds),
            Task("the watch over the engines", self._watch, lambda: self._looks),
        )
        # Readings are stamped with this process's clock when they change: engines' clocks need not agree with it.
        self._loads: dict[str, tuple[int, EngineLoad]] = {}  # engine -> its own time_ms, load with ours
        self._heard_ms: dict[str, int] = {}  # engine -> unix time of its last exchange, on this process's clock
        self._queue = Queue(accepted=False, queued=0, queued_tokens=0, room_tokens=0, tenants={})
        self._oldest_ms = self._quarantined = 0  # as of the last look at the fleet
        self._read_ms = 0  # when it was read, on this process's clock
        # Why the bus cannot be used, one line by each part that found out; the part alone clears it when it succeeds.
        self._troubles = {"fleet": "the engines have not been looked up yet"}

    # -- life

    async def start(self) -> None:
        """Read the fleet once, then keep reading it and the tokens."""
        await self._refresh()
        self.supervisor.start()

    async def stop(self) -> None:
        """Stop reading; give the last cancels a moment to leave, and close the books."""
        self._leaving = True
        await self.supervisor.stop()
        await self._bus.withdrawn()  # bounded by the bus' own patience
        for order in list(self._orders.values()):
            self._close(order)
        with contextlib.suppress(BusDown):
            await self._settle()

    @property
    def trouble(self) -> str | None:
        """Why the bus cannot be used, one line; None: it can."""
        return self.supervisor.trouble or next(iter(self._troubles.values()), None)

    def __len__(self) -> int:
        """Orders that somebody reads."""
        return self._reading

    def end_all(self, finish: Finish) -> None:
        """End every open request, but hand those over whose clients may come back."""
        self._leaving = True
        for order in list(self._orders.values()):
            for reader, _ in order.readers:
                if reader.resumable:
                    self.pacer.run(reader.hand_over)
                else:
                    self.pacer.run(reader.end_all, finish)

    # -- requests

    @contextlib.asynccontextmanager
    async def open(
        self,
        requests: list[Generate],
        timeout_s: float,
        admit: Admit,
        *,
        record: bytes = b"",
        once: IdempotencyKey | None = None,
        resumable: bool = False,
    ) -> AsyncIterator[OpenRequest]:
        """A context in which the requests run; one for each prompt, all with the same `n`.

        `admit` decides on a reading of the fleet, and again on a newer one if the queue has grown past its excess.
        `record` is what `find` gives to whoever comes back.  Raises Refusal when there is no room or Redis does not
        take them, Before when a request with the key `once` came first; then none is queued."""
        opened = OpenRequest(self, [Order(one.id, one.n, one.tenant) for one in requests], resumable=resumable)
        deadline = opened.loop.time() + timeout_s
        self._enter(opened)
        queued = True  # if cancelled meanwhile, nobody knows
        try:
            try:
                await self._submit(requests, admit, record, once)
            except (Refusal, Before):
                queued = False
                raise
            opened.start(deadline, self._config.heartbeat_s)
            yield opened
        finally:
            opened.stop()
            self._leave(opened, queued)

    async def find(self, request_id: str) -> bytes | None:
        """The record of a request of any gateway, by the id its client knows; None: not known, or not any more.
        Raises Refusal(503)."""
        found = await self._ask(self._bus.attach(f"{request_id}.0", listen=False))
        return found.record if found is not None else None

    async def twin(self, once: IdempotencyKey) -> DuplicateRequest | None:
        """The request that came first with this idempotency key, if any.  Raises Refusal(503)."""
        return await self._ask(self._bus.twin(once))

    async def audit(self, patience_s: float) -> dict[str, str | None]:
        """See GatewaySide.audit.  Raises Refusal(503)."""
        return await self._ask(self._bus.audit(patience_s))

    async def release(self, once: IdempotencyKey, twin: DuplicateRequest) -> None:
        """Forget that `twin` came first: its answer is not to be had.  Raises Refusal(503)."""
        await self._ask(self._bus.release(once, twin.request_id))

    @contextlib.asynccontextmanager
    async def join(
        self, order_ids: list[str], had: Sequence[Sequence[int]], tenant: str, timeout_s: float
    ) -> AsyncIterator[OpenRequest]:
        """A context in which a request that was opened before, here or elsewhere, is read on.

        `had`: for each prompt, how many output tokens of each choice its client has already.  Raises Refusal: 410 where
        there is no log any more, 400 where it ended with less than that, 503 where it may grow again or without Redis.
        """
        orders = [
            self._orders.get(order_id) or Order(order_id, len(counts), tenant)
            for order_id, counts in zip(order_ids, had, strict=True)
        ]
        opened = OpenRequest(self, orders, resumable=True)
        self._enter(opened)
        try:
            for prompt, (order, counts) in enumerate(zip(orders, had, strict=True)):
                found = await self._ask(self._bus.attach(order.id))
                if found is None:
                    raise Refusal(410, "stream_gone", "this answer is not kept any longer")
                said = found.continuations
                short = [one for one, count in zip(said, counts, strict=False) if len(one.token_ids) < count]
                if len(said) != order.n or any(one.finish is not None for one in short):
                    raise Refusal(400, "invalid_event_id", "Last-Event-ID: the answer is not as long as that")
                if short:  # Redis has lost its end, which its engine sends again; or it never was so long
                    message = "Last-Event-ID: the answer is not as long as that yet"
                    raise Refusal(503, "answer_incomplete", message, retry_after_s=1.0)
                for index, one in enumerate(said):
                    if one.finish is not None:
                        order.ended(index)
                opened.resume(prompt, said, counts)
            opened.start(opened.loop.time() + timeout_s, self._config.heartbeat_s)
            yield opened
        finally:
            opened.stop()
            self._leave(opened, queued=True)

    def _enter(self, opened: OpenRequest) -> None:
        for prompt, order in enumerate(opened.orders):
            self._orders[order.id] = order
            self._stop_timer(order)
            self._reading += not order.readers
            order.readers.append((opened, prompt))
        self._telemetry.open_requests.set(self._reading)

    def _leave(self, opened: OpenRequest, queued: bool) -> None:
        for prompt, order in enumerate(opened.orders):
            order.readers.remove((opened, prompt))
            sent = opened.delivered[prompt * order.n : (prompt + 1) * order.n]
            order.delivered = list(map(max, order.delivered, sent))
            if order.readers:
                continue
            self._reading -= 1
            if not queued:
                del self._orders[order.id]
            elif not order.running:
                self._close(order)
            elif not opened.resumable:
                self._abandon(order)
            elif self._leaving:
                self._book(order)
            else:
                self._start_timer(order, self._config.resume_s, self._abandon)
        self._telemetry.open_requests.set(self._reading)
        boxes = opened.mailboxes
        self._telemetry.record_stream(sum(box.lost for box in boxes), sum(box.repeated for box in boxes))

    def _abandon(self, order: Order) -> None:
        """Nobody reads it, and nobody will."""
        order.running.clear()
        self.withdraw(order.id)
        self._close(order)

    def _close(self, order: Order) -> None:
        """Nobody reads it or computes it; what an engine has produced meanwhile is still on its way."""
        self._stop_timer(order)
        if order.unfinished and not self._leaving:
            self._start_timer(order, SETTLE_S, self._book)
        else:
            self._book(order)

    def _start_timer(self, order: Order, seconds: float, action: Callable[[Order], None]) -> None:
        """Call action(order) after `seconds`, unless the timer is stopped before."""
        order.timer = self.pacer.call_at(asyncio.get_running_loop().time() + seconds, action, order)

    def _stop_timer(self, order: Order) -> None:
        if order.timer is not None:
            order.timer.cancel()
            order.timer = None

    def _book(self, order: Order) -> None:
        self._stop_timer(order)
        del self._orders[order.id]
        self._settled.append(order)

    async def _settle(self) -> None:
        """Write to the ledger what has been delivered; it knows itself what was generated.  Raises BusDown."""
        while settled := self._settled[:SETTLE_COUNT]:
            for usage in await self._bus.settle([(order.id, order.tenant, order.delivered) for order in settled]):
                self._telemetry.record_usage(usage)
            del self._settled[: len(settled)]

    async def _submit(self, requests: list[Generate], admit: Admit, record: bytes, once: IdempotencyKey | None) -> None:
        """Queue one client's requests, all or none, if `admit` lets them.  Raises Refusal: its own, or 503; Before."""
        returning = False
        for _ in range(ATTEMPTS):
            if self.trouble is not None:  # known: nobody is kept waiting to hear it
                raise unavailable()
            try:
                excess_tokens = admit(self.fleet, returning)
            except Overloaded as refusal:
                if not await self._told_to_come_now(requests, refusal, broken=returning):
                    raise
                returning = True
                continue
            began = time.monotonic()
            submit = self._bus.submit(*requests, excess_tokens=excess_tokens, record=record, once=once)
            queue = await self._ask(submit, "submit")
            self._telemetry.record_redis("submit", time.monotonic() - began)
            self._note_queue(queue)
            if queue.twin is not None:
                raise Before(queue.twin)
            if queue.accepted:
                return
        raise Refusal(429, "rate_limit_exceeded", "overloaded: the queue fills faster than it is read", retry_after_s=1)

    async def _told_to_come_now(self, requests: list[Generate], refusal: Overloaded, *, broken: bool) -> bool:
        """If these were not, or were and can't be let in (`broken`), the refusal says from here on when they may come.
        Raises Refusal(503)."""
        if refusal.terms is None:
            return False
        pause_ms = await self._ask(self._bus.promise(*requests, terms=refusal.terms, broken=broken), "submit")
        if pause_ms:
            refusal.retry_after_s = pause_ms / 1000
        return pause_ms == 0

    async def _ask(self, reply: Awaitable[T], part: str = "") -> T:
        """Raises Refusal(503); new requests are refused from then on if `part` names one of the `_troubles`."""
        try:
            return await reply
        except BusDown as error:
            if part:
                self._troubles[part] = str(error)
            raise unavailable() from None

    def stop_one(self, order: Order, index: int) -> None:
        """Nobody wants more of this continuation."""
        if index in order.running:
            order.running.discard(index)
            self.withdraw(order.id, index if order.running else -1)

    def withdraw(self, order_id: str, index: int = -1) -> None:
        """Stop an order, unless another gateway reads it, or one of its continuations.  Never waits: the caller may be
        cancelled."""
        self._bus.withdraw(order_id, index)

    # -- tokens and the fleet

    async def _read(self) -> None:
        """The only consumer of this gateway's token stream.  Started again it sees what it had not dealt with."""
        async with contextlib.aclosing(self._bus.batches()) as batches:
            async for batch in batches:
                first, *later = batch.split(DELIVER_COUNT)
                self.deliver(first)
                for part in later:
                    await asyncio.sleep(0)  # other tasks of the event loop run
                    self.deliver(part)

    def deliver(self, batch: TokenBatch) -> None:
        """Spread one step's tokens over the mailboxes.  Deltas of orders that are over are dropped."""
        orders = self._orders
        for delta in batch.deltas:
            order = orders.get(delta.id)
            if order is not None:
                order.put(delta)
                if delta.finish is not None and not order.unfinished and not order.readers:
                    self._book(order)
        if batch.load is not None:
            self._note(batch.load)

    async def refill(self, order_id: str, mailbox: Mailbox, index: int) -> None:
        """Read what a mailbox has missed, or had no room for, from the log.  Waits for Redis as long as it takes."""
        clock = asyncio.get_running_loop().time
        until = math.inf
        while mailbox.behind:
            try:
                said = await self._bus.log(order_id, index, mailbox.at, mailbox.refill_tokens)
            except BusDown:
                until = math.inf
            else:
                # The log was longer once: its engine sends again what Redis has lost, or another computes it.
                until = min(until, clock() + RESEND_S)
                resent = said is None or said.token_ids or said.finish is not None
                if mailbox.behind and (resent or clock() >= until):  # still: its deadline may have come meanwhile
                    mailbox.refill(said)
                    continue
            await asyncio.sleep(self._config.fleet_s)

    def _note(self, load: EngineLoad) -> None:
        known = self._loads.get(load.engine)
        if known is None or known[0] != load.time_ms:
            ours = msgspec.structs.replace(load, time_ms=steady_ms())
            self._loads[load.engine] = (load.time_ms, ours)
            self._heard_ms[load.engine] = ours.time_ms

    def _note_queue(self, queue: Queue) -> None:
        self._queue, self._read_ms = queue, steady_ms()

    async def _refresh(self) -> None:
        """Read the fleet, and do what its reading asks for.  Each part's trouble stays until the part succeeds."""
        began = time.monotonic()
        try:
            fleet = await self._bus.fleet()
        except BusDown as error:
            self._troubles["fleet"] = str(error)
            return
        self._telemetry.record_redis("fleet", time.monotonic() - began)
        for load in fleet.engines:
            self._note(load)
        ahead_ms = steady_ms() - fleet.time_ms  # of this process's clock
        alive = {load.engine for load in fleet.engines}
        for engine in self._loads.keys() - alive:
            del self._loads[engine]
        self._heard_ms = {engine: heard + ahead_ms for engine, heard in fleet.heard_ms.items()}
        self._note_queue(Queue(False, fleet.queued, fleet.queued_tokens, fleet.room_tokens, fleet.tenants))
        self._troubles.pop("fleet", None)
        self._oldest_ms, self._quarantined = fleet.oldest_ms, fleet.quarantined
        self._telemetry.record_fleet(self.fleet)
        self._telemetry.record_backlog(self.backlog.held)
        self._telemetry.clock_skew.set(self._bus.clock.skew_s)
        try:
            if fleet.forgotten:
                await self._listen_again()
            await self._settle()
            await self._keep()
            self._troubles.pop("ledger", None)
        except BusDown as error:
            self._troubles["ledger"] = str(error)
        if "submit" in self._troubles:  # requests are refused until it is cleared
            try:
                await self._bus.probe()
                del self._troubles["submit"]
            except BusDown as error:
                self._troubles["submit"] = str(error)

    async def _listen_again(self) -> None:
        """Others have taken this gateway for dead (it was stopped, or Redis was away), or Redis has lost what it had
        acknowledged: what its requests have said meanwhile is in their logs.  Who has none there is told."""
        orders = [order for order in self._orders.values() if order.readers and order.unfinished]
        for at in range(0, len(orders), ATTACH_COUNT):  # one after the other, 16,000 took longer than a heartbeat may
            await asyncio.gather(*map(self._listen_again_to, orders[at : at + ATTACH_COUNT]))

    async def _listen_again_to(self, order: Order) -> None:
        queued = [reader for reader, _ in order.readers if reader.started]  # the others' submit is under way
        found = await self._bus.attach(order.id)
        for index, said in enumerate(found.continuations if found is not None else ()):
            order.put(Delta(order.id, len(said.token_ids), [], said.finish, index))
        for reader in queued if found is None else ():
            reader.end_all(FORGOTTEN)

    async def _keep(self) -> None:
        """What is over and still read must not leave the log under its reader."""
        now = asyncio.get_running_loop().time()
        if now - self._kept > self._config.retain_s / 3:
            self._kept = now
            if over := [order.id for order in self._orders.values() if order.readers and not order.unfinished]:
                await self._bus.keep(over)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.fleet_s)
            await self._refresh()
            self._looks += 1

    @property
    def fleet(self) -> Fleet:
        """The engines with a live lease, `time_ms` on this process's clock, and the queue."""
        loads, queue = [load for _, load in self._loads.values()], self._queue
        return Fleet(
            loads,
            queue.queued,
            queue.queued_tokens,
            self._read_ms,
            queue.room_tokens,
            queue.tenants,
            oldest_ms=self._oldest_ms,
            quarantined=self._quarantined,
            heard_ms=dict(self._heard_ms),
        )

    def redis_ms(self) -> int:
        """Unix time in ms on Redis' clock, which deadlines and request ids are in."""
        return self._bus.clock.redis_ms()

    @property
    def fingerprint(self) -> str | None:
        """What answers carry as system_fingerprint: changes when the weights do."""
        return next((f"fp_{load.fingerprint[:16]}" for _, load in self._loads.values()), None)


def unavailable() -> Refusal:
    return Refusal(503, "queue_unavailable", "the request queue is not reachable", retry_after_s=2.0)
