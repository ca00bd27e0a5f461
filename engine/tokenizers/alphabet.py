"""The byte-level alphabet of BPE vocabularies, and the bound on token ids in vocabulary files."""

from __future__ import annotations

MAX_TOKENS = 2**19  # token ids must be below this; the largest published vocabularies have about half as many tokens


def byte_level_alphabet() -> dict[str, int]:
    """Return printable character -> byte, the inverse of GPT-2's `bytes_to_unicode` (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + at): b for at, b in enumerate(others)}


def token_number(written: str) -> int | None:
    """Return the token id that a file writes as decimal digits; None if it is not below MAX_TOKENS."""
    digits = written.lstrip("0")
    if len(digits) > len(str(MAX_TOKENS)):  # int() raises for thousands of digits
        return None
    number = int(digits or "0")
    return number if number < MAX_TOKENS else None
