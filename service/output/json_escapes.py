"""Escapes and ends of strings in the JSON that models write.  Results are None if further text is needed to decide."""

from __future__ import annotations

import re

LOOK_AHEAD = 16  # maximum spaces after a quote, before the character that shows whether the quote ends its string
_AFTER_QUOTE = re.compile(rf"[ \t]{{0,{LOOK_AHEAD}}}")
_ENDS_VALUE = ",}])\n\r\"'<;"  # characters that may follow a string value
_HEX = re.compile(r"[0-9a-fA-F]{4}")


def ends_string(text: str, at: int, *, final: bool, key: bool, strict: bool) -> bool | None:
    """Return whether the quote before position `at` ends its string; None if further text is needed.

    `key`: the string is a key.  `strict`: a quote followed by a backslash does not end the string."""
    after = _AFTER_QUOTE.match(text, at)
    end = after.end() if after else at
    if end == len(text) and end - at < LOOK_AHEAD:
        return True if final else None
    if key or end == len(text):
        return True
    return text[end] in _ENDS_VALUE or (text[end] == "\\" and not strict)


def unescape(text: str, at: int, *, final: bool) -> tuple[str, int] | None:
    """Read the escape at a position.  Returns it as valid JSON, and the next position; None if more text is needed."""
    if len(text) < at + 12 and not final and (len(text) == at + 1 or text[at + 1] in "ux"):
        short = text[at : at + 12]
        if not re.fullmatch(r"\\u(?!d[89ab])[0-9a-f]{4}.*|\\x[0-9a-f]{2}.*", short, re.IGNORECASE | re.DOTALL):
            wanted = r"\\(u([0-9a-f]{0,3}|d[89ab][0-9a-f]{2}(\\(u[0-9a-f]{0,3})?)?)|x[0-9a-f]?)?"
            if re.fullmatch(wanted, short, re.IGNORECASE):
                return None
    char = text[at + 1 : at + 2]
    if char and char in '"\\/bfnrt':
        return text[at : at + 2], at + 2
    if char == "u" and (code := _HEX.match(text, at + 2)):
        return _unicode(text, at, int(code[0], 16))
    if char == "x" and re.match(r"[0-9a-fA-F]{2}", text[at + 2 : at + 4]):
        return "\\u00" + text[at + 2 : at + 4], at + 4
    if char == "'":
        return "'", at + 2
    return "\\\\", at + 1


def _unicode(text: str, at: int, code: int) -> tuple[str, int]:
    """Return the \\u escape at a position, and the next position.  A lone surrogate becomes U+FFFD."""
    low = _HEX.match(text, at + 8) if text.startswith("\\u", at + 6) else None
    if 0xD800 <= code < 0xDC00 and low is not None and 0xDC00 <= int(low[0], 16) < 0xE000:
        return text[at : at + 12], at + 12
    return "\\ufffd" if 0xD800 <= code < 0xE000 else text[at : at + 6], at + 6
