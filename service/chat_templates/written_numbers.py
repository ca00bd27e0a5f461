"""Keeps the spelling of numbers in the arguments of earlier tool calls, when a chat template writes them as JSON.

    '{"a": 1e400}' --read--> {"a": Written} --placed--> {"a": 730118530201.5} --template--> "... 730118530201.5 ..."
                                                         --revealed--> "... 1e400 ..."

Python's JSON loses the spelling of `1e400` (infinite), `1.50`, `-0` and integers of thousands of digits.  So each such
number is replaced by a random number before rendering, and the random number by the original text afterwards.

A model may write an argument twice.  Python's JSON keeps only the last one, so a template would not show the others.
So the key of each earlier argument of that name gets a random suffix before rendering, which is removed afterwards.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from typing import Any

INT_DIGITS, FLOAT_DIGITS = 15, 12  # digits of a placeholder number, few enough that it is written without exponent
_STAND_IN = re.compile(rf"(?<![\d.])(?:\d{{{INT_DIGITS}}}|\d{{{FLOAT_DIGITS}}}\.5)(?!\.?\d)")
SAFE_DIGITS = 18  # integers of at most this many digits fit into 64 bits; longer ones are Written


class Written(float):
    """A number whose spelling Python would change."""

    text: str

    def __new__(cls, text: str) -> Written:
        """Return the number that is written as `text`; infinite if it is beyond a float's range."""
        made = super().__new__(cls, text)
        made.text = text
        return made

    @property
    def plain(self) -> float | str:
        """The number as a float, or its text if it is beyond the range of floats."""
        return self.text if self in (float("inf"), float("-inf")) else float(self)


class Repeated(str):
    """A key that occurs again later in its object.  It equals no other key, so that a dict has both members."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


def read(text: str) -> Any:
    """Parse JSON, keeping the spelling of numbers and members whose key is repeated.

    Looking up a key returns the last of its values.  Raises ValueError and RecursionError."""
    return json.loads(text, parse_int=_whole, parse_float=_float, object_pairs_hook=_members)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    last = {key: at for at, (key, _) in enumerate(pairs)}
    if len(last) == len(pairs):
        return dict(pairs)
    return {key if last[key] == at else Repeated(key): value for at, (key, value) in enumerate(pairs)}


def _whole(text: str) -> int | Written:
    return Written(text) if text == "-0" or len(text.lstrip("-")) > SAFE_DIGITS else int(text)


def _float(text: str) -> float:
    return plain if repr(plain := float(text)) == text else Written(text)


def written(value: Any) -> str:
    """Return a value as JSON text, with the original spelling of numbers."""
    numbers = _Numbers()
    text = json.dumps(_mapped(value, numbers.stand_in, numbers.unique), ensure_ascii=False)
    return numbers.revealed(text) or json.dumps(value, ensure_ascii=False)


def rendered(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> str:
    """Render messages, with the original spelling of numbers in their tool calls.

    If the template itself changes one of the numbers, all numbers get Python's spelling."""
    numbers = _Numbers()
    text = numbers.revealed(render(numbers.placed(messages)))
    if text is not None:
        return text
    keys = _Numbers()
    plain = render(_in_calls(messages, lambda number: number.plain, keys.unique))
    return keys.revealed(plain) or plain


class _Numbers:
    """Placeholders for the numbers of one rendering."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # placeholder number -> text of the number that it stands for
        self._suffix, self._keys = f"q{secrets.token_hex(8)}q", 0  # suffix of repeated keys, and how many have got one

    def placed(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages whose tool calls have random numbers for Written ones, and suffixes at repeated keys."""
        return _in_calls(messages, self.stand_in, self.unique)

    def unique(self, key: Repeated) -> str:
        """Return a key that no other member of its object has."""
        self._keys += 1
        return f"{key}{self._suffix}{self._keys}q"

    def stand_in(self, number: Written) -> float:
        """Return a random number as the placeholder of `number`."""
        digits = INT_DIGITS if number.text.lstrip("-").isdecimal() else FLOAT_DIGITS
        drawn = 10 ** (digits - 1) + secrets.randbelow(9 * 10 ** (digits - 1))
        random: float = drawn if digits == INT_DIGITS else drawn + 0.5
        self._texts[repr(random)] = number.text
        return random

    def revealed(self, text: str) -> str | None:
        """Replace placeholders in a rendered text by the original numbers; None if the template changed one."""
        if self._keys:
            text = re.sub(rf"{self._suffix}\d+q", "", text)
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


def _in_calls(
    messages: list[dict[str, Any]], of: Callable[[Written], Any], key_of: Callable[[Repeated], str] = str
) -> list[dict[str, Any]]:
    return [
        {**one, "tool_calls": _mapped(one["tool_calls"], of, key_of)} if "tool_calls" in one else one
        for one in messages
    ]


def _mapped(value: Any, of: Callable[[Written], Any], key_of: Callable[[Repeated], str]) -> Any:
    if isinstance(value, Written):
        return of(value)
    if isinstance(value, dict):
        return {
            key_of(key) if isinstance(key, Repeated) else key: _mapped(inner, of, key_of)
            for key, inner in value.items()
        }
    return [_mapped(inner, of, key_of) for inner in value] if isinstance(value, list) else value
