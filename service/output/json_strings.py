"""Tracks whether a text that arrives in deltas is within a JSON string."""

from __future__ import annotations

import re

_QUOTES = re.compile(r"\\.|[\"\\]", re.DOTALL)


class JsonStrings:
    """Follows the quotes of a text that begins as an object or a list.  In any other text `inside` stays False."""

    def __init__(self) -> None:
        self.inside = False  # the text so far ends within a string
        self._begins = ""  # first character that is no white space
        self._escapes = False  # the text so far ends in a backslash that escapes the next character

    def follow(self, text: str) -> None:
        """Read the next part of the text."""
        if not self._begins:
            self._begins = text.lstrip()[:1]
        if self._begins not in ("{", "["):
            return
        start = 1 if self._escapes and text else 0
        self._escapes = self._escapes and not text
        for found in _QUOTES.finditer(text, start):
            if found[0] == '"':
                self.inside = not self.inside
            elif found[0] == "\\":
                self._escapes = True
