"""Delays requests until their LoRA adapter is in host memory (gate.py): no step waits for a file."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.adapters.counts import AdapterCounts
from quire.engine.executor.grammar_store import HeldAdapters
from quire.engine.gate import Gate
from quire.engine.orders import Inbox, Order, Returned, request_of
from quire.engine.wire.clock import steady_ms
from quire.engine.wire.messages import Generate

UNSUPPORTED = "no engine of this deployment supports LoRA adapters now"  # message for clients


class AdapterGate(Gate):
    """A gate whose resources are LoRA adapters."""

    def __init__(
        self, inbox: Inbox, store: HeldAdapters | None, clock: Callable[[], int] = steady_ms, *, returns: bool = False
    ) -> None:
        """`store`: None: the executor has no LoRA support.  `returns`: requests that this engine cannot serve, because
        it lacks LoRA support or the adapter's files, return to the queue; False: they end with an error."""
        super().__init__(inbox, store, clock)
        self._adapters, self._returns = store, returns

    @property
    def loads(self) -> tuple[float, int]:
        """(seconds until one more adapter would be in host memory, adapters that wait for their load).

        0 seconds: unknown; negative: this engine takes no adapters."""
        return (-1.0, 0) if self._adapters is None else (self._adapters.load_s, self._adapters.unloaded)

    def counts(self) -> AdapterCounts:
        """Return counts of adapters in host memory and of loads."""
        return AdapterCounts() if self._adapters is None else self._adapters.counts

    def drain(self, wait_s: float) -> list[Order]:
        orders = super().drain(wait_s)
        if self._adapters is not None or not self._returns:
            return orders
        return [self._left(order) for order in orders]

    def _left(self, order: Order) -> Order:
        """Return the order, or for a request with an adapter the order to return it to the queue."""
        request = request_of(order)
        return order if request is None or not request.adapter else Returned(request, UNSUPPORTED)

    def end(self, order: Order, request: Generate, fault: str) -> Order:
        if self._returns and self._adapters is not None and self._adapters.is_missing(self.need(request)):
            return Returned(request, fault)
        return super().end(order, request, fault)

    def need(self, request: Generate) -> str:
        return f"{request.adapter}={request.adapter_path}" if request.adapter else ""
