"""Raise the limit of open files, because every connection of a process is an open file."""

from __future__ import annotations

import contextlib
import resource

MAX = 1_048_576  # soft limit to set if the hard limit is infinite


def raise_limit() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard limit; return (soft limit before, after).

    The usual soft limit is 1,024, for old programs that use select().  A server needs more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else MAX, soft if soft != resource.RLIM_INFINITY else MAX
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return soft, wanted
    return soft, soft
