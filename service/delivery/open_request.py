"""One client's request while it is answered, and the submissions that engines work on for it.

    OpenRequest (one client) --1..n--> Submission (one prompt) --1..n--> choices, one mailbox per choice and reader

Several open requests may read one submission: the original request, its retry, and a client that resumed the answer.
`streams.py` routes deltas to the submissions; the request's own handler iterates over the `OpenRequest`.
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
    """Raised when this gateway shuts down and the client can resume: another gateway will continue the answer."""


class Upstream(Protocol):
    """The methods of `Submissions` that an open request uses."""

    backlog: Backlog
    pacer: Pacer

    async def refill(self, submission_id: str, mailbox: Mailbox, index: int) -> None:
        """Read from the token log the tokens that a mailbox lacks."""

    def stop_one(self, submission: Submission, index: int) -> None:
        """Withdraw one choice that no client reads any more."""


class Submission:
    """One prompt of a request, as this gateway knows it: its readers at this gateway, and its unfinished choices."""

    __slots__ = ("delivered", "id", "n", "readers", "running", "tenant", "timer", "unfinished")

    def __init__(self, submission_id: str, n: int, tenant: str) -> None:
        self.id, self.n, self.tenant = submission_id, n, tenant
        self.readers: list[tuple[OpenRequest, int]] = []  # (reader, index of the prompt within its request)
        self.unfinished = set(range(n))  # choices whose Finish has not arrived
        self.running = set(range(n))  # unfinished choices that were not withdrawn
        self.delivered = [0] * n  # output tokens sent to a client, per choice: the maximum over all readers
        self.timer: Timer | None = None  # set by `Submissions` while the submission has no reader

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

    Each iteration returns the mailboxes that have changed since the last one.  An empty list means that the client was
    sent nothing for `heartbeat_s`, or that announce() was called.  The iteration ends when every choice was closed
    with `end`.
    Raises HandedOver when this gateway shuts down and the client may resume at another gateway."""

    def __init__(self, streams: Upstream, submissions: list[Submission], *, resumable: bool) -> None:
        """`resumable`: if the client loses its connection, the request keeps running, so that the client can resume."""
        self._streams, self.submissions, self.resumable = streams, submissions, resumable
        self.loop = asyncio.get_running_loop()
        self._n = submissions[0].n
        self.mailboxes = [Mailbox(choice, streams.backlog) for choice in range(len(submissions) * self._n)]
        self.delivered = [0] * len(self.mailboxes)  # output tokens sent to this client, per choice
        self._unfinished = len(self.mailboxes)
        self._heartbeat_s = math.inf
        self._changed: dict[Mailbox, None] = {}  # changed mailboxes, in order of their first change
        self._given: list[Mailbox] = []  # mailboxes that the last iteration returned
        self._wake: asyncio.Future[None] | None = None
        self._nudged = False  # `_wake` is done, or a call that sets it is scheduled
        self._handed_over = False
        self.waiting: Waiting | None = None  # position in the queue; None for a resumed request
        self._announced = True  # the handler has run since the last announce()
        self._last_byte = self.loop.time()  # time of the last write to this client
        self._timers: list[Timer] = []

    @property
    def pacer(self) -> Pacer:
        """The limiter of work per turn of the event loop."""
        return self._streams.pacer

    def start(self, deadline: float, heartbeat_s: float) -> None:
        """Start the timers for deadline and heartbeat.  `deadline` is in the event loop's time."""
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
        """Record how many tokens of each choice the client has, including tokens sent on earlier connections.

        Called after every write to the client, keep-alives included."""
        self.delivered = tokens.copy()
        self._last_byte = self.loop.time()

    def silent(self) -> bool:
        """Return whether nothing was written to the client for `heartbeat_s`, so that a keep-alive is due."""
        return self.loop.time() - self._last_byte >= self._heartbeat_s

    def stop(self) -> None:
        """Cancel the timers and drop the undelivered tokens: this client reads no more."""
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
                await self._streams.refill(
                    self.submissions[mailbox.choice // self._n].id, mailbox, mailbox.choice % self._n
                )
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
        """Begin each choice of one prompt after the first `had` tokens, which the client already has."""
        for index, (output, count) in enumerate(zip(logged, had, strict=True)):
            mailbox = self.mailboxes[prompt * self._n + index]
            mailbox.resume(output, count)
            self.delivered[mailbox.choice] = count
            if mailbox.ended or mailbox.next > mailbox.at:
                self._notify(mailbox)

    def wait_in_queue(self, waiting: Waiting) -> None:
        """Record where the request joined the queue.  If it is in the late lane, its client is notified at once."""
        self.waiting = waiting
        if self._changed:  # the first tokens arrived before the reply to the submit
            waiting.end()
        elif waiting.lane == "late":
            self.announce()

    def announce(self) -> None:
        """Wake the handler with an empty list, so that it sends its client the place in the queue or a keep-alive."""
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
        """Close a choice whose answer is complete.  If an engine still computes it, the choice is withdrawn."""
        mailbox = self.mailboxes[choice]
        if mailbox.closed:
            return
        mailbox.closed = True
        mailbox.take()
        self._changed.pop(mailbox, None)
        self._unfinished -= 1
        prompt, index = divmod(choice, self._n)
        self._streams.stop_one(self.submissions[prompt], index)

    def end_all(self, finish: Finish) -> None:
        """End every running choice with `finish`, because the deadline has passed or this gateway shuts down."""
        for mailbox in self.mailboxes:
            if not (mailbox.ended or mailbox.closed):
                mailbox.fail(finish)
                self._notify(mailbox)

    def hand_over(self) -> None:
        """Make the iteration raise HandedOver."""
        self._handed_over = True
        self._nudge()

    def _beat(self) -> None:
        """Wake the handler if nothing was written to the client for `heartbeat_s`.

        A request has one timer, which is set again only when it fires, so tokens cost no timer work.  Tokens that the
        handler holds back (a possible stop string) do not count as a write."""
        now = self.loop.time()
        due = self._last_byte + self._heartbeat_s
        if due <= now:
            due = now + self._heartbeat_s
            self.announce()
        self._timers[1] = self._streams.pacer.call_at(due, self._beat)
