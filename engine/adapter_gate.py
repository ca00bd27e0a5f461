"""Delays requests until their LoRA adapter is in host memory (gate.py): no step waits for a file."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.adapters.counts import AdapterCounts
from quire.engine.commands import Command, Inbox, Returned, request_of
from quire.engine.executor.grammar_store import HeldAdapters
from quire.engine.gate import Gate
from quire.engine.wire.clock import steady_ms
from quire.engine.wire.messages import Generate

UNSUPPORTED = "no engine of this deployment supports LoRA adapters now"  # message for clients


class AdapterGate(Gate):
    """A gate whose resources are LoRA adapters."""

    def __init__(
        self, inbox: Inbox, store: HeldAdapters | None, clock: Callable[[], int] = steady_ms, *, returns: bool = False
    ) -> None:
        """`store`: None if the executor has no LoRA support.  `returns`: whether requests that this engine cannot
        serve, for want of LoRA support or the adapter's files, return to the queue; if not, they end with an error."""
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

    def drain(self, wait_s: float) -> list[Command]:
        commands = super().drain(wait_s)
        if self._adapters is not None or not self._returns:
            return commands
        return [self._left(command) for command in commands]

    def _left(self, command: Command) -> Command:
        """Return the command, or for a request with an adapter the command to return it to the queue."""
        request = request_of(command)
        return command if request is None or not request.adapter else Returned(request, UNSUPPORTED)

    def end(self, command: Command, request: Generate, fault: str) -> Command:
        if self._returns and self._adapters is not None and self._adapters.is_missing(self.need(request)):
            return Returned(request, fault)
        return super().end(command, request, fault)

    def need(self, request: Generate) -> str:
        return f"{request.adapter}={request.adapter_path}" if request.adapter else ""
