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
    """A gate whose resources are LoRA adapters."""

    def __init__(
        self, inbox: Inbox, store: HeldAdapters | None, clock: Callable[[], int] = steady_ms, *, returns: bool = False
    ) -> None:
        """`store`: None: the executor has no LoRA support.  `returns`: requests whose adapter is not on this machine
        return to the queue; False: they end with an error."""
        super().__init__(inbox, store, clock)
        self._adapters, self._returns = store, returns

    @property
    def loads(self) -> tuple[float, int]:
        """(seconds until one more adapter would be in host memory, 0: unknown; adapters that wait for their load)."""
        return (0.0, 0) if self._adapters is None else (self._adapters.load_s, self._adapters.unloaded)

    def counts(self) -> AdapterCounts:
        """Return counts of adapters in host memory and of loads."""
        return AdapterCounts() if self._adapters is None else self._adapters.counts

    def end(self, order: Order, request: Generate, fault: str) -> Order:
        if self._returns and self._adapters is not None and self._adapters.is_missing(self.need(request)):
            return Returned(request, fault)
        return super().end(order, request, fault)

    def need(self, request: Generate) -> str:
        return f"{request.adapter}={request.adapter_path}" if request.adapter else ""
