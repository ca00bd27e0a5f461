"""The submissions (prompts of requests) of this gateway: their readers, and their end when no client reads them.

    enter --> has readers --leave--+--> its answer is over ------------------------------------> settle
                  ^                +--> the client may resume --resume_s--+                        ^
                  +--- enter ------|------------------------              v                        |
                                   +--> it may not resume ------------> abandon --SETTLE_S, or its last token
                                                                     (withdrawn)

There is one way to cancel a submission: `Submissions.withdraw`.  `leave` calls it when a client leaves early for any
reason (disconnect, deadline, error).  `OpenRequest.end` calls it for a choice that met its stop string while other
choices still run.
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
from quire.service.delivery.mailbox import REQUEST_LOST, Backlog, Mailbox
from quire.service.delivery.open_request import OpenRequest, Submission
from quire.service.delivery.usage_ledger import UsageLedger

SETTLE_S = 10.0  # seconds to wait for a withdrawn submission's last delta before its usage enters the ledger
ATTACH_COUNT = 64  # maximum number of logs read at once after Redis may have lost data
RESEND_S = 10.0  # seconds to wait until an engine sends tokens again that Redis has lost


class Submissions:
    """Every submission that this gateway knows.  Implements `open_request.Upstream`."""

    def __init__(self, bus: GatewaySide, config: GatewayConfig, telemetry: Telemetry, ledger: UsageLedger) -> None:
        self._bus, self._config, self._telemetry, self._ledger = bus, config, telemetry, ledger
        self.backlog = Backlog(config.backlog_mib * 2**20)
        self.pacer = Pacer()  # spreads work for all open requests over several turns of the event loop
        self._submissions: dict[str, Submission] = {}
        self.reading = 0  # number of submissions that have a reader
        self.leaving = False  # True at shutdown: resumable requests stay in Redis for another gateway
        self._kept = 0.0  # when the retention of logs was last extended, in the event loop's time

    def get(self, submission_id: str) -> Submission | None:
        """Return a submission; None if this gateway does not know it."""
        return self._submissions.get(submission_id)

    def end_all(self, finish: Finish) -> None:
        """End every open request with `finish`; a resumable request is left to another gateway instead."""
        self.leaving = True
        for submission in list(self._submissions.values()):
            for reader, _ in submission.readers:
                if reader.resumable:
                    self.pacer.call_soon(reader.hand_over)
                else:
                    self.pacer.call_soon(reader.end_all, finish)

    def close_all(self) -> None:
        """Settle every submission at once, since the gateway stops."""
        for submission in list(self._submissions.values()):
            self._close(submission)

    def deliver(self, deltas: list[Delta]) -> None:
        """Spread deltas over the mailboxes.  Deltas of unknown submissions are dropped: these have ended."""
        submissions = self._submissions
        for delta in deltas:
            submission = submissions.get(delta.id)
            if submission is not None:
                submission.deliver(delta)
                if delta.finish is not None and not submission.unfinished and not submission.readers:
                    self._settle(submission)

    def enter(self, opened: OpenRequest) -> None:
        """Add a client to the readers of its submissions."""
        for prompt, submission in enumerate(opened.submissions):
            self._submissions[submission.id] = submission
            self._stop_timer(submission)
            if not submission.readers:
                self.reading += 1
                submission.running = set(submission.unfinished)  # also if a withdrawal of it was revoked
            submission.readers.append((opened, prompt))
        self._telemetry.set(OPEN_REQUESTS, self.reading)

    def leave(self, opened: OpenRequest, queued: bool) -> None:
        """Remove a client from the readers of its submissions.  `queued`: the submissions may be in Redis."""
        for prompt, submission in enumerate(opened.submissions):
            submission.readers.remove((opened, prompt))
            sent = opened.delivered[prompt * submission.n : (prompt + 1) * submission.n]
            submission.delivered = list(map(max, submission.delivered, sent))
            if submission.readers:
                continue
            self.reading -= 1
            if not queued:
                del self._submissions[submission.id]
            elif not submission.running:
                self._close(submission)
            elif not opened.resumable:
                self._abandon(submission)
            elif self.leaving:
                self._settle(submission)
            else:
                self._start_timer(submission, self._config.resume_s, self._abandon)
        self._telemetry.set(OPEN_REQUESTS, self.reading)
        self._telemetry.count(TOKENS_LOST, sum(box.lost for box in opened.mailboxes))
        self._telemetry.count(TOKENS_REPEATED, sum(box.repeated for box in opened.mailboxes))

    def _abandon(self, submission: Submission) -> None:
        """Withdraw a submission that no client reads and none will resume."""
        submission.running.clear()
        self.withdraw(submission.id)
        self._close(submission)

    def _close(self, submission: Submission) -> None:
        """Settle a submission that has no reader and was withdrawn or finished, once its last tokens have arrived."""
        self._stop_timer(submission)
        if submission.unfinished and not self.leaving:
            self._start_timer(submission, SETTLE_S, self._settle)
        else:
            self._settle(submission)

    def _start_timer(self, submission: Submission, seconds: float, action: Callable[[Submission], None]) -> None:
        """Call action(submission) after `seconds`, unless `_stop_timer` is called before."""
        submission.timer = self.pacer.call_at(asyncio.get_running_loop().time() + seconds, action, submission)

    def _stop_timer(self, submission: Submission) -> None:
        if submission.timer is not None:
            submission.timer.cancel()
            submission.timer = None

    def _settle(self, submission: Submission) -> None:
        """Remove a submission from this gateway, and add its usage to the ledger."""
        self._stop_timer(submission)
        del self._submissions[submission.id]
        self._ledger.add(submission)

    def stop_one(self, submission: Submission, index: int) -> None:
        """Withdraw one choice that no client reads any more."""
        if index in submission.running:
            submission.running.discard(index)
            self.withdraw(submission.id, index if submission.running else -1)

    def withdraw(self, submission_id: str, index: int = -1) -> None:
        """Cancel a submission, or one of its choices, in the engine, unless another gateway reads it.

        Does not await, since the calling task may be cancelled."""
        self._bus.withdraw(submission_id, index)

    async def refill(self, submission_id: str, mailbox: Mailbox, index: int) -> None:
        """Read from the log the tokens that a mailbox lacks.  Retries until Redis answers."""
        clock = asyncio.get_running_loop().time
        until = math.inf
        while mailbox.behind:
            try:
                logged = await self._bus.log(submission_id, index, mailbox.at, mailbox.refill_tokens)
            except BusDown:
                until = math.inf
            else:
                # An empty result means that Redis has lost tokens.  Wait until the engine sends or recomputes them.
                until = min(until, clock() + RESEND_S)
                resent = logged is None or logged.token_ids or logged.finish is not None
                if mailbox.behind and (resent or clock() >= until):  # not if the deadline has ended it
                    mailbox.refill(logged)
                    continue
            await asyncio.sleep(self._config.fleet_s)

    async def listen_again(self) -> None:
        """Read from the token logs the tokens that open requests missed.

        Called after engines considered this gateway dead (it was paused, or Redis was away), or after Redis lost
        acknowledged writes.  Requests without a log end with REQUEST_LOST."""
        submissions = [
            submission for submission in self._submissions.values() if submission.readers and submission.unfinished
        ]
        # Logs are read in batches: reading 16,000 one by one took longer than the interval of heartbeats.
        for at in range(0, len(submissions), ATTACH_COUNT):
            await asyncio.gather(*map(self._listen_again_to, submissions[at : at + ATTACH_COUNT]))

    async def _listen_again_to(self, submission: Submission) -> None:
        # A reader whose submit is in flight has no log yet, so the absence of one ends only `started` readers.
        queued = [reader for reader, _ in submission.readers if reader.started]
        found = await self._bus.attach(submission.id)
        for index, logged in enumerate(found.choices if found is not None else ()):
            submission.deliver(Delta(submission.id, len(logged.token_ids), [], logged.finish, index))
        for reader in queued if found is None else ():
            reader.end_all(REQUEST_LOST)

    async def extend_retention(self) -> None:
        """Extend the TTL of the logs of finished submissions that still have a reader."""
        now = asyncio.get_running_loop().time()
        if now - self._kept > self._config.retain_s / 3:
            self._kept = now
            if over := [
                submission.id
                for submission in self._submissions.values()
                if submission.readers and not submission.unfinished
            ]:
                await self._bus.keep(over)
