"""Integers in schemas that llguidance would round, since it compares and writes numbers as doubles.

Bounds move inward to the next double, so every number that the grammar allows fits the client's bound.  Values of
`const` and `enum` that are not doubles are refused.
"""

from __future__ import annotations

import math
from typing import Any

from quire.service.grammar.grammar_errors import NotServed

EXACT = 2**53  # every integer up to this is exact as a double
LARGEST = 2**63 - 1024  # largest double that llguidance accepts as a bound
BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}  # keyword -> direction inward


def move_bounds(schema: dict[str, Any], at: str) -> None:
    """Round the bounds of a schema for integers, in place.  Raises NotServed if no number is left."""
    given = schema.get("type")
    kinds = given if isinstance(given, list) else [given]
    if "integer" not in kinds or "number" in kinds:
        return
    for name, way in BOUNDS.items():
        bound = schema.get(name)
        if not isinstance(bound, int) or abs(bound) <= EXACT:
            continue
        if bound * way > LARGEST:
            raise _unserved(f"{at}.{name}", f"of whole numbers: at most {LARGEST} here", LARGEST, bound)
        found = float(max(-LARGEST, min(LARGEST, bound)))
        schema[name] = int(found if int(found) * way >= bound * way else math.nextafter(found, way * math.inf))


def check_values(schema: dict[str, Any], at: str) -> None:
    """Raise NotServed for an integer in `const` or `enum` that llguidance would write as a different number."""
    for name in ("const", "enum"):
        waiting = [schema.get(name)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict | list):
                waiting += value.values() if isinstance(value, dict) else value
            elif isinstance(value, int) and not _is_exact(value):
                reason = f"whole numbers beyond {EXACT} are written as doubles, which have no {_shown(value)}"
                raise _unserved(f"{at}.{name}", reason, EXACT, value)


def _is_exact(number: int) -> bool:
    return abs(number) <= EXACT or (abs(number) <= LARGEST and int(float(number)) == number)


def _shown(number: int) -> str:
    return str(number)[:64] if number.bit_length() < 4096 else f"number of {number.bit_length()} bits"


def _unserved(param: str, reason: str, limit: int, given: int) -> NotServed:
    return NotServed(param[:256], reason, code="unsupported", limit=limit, given=_shown(given))
