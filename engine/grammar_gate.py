"""Holds requests back until their grammar is compiled, so that no step of other requests waits for it.

    Inbox.drain() ==orders==> GrammarGate.drain() ==those that may start==> Engine.turn ==those that ended==> ended
                                  |  waiting: by grammar, by deadline                                          |
                                  '-- hold ──> GrammarStore: compiles on threads, tenants in turns <── release ┘

A request holds its grammar until it ends, so a sequence that returns after a preemption finds it.  An abort, or a
deadline that has passed, releases a request that waits: the scheduler then ends it as any other one.  A grammar that
cannot be followed ends its own request (`Refused`).

The grammars that requests hold are bounded in bytes.  Above the bound a request with another grammar waits here and
holds nothing, tenants in turns (fair_list.py).  It holds its grammar once enough requests have ended.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable

from quire.engine.common.fair_list import FairList
from quire.engine.executor.grammar_store import GrammarCounts, HeldGrammars
from quire.engine.orders import Inbox, Order, Refused, Resume, request_of
from quire.engine.wire.clock import steady_ms
from quire.engine.wire.messages import Abort, Generate

log = logging.getLogger("quire.engine")

WARN_MS = 60_000  # shortest time between two warnings
POLL_S = 0.002  # how often an engine with nothing else to do asks for the grammars that it waits for


class GrammarGate:
    """An Inbox over another one.  The loop's thread owns it."""

    def __init__(
        self,
        inbox: Inbox,
        store: HeldGrammars | None,
        clock: Callable[[], int] = steady_ms,
        *,
        most_held_mib: int = 1024,
    ) -> None:
        """`store`: None: the executor follows no grammar, and the scheduler refuses requests with one.
        `clock`: unix time in ms that deadlines are compared with.  `most_held_mib`: bound of the grammars that requests
        hold; the last one may exceed it."""
        self._inbox, self._store, self._clock = inbox, store, clock
        self._waiting: dict[str, list[Order]] = {}  # by id: a request, then the aborts of single choices
        self._by_grammar: dict[str, dict[str, None]] = {}  # the ids that wait for each, in the order of their arrival
        self._deadlines: list[tuple[int, str]] = []  # heap of (deadline_ms, id); those that left drop out lazily
        self._queue: FairList[str] = FairList()  # ids of those that hold no grammar yet
        self._tenants: dict[str, str] = {}  # id -> tenant, of these
        self._most_held_mib, self._warn_ms = most_held_mib, 0
        self.waiting_sequences = self.waiting_tokens = 0  # choices that wait here, and tokens of their prompts

    @property
    def waiting(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    @property
    def relieved(self) -> bool:
        """Whether another engine can take over every request of this one."""
        return self._inbox.relieved

    @property
    def queued(self) -> int:
        """Requests that wait in the shared queue, this engine's share of them."""
        return self._inbox.queued

    def counts(self) -> GrammarCounts:
        """Return what is held, kept and waits to be compiled."""
        return GrammarCounts() if self._store is None else self._store.counts

    def drain(self, wait_s: float) -> list[Order]:
        """Return every order that may be applied now; wait up to `wait_s` seconds for the first one.

        Costs O(orders that arrive or pass), however many wait."""
        arrived = self._inbox.drain(min(wait_s, POLL_S) if self._waiting else wait_s)
        if self._store is None:
            return list(arrived)
        passed: list[Order] = []
        for grammar in self._store.finished():
            for request_id in list(self._by_grammar.get(grammar, ())):
                passed += self._checked(self._leave(request_id))
        passed += self._expired()
        passed += self._next_holders()
        for order in arrived:
            passed += self._route(order)
        return passed

    def ended(self, request_ids: Iterable[str]) -> None:
        """Release the grammars of requests that have ended."""
        if self._store is not None:
            for request_id in request_ids:
                self._store.release(request_id)

    def _route(self, order: Order) -> list[Order]:
        """Return what an order lets pass."""
        assert self._store is not None
        if isinstance(order, Abort):
            return self._abort(order)
        request = request_of(order)
        if request is None or not (grammar := request.sampling.grammar):
            return [order]
        if request.id in self._waiting:  # delivered twice
            return []
        if self._full() and not self._store.is_held(grammar):
            self._queue.add(request.tenant, request.id, request.weight)
            self._tenants[request.id] = request.tenant
        elif self._store.hold(request.id, grammar, request.tenant, request.weight):
            return self._checked([order])
        else:
            self._by_grammar.setdefault(grammar, {})[request.id] = None
        self._waiting[request.id] = [order]
        self._count(request, 1)
        heapq.heappush(self._deadlines, (request.deadline_ms, request.id))
        return []

    def _full(self) -> bool:
        """Whether the grammars that requests hold have reached their bound."""
        assert self._store is not None
        held_mib = self._store.counts.held_bytes >> 20
        if held_mib < self._most_held_mib:
            return False
        if (now := self._clock()) >= self._warn_ms:
            self._warn_ms = now + WARN_MS
            log.warning(
                "the grammars of requests take %d MiB: requests with other grammars wait (--grammars-held-mib %d)",
                *(held_mib, self._most_held_mib),
            )
        return True

    def _next_holders(self) -> list[Order]:
        """Let requests hold their grammars, as long as the bound allows more.  Returns those that may start."""
        assert self._store is not None
        passed: list[Order] = []
        while self._queue and not self._full() and (request_id := self._queue.pop()) is not None:
            del self._tenants[request_id]
            request = request_of(self._waiting[request_id][0])
            assert request is not None
            grammar = request.sampling.grammar
            done = self._store.hold(request_id, grammar, request.tenant, request.weight)
            self._by_grammar.setdefault(grammar, {})[request_id] = None
            if done:
                passed += self._checked(self._leave(request_id))
        return passed

    def _abort(self, order: Abort) -> list[Order]:
        assert self._store is not None
        if order.id not in self._waiting:
            if order.reassigned:  # the scheduler forgets it without a word
                self._store.release(order.id)
            return [order]
        if order.index >= 0 and not order.reassigned:  # its other choices wait on
            self._waiting[order.id].append(order)
            return []
        self._store.release(order.id)
        return [*self._leave(order.id), order]

    def _expired(self) -> list[Order]:
        """Return the requests whose deadline has passed: the scheduler ends them before it starts any."""
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
        """Take a request out, with the aborts of its choices."""
        orders = self._waiting.pop(request_id)
        request = request_of(orders[0])
        assert request is not None
        self._count(request, -1)
        if (tenant := self._tenants.pop(request_id, None)) is not None:
            self._queue.discard(tenant, request_id)
            return orders
        same = self._by_grammar[request.sampling.grammar]
        del same[request_id]
        if not same:
            del self._by_grammar[request.sampling.grammar]
        return orders

    def _count(self, request: Generate, sign: int) -> None:
        self.waiting_sequences += sign * request.width
        self.waiting_tokens += sign * len(request.token_ids)

    def _checked(self, orders: list[Order]) -> list[Order]:
        """Return a request whose grammar is compiled, and its aborts; where it is at fault, its end instead."""
        order = orders[0]
        request = request_of(order)
        assert self._store is not None
        assert request is not None
        if not (fault := self._store.fault(request.sampling.grammar)):
            return orders
        self._store.release(request.id)
        return [Refused(request, order.outputs if isinstance(order, Resume) else None, fault), *orders[1:]]
