"""Text in a Lark grammar: special tokens by their ids, other text in quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from quire.service.output.marker_beginnings import shared_beginning
from quire.service.text.call_form import CALL_ID, INDEX

# Regexes for placeholders of call ids, which `call_form.py` puts into the calls that it renders.
PLACES = {CALL_ID: "/[a-zA-Z0-9]{9}/", INDEX: "/0|[1-9][0-9]{0,2}/"}


class LarkText:
    """Converts text to Lark syntax, for the special tokens of one model."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        known = sorted([*special, *PLACES], key=len, reverse=True)
        self._parts = re.compile("(" + "|".join(map(re.escape, known)) + ")")

    def __call__(self, text: str) -> str:
        """Return a text as the right side of a Lark rule."""
        written = []
        for part in self._split(text):
            if part in self._special:
                written.append(f"<[{self._special[part]}]>")
            else:
                written.append(PLACES.get(part) or json.dumps(part))
        return " ".join(written)

    def first_special(self, text: str) -> int:
        """Return the position of the first special token in a text, or the text's length if it has none."""
        return min((at for one in self._special if (at := text.find(one)) >= 0), default=len(text))

    def shared(self, one: str, other: str) -> str:
        """Return the longest common prefix of two texts that does not end within a special token."""
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
