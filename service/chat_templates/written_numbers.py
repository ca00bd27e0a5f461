"""Numbers in the arguments of earlier calls reach the prompt as they were written.

    '{"a": 1e400}' --read--> {"a": Written} --placed--> {"a": 730118530201.5} --template--> "... 730118530201.5 ..."
                                                         --revealed--> "... 1e400 ..."

Python's JSON loses the text of `1e400` (infinite), `1.50`, `-0` and integers of thousands of digits, and a template
writes JSON from values.  So it gets a random number in the place of each, and the text takes its place again.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from typing import Any

INT_DIGITS, FLOAT_DIGITS = 15, 12  # digits of a placeholder number: written in full by Python and by JSON
_STAND_IN = re.compile(rf"(?<![\d.])(?:\d{{{INT_DIGITS}}}|\d{{{FLOAT_DIGITS}}}\.5)(?!\.?\d)")
SAFE_DIGITS = 18  # digits that every 64-bit integer may have; longer ones are Written


class Written(float):
    """A number whose text Python would change."""

    text: str

    def __new__(cls, text: str) -> Written:
        """Return the number that is written as `text`; one beyond a float is infinite."""
        made = super().__new__(cls, text)
        made.text = text
        return made

    @property
    def plain(self) -> float | str:
        """The number as a float, or its text if it is beyond the range of floats."""
        return self.text if self in (float("inf"), float("-inf")) else float(self)


def read(text: str) -> Any:
    """Return a value of JSON, numbers as they are written.  Raises ValueError and RecursionError."""
    return json.loads(text, parse_int=_whole, parse_float=_float)


def _whole(text: str) -> int | Written:
    return Written(text) if text == "-0" or len(text.lstrip("-")) > SAFE_DIGITS else int(text)


def _float(text: str) -> float:
    return plain if repr(plain := float(text)) == text else Written(text)


def written(value: Any) -> str:
    """Return a value as JSON text, numbers as they were written."""
    numbers = _Numbers()
    text = json.dumps(_mapped(value, numbers.stand_in), ensure_ascii=False)
    return numbers.revealed(text) or json.dumps(value, ensure_ascii=False)


def rendered(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> str:
    """Return the text of messages, the numbers in their calls as they were written.

    Numbers that the template itself changes are there as Python has them."""
    numbers = _Numbers()
    text = numbers.revealed(render(numbers.placed(messages)))
    return render(_in_calls(messages, lambda number: number.plain)) if text is None else text


class _Numbers:
    """The numbers of one rendering."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # placeholder number -> text of the number that it stands for

    def placed(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with random numbers for those of their calls of which Python would change the text."""
        return _in_calls(messages, self.stand_in)

    def stand_in(self, number: Written) -> float:
        """Return a random number that stands for another."""
        digits = INT_DIGITS if number.text.lstrip("-").isdecimal() else FLOAT_DIGITS
        drawn = 10 ** (digits - 1) + secrets.randbelow(9 * 10 ** (digits - 1))
        random: float = drawn if digits == INT_DIGITS else drawn + 0.5
        self._texts[repr(random)] = number.text
        return random

    def revealed(self, text: str) -> str | None:
        """Return a rendered text with the numbers as they were written; None if the template changed one of them."""
        if not self._texts:
            return text
        found: set[str] = set()

        def written(match: re.Match[str]) -> str:
            if (of := self._texts.get(match[0])) is None:
                return match[0]
            found.add(match[0])
            return of

        revealed = _STAND_IN.sub(written, text)
        return revealed if len(found) == len(self._texts) else None


def _in_calls(messages: list[dict[str, Any]], of: Callable[[Written], Any]) -> list[dict[str, Any]]:
    return [{**one, "tool_calls": _mapped(one["tool_calls"], of)} if "tool_calls" in one else one for one in messages]


def _mapped(value: Any, of: Callable[[Written], Any]) -> Any:
    if isinstance(value, Written):
        return of(value)
    if isinstance(value, dict):
        return {key: _mapped(inner, of) for key, inner in value.items()}
    return [_mapped(inner, of) for inner in value] if isinstance(value, list) else value
