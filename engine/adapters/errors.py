"""The error of an adapter that cannot be served."""

from __future__ import annotations

from quire.engine.common.errors import OperatorError


class AdapterError(OperatorError):
    """A LoRA adapter cannot be served: one line that names the file, the fault, and limit and value."""

    exit_status = 2

    def __init__(self, message: str, limit: float | str | None = None, given: float | str | None = None) -> None:
        """`limit`, `given`: the limit that the adapter exceeds, and its value; None: the fault has no limit."""
        super().__init__(message)
        self.limit, self.given = limit, given


class AdapterMissing(AdapterError):
    """An adapter's files are not on this machine, or other files are there.  Another engine may have them."""
