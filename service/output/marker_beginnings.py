"""Fixed beginnings of markers, computed from their patterns.  A text without any of them contains no marker.

<parameter=(?P<key>[^>\\n]+)>            -> <parameter=
\\n?</parameter>                         -> </parameter>; leading white space is left out
</function>(?:\\s*</call>)?|</call>      -> </function>, </call>
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_SPACE = re.compile(r"(?:\\[snrt]|[ \n\t]|\[(?:\\[snrt]|[ \n\t])+\])(?:[*+?]\??)?")
_LITERAL = re.compile(r"\\(\W)|([^\\.^$*+?{}\[\]|()])", re.DOTALL)
_REPEAT = re.compile(r"[*?]|\{0?,")  # quantifiers that allow zero repetitions
_GROUP = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))")


def beginnings(pattern: str) -> list[str]:
    """Return the fixed beginnings of a pattern's matches, with "" if a match may begin with any text."""
    return list(dict.fromkeys(found for branch in _branches(pattern) for found in _of_branch(branch)))


def fixed(patterns: Iterable[str], least: int = 3) -> list[str]:
    """Return the beginnings of all patterns with at least `least` characters; shorter ones occur in any text."""
    return list(dict.fromkeys(text for one in patterns for text in beginnings(one) if len(text) >= least))


def shared_beginning(one: str, other: str) -> str:
    """Return the longest common prefix of two texts."""
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def required(pattern: str) -> str:
    """Return a pattern without the optional groups at its beginning."""
    while (group := _GROUP.match(pattern)) is not None:
        end = _after(pattern, 0)
        inner, rest = pattern[group.end() : end - 1], pattern[end:]
        if rest[:1] in ("?", "*"):
            pattern = rest[1:]
        elif rest[:1] not in ("+", "{") and len([*_branches(inner)]) == 1:
            pattern = inner + rest
        else:
            break
    return pattern


def _branches(pattern: str) -> Iterator[str]:
    """Yield the top-level alternatives of a pattern."""
    begin = at = 0
    while at < len(pattern):
        if pattern[at] == "|":
            yield pattern[begin:at]
            begin = at + 1
        at = _after(pattern, at)
    yield pattern[begin:]


def _after(pattern: str, at: int) -> int:
    """Return the end of the character, set or group that begins at a position."""
    if pattern[at] == "\\":
        return at + 2
    if pattern[at] not in "([":
        return at + 1
    closes, start = (")", at) if pattern[at] == "(" else ("]", at + 1)
    at += 1
    while at < len(pattern) and (pattern[at] != closes or at == start):
        at = _after(pattern, at) if closes == ")" else at + (2 if pattern[at] == "\\" else 1)
    return at + 1


def _of_branch(branch: str) -> Iterator[str]:
    while (space := _SPACE.match(branch)) is not None:
        branch = branch[space.end() :]
    if (group := _GROUP.match(branch)) is not None:
        end = _after(branch, 0)
        inner, rest = branch[group.end() : end - 1], branch[end:]
        yield from beginnings(inner)
        if (repeat := _REPEAT.match(rest)) is not None:
            yield from _of_branch(rest[repeat.end() :])
        return
    text, at = "", 0
    while (literal := _LITERAL.match(branch, at)) is not None:
        if _REPEAT.match(branch, literal.end()):
            break
        text += literal[1] or literal[2]
        at = literal.end()
    yield text
