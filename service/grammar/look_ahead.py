"""Replaces a regex with look-ahead by several regexes without it, all of which must match.

    ^(?=.{1,9}$)[a-z.]+$        -> ^.{1,9}$    and  ^[a-z.]+$
    ^(?!\\.)(?!.*\\.\\.)[a-z.]+$  -> ^($|[^.])   and  no two dots in the first line  and  ^[a-z.]+$

Schema generators such as zod write look-ahead, which llguidance does not support.  A look-ahead at the beginning of an
anchored regex is an assertion about the complete text.  So a positive look-ahead becomes a regex of its own.  A
negative look-ahead becomes the regex of its opposite, in the few forms for which that is short; others are refused.
"""

from __future__ import annotations

import re

_CHAR = r"(?:\\[^\w\s]|\\[sSdDwW]|[\w @#%&=~:;,<>/\"'!-])"  # one literal character, or a class such as \d
_SET = r"\[(?:[^\]\\]|\\.)+\]"
_ATOM = re.compile(rf"{_CHAR}|{_SET}")
_TEXT = re.compile(rf"(?P<atoms>(?:{_CHAR}|{_SET})+)(?P<end>\$?)")
_CONTAINS = re.compile(rf"\.\*(?P<first>{_CHAR}|{_SET})(?P<again>{_CHAR}|{_SET})?")
_ONLY = re.compile(rf"(?P<one>{_CHAR}|{_SET})\*\$")
# Known regexes with look-ahead in their middle -> equivalent regexes without.
_TIME = r"T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_DAYS = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
EQUAL = {
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|{_DAYS}(?:{_TIME})?|{_TIME})$"  # zod's regex of a duration
    ),
}


def without_look_ahead(pattern: str) -> list[str]:
    """Return regexes that all match a text exactly if `pattern` does; [pattern] if no such regexes are known."""
    if pattern in EQUAL:
        return [EQUAL[pattern]]
    if not pattern.startswith(("^(?=", "^(?!")) or "|" in _outside(pattern[1:]):
        return [pattern]
    found, rest = list[str](), pattern[1:]
    while rest.startswith(("(?=", "(?!")):
        end = _closing(rest)
        inner, negative = rest[3 : end - 1], rest[2] == "!"
        opposites = _opposites(inner) if negative else [f"^(?:{inner.removeprefix('^')})"]
        if end < 0 or not opposites or rest[end : end + 1] in tuple("*+?{"):
            return [pattern]
        found += opposites
        rest = rest[end:]
    return [*found, f"^{rest}"]


def _opposites(inner: str) -> list[str]:
    """Return regexes that all match exactly the texts without a match of `inner` at their start; [] if not known."""
    branches = inner.split("|") if "(" not in inner and "[" not in inner and "\\|" not in inner else [inner]
    found = [_opposite(branch.removeprefix("^")) for branch in branches]
    return [] if None in found else [one for one in found if one is not None]


def _opposite(inner: str) -> str | None:
    if match := _TEXT.fullmatch(inner):
        atoms = _ATOM.findall(match["atoms"])
        after = r"[\s\S]" if match["end"] else None  # with `$`, a longer text is allowed
        for atom in reversed(atoms):
            after = f"(?:$|{_other(atom)}{f'|{atom}{after}' if after else ''})"
        return f"^{after}"
    if match := _ONLY.fullmatch(inner):
        return _other(match["one"])
    if (match := _CONTAINS.fullmatch(inner)) is None:
        return None
    first, again = match["first"], match["again"]
    if re.match(first, "\n"):
        return None
    within, line = _other(first, "\\n"), r"(?:\n[\s\S]*)?$"  # `.` matches no line end, so any second line is allowed
    if again is None:
        return f"^{within}*{line}"
    return rf"^(?:{first}?{within})*{first}?{line}" if again == first else None


def _other(one: str, more: str = "") -> str:
    """Return a regex set of all characters except those in `one` (a character or set) and in `more`."""
    if one.startswith("[^"):
        return f"[{one[2:-1]}]"
    return f"[^{one[1:-1] if one.startswith('[') else one}{more}]"


def _closing(text: str) -> int:
    """Return the end of the group at the beginning of a regex; -1 if it is not closed."""
    depth = at = 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "[":
            at = _set_end(text, at)
        elif text[at] in "()":
            depth += 1 if text[at] == "(" else -1
            if not depth:
                return at + 1
        at += 1
    return -1


def _set_end(text: str, at: int) -> int:
    match = re.compile(r"\[\^?(?:[^\]\\]|\\.)*\]").match(text, at)
    return match.end() - 1 if match else len(text)


def _outside(text: str) -> str:
    """Return the characters of a regex outside of groups and sets."""
    found, at = "", 0
    while at < len(text):
        if text[at] == "(":
            end = _closing(text[at:])
            at = len(text) if end < 0 else at + end
        elif text[at] == "[":
            at = _set_end(text, at) + 1
        else:
            step = 2 if text[at] == "\\" else 1
            found, at = found + text[at : at + step], at + step
    return found
