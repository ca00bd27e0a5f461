"""Parts of a request that have no effect in Quire: they are ignored, and the header `x-unknown-fields` names them.

    hints that the model's chat template does not read, tools that only OpenAI or Anthropic can run, parts of a history
    without text --Skipped.add--> ValidRequest.unknown --> the header `x-unknown-fields`

With `--strict-fields` such a part gets 400 `unknown_field`, like an unknown field.
"""

from __future__ import annotations

from quire.service.common.limits import shown
from quire.service.common.refusal import bad_request, field_name
from quire.service.config import GatewayConfig


class Skipped:
    """Names of the ignored parts of one request, without duplicates."""

    def __init__(self, config: GatewayConfig) -> None:
        self._strict = config.strict_fields
        self._names: dict[str, None] = {}

    def add(self, name: str) -> None:
        """Add the name of an ignored part.  Raises Refusal with `strict_fields`."""
        if self._strict:
            message = f"{shown(name)}: it has no effect here (--strict-fields)"
            raise bad_request("unknown_field", message, str(shown(name)))
        self._names[name] = None

    def names(self) -> tuple[str, ...]:
        """Return all names added so far."""
        return tuple(self._names)


def left_out(unread: tuple[str, ...], names: tuple[tuple[str, str], ...], config: GatewayConfig) -> tuple[str, ...]:
    """Return the names, in the client's API format, of fields that the chat template does not read.

    `names`: see `refusal.renamed`.  Raises Refusal with `strict_fields` if there is such a field."""
    skipped = Skipped(config)
    for name in unread:
        skipped.add(field_name(name, names))
    return skipped.names()
