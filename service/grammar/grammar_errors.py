"""Why a request for structured output is not served."""

from __future__ import annotations

from typing import Any


class NotServed(Exception):
    """The fields of a request ask for what cannot be honoured.  `param`: the path of the field or keyword."""

    def __init__(self, param: str, reason: str, *, code: str = "invalid_value", limit: Any = None, given: Any = None):
        super().__init__(f"{param}: {reason}")
        self.param, self.code, self.limit, self.given = param, code, limit, given
