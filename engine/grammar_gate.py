"""Holds requests back until their grammar is compiled, so that no step of other requests waits for it.

    Inbox.drain() ==orders==> GrammarGate.drain() ==those that may start==> Engine.turn
                                  held: grammars that the executor still compiles, on a thread of its own

An abort releases what it aborts: the scheduler then ends it as any other request.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.orders import Inbox, Order, request_of
from engine.wire.messages import Abort

POLL_S = 0.002  # how often an engine with nothing else to do asks for the grammars that it waits for


class GrammarGate:
    """An Inbox over another one.  The loop's thread owns it."""

    def __init__(self, inbox: Inbox, ready: Callable[[str], bool]) -> None:
        """`ready`: starts to compile a grammar, returns whether that is done.  Never blocks."""
        self._inbox, self._ready = inbox, ready
        self._held: list[Order] = []  # in the order of their arrival

    @property
    def relieved(self) -> bool:
        """Whether another engine can take over every request of this one."""
        return self._inbox.relieved

    @property
    def queued(self) -> int:
        """Requests that wait in the shared queue, this engine's share of them."""
        return self._inbox.queued

    def drain(self, wait_s: float) -> list[Order]:
        """Return every order that may be applied now; wait up to `wait_s` seconds for the first one."""
        arrived = self._inbox.drain(min(wait_s, POLL_S) if self._held else wait_s)
        aborted = {order.id for order in arrived if isinstance(order, Abort)}
        waiting, self._held = self._held, []
        passed: list[Order] = []
        for order in (*waiting, *arrived):
            request = request_of(order)
            grammar = request.sampling.grammar if request is not None and request.id not in aborted else ""
            if grammar and not self._ready(grammar):
                self._held.append(order)
            else:
                passed.append(order)
        return passed
