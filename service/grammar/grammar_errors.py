"""The error of a request for structured output that is not supported."""

from __future__ import annotations

from typing import Any


class NotServed(Exception):
    """Structured output that cannot be enforced.  `param`: path of the field or keyword at fault."""

    def __init__(self, param: str, reason: str, *, code: str = "invalid_value", limit: Any = None, given: Any = None):
        super().__init__(f"{param}: {reason}")
        self.param, self.code, self.limit, self.given = param, code, limit, given
