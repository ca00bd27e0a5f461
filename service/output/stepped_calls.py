"""The loop of readers that read calls in steps: between arguments or calls, and within one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from quire.service.output.calls import CallPart, Context, End, Status
from quire.service.output.json_calls import JsonCalls


class SteppedCalls(ABC):
    """Reads calls step by step.  A call whose arguments are JSON after all is read to its end by `JsonCalls`."""

    def __init__(self, context: Context) -> None:
        self.parts: list[CallPart] = []
        self.committed = False
        self._context = context
        self._json: JsonCalls | None = None  # reads arguments or calls that are JSON after all

    def read(self, text: str, at: int, end: End) -> tuple[int, Status]:
        """Read on; see `CallReader`."""
        while self._json is None:
            at, status = self._step(text, at, end)
            if status is not None:
                return at, status
        at, status = self._json.read(text, at, end)
        self.parts, self._json.parts = self.parts + self._json.parts, []
        self.committed = self._json.committed
        return at, status

    @abstractmethod
    def _step(self, text: str, at: int, end: End) -> tuple[int, Status | None]:
        """Read one step on; return the position that was reached, and its status; None: the next step follows."""
