"""One client's request while it is answered, and the orders that engines work on for it.

    OpenRequest (one client) --1..n--> Order (one prompt) --1..n--> choices, one mailbox each per reader

Several open requests may read one order: the first client, its retry, and a client that resumed the answer.
`streams.py` routes deltas to the orders; the request's own handler iterates over the `OpenRequest`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Protocol

from quire.engine.wire.messages import Delta, Finish
from quire.engine.wire.token_log import LoggedOutput
from quire.service.common.pacing import Pacer, Timer
from quire.service.delivery.mailbox import Backlog, Mailbox
from quire.service.delivery.queue_updates import Waiting

log = logging.getLogger("quire.gateway")


class HandedOver(ConnectionError):
    """This gateway is shutting down, and another gateway will continue the answer: the client knows how to resume."""


class Upstream(Protocol):
    """What an open request needs from the gateway's streams."""

    backlog: Backlog
    pacer: Pacer

    async def refill(self, order_id: str, mailbox: Mailbox, index: int) -> None:
        """Read from the token log what a mailbox missed."""

    def stop_one(self, order: Order, index: int) -> None:
        """Stop one choice that no client reads any more."""


class Order:
    """One prompt of a request, as this gateway knows it: its readers here, and what its engine still computes."""

    __slots__ = ("delivered", "id", "n", "readers", "running", "tenant", "timer", "unfinished")

    def __init__(self, order_id: str, n: int, tenant: str) -> None:
        self.id, self.n, self.tenant = order_id, n, tenant
        self.readers: list[tuple[OpenRequest, int]] = []  # (reader, number of the prompt within its request)
        self.unfinished = set(range(n))  # choices whose Finish has not arrived
        self.running = set(range(n))  # those of them that no withdrawal was sent for
        self.delivered = [0] * n  # output tokens of each that were sent to a client; the furthest reader counts
        self.timer: Timer | None = None  # runs while the order has no reader

    def mark_ended(self, index: int) -> None:
        """Record that an engine has finished a choice."""
        self.unfinished.discard(index)
        self.running.discard(index)

    def deliver(self, delta: Delta) -> None:
        """Pass a delta on to every reader."""
        if not 0 <= delta.index < self.n:
            log.error("ignored a delta of %s: it is for choice %d of %d", self.id, delta.index, self.n)
            return
        if delta.finish is not None:
            self.mark_ended(delta.index)
        for reader, prompt in self.readers:
            reader.deliver(prompt, delta)


