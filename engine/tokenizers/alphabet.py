"""The byte-level alphabet of BPE vocabularies, and the numbers that a vocabulary file may give its tokens."""

from __future__ import annotations

MOST_TOKENS = 2**19  # numbers of tokens are below this; the largest published vocabularies have about half of it


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte -> that byte (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + at): b for at, b in enumerate(others)}


def token_number(written: str) -> int | None:
    """Return the number of a token that a file writes as decimal digits; None if it is not below MOST_TOKENS."""
    digits = written.lstrip("0")
    if len(digits) > len(str(MOST_TOKENS)):  # Python reads no number of thousands of digits
        return None
    number = int(digits or "0")
    return number if number < MOST_TOKENS else None
