"""Gate: delays requests until their resource (grammar, LoRA adapter) is ready, so that no step waits for it.

    Inbox.drain() ==orders==> Gate.drain() ==ready requests==> Engine.turn ==ended requests==> ended
                               |  waiting: by resource, by deadline                             |
                               '-- hold ──> store: prepares resources on threads <── release ───┘

A request holds (references) its resource until it ends, so the resource is still ready when a preempted sequence
resumes.  After an abort or its deadline a waiting request passes the gate, and the scheduler ends it.  If a resource
cannot be prepared, its request ends with an error (`Refused`).  Gates are chained: each gate is the inbox of the next
one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from quire.engine.common.fair_list import FairList
from quire.engine.executor.grammar_store import HeldResources
from quire.engine.orders import Inbox, Order, Refused, Resume, request_of
from quire.engine.wire.clock import steady_ms
from quire.engine.wire.messages import Abort, Generate

POLL_S = 0.002  # seconds between polls of the awaited grammar or adapter while the engine is idle


class Gate:
    """An Inbox that filters the orders (control messages) of another Inbox.  Only the loop's thread may use it."""

    def __init__(self, inbox: Inbox, store: HeldResources | None, clock: Callable[[], int] = steady_ms) -> None:
        """`store`: None: all orders pass, and the scheduler refuses requests that the executor cannot serve.
        `clock`: unix time in ms for deadlines."""
        self._inbox, self._store, self._clock = inbox, store, clock
        self._waiting: dict[str, list[Order]] = {}  # request id -> its order, then aborts of its choices
        self._by_need: dict[str, dict[str, None]] = {}  # resource -> ids of requests that wait for it, oldest first
        self._deadlines: list[tuple[int, str]] = []  # heap of (deadline_ms, id); ids of gone requests are skipped
        self._queue: FairList[str] = FairList()  # ids of waiting requests that do not hold their resource yet
        self._tenants: dict[str, str] = {}  # id -> tenant, for the ids in `_queue`
        self.waiting_sequences = self.waiting_tokens = 0  # choices of waiting requests, and their prompt tokens

    def need(self, request: Generate) -> str:
        """Return the name of the resource that a request needs, as its store uses it; "": none."""
        raise NotImplementedError

    @property
    def waiting(self) -> int:
        """Number of requests that wait at this gate."""
        return len(self._waiting)

    @property
    def relieved(self) -> bool:
        """Whether another engine can take over all requests of this engine."""
        return self._inbox.relieved

    @property
    def queued(self) -> int:
        """This engine's share of the requests that wait in the shared queue."""
        return self._inbox.queued

    def drain(self, wait_s: float) -> list[Order]:
        """Return every order that may be applied now; wait up to `wait_s` seconds for the first one.

        Takes O(orders that arrive or pass), for any number of waiting requests."""
        arrived = self._inbox.drain(min(wait_s, POLL_S) if self._waiting else wait_s)
        if self._store is None:
            return list(arrived)
        passed: list[Order] = []
        for text in self._store.finished():
            for request_id in list(self._by_need.get(text, ())):
                passed += self._checked(self._leave(request_id))
        passed += self._expired()
        passed += self._next_holders()
        for order in arrived:
            passed += self._route(order)
        return passed

    def ended(self, request_ids: Iterable[str]) -> None:
        """Release the resources of requests that have ended."""
        if self._store is not None:
            for request_id in request_ids:
                self._store.release(request_id)

    def _route(self, order: Order) -> list[Order]:
        """Process a new order; return the orders that may be applied now."""
        assert self._store is not None
        if isinstance(order, Abort):
            return self._abort(order)
        request = request_of(order)
        if request is None or not (text := self.need(request)):
            return [order]
        if request.id in self._waiting:  # the request was delivered twice
            return []
        if self._full() and not self._store.is_held(text):
            self._queue.add(request.tenant, request.id, request.weight)
            self._tenants[request.id] = request.tenant
        elif self._store.hold(request.id, text, request.tenant, request.weight):
            return self._checked([order])
        else:
            self._by_need.setdefault(text, {})[request.id] = None
        self._waiting[request.id] = [order]
        self._count(request, 1)
        heapq.heappush(self._deadlines, (request.deadline_ms, request.id))
        return []

    def _full(self) -> bool:
        """Return whether the held resources have reached their bound.

        Then further requests wait here without holding their resource; tenants are served round-robin."""
        return False

    def _next_holders(self) -> list[Order]:
        """Add references of waiting requests to their resources while the bound allows it.  Returns the orders that may
        start."""
        assert self._store is not None
        passed: list[Order] = []
        while self._queue and not self._full() and (request_id := self._queue.pop()) is not None:
            del self._tenants[request_id]
            request = request_of(self._waiting[request_id][0])
            assert request is not None
            text = self.need(request)
            done = self._store.hold(request_id, text, request.tenant, request.weight)
            self._by_need.setdefault(text, {})[request_id] = None
            if done:
                passed += self._checked(self._leave(request_id))
        return passed

    def _abort(self, order: Abort) -> list[Order]:
        assert self._store is not None
        if order.id not in self._waiting:
            if order.reassigned:  # the scheduler drops the request without reporting its end
                self._store.release(order.id)
            return [order]
        if order.index >= 0 and not order.reassigned:  # the request's other choices still wait
            self._waiting[order.id].append(order)
            return []
        self._store.release(order.id)
        return [*self._leave(order.id), order]

    def _expired(self) -> list[Order]:
        """Return the requests whose deadline has passed; the scheduler ends them before it starts any request."""
        assert self._store is not None
        passed: list[Order] = []
        while self._deadlines and (self._deadlines[0][1] not in self._waiting or self._is_late()):
            request_id = heapq.heappop(self._deadlines)[1]
            if request_id in self._waiting:
                self._store.release(request_id)
                passed += self._leave(request_id)
        return passed

    def _is_late(self) -> bool:
        return self._deadlines[0][0] <= self._clock()

    def _leave(self, request_id: str) -> list[Order]:
        """Remove a waiting request; return its order and the aborts of its choices."""
        orders = self._waiting.pop(request_id)
        request = request_of(orders[0])
        assert request is not None
        self._count(request, -1)
        if (tenant := self._tenants.pop(request_id, None)) is not None:
            self._queue.discard(tenant, request_id)
            return orders
        same = self._by_need[text := self.need(request)]
        del same[request_id]
        if not same:
            del self._by_need[text]
        return orders

    def _count(self, request: Generate, sign: int) -> None:
        self.waiting_sequences += sign * request.width
        self.waiting_tokens += sign * len(request.token_ids)

    def _checked(self, orders: list[Order]) -> list[Order]:
        """Return the orders of a request whose resource is ready; if the resource failed, an order that ends it."""
        order = orders[0]
        request = request_of(order)
        assert self._store is not None
        assert request is not None
        if not (fault := self._store.fault(self.need(request))):
            return orders
        end = self.end(order, request, fault)
        self._store.release(request.id)
        return [end, *orders[1:]]

    def end(self, order: Order, request: Generate, fault: str) -> Order:
        """Return the order that ends a request whose resource could not be prepared.  `fault`: the error line."""
        return Refused(request, order.outputs if isinstance(order, Resume) else None, fault)
