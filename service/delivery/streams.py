"""The token reader: one task reads the tokens of all open requests of this gateway from Redis and delivers them.

    bus.batches() --> reader --> Submission --> mailbox (merged) --> the request's own handler --> text --> socket
                                              ^ a slow client's tokens wait here (see `mailbox.py`)

`Streams.open` submits a new request.  `Streams.join` attaches to a request that was submitted before, by this or
another gateway, and that runs or has ended: a client resumes or retries it.  So a submission (one prompt of a request)
can have several readers.  `submissions.py` shows the life of a submission.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from quire.engine.wire.adapter_list import AdapterList
from quire.engine.wire.clock import steady_ms
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import Finish, Generate, TokenBatch
from quire.engine.wire.pool_state_store import PoolStateStore
from quire.engine.wire.quotas import QuotaStore
from quire.engine.wire.records import DuplicateRequest, Fleet, IdempotencyKey
from quire.engine.wire.response_store import ResponseStore
from quire.service.common.metrics import REDIS_SECONDS, Telemetry
from quire.service.common.refusal import Refusal, limit_refusal
from quire.service.common.supervision import Supervisor, Task
from quire.service.config import GatewayConfig
from quire.service.delivery import admission
from quire.service.delivery.fleet_view import FleetView
from quire.service.delivery.fleet_watch import FleetWatch
from quire.service.delivery.open_request import OpenRequest, Submission
from quire.service.delivery.queue_updates import QueueUpdates, Waiting
from quire.service.delivery.retry_book import RetryBook
from quire.service.delivery.submissions import Submissions
from quire.service.delivery.usage_ledger import UsageLedger

T = TypeVar("T")

# Maximum rounds of admission and submit per request.  A submit fails if other gateways have filled the lane meanwhile;
# it returns the new queue length, on which the next round decides.
ATTEMPTS = 5

# Maximum number of submits in flight.  Further submits wait for this semaphore, not for a connection to Redis: a wait
# for a connection would count as a slow Redis and end in a 503.  Two more connections serve snapshots of the fleet.
SUBMITS = 6
DELIVER_COUNT = 1000  # maximum number of deltas delivered in one turn of the event loop, about 10 ms of work


class AlreadySubmitted(Exception):
    """Nothing was queued: another request with the same idempotency key was first."""

    def __init__(self, duplicate: DuplicateRequest) -> None:
        super().__init__(duplicate.request_id)
        self.duplicate = duplicate


class Streams:
    """Every open request of this gateway, and the tasks that read tokens and the fleet's state from Redis."""

    def __init__(
        self,
        bus: GatewaySide,
        config: GatewayConfig,
        telemetry: Telemetry,
        *,
        now_ms: Callable[[], int] = steady_ms,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`now_ms`: the clock of admission, unix ms.  `jitter`: random numbers in [0, 1) that spread retries out."""
        self._bus, self._config, self._telemetry = bus, config, telemetry
        self._now_ms, self._jitter = now_ms, jitter
        self._view, self._retries = FleetView(), RetryBook()
        self._ledger = UsageLedger(bus, telemetry)
        self._updates = QueueUpdates(bus, self._view.fleet)
        self.submissions = Submissions(bus, config, telemetry, self._ledger)
        self.fleet_watch = FleetWatch(bus, config, telemetry, self._view, self.submissions, self._updates, self._ledger)
        self._submits = asyncio.Semaphore(SUBMITS)
        self.supervisor = Supervisor(
            Task("the token reader", self._read, lambda: self._bus.rounds),
            Task("the watch over the engines", self.fleet_watch.run, lambda: self.fleet_watch.readings),
        )

    # -- life

    async def start(self) -> None:
        """Read the fleet's state once, then start the token reader and the watch over the engines."""
        await self.fleet_watch.refresh()
        self.supervisor.start()

    async def stop(self) -> None:
        """Stop the reader tasks, wait until pending withdrawals are sent to Redis, and write the usage ledger."""
        self.submissions.leaving = True
        await self.supervisor.stop()
        await self._bus.withdrawn()  # bounded by the timeout of calls to Redis
        self.submissions.close_all()
        with contextlib.suppress(BusDown):
            await self._ledger.write()

    @property
    def trouble(self) -> str | None:
        """Why Redis cannot be used, in one line; None while it works."""
        return self.supervisor.trouble or self.fleet_watch.trouble

    def __len__(self) -> int:
        """Return how many submissions have a reader."""
        return self.submissions.reading

    def end_all(self, finish: Finish) -> None:
        """End every open request with `finish`; a resumable request is left to another gateway instead."""
        self.submissions.end_all(finish)

    # -- requests

    @contextlib.asynccontextmanager
    async def open(
        self,
        requests: list[Generate],
        cost: admission.Cost,
        *,
        record: bytes = b"",
        idempotency_key: IdempotencyKey | None = None,
        resumable: bool = False,
    ) -> AsyncIterator[OpenRequest]:
        """A context in which a client's `requests` run: one per prompt, all with the same `n`, for `cost.timeout_s`.

        Admission decides on the last snapshot of the fleet, and again on a newer one if the queue has grown past the
        bounds of its decision.  `record` is stored with the requests; `find` returns it when a client resumes.
        Raises Refusal when no lane is free or Redis does not accept the requests, and AlreadySubmitted when an earlier
        request has the same idempotency key.  In both cases nothing is queued."""
        opened = OpenRequest(
            self.submissions, [Submission(one.id, one.n, one.tenant) for one in requests], resumable=resumable
        )
        deadline = opened.loop.time() + cost.timeout_s
        self.submissions.enter(opened)
        queued = True  # if this task is cancelled during the submit, Redis may have queued the requests
        try:
            try:
                waiting = await self._submit(requests, cost, record, idempotency_key)
            except (Refusal, AlreadySubmitted):
                queued = False
                raise
            opened.start(deadline, self._config.heartbeat_s)
            opened.wait_in_queue(waiting)
            self._updates.add(requests[0].id, opened)
            yield opened
        finally:
            self._updates.discard(requests[0].id)
            opened.stop()
            self.submissions.leave(opened, queued)

    async def find(self, request_id: str) -> bytes | None:
        """Return the stored record of a request of any gateway, by its request id; None: unknown or expired.

        Raises Refusal(503)."""
        found = await ask(self._bus.attach(f"{request_id}.0", listen=False))
        return found.record if found is not None else None

    async def cancel(self, submission_ids: list[str]) -> None:
        """End submissions of any gateway as cancelled, for every reader.  Submissions that have ended do not change."""
        await self._bus.cancel_for_all(submission_ids)

    async def reset_prefix_caches(self) -> int:
        """Ask all engines to empty their prefix caches.  Returns the number of engines.  Raises Refusal(503)."""
        if self.trouble is not None:
            raise unavailable()
        return len(await ask(self._bus.operations.reset_prefix_caches()))

    async def find_duplicate(self, key: IdempotencyKey) -> DuplicateRequest | None:
        """Return the first request with this idempotency key, if there is one.  Raises Refusal(503)."""
        return await ask(self._bus.find_duplicate(key))

    async def release(self, key: IdempotencyKey, duplicate: DuplicateRequest) -> None:
        """Free an idempotency key whose first request, `duplicate`, has no answer.  Raises Refusal(503)."""
        await ask(self._bus.release(key, duplicate.request_id))

    @contextlib.asynccontextmanager
    async def join(
        self, submission_ids: list[str], had: Sequence[Sequence[int]], tenant: str, timeout_s: float
    ) -> AsyncIterator[OpenRequest]:
        """A context that continues to read a request that was opened before, at this or another gateway.

        `had`: for each prompt, how many output tokens of each choice the client already has.  Raises Refusal: 410 if
        the token log has expired, 400 if the answer ended with fewer tokens than `had`, 503 if Redis is away or if the
        log is shorter than `had` but its engine may send more."""
        submissions = [
            self.submissions.get(submission_id) or Submission(submission_id, len(counts), tenant)
            for submission_id, counts in zip(submission_ids, had, strict=True)
        ]
        opened = OpenRequest(self.submissions, submissions, resumable=True)
        self.submissions.enter(opened)
        try:
            for prompt, (submission, counts) in enumerate(zip(submissions, had, strict=True)):
                await self._attach(opened, prompt, submission, counts)
            opened.start(opened.loop.time() + timeout_s, self._config.heartbeat_s)
            yield opened
        finally:
            opened.stop()
            self.submissions.leave(opened, queued=True)

    async def _attach(self, opened: OpenRequest, prompt: int, submission: Submission, counts: Sequence[int]) -> None:
        """Read the log of one prompt, and begin its choices after `counts` tokens.  Raises Refusal as `join` does."""
        found = await ask(self._bus.attach(submission.id))
        if found is None:
            raise Refusal(410, "stream_gone", "this answer is not kept any longer")
        logged = found.choices
        short = [one for one, count in zip(logged, counts, strict=False) if len(one.token_ids) < count]
        if len(logged) != submission.n or any(one.finish is not None for one in short):
            raise Refusal(400, "invalid_event_id", "Last-Event-ID: the answer is not as long as that")
        if short:  # Redis lost the last tokens, which the engine will send again; or the client's position is wrong
            message = "Last-Event-ID: the answer is not as long as that yet"
            raise Refusal(503, "answer_incomplete", message, retry_after_s=1.0)
        for index, one in enumerate(logged):
            if one.finish is not None:
                submission.mark_ended(index)
        opened.resume(prompt, logged, counts)

    async def _submit(
        self, requests: list[Generate], cost: admission.Cost, record: bytes, key: IdempotencyKey | None
    ) -> Waiting:
        """Queue the requests of one client, all or none, if admission permits.

        Raises Refusal (from admission, or 503) and AlreadySubmitted."""
        for _ in range(ATTEMPTS):
            async with self._submits:
                if self.trouble is not None:  # refuse at once instead of waiting for a call to Redis to fail
                    raise unavailable()
                now_ms, jitter = self._now_ms(), self._jitter()
                decision = self._retries.decide(requests, cost, self.fleet, now_ms, self._config, jitter)
                began = time.monotonic()
                submit = self._bus.submit(*requests, bounds=decision.bounds, record=record, idempotency_key=key)
                try:
                    queue = await submit
                except BusDown as error:
                    self.fleet_watch.record_failed_submit(error)  # new requests are refused until Redis accepts writes
                    raise unavailable() from None
                self._telemetry.observe(REDIS_SECONDS, time.monotonic() - began, "submit")
                self._view.record_queue(queue)
            if queue.duplicate is not None:
                raise AlreadySubmitted(queue.duplicate)
            if queue.full:
                wait_s = decision.late_wait_s or 0.0
                message = f"the queue is full: {queue.queued} requests wait"
                pause_s = min(admission.RETRY_CAP_S, max(5.0, wait_s))
                raise limit_refusal("queued", message, self._config.max_queued, retry_after_s=pause_s)
            if queue.lane is not None:
                self._retries.joined(requests)
                late = queue.lane == "late"
                return Waiting(queue.lane, queue.ahead, decision.late_wait_s if late else decision.on_time_wait_s)
        raise Refusal(429, "rate_limit_exceeded", "overloaded: the queue fills faster than it is read", retry_after_s=1)

    # -- tokens

    async def _read(self) -> None:
        """Deliver this gateway's tokens.  A restarted task begins with the tokens that were not delivered."""
        async with contextlib.aclosing(self._bus.batches()) as batches:
            async for batch in batches:
                first, *later = batch.split(DELIVER_COUNT)
                self.deliver(first)
                for part in later:
                    await asyncio.sleep(0)  # other tasks of the event loop run
                    self.deliver(part)

    def deliver(self, batch: TokenBatch) -> None:
        """Spread the tokens of one engine step over the mailboxes."""
        self.submissions.deliver(batch.deltas)

    # -- data in Redis

    @property
    def responses(self) -> ResponseStore:
        """Stored responses in Redis."""
        return self._bus.responses

    @property
    def adapters(self) -> AdapterList:
        """The fleet's list of LoRA adapters in Redis."""
        return self._bus.adapters

    @property
    def quotas(self) -> QuotaStore:
        """The quotas of tenants in Redis."""
        return self._bus.quotas

    @property
    def pool_states(self) -> PoolStateStore:
        """The state of each engine's KV block pool, in Redis."""
        return self._bus.pool_states

    @property
    def fleet(self) -> Fleet:
        """The queue, and the engines with a live lease, as last read."""
        return self._view.fleet()

    def redis_ms(self) -> int:
        """Return the unix time in ms on Redis' clock, which deadlines and request ids use."""
        return self._bus.clock.redis_ms()


async def ask(reply: Awaitable[T]) -> T:
    """Await a reply of Redis.  Raises Refusal(503) if Redis is away."""
    try:
        return await reply
    except BusDown:
        raise unavailable() from None


def unavailable() -> Refusal:
    """Return the refusal of a request while Redis is away."""
    return Refusal(503, "queue_unavailable", "the request queue is not reachable", retry_after_s=2.0)
