"""Half surrogates: JSON can escape them, UTF-8 cannot hold them.  Each becomes U+FFFD.

A model cuts an emoji in half, a client keeps what it wrote, and the next request holds `"\\ud83d"`.
"""

from __future__ import annotations

import json
import re
from typing import Any

MOST_ESCAPES = 100_000  # backslashes of a body that is repaired; with more, half a surrogate is no JSON: a 400
STRETCH = 2**16  # bytes that one search reads: other threads run between two
REPLACEMENT = "\ufffd"
HALVES = re.compile("[\ud800-\udfff]")
# An escape of JSON: a complete pair, half of one, or any other, which is only there to be passed over.
ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.S
)
_NUMBERS = {"Infinity": "1e999", "-Infinity": "-1e999", "NaN": "null"}
_CONSTANTS = re.compile(r'("(?:[^"\\]|\\.)*")|-?Infinity|NaN')  # strings are passed over
TEXT_ESCAPES = re.compile(ESCAPES.pattern.decode(), re.S)


def without_surrogates(value: Any) -> Any:
    """Return a value of JSON with U+FFFD in place of half surrogates, in keys, too.  May raise RecursionError."""
    if isinstance(value, str):
        return value if value.isascii() else HALVES.sub(REPLACEMENT, value)
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(inner) for key, inner in value.items()}
    return [without_surrogates(inner) for inner in value] if isinstance(value, list) else value


def json_of(value: Any) -> str:
    """Return valid JSON that UTF-8 can hold.  An infinite float is a number beyond any float, NaN is null."""
    text = str(without_surrogates(json.dumps(value, ensure_ascii=False)))
    if "Infinity" not in text and "NaN" not in text:
        return text
    return _CONSTANTS.sub(lambda match: match[1] or _NUMBERS[match[0]], text)


def without_escaped_halves(text: str) -> str:
    """Return JSON text with U+FFFD in place of escaped half surrogates."""
    if "\\ud" not in text and "\\uD" not in text:
        return text
    return TEXT_ESCAPES.sub(lambda match: "\\ufffd" if match.group(1) else match.group(), text)


def repaired(body: bytes) -> bytes:
    """Return a body of JSON with U+FFFD in place of escaped half surrogates."""
    starts = range(0, len(body), STRETCH)
    if not any(body.find(half, at, at + STRETCH + 2) >= 0 for at in starts for half in (b"\\ud", b"\\uD")):
        return body
    if sum(body.count(b"\\", at, at + STRETCH) for at in starts) > MOST_ESCAPES:
        return body
    return ESCAPES.sub(lambda match: b"\\ufffd" if match.group(1) else match.group(), body)
