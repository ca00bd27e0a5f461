"""JSON values nested too deep for a client's JSON parser: their text becomes one JSON string.

[[[ ... [1, "a]"] ... ]]]  --DeepValue.read-->  "[1, \\"a]\\"]", up to the bracket that closes the value
"""

from __future__ import annotations

import json
import re

_RUN = {True: re.compile(r'[^"\\]+'), False: re.compile(r'[^"\[\](){}]+')}  # within a string, and outside
_OPENING, _CLOSING = re.compile(r"[\[({]+"), re.compile(r"[\])}]+")
READ_TOGETHER = 256  # maximum characters per step
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)


def nests_deeper(text: str, most: int) -> bool:
    """Return whether objects and lists in valid JSON are nested deeper than `most`."""
    if text.count("{") + text.count("[") <= most:
        return False
    depth = 0
    for found in _BRACKETS.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
        if depth > most:
            return True
    return False


class DeepValue:
    """Reads one deep object or list as the content of a JSON string."""

    __slots__ = ("_open", "quoted")

    def __init__(self) -> None:
        self._open = 0  # number of open brackets
        self.quoted = False  # the position is within a string of the value

    def read(self, text: str, at: int, upto: int, *, final: bool) -> tuple[str, int, bool]:
        """Read at least one character from `at`, and none beyond `upto`.

        Returns the text read, escaped for a JSON string; the next position; and whether the value is complete.
        Reads nothing if further text is needed to decide."""
        end = at + 1
        if run := _RUN[self.quoted].match(text, at, min(upto, at + READ_TOGETHER)):
            end = run.end()
        elif text[at] == "\\":
            if at + 1 == len(text) and not final:
                return "", at, False
            end = min(at + 2, len(text))
        elif text[at] == '"':
            self.quoted = not self.quoted
        elif run := _OPENING.match(text, at, max(end, min(upto, at + READ_TOGETHER))):
            end = run.end()
            self._open += end - at
        elif run := _CLOSING.match(text, at, max(end, min(upto, at + READ_TOGETHER, at + self._open))):
            end = run.end()
            self._open -= end - at
        return json.dumps(text[at:end], ensure_ascii=False)[1:-1], end, self._open == 0
