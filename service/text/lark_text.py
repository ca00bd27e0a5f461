"""Text in a Lark grammar: special tokens by their ids, all else in quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from quire.service.output.marker_beginnings import shared_beginning
from quire.service.text.call_form import CALL_ID, INDEX

# What stands for a mark of the probe that is a part of a call's id.
PLACES = {CALL_ID: "/[a-zA-Z0-9]{9}/", INDEX: "/0|[1-9][0-9]{0,2}/"}


class LarkText:
    """Writes text as Lark does, for the special tokens of one model."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        known = sorted([*special, *PLACES], key=len, reverse=True)
        self._parts = re.compile("(" + "|".join(map(re.escape, known)) + ")")

    def __call__(self, text: str) -> str:
        """Return a text as parts of a rule."""
        written = []
        for part in self._split(text):
            if part in self._special:
                written.append(f"<[{self._special[part]}]>")
            else:
                written.append(PLACES.get(part) or json.dumps(part))
        return " ".join(written)

    def first_special(self, text: str) -> int:
        """Return where the first special token of a text begins, else its length."""
        return min((at for one in self._special if (at := text.find(one)) >= 0), default=len(text))

    def shared(self, one: str, other: str) -> str:
        """Return the beginning that two texts share, without a part of a special token."""
        found = ""
        for first, second in zip(self._split(one), self._split(other), strict=False):
            if first == second:
                found += first
                continue
            marks = {*self._special, *PLACES}
            return found if marks & {first, second} else found + shared_beginning(first, second)
        return found

    def _split(self, text: str) -> list[str]:
        return [part for part in self._parts.split(text) if part]
