"""Why a model cannot be served.  Each message is one line an operator can act on; callers print it and exit."""

from __future__ import annotations

from engine.common.errors import OperatorError


class ModelLoadError(OperatorError):
    """The checkpoint is absent, damaged, or needs more than the configuration gives it."""

    exit_status = 2


class UnsupportedModel(ModelLoadError):
    """The checkpoint is sound, but this architecture would compute wrong tokens here, so it is refused by name."""


class NotEnoughMemory(ModelLoadError):
    """The KV cache cannot hold even one sequence of max_model_len."""