class OpenRequest:
    """One client's request while it is answered.

    Iterate for lists of the mailboxes that changed since the last iteration.  An empty list means that the client was
    sent nothing for `heartbeat_s`, or that announce() was called.  The iteration ends when every choice was closed
    with `end`.
    Raises HandedOver when this gateway shuts down and the client may resume elsewhere."""

    def __init__(self, streams: Upstream, orders: list[Order], *, resumable: bool) -> None:
        """`resumable`: the client may lose its connection and resume."""
        self._streams, self.orders, self.resumable = streams, orders, resumable
        self.loop = asyncio.get_running_loop()
        self._n = orders[0].n
        self.mailboxes = [Mailbox(choice, streams.backlog) for choice in range(len(orders) * self._n)]
        self.delivered = [0] * len(self.mailboxes)  # output tokens of each choice that were sent to this client, in all
        self._unfinished = len(self.mailboxes)
        self._heartbeat_s = math.inf
        self._changed: dict[Mailbox, None] = {}  # changed mailboxes, in order of their first change
        self._given: list[Mailbox] = []  # what the last iteration returned
        self._wake: asyncio.Future[None] | None = None
        self._nudged = False  # `_wake` is done, or a call that sets it is scheduled
        self._handed_over = False
        self.waiting: Waiting | None = None  # position in the queue; None: a client resumed it
        self._announced = True  # whether its handler has run since announce()
        self._last_byte = self.loop.time()  # when this client was sent something
        self._timers: list[Timer] = []

    @property
    def pacer(self) -> Pacer:
        """What bounds the work of one turn of the loop."""
        return self._streams.pacer

    def start(self, deadline: float, heartbeat_s: float) -> None:
        """Start the timers of deadline and heartbeat.  `deadline` is in the event loop's time."""
        self._heartbeat_s = heartbeat_s
        self._timers = [
            self._streams.pacer.call_at(deadline, self.end_all, Finish("deadline")),
            self._streams.pacer.call_at(self.loop.time() + heartbeat_s, self._beat),
        ]

    @property
    def started(self) -> bool:
        """Whether Redis has accepted the request."""
        return bool(self._timers)

    def record_sent(self, tokens: list[int]) -> None:
        """Record how many tokens of each choice the client has, those of earlier connections included.

        Called for everything that is written to the client, also what fills a silence."""
        self.delivered = tokens.copy()
        self._last_byte = self.loop.time()

    def silent(self) -> bool:
        """Return whether the client was sent nothing for so long that something must fill the silence."""
        return self.loop.time() - self._last_byte >= self._heartbeat_s

    def stop(self) -> None:
        """Release what waits for this client: it reads no more."""
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
        if not self._changed and not self._handed_over and self._announced:
            self._nudged = False
            self._wake = self.loop.create_future()
            await self._wake
            self._wake = None
        if self._handed_over:
            raise HandedOver("this gateway is shutting down")
        self._announced = True
        changed, self._changed = list(self._changed), {}
        for mailbox in changed:
            if mailbox.behind:
                await self._streams.refill(self.orders[mailbox.choice // self._n].id, mailbox, mailbox.choice % self._n)
        self._given = changed
        return changed

    def deliver(self, prompt: int, delta: Delta) -> None:
        """Merge a delta into its mailbox and wake the handler.  Called by the reader task."""
        mailbox = self.mailboxes[prompt * self._n + delta.index]
        if delta.token_ids and self.waiting is not None and self.waiting.waited_s is None:
            self.waiting.end()
        if mailbox.merge(delta):
            self._notify(mailbox)

    def resume(self, prompt: int, logged: list[LoggedOutput], had: Sequence[int]) -> None:
        """Begin the choices of one prompt after the tokens that the client already has: `had` of each."""
        for index, (output, count) in enumerate(zip(logged, had, strict=True)):
            mailbox = self.mailboxes[prompt * self._n + index]
            mailbox.resume(output, count)
            self.delivered[mailbox.choice] = count
            if mailbox.ended or mailbox.next > mailbox.at:
                self._notify(mailbox)

    def wait_in_queue(self, waiting: Waiting) -> None:
        """Record where the request joined the queue.  A late one is announced to its client at once."""
        self.waiting = waiting
        if self._changed:  # its first tokens were quicker than the reply to its submit
            waiting.end()
        elif waiting.lane == "late":
            self.announce()

    def announce(self) -> None:
        """End the handler's wait with an empty list now: it tells its client where the request stands."""
        self._announced = False
        self._nudge()

    def _notify(self, mailbox: Mailbox) -> None:
        self._changed[mailbox] = None
        self._nudge()

    def _nudge(self) -> None:
        if self._wake is not None and not self._nudged:
            self._nudged = True
            self._streams.pacer.call_soon(self._rouse)

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def end(self, choice: int) -> None:
        """Close a choice whose answer is complete.  An engine that still computes it is stopped."""
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
        """End every choice that still runs: its deadline has passed, or this gateway shuts down."""
        for mailbox in self.mailboxes:
            if not (mailbox.ended or mailbox.closed):
                mailbox.fail(finish)
                self._notify(mailbox)

    def hand_over(self) -> None:
        """Make the iteration raise HandedOver."""
        self._handed_over = True
        self._nudge()

    def _beat(self) -> None:
        """Wake the handler after a silence.  One timer a request, re-armed lazily: a token costs it nothing.

        The silence is the client's: tokens that are held back do not end it."""
        now = self.loop.time()
        due = self._last_byte + self._heartbeat_s
        if due <= now:
            due = now + self._heartbeat_s
            self.announce()
        self._timers[1] = self._streams.pacer.call_at(due, self._beat)
