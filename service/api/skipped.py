"""Parts of a request that change no answer here, or cannot run here: they are left out, and a header names them.

    hints that the model's chat template does not read, tools that only a provider runs, parts of a history without text
        --Skipped.add--> ValidRequest.unknown --> the header `x-unknown-fields`

With `--strict-fields` such a part is a 400 `unknown_field`, as an unknown field is.
"""

from __future__ import annotations

from quire.service.common.limits import shown
from quire.service.common.refusal import bad_request, field_name
from quire.service.config import GatewayConfig


class Skipped:
    """Names of the parts that one request loses, each once."""

    def __init__(self, config: GatewayConfig) -> None:
        self._strict = config.strict_fields
        self._names: dict[str, None] = {}

    def add(self, name: str) -> None:
        """Note one part.  Raises Refusal with `strict_fields`."""
        if self._strict:
            message = f"{shown(name)}: it has no effect here (--strict-fields)"
            raise bad_request("unknown_field", message, str(shown(name)))
        self._names[name] = None

    def names(self) -> tuple[str, ...]:
        """Return all names so far."""
        return tuple(self._names)


def left_out(unread: tuple[str, ...], names: tuple[tuple[str, str], ...], config: GatewayConfig) -> tuple[str, ...]:
    """Return fields of a chat that its template does not read, as their format names them.

    Raises Refusal with `strict_fields`."""
    skipped = Skipped(config)
    for name in unread:
        skipped.add(field_name(name, names))
    return skipped.names()
