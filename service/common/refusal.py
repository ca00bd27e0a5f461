"""`Refusal`: the error response of a request, with status, code, message, field, limit and value."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.service.common.limits import LIMITS, broken, shown
from quire.service.config import GatewayConfig

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "server_error",
}


class Refusal(Exception):
    """An error response.  `limit`, `given`: the allowed and the sent value, if the request exceeds a limit."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        limit: float | str | None = None,
        given: float | str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.limit, self.retry_after_s = limit, retry_after_s
        self.given = None if given is None else shown(given)

    def body(self) -> bytes:
        """Return the error in OpenAI's JSON format."""
        error: dict[str, Any] = {
            "message": _encodable(self.message),
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        if self.limit is not None:
            error["limit"] = self.limit
        if self.given is not None:
            error["given"] = _encodable(self.given) if isinstance(self.given, str) else self.given
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        """Return Retry-After in whole seconds (>= 1) and in milliseconds; for 504, `x-should-retry: false`."""
        if self.retry_after_s is not None:
            seconds = max(1, math.ceil(self.retry_after_s))
            return {"Retry-After": str(seconds), "retry-after-ms": str(round(self.retry_after_s * 1000))}
        return {"x-should-retry": "false"} if self.status == 504 else {}


def _encodable(text: str) -> str:
    """Return `text` without lone surrogates, by which Python represents non-UTF-8 bytes of a header or path."""
    return text.encode("utf-8", "replace").decode()


def bad_request(code: str, message: str, param: str | None, limit: Any = None, given: Any = None) -> Refusal:
    """Return a 400 for one field."""
    return Refusal(400, code, message, param=param, limit=limit, given=given)


def wrong_type(param: str, wanted: str) -> Refusal:
    """Return a 400 for a field with a wrong type.  `wanted`: the right type in words."""
    return bad_request("invalid_type", f"{param}: must be {wanted}", param, wanted)


def unsupported(param: str, reason: str, limit: Any = None, given: Any = None) -> Refusal:
    """Return a 400 for a field or value that is not supported."""
    return bad_request("unsupported", f"{param}: {reason}", param, limit, given)


def field_name(name: str, names: tuple[tuple[str, str], ...]) -> str:
    """Return the name of a chat's field in another API format; `names` as for `renamed`."""
    patterns = ((_bounded(old), new) for old, new in names)
    return next((re.sub(old, new, name, count=1) for old, new in patterns if re.match(old, name)), name)


def _bounded(pattern: str) -> str:
    """Return a regex that matches `pattern` at the start of a field path, up to the end of a name."""
    return rf"^(?:{pattern})(?!\w)"


def renamed(refusal: Refusal, names: tuple[tuple[str, str], ...]) -> Refusal:
    """Change the field name in a refusal to that of another API format.

    `names`: (regex of the beginning of `param`, replacement) pairs; the first match counts."""
    given = refusal.param
    for pattern, name in names if given is not None else ():
        if given is not None and re.match(_bounded(pattern), given):
            refusal.param = re.sub(_bounded(pattern), name, given, count=1)
            if refusal.message.startswith(given):
                refusal.message = refusal.param + refusal.message[len(given) :]
            break
    return refusal


def check(key: str, value: float, config: GatewayConfig) -> None:
    """Raise a Refusal that names field, limit and value, if `value` is beyond the limit `key` of LIMITS."""
    if (found := broken(key, value, config)) is not None:
        raise Refusal(found.status, found.code, found.message, param=found.param, limit=found.limit, given=found.given)


def limit_refusal(
    key: str,
    message: str,
    limit: float,
    *,
    param: str | None = None,
    given: float | str | None = None,
    retry_after_s: float | None = None,
) -> Refusal:
    """Return the Refusal for a limit of LIMITS that `broken` cannot check; status and code come from the table."""
    row = LIMITS[key]
    return Refusal(row.status, row.code, message, param=param, limit=limit, given=given, retry_after_s=retry_after_s)


@contextlib.contextmanager
def renaming(names: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """A context that changes field names in refusals to those of another API format; see `renamed`."""
    try:
        yield
    except Refusal as refusal:
        raise renamed(refusal, names) from None


@contextlib.contextmanager
def placing(sources: Sequence[str]) -> Iterator[None]:
    """A context that replaces `messages[i]` in refusals by `sources[i]`, a field path in the client's API format.

    The rest of the path, a field of the chat's message, is dropped.  Without `sources`, nothing is renamed."""
    try:
        yield
    except Refusal as refusal:
        found = re.match(r"messages\[(\d+)\][\w.\[\]]*", refusal.param or "") if sources else None
        if found is None or int(found[1]) >= len(sources):
            raise
        raise renamed(refusal, ((re.escape(found[0]), sources[int(found[1])]),)) from None
