"""Why a model cannot be served.  Each message is one line an operator can act on; callers print it and exit."""

from __future__ import annotations

from quire.engine.common.errors import OperatorError


class ModelLoadError(OperatorError):
    """The checkpoint is absent, damaged, or needs more than the configuration gives it."""

    exit_status = 2


class UnsupportedModel(ModelLoadError):
    """The checkpoint is sound, but this architecture would compute wrong tokens here, so it is refused by name."""


class NotEnoughMemory(ModelLoadError):
    """The KV cache cannot hold even one sequence of max_model_len."""


def one_line(error: BaseException) -> str:
    """Return the type and first line of an error's text; if that line ends with a colon, the next line too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines[0] = f"{lines[0]} {lines[1]}"
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
