"""The orders of this gateway: which clients read each, and what becomes of one that no client reads.

    enter --> has readers --leave--+--> its answer is over ------------------------------------> settle
                  ^                +--> the client may resume --resume_s--+                        ^
                  +--- enter ------|------------------------              v                        |
                                   +--> it may not -------------------> abandon --SETTLE_S, or its last token
                                                                     (withdrawn)

There is one way to cancel an order: `Orders.withdraw`.  A client that leaves early, for any reason (it disconnected,
its deadline passed, an error), reaches it through `leave`.  A choice that met its stop string while others still run
reaches it through `OpenRequest.end`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import Delta, Finish
from quire.service.common.metrics import OPEN_REQUESTS, TOKENS_LOST, TOKENS_REPEATED, Telemetry
from quire.service.common.pacing import Pacer
from quire.service.config import GatewayConfig
from quire.service.delivery.mailbox import Backlog, Mailbox
from quire.service.delivery.open_request import OpenRequest, Order
from quire.service.delivery.usage_ledger import UsageLedger

SETTLE_S = 10.0  # how long a withdrawn order waits for its engine's last delta, before it enters the ledger
ATTACH_COUNT = 64  # orders whose logs are read at once, after Redis may have lost something
RESEND_S = 10.0  # seconds to wait for an engine's next sync after Redis lost its tokens
REQUEST_LOST = Finish("error", message="Redis has lost this request: send it again")


class Orders:
    """Every order that this gateway knows.  What open requests need from the gateway (`open_request.Upstream`)."""

    def __init__(self, bus: GatewaySide, config: GatewayConfig, telemetry: Telemetry, ledger: UsageLedger) -> None:
        self._bus, self._config, self._telemetry, self._ledger = bus, config, telemetry, ledger
        self.backlog = Backlog(config.backlog_mib * 2**20)
        self.pacer = Pacer()  # pacer of work that may concern all open requests at once
        self._orders: dict[str, Order] = {}
        self.reading = 0  # orders that have a reader
        self.leaving = False  # shutting down: resumable requests stay in Redis for another gateway
        self._kept = 0.0  # when the retention of logs was last extended, in the event loop's time

    def get(self, order_id: str) -> Order | None:
        """Return an order; None if this gateway does not know it."""
        return self._orders.get(order_id)

    def end_all(self, finish: Finish) -> None:
        """End every open request with `finish`, but hand over those whose clients may resume."""
        self.leaving = True
        for order in list(self._orders.values()):
            for reader, _ in order.readers:
                if reader.resumable:
                    self.pacer.call_soon(reader.hand_over)
                else:
                    self.pacer.call_soon(reader.end_all, finish)

    def close_all(self) -> None:
        """Settle every order now: the gateway stops."""
        for order in list(self._orders.values()):
            self._close(order)

    def deliver(self, deltas: list[Delta]) -> None:
        """Spread deltas over the mailboxes.  Those of unknown orders are dropped: they are over."""
        orders = self._orders
        for delta in deltas:
            order = orders.get(delta.id)
            if order is not None:
                order.deliver(delta)
                if delta.finish is not None and not order.unfinished and not order.readers:
                    self._settle(order)

    def enter(self, opened: OpenRequest) -> None:
        """Add a client to the readers of its orders."""
        for prompt, order in enumerate(opened.orders):
            self._orders[order.id] = order
            self._stop_timer(order)
            self.reading += not order.readers
            order.readers.append((opened, prompt))
        self._telemetry.set(OPEN_REQUESTS, self.reading)

    def leave(self, opened: OpenRequest, queued: bool) -> None:
        """Remove a client from the readers of its orders.  `queued`: Redis may have the orders."""
        for prompt, order in enumerate(opened.orders):
            order.readers.remove((opened, prompt))
            sent = opened.delivered[prompt * order.n : (prompt + 1) * order.n]
            order.delivered = list(map(max, order.delivered, sent))
            if order.readers:
                continue
            self.reading -= 1
            if not queued:
                del self._orders[order.id]
            elif not order.running:
                self._close(order)
            elif not opened.resumable:
                self._abandon(order)
            elif self.leaving:
                self._settle(order)
            else:
                self._start_timer(order, self._config.resume_s, self._abandon)
        self._telemetry.set(OPEN_REQUESTS, self.reading)
        self._telemetry.count(TOKENS_LOST, sum(box.lost for box in opened.mailboxes))
        self._telemetry.count(TOKENS_REPEATED, sum(box.repeated for box in opened.mailboxes))

    def _abandon(self, order: Order) -> None:
        """Withdraw an order that no client reads or will resume."""
        order.running.clear()
        self.withdraw(order.id)
        self._close(order)

    def _close(self, order: Order) -> None:
        """Settle an order that has no reader and is not computed, once its last tokens have arrived."""
        self._stop_timer(order)
        if order.unfinished and not self.leaving:
            self._start_timer(order, SETTLE_S, self._settle)
        else:
            self._settle(order)

    def _start_timer(self, order: Order, seconds: float, action: Callable[[Order], None]) -> None:
        """Call action(order) after `seconds`, unless the timer is stopped before."""
        order.timer = self.pacer.call_at(asyncio.get_running_loop().time() + seconds, action, order)

    def _stop_timer(self, order: Order) -> None:
        if order.timer is not None:
            order.timer.cancel()
            order.timer = None

    def _settle(self, order: Order) -> None:
        """Forget an order here; its usage enters the ledger."""
        self._stop_timer(order)
        del self._orders[order.id]
        self._ledger.add(order)

    def stop_one(self, order: Order, index: int) -> None:
        """Stop one choice that no client reads any more."""
        if index in order.running:
            order.running.discard(index)
            self.withdraw(order.id, index if order.running else -1)

    def withdraw(self, order_id: str, index: int = -1) -> None:
        """Stop an order, or one of its choices, unless another gateway reads it.

        Never waits: the caller's task may be cancelled."""
        self._bus.withdraw(order_id, index)

    async def refill(self, order_id: str, mailbox: Mailbox, index: int) -> None:
        """Read from the log what a mailbox missed or had no space for.  Waits for Redis as long as it takes."""
        clock = asyncio.get_running_loop().time
        until = math.inf
        while mailbox.behind:
            try:
                logged = await self._bus.log(order_id, index, mailbox.at, mailbox.refill_tokens)
            except BusDown:
                until = math.inf
            else:
                # The log was longer once: its engine sends again what Redis has lost, or another computes it.
                until = min(until, clock() + RESEND_S)
                resent = logged is None or logged.token_ids or logged.finish is not None
                if mailbox.behind and (resent or clock() >= until):  # still: its deadline may have passed meanwhile
                    mailbox.refill(logged)
                    continue
            await asyncio.sleep(self._config.fleet_s)

    async def listen_again(self) -> None:
        """Read from the logs what open requests missed.

        Engines took this gateway for dead (it was stopped, or Redis was away), or Redis has lost what it had
        acknowledged.  Requests without a log end with REQUEST_LOST."""
        orders = [order for order in self._orders.values() if order.readers and order.unfinished]
        for at in range(0, len(orders), ATTACH_COUNT):  # one after the other, 16,000 took longer than a heartbeat may
            await asyncio.gather(*map(self._listen_again_to, orders[at : at + ATTACH_COUNT]))

    async def _listen_again_to(self, order: Order) -> None:
        queued = [reader for reader, _ in order.readers if reader.started]  # the submit of the others is under way
        found = await self._bus.attach(order.id)
        for index, logged in enumerate(found.continuations if found is not None else ()):
            order.deliver(Delta(order.id, len(logged.token_ids), [], logged.finish, index))
        for reader in queued if found is None else ():
            reader.end_all(REQUEST_LOST)

    async def extend_retention(self) -> None:
        """Keep the logs of finished orders that still have a reader."""
        now = asyncio.get_running_loop().time()
        if now - self._kept > self._config.retain_s / 3:
            self._kept = now
            if over := [order.id for order in self._orders.values() if order.readers and not order.unfinished]:
                await self._bus.keep(over)
