"""Delays requests until their grammar is compiled (gate.py).

The grammars that requests hold are bounded in bytes.  Above the bound, a request with another grammar waits here until
enough requests have ended; tenants are served round-robin (fair_list.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from quire.engine.commands import Inbox
from quire.engine.executor.grammar_store import GrammarCounts, HeldGrammars
from quire.engine.gate import Gate
from quire.engine.wire.clock import steady_ms
from quire.engine.wire.messages import Generate

log = logging.getLogger("quire.engine")

WARN_MS = 60_000  # minimum time between two warnings


class GrammarGate(Gate):
    """A gate whose resources are compiled grammars (GrammarStore)."""

    def __init__(
        self,
        inbox: Inbox,
        store: HeldGrammars | None,
        clock: Callable[[], int] = steady_ms,
        *,
        max_held_mib: int = 1024,
    ) -> None:
        """`store`: if None, grammars are not supported, and the scheduler refuses requests with a grammar.
        `max_held_mib`: maximum MiB of grammars held by requests; the last grammar may exceed it."""
        super().__init__(inbox, store, clock)
        self._grammars = store
        self._max_held_mib, self._warn_ms = max_held_mib, 0

    def need(self, request: Generate) -> str:
        return request.sampling.grammar

    def counts(self) -> GrammarCounts:
        """Return counts of grammars that are held, cached, and waiting to be compiled."""
        return GrammarCounts() if self._grammars is None else self._grammars.counts

    def _full(self) -> bool:
        assert self._grammars is not None
        held_mib = self._grammars.counts.held_bytes >> 20
        if held_mib < self._max_held_mib:
            return False
        if (now := self._clock()) >= self._warn_ms:
            self._warn_ms = now + WARN_MS
            log.warning(
                "the grammars of requests take %d MiB: requests with other grammars wait (--grammars-held-mib %d)",
                *(held_mib, self._max_held_mib),
            )
        return True
