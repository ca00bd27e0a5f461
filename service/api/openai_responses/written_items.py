"""Input items whose arguments are objects: keeps the spelling of their numbers for the model.

    {"type": "shell_call", "action": {"timeout": 1.50}} --as_written--> {..., "action": {"timeout": Written("1.50")}}

Only the prompt gets the original spelling. In stored and listed items, Python's spelling turns 1.50 into 1.5.
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
    """Return the decoded `items` of a body, with the original spelling of numbers in items of these `kinds`."""
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
