"""Lone surrogates, which JSON can escape but UTF-8 cannot encode, become U+FFFD.

They occur when a model's answer ends within an emoji: the client keeps the half, and its next request contains
`"\\ud83d"`.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_ESCAPES = 100_000  # maximum backslashes of a body; with more, its lone surrogates are not replaced, and it gets 400
STRETCH = 2**16  # bytes that one search covers; other threads run between two searches
REPLACEMENT = "\ufffd"
HALVES = re.compile("[\ud800-\udfff]")
# Escapes in JSON: a surrogate pair, a lone surrogate (group 1), or any other escape, which the regex must skip.
ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.S
)
_NUMBERS = {"Infinity": "1e999", "-Infinity": "-1e999", "NaN": "null"}
_CONSTANTS = re.compile(r'("(?:[^"\\]|\\.)*")|-?Infinity|NaN')  # strings (group 1) stay unchanged
TEXT_ESCAPES = re.compile(ESCAPES.pattern.decode(), re.S)


def without_surrogates(value: Any) -> Any:
    """Return a JSON value with U+FFFD in place of lone surrogates, also in keys.  May raise RecursionError."""
    if isinstance(value, str):
        return value if value.isascii() or not HALVES.search(value) else HALVES.sub(REPLACEMENT, value)
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(inner) for key, inner in value.items()}
    return [without_surrogates(inner) for inner in value] if isinstance(value, list) else value


def json_of(value: Any) -> str:
    """Encode a value as valid JSON without surrogates.  Infinity becomes 1e999 and NaN becomes null."""
    text = str(without_surrogates(json.dumps(value, ensure_ascii=False)))
    if "Infinity" not in text and "NaN" not in text:
        return text
    return _CONSTANTS.sub(lambda match: match[1] or _NUMBERS[match[0]], text)


def without_escaped_halves(text: str) -> str:
    """Return JSON text with U+FFFD in place of escaped lone surrogates."""
    if "\\ud" not in text and "\\uD" not in text:
        return text
    return TEXT_ESCAPES.sub(lambda match: "\\ufffd" if match.group(1) else match.group(), text)


def repaired(body: bytes) -> bytes:
    """Return a JSON body with U+FFFD in place of escaped lone surrogates."""
    starts = range(0, len(body), STRETCH)
    if not any(body.find(half, at, at + STRETCH + 2) >= 0 for at in starts for half in (b"\\ud", b"\\uD")):
        return body
    if sum(body.count(b"\\", at, at + STRETCH) for at in starts) > MAX_ESCAPES:
        return body
    return ESCAPES.sub(lambda match: b"\\ufffd" if match.group(1) else match.group(), body)
