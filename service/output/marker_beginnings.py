"""Fixed beginnings of markers, computed from their patterns.  A text without any of them contains no marker.

<parameter=(?P<key>[^>\\n]+)>            -> <parameter=
\\n?</parameter>                         -> </parameter>; leading white space is left out
</function>(?:\\s*</call>)?|</call>      -> </function>, </call>
</?calls>|<(?:a|b)>                     -> <calls>, </calls>, <a>, <b>
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_SPACE = re.compile(r"(?:\\[snrt]|[ \n\t]|\[(?:\\[snrt]|[ \n\t])+\])(?:[*+?]\??)?")
_LITERAL = re.compile(r"\\(\W)|([^\\.^$*+?{}\[\]|()])", re.DOTALL)
_REPEAT = re.compile(r"[*?]|\{0?,")  # quantifiers that allow zero repetitions
_QUANTIFIER = re.compile(r"(?:[*+?]|\{[\d,]+\})[+?]?")
MOST = 64  # maximum number of beginnings that alternatives within one branch may produce
_GROUP = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))")


def beginnings(pattern: str) -> list[str]:
    """Return the fixed beginnings of a pattern's matches, with "" if a match may begin with any text."""
    return list(dict.fromkeys(text for text, _ in _of_branches(pattern)))


def fixed(patterns: Iterable[str], least: int = 3) -> list[str]:
    """Return the beginnings of patterns that have at least `least` characters; shorter ones occur in any text."""
    return list(dict.fromkeys(text for one in patterns for text in beginnings(one) if len(text) >= least))


def shared_beginning(one: str, other: str) -> str:
    """Return the longest common prefix of two texts."""
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def required(pattern: str) -> str:
    """Return a pattern without the optional groups at its beginning."""
    while (group := _GROUP.match(pattern)) is not None:
        end = end_of(pattern, 0)
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
        at = end_of(pattern, at)
    yield pattern[begin:]


def end_of(pattern: str, at: int) -> int:
    """Return the end of the character, set or group that begins at a position."""
    if pattern[at] == "\\":
        return at + 2
    if pattern[at] not in "([":
        return at + 1
    closes, start = (")", at) if pattern[at] == "(" else ("]", at + 1)
    at += 1
    while at < len(pattern) and (pattern[at] != closes or at == start):
        at = end_of(pattern, at) if closes == ")" else at + (2 if pattern[at] == "\\" else 1)
    return at + 1


def _of_branch(branch: str, *, first: bool = True) -> list[tuple[str, bool]]:
    """Return the beginnings of a branch's matches, each with whether it is a complete match.

    `first`: nothing precedes the branch, so white space at its beginning is left out."""
    while first and (space := _SPACE.match(branch)) is not None:
        branch = branch[space.end() :]
    done, texts, at = list[str](), [""], 0
    while at < len(branch):
        group, literal = _GROUP.match(branch, at), _LITERAL.match(branch, at)
        if group is not None:
            at = end_of(branch, at)
            parts = _of_branches(branch[group.end() : at - 1], first=first and texts == [""])
        elif literal is not None:
            at, parts = literal.end(), [(literal[1] or literal[2], True)]
        else:
            break
        repeat = _QUANTIFIER.match(branch, at)
        at = repeat.end() if repeat is not None else at
        often = repeat is not None and repeat[0][0] != "?"
        skips = repeat is not None and _REPEAT.match(repeat[0]) is not None
        done += [text + part for text in texts for part, whole in parts if often or not whole]
        texts = [
            *(texts if skips else []),
            *(text + part for text in texts for part, whole in parts if whole and not often),
        ]
        if not texts or len(texts) + len(done) > MOST:
            break
    else:
        return [*((text, False) for text in done), *((text, True) for text in texts)]
    return [(text, False) for text in [*done, *texts]]


def _of_branches(pattern: str, *, first: bool = True) -> list[tuple[str, bool]]:
    return [found for branch in _branches(pattern) for found in _of_branch(branch, first=first)]
