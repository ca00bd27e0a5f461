"""The orders (prompts of requests) of this gateway: which clients read each, and its end when no client reads it.

    enter --> has readers --leave--+--> its answer is over ------------------------------------> settle
                  ^                +--> the client may resume --resume_s--+                        ^
                  +--- enter ------|------------------------              v                        |
                                   +--> it may not resume ------------> abandon --SETTLE_S, or its last token
                                                                     (withdrawn)

There is one way to cancel an order: `Orders.withdraw`.  `leave` calls it when a client leaves early for any reason
(disconnect, deadline, error).  `OpenRequest.end` calls it for a choice that met its stop string while other choices
still run.
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

SETTLE_S = 10.0  # seconds that a withdrawn order waits for its engine's last delta, before it enters the ledger
ATTACH_COUNT = 64  # maximum number of logs read at once after Redis may have lost data
RESEND_S = 10.0  # seconds to wait for an engine's next sync after Redis lost its tokens
REQUEST_LOST = Finish("error", message="Redis has lost this request: send it again")


class Orders:
    """Every order that this gateway knows.  Implements `open_request.Upstream`."""

    def __init__(self, bus: GatewaySide, config: GatewayConfig, telemetry: Telemetry, ledger: UsageLedger) -> None:
        self._bus, self._config, self._telemetry, self._ledger = bus, config, telemetry, ledger
        self.backlog = Backlog(config.backlog_mib * 2**20)
        self.pacer = Pacer()  # spreads work for all open requests over several turns of the event loop
        self._orders: dict[str, Order] = {}
        self.reading = 0  # number of orders that have a reader
        self.leaving = False  # True at shutdown: resumable requests stay in Redis for another gateway
        self._kept = 0.0  # when the retention of logs was last extended, in the event loop's time

    def get(self, order_id: str) -> Order | None:
        """Return an order; None if this gateway does not know it."""
        return self._orders.get(order_id)

    def end_all(self, finish: Finish) -> None:
        """End every open request with `finish`; a resumable request is left to another gateway instead."""
        self.leaving = True
        for order in list(self._orders.values()):
            for reader, _ in order.readers:
                if reader.resumable:
                    self.pacer.call_soon(reader.hand_over)
                else:
                    self.pacer.call_soon(reader.end_all, finish)

    def close_all(self) -> None:
        """Settle every order at once, since the gateway stops."""
        for order in list(self._orders.values()):
            self._close(order)

    def deliver(self, deltas: list[Delta]) -> None:
        """Spread deltas over the mailboxes.  Deltas of unknown orders are dropped: those orders have ended."""
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
        """Remove a client from the readers of its orders.  `queued`: the orders may be in Redis."""
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
        """Withdraw an order that no client reads and none will resume."""
        order.running.clear()
        self.withdraw(order.id)
        self._close(order)

    def _close(self, order: Order) -> None:
        """Settle an order that has no reader and was withdrawn or finished, once its last tokens have arrived."""
        self._stop_timer(order)
        if order.unfinished and not self.leaving:
            self._start_timer(order, SETTLE_S, self._settle)
        else:
            self._settle(order)

    def _start_timer(self, order: Order, seconds: float, action: Callable[[Order], None]) -> None:
        """Call action(order) after `seconds`, unless `_stop_timer` is called before."""
        order.timer = self.pacer.call_at(asyncio.get_running_loop().time() + seconds, action, order)

    def _stop_timer(self, order: Order) -> None:
        if order.timer is not None:
            order.timer.cancel()
            order.timer = None

    def _settle(self, order: Order) -> None:
        """Remove an order from this gateway, and add its usage to the ledger."""
        self._stop_timer(order)
        del self._orders[order.id]
        self._ledger.add(order)

    def stop_one(self, order: Order, index: int) -> None:
        """Withdraw one choice that no client reads any more."""
        if index in order.running:
            order.running.discard(index)
            self.withdraw(order.id, index if order.running else -1)

    def withdraw(self, order_id: str, index: int = -1) -> None:
        """Cancel an order, or one of its choices, in the engine, unless another gateway reads it.

        Does not await, since the calling task may be cancelled."""
        self._bus.withdraw(order_id, index)

    async def refill(self, order_id: str, mailbox: Mailbox, index: int) -> None:
        """Read from the log the tokens that a mailbox lacks.  Retries until Redis answers."""
        clock = asyncio.get_running_loop().time
        until = math.inf
        while mailbox.behind:
            try:
                logged = await self._bus.log(order_id, index, mailbox.at, mailbox.refill_tokens)
            except BusDown:
                until = math.inf
            else:
                # An empty result means that Redis has lost tokens.  Wait until the engine sends or recomputes them.
                until = min(until, clock() + RESEND_S)
                resent = logged is None or logged.token_ids or logged.finish is not None
                if mailbox.behind and (resent or clock() >= until):  # `behind` again: the deadline may have passed
                    mailbox.refill(logged)
                    continue
            await asyncio.sleep(self._config.fleet_s)

    async def listen_again(self) -> None:
        """Read from the token logs the tokens that open requests missed.

        Called after engines considered this gateway dead (it was paused, or Redis was away), or after Redis lost
        acknowledged writes.  Requests without a log end with REQUEST_LOST."""
        orders = [order for order in self._orders.values() if order.readers and order.unfinished]
        # In batches: 16,000 logs read one by one took longer than the interval of heartbeats.
        for at in range(0, len(orders), ATTACH_COUNT):
            await asyncio.gather(*map(self._listen_again_to, orders[at : at + ATTACH_COUNT]))

    async def _listen_again_to(self, order: Order) -> None:
        queued = [reader for reader, _ in order.readers if reader.started]  # without readers whose submit is in flight
        found = await self._bus.attach(order.id)
        for index, logged in enumerate(found.choices if found is not None else ()):
            order.deliver(Delta(order.id, len(logged.token_ids), [], logged.finish, index))
        for reader in queued if found is None else ():
            reader.end_all(REQUEST_LOST)

    async def extend_retention(self) -> None:
        """Extend the TTL of the logs of finished orders that still have a reader."""
        now = asyncio.get_running_loop().time()
        if now - self._kept > self._config.retain_s / 3:
            self._kept = now
            if over := [order.id for order in self._orders.values() if order.readers and not order.unfinished]:
                await self._bus.keep(over)
