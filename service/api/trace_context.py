"""W3C trace context of a request: the headers `traceparent` and `tracestate`, checked.

https://www.w3.org/TR/trace-context/.  Quire passes them on to engines and ignores malformed ones.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class TraceContext(NamedTuple):
    """The two headers; both are "" without a valid `traceparent`."""

    parent: str = ""
    state: str = ""


def traceparent(header: str) -> str:
    """Return a W3C `traceparent` header unchanged, or "" if it is malformed.

    https://www.w3.org/TR/trace-context/: version, trace id, parent id, flags.
    All-zero ids and version ff are invalid."""
    form = r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    return header if re.fullmatch(form, header) else ""


TRACESTATE_CHARS = 512  # characters of `tracestate` that W3C requires to pass on; further members are dropped
TRACESTATE_MEMBERS = 32  # maximum number of members, from the W3C specification
_STATE_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_STATE_MEMBER = re.compile(_STATE_KEY + r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]")


def tracestate(header: str) -> str:
    """Return the members of a W3C `tracestate` header, or "" if it is malformed.

    https://www.w3.org/TR/trace-context/: up to 32 members `key=value`, no key twice.  Several headers are joined."""
    members = [member for one in header.split(",") if (member := one.strip(" \t"))]
    keys = {member.partition("=")[0] for member in members}
    if len(keys) < len(members) or len(members) > TRACESTATE_MEMBERS or not all(map(_STATE_MEMBER.fullmatch, members)):
        return ""
    while len(kept := ",".join(members)) > TRACESTATE_CHARS:
        members.pop()
    return kept
