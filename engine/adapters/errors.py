"""The error of an adapter that cannot be served."""

from __future__ import annotations

from quire.engine.common.errors import OperatorError


class AdapterError(OperatorError):
    """A LoRA adapter cannot be served: one line that names the file, the fault, and limit and value."""

    exit_status = 2
