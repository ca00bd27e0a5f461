"""Holds requests back until their LoRA adapter is in host memory (gate.py): no step waits for a file."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.adapters.counts import AdapterCounts
from quire.engine.executor.grammar_store import HeldAdapters
from quire.engine.gate import Gate
from quire.engine.orders import Inbox, Order, Returned
from quire.engine.wire.clock import steady_ms
from quire.engine.wire.messages import Generate


class AdapterGate(Gate):
    """Its store reads adapters."""

    def __init__(
        self, inbox: Inbox, store: HeldAdapters | None, clock: Callable[[], int] = steady_ms, *, returns: bool = False
    ) -> None:
        """`store`: None: the executor takes no adapters.  `returns`: requests whose adapter is not on this machine go
        back to the queue; else they end."""
        super().__init__(inbox, store, clock)
        self._adapters, self._returns = store, returns

    @property
    def loads(self) -> tuple[float, int]:
        """Seconds until one more adapter is in host memory, 0: not known; and adapters that wait for their load."""
        return (0.0, 0) if self._adapters is None else (self._adapters.load_s, self._adapters.unloaded)

    def counts(self) -> AdapterCounts:
        """Return what is in host memory and what was loaded."""
        return AdapterCounts() if self._adapters is None else self._adapters.counts

    def end(self, order: Order, request: Generate, fault: str) -> Order:
        if self._returns and self._adapters is not None and self._adapters.is_missing(self.need(request)):
            return Returned(request, fault)
        return super().end(order, request, fault)

    def need(self, request: Generate) -> str:
        return f"{request.adapter}={request.adapter_path}" if request.adapter else ""
