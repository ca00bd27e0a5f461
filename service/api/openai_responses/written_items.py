"""Items of an input whose calls hold objects: the model reads their numbers as the client wrote them.

    {"type": "shell_call", "action": {"timeout": 1.50}} --as_written--> {..., "action": {"timeout": Written("1.50")}}

Items are stored and listed as Python has them, where 1.50 is 1.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.service.chat_templates import written_numbers
from quire.service.common.surrogates import repaired, without_surrogates


class _Texts(msgspec.Struct):
    """The items of a body as JSON text."""

    input: list[msgspec.Raw]


def as_written(body: bytes, items: Sequence[dict[str, Any]], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the items of a body, which has been decoded before, those of `kinds` with numbers as they were written."""
    wanted = [at for at, item in enumerate(items) if item.get("type") in kinds]
    found = list(items)
    if not wanted:
        return found
    texts = msgspec.json.decode(repaired(body), type=_Texts).input
    for at in wanted:
        try:
            found[at] = {**items[at], **without_surrogates(written_numbers.read(bytes(texts[at]).decode()))}
        except RecursionError:
            continue
    return found
