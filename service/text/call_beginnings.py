"""Finds the texts that begin a tool call, in every notation that the parser of a model family accepts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from quire.service.output.marker_beginnings import beginnings, end_of, fixed, required
from quire.service.output.notations import LINE, Notation
from quire.service.output.regions import ResponseTemplate

LEAST = 3  # minimum length of a text that shows where a call begins
CLASSES = {r"\s": r"\x00-\x20\x80-\U0010FFFF", r"\w": r"0-9A-Z_a-z\x80-\U0010FFFF", r"\d": r"0-9\x80-\U0010FFFF"}
_MARK = re.compile(r"(?:\\\W|[^\w\\.^$*+?{}\[\]|()])+(?![*+?{])")  # fixed text after the name
_FIXED = re.compile(r"(?:\\\W|[^\s\\.^$*+?{}\[\]|()]){3,}(?![*+?{])")
_OPTIONAL = re.compile(r"\((?:[^()\\]|\\.)*\)[?*]")
_BEFORE_VALUE = re.compile(r"\\s\*[:=]$")  # separator of a key from its value
NAMES = "\ue000"  # stands for the names of the tools
_LOOKS = re.compile(r"\(\?(?!:)")  # groups that llguidance does not support, such as lookaheads


class CallBeginnings(NamedTuple):
    """The beginnings of calls in all notations of a model family."""

    marker: str  # begins calls in the form that the model is trained to write; "": no text shows where a call begins
    texts: tuple[str, ...]
    patterns: tuple[str, ...]  # regexes; {names} stands for the names of the tools
    dropped: tuple[str, ...]  # patterns and beginnings of the markers that free text may contain


def beginnings_of_calls(responses: ResponseTemplate, head: str) -> CallBeginnings:
    """Return the beginnings of calls.  `head`: text before the name in the calls that the model is trained to write."""
    texts, patterns = list[str](), list[str]()
    for notation in responses.notations:
        found = beginnings(required(notation.open.pattern.pattern))
        if not notation.bare and all(len(text) >= LEAST for text in found):
            texts += found
        elif (pattern := _pattern(notation)) is not None:
            patterns.append(pattern)
    marker = max(
        (text for text in [*texts, *fixed(responses.dropped_patterns)] if head.startswith(text)), key=len, default=""
    )
    if marker:
        texts.append(marker)
    else:
        marker = _shortest(responses, head)
    patterns = [pattern for pattern in patterns if not _contains_one(pattern, texts)]
    free = [part for one in responses.free_patterns for part in (*beginnings(one), re.sub(r"\\(\W)", r"\1", one))]
    return CallBeginnings(marker, _unique(texts), _unique(patterns), _unique(free))


def _unique(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _contains_one(pattern: str, texts: list[str]) -> bool:
    """Return whether every match of a pattern begins with one of `texts`, so that the pattern excludes no further text.

    Every pattern in a grammar makes its token masks slower, and takes memory."""
    found = beginnings(pattern)
    return bool(found) and all(any(one.startswith(text) for text in texts) for one in found)


def _pattern(notation: Notation) -> str | None:
    """Return a regex of the texts that begin a call; None if it would need a lookbehind."""
    pattern, named, rest = notation.open.pattern.pattern.partition("(?P<name>")
    if named and notation.bare and notation.captured:
        pattern += NAMES + (named + rest)[end_of(named + rest, 0) :]
    else:
        pattern += named + rest
    pattern = required(_plain(pattern))
    before, named, rest = pattern.partition(NAMES)
    if named and _open_groups(before) == 0 and any(len(text) >= LEAST for text in beginnings(before)):
        pattern = before + named  # what follows may be special tokens, which no text contains
    elif named and (mark := _FIXED.search(_OPTIONAL.sub("", rest))) is not None:
        pattern = mark[0]  # every match contains this text, which is rare in ordinary text
    elif named and (mark := _MARK.match(rest)) is not None:  # the rest would slow the grammar down more than it helps
        pattern = before + named + mark[0] + ")" * _open_groups(before)
    pattern = _BEFORE_VALUE.sub("", pattern)
    if _LOOKS.search(pattern):
        return None
    return _simple(pattern).replace("+?", "+").replace("/", r"\/").replace(NAMES, "({names})")


def _simple(pattern: str) -> str:
    """Return a pattern that matches the same texts, or more, without character classes of many Unicode ranges.

    Such classes are slow in a grammar engine, which computes with the bytes of each range."""

    def replaced(found: re.Match[str]) -> str:
        inside = re.sub(r"\\[swd]", lambda one: "" if found[1] == "[^" else CLASSES[one[0]], found[2] or "")
        return f"{found[1]}{inside}]" if found[1] else f"[{CLASSES[found[0]]}]" if found[0] in CLASSES else found[0]

    return re.sub(r"(\[\^?)((?:\\.|[^\]\\])+)\]|\\.", replaced, pattern, flags=re.DOTALL)


def _open_groups(pattern: str) -> int:
    """Return how many groups a pattern opens and does not close."""
    bare = re.sub(r"\\.|\[\^?.[^\]]*\]", "", pattern, flags=re.DOTALL)
    return bare.count("(") - bare.count(")")


def _plain(pattern: str) -> str:
    """Return a pattern that matches the same texts, or more, without lookaheads, named groups and line beginnings."""
    return re.sub(r"\(\?(?:=|P<\w+>)", "(?:", re.sub(r"\(\?![^()]*\)", "", pattern.removeprefix(LINE)))


def _shortest(responses: ResponseTemplate, head: str) -> str:
    """Return the shortest beginning of `head` that the parser takes for a call; "" if there is none."""
    for notation in responses.notations:
        if _pattern(notation) is None:  # the token mask does not keep this marker out of the text around calls
            continue
        for end in range(1, len(head) + 1):
            if notation.open.pattern.match(head[:end]):
                return head[:end]
    return ""
