"""Base class of call readers that work in steps: between arguments or calls, and within an argument or call."""

from __future__ import annotations

from abc import ABC, abstractmethod

from quire.service.output.calls import CallPart, Context, End, Status
from quire.service.output.json_calls import JsonCalls


class SteppedCalls(ABC):
    """Reads calls step by step.  If arguments turn out to be JSON, `JsonCalls` reads the call to its end."""

    def __init__(self, context: Context) -> None:
        self.parts: list[CallPart] = []
        self.committed = False
        self._context = context
        self._json: JsonCalls | None = None  # set once arguments or calls turn out to be JSON

    def read(self, text: str, at: int, end: End) -> tuple[int, Status]:
        """See `CallReader.read`."""
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
        """Do one step from position `at`.  Returns the new position and the status; None: do the next step."""
