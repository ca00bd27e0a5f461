"""Promises to refused clients: a retry after the stated pause is admitted.

    refused ──> pause until the queue and all earlier promises have started ──> promise in the book
    retry at that time, with the same prompts ──> joins, and the promise leaves
    new request ──> counts all promises as if they were queued before it; without a late lane, only the due promises

Without the book, every refusal in the same moment would state the same pause: the time until the present queue is
short enough.  All clients would retry at once, and most retries would be refused again.  With the book, each refused
client gets a later time than the one before; the engines' prompt throughput spaces them.

A gateway knows its own promises only: a retry at another gateway is a new request there.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from quire.engine.wire.messages import Generate
from quire.engine.wire.records import Fleet
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery import admission
from quire.service.delivery.admission import Cost, Decision, Promised

MOST = 10_000  # maximum number of promises in the book; a refusal while the book is full promises nothing
# A promise expires GRACE * its pause after its due time, but at least MIN_GRACE_MS after it: clients round pauses
# up to full seconds, and add some randomness of their own.
GRACE, MIN_GRACE_MS = 0.25, 3000
EARLY_MS = 500  # milliseconds by which a retry may be early: clocks and rounding

Key = tuple[str, int]


class _Promise(NamedTuple):
    number: int  # position in the order of first refusals; a client that is refused again keeps it
    tokens: int  # prompt tokens
    pause_ms: int  # the stated pause
    due_ms: int  # time of the promised retry
    until_ms: int  # time at which the promise expires


class RetryBook:
    """The promises of one gateway."""

    def __init__(self) -> None:
        self._promises: dict[Key, _Promise] = {}
        # Heaps of (until_ms, key) and (due_ms, key); when a promise changes, its old entries stay and are ignored.
        self._ends: list[tuple[int, Key]] = []
        self._dues: list[tuple[int, Key]] = []
        self._due: set[Key] = set()  # promises whose time has come
        self._tokens = self._due_tokens = self._number = 0

    def __len__(self) -> int:
        return len(self._promises)

    def decide(
        self, requests: Sequence[Generate], cost: Cost, fleet: Fleet, now_ms: int, config: GatewayConfig, jitter: float
    ) -> Decision:
        """Call `admission.decide`, with the promises that precede this request counted as queued.

        Raises Refusal.  A refusal `rate_limit_exceeded` enters a promise for the end of its pause into the book."""
        self._expire(now_ms)
        key = _key(requests) if self._promises else None
        own = self._promises.get(key) if key is not None else None
        try:
            return admission.decide(cost, fleet, now_ms, config, jitter, self._ahead(own, now_ms))
        except Refusal as refusal:
            if refusal.code == "rate_limit_exceeded" and refusal.retry_after_s is not None:
                self._promise(_key(requests), own, cost.prompt_tokens, now_ms, refusal.retry_after_s)
            raise

    def joined(self, requests: Sequence[Generate]) -> None:
        """Forget the promise of requests that have joined the queue."""
        if self._promises:
            self._drop(_key(requests))

    def _ahead(self, own: _Promise | None, now_ms: int) -> Promised:
        if own is None:
            return Promised(self._tokens, due_tokens=self._due_tokens)
        before = [promise for promise in self._promises.values() if promise.number < own.number]
        return Promised(
            sum(promise.tokens for promise in before),
            due=now_ms >= own.due_ms - EARLY_MS,
            due_tokens=sum(promise.tokens for promise in before if promise.due_ms <= now_ms),
            paused_s=own.pause_ms / 1000,
        )

    def _promise(self, key: Key, own: _Promise | None, tokens: int, now_ms: int, pause_s: float) -> None:
        """Enter a promise: the retry is due after `pause_s`.  A client refused again keeps its position in the book."""
        if own is None and len(self._promises) >= MOST:
            return
        self._number += 1
        pause_ms = round(1000 * pause_s)
        grace_ms = max(MIN_GRACE_MS, round(GRACE * pause_ms))
        number = self._number if own is None else own.number
        self._drop(key)
        promise = _Promise(number, tokens, pause_ms, now_ms + pause_ms, now_ms + pause_ms + grace_ms)
        self._promises[key] = promise
        self._tokens += tokens
        heapq.heappush(self._ends, (promise.until_ms, key))
        heapq.heappush(self._dues, (promise.due_ms, key))

    def _expire(self, now_ms: int) -> None:
        """Mark promises whose due time has come, and drop expired promises."""
        while self._dues and self._dues[0][0] <= now_ms:
            due_ms, key = heapq.heappop(self._dues)
            promise = self._promises.get(key)
            if promise is not None and promise.due_ms == due_ms and key not in self._due:
                self._due.add(key)
                self._due_tokens += promise.tokens
        while self._ends and self._ends[0][0] < now_ms:
            until_ms, key = heapq.heappop(self._ends)
            promise = self._promises.get(key)
            if promise is not None and promise.until_ms <= until_ms:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        if promise := self._promises.pop(key, None):
            self._tokens -= promise.tokens
            if key in self._due:
                self._due.remove(key)
                self._due_tokens -= promise.tokens


def _key(requests: Sequence[Generate]) -> Key:
    """Return the tenant and a hash of the prompts, by which a retry is recognised."""
    return requests[0].tenant, hash(tuple(tuple(request.token_ids) for request in requests))
