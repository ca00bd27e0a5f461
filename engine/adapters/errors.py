"""The error of an adapter that cannot be served."""

from __future__ import annotations

from quire.engine.common.errors import OperatorError

MAX_CHARS = 1_000  # maximum characters of a message, which may quote module names and patterns from files


class AdapterError(OperatorError):
    """A LoRA adapter cannot be served: one line that names the file, the fault, and limit and value."""

    exit_status = 2

    def __init__(self, message: str, limit: float | str | None = None, given: float | str | None = None) -> None:
        """`limit`, `given`: the limit that the adapter exceeds, and the adapter's value; None: no limit is exceeded."""
        super().__init__(one_line(message))
        self.limit, self.given = limit, given


class AdapterMissing(AdapterError):
    """An adapter's files are not on this machine, or other files are there.  Another engine may have them."""


def one_line(text: str) -> str:
    """Return an untrusted text as one line of bounded length, with unprintable characters escaped."""
    line = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text[: 2 * MAX_CHARS])
    if len(text) <= MAX_CHARS >= len(line):
        return line
    return f"{line[: MAX_CHARS // 2]} ... {text[-MAX_CHARS // 4 :]!a}"
