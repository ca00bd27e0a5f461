"""Classify errors of Redis by their remedy, for all supported versions of the server and of redis-py.

For an error inside a script, Redis 6.2 puts the error code into the text of a general error; Redis 7 and Valkey return
the code itself.  redis-py removes the codes that it knows from the text and raises a class of its own.  So this module
checks both text and class.
"""

from __future__ import annotations

import enum
import re

from redis import exceptions


class Remedy(enum.Enum):
    """The action that may make the next attempt succeed."""

    WAIT = enum.auto()  # retry: the server is full, loading or busy, or its disk fails, and may recover
    RECONNECT = enum.auto()  # retry on new connections: another server may answer at this address by now
    UNKNOWN = enum.auto()  # unknown error: retry for a bounded time, and log it
    OPERATOR = enum.auto()  # an operator must give a valid password, or more rights for this user
    NONE = enum.auto()  # do not retry: the program has a bug, or another process has taken its place


CODES = {
    "OOM": Remedy.WAIT,
    "MISCONF": Remedy.WAIT,
    "LOADING": Remedy.WAIT,
    "BUSY": Remedy.WAIT,
    "TRYAGAIN": Remedy.WAIT,
    "EXECABORT": Remedy.WAIT,
    "READONLY": Remedy.RECONNECT,
    "UNBLOCKED": Remedy.RECONNECT,
    "MASTERDOWN": Remedy.RECONNECT,
    "NOREPLICAS": Remedy.RECONNECT,  # the server may have lost its replicas because one of them was promoted
    "CLUSTERDOWN": Remedy.RECONNECT,
    "MOVED": Remedy.RECONNECT,
    "ASK": Remedy.RECONNECT,
    "NOAUTH": Remedy.OPERATOR,
    "WRONGPASS": Remedy.OPERATOR,
    "NOPERM": Remedy.OPERATOR,
    "SUPERSEDED": Remedy.NONE,
    "WRONGTYPE": Remedy.NONE,
    "NOSCRIPT": Remedy.NONE,
    "CROSSSLOT": Remedy.NONE,
}
# Searched in order, so subclasses stand before their base classes: the first matching class gives the code.
CLASSES: list[tuple[type[Exception], str]] = [
    (exceptions.OutOfMemoryError, "OOM"),
    (exceptions.ReadOnlyError, "READONLY"),
    (exceptions.MasterDownError, "MASTERDOWN"),
    (exceptions.ClusterDownError, "CLUSTERDOWN"),
    (exceptions.TryAgainError, "TRYAGAIN"),
    (exceptions.MovedError, "MOVED"),
    (exceptions.AskError, "ASK"),
    (exceptions.ClusterCrossSlotError, "CROSSSLOT"),
    (exceptions.BusyLoadingError, "LOADING"),
    (exceptions.ExecAbortError, "EXECABORT"),
    (exceptions.NoScriptError, "NOSCRIPT"),
    (exceptions.NoPermissionError, "NOPERM"),
    (exceptions.AuthorizationError, "NOPERM"),
    (exceptions.AuthenticationWrongNumberOfArgsError, "WRONGPASS"),
    (exceptions.AuthenticationError, "WRONGPASS"),
]
# Texts of errors with the general code ERR, in any version, that no retry can fix.
HOPELESS = re.compile(r"(?i)wrong number of arg|unknown (redis )?command|error compiling script|syntax error")
# "Error running script (call to f_SHA): @user_script:5: @user_script: 5: -OOM command not allowed ..."
WRAPPED = re.compile(r"^Error running script .*?@user_script: ?\d+: -?([A-Z]{3,})\b")
PLAIN = re.compile(r"^([A-Z]{3,})\b")


def code_of(error: Exception) -> str:
    """Return the code of an error reply, such as "OOM"; "ERR" for the general code; "" for an error without a reply."""
    if type(error) is exceptions.ConnectionError and isinstance(error.__cause__, exceptions.RedisError):
        error = error.__cause__  # the error reply to redis-py's own first command on a new connection
    for kind, code in CLASSES:
        if isinstance(error, kind):
            return "NOAUTH" if getattr(error, "status_code", None) == "NOAUTH" else code
    if not isinstance(error, exceptions.ResponseError):
        return ""
    text = str(error)
    found = WRAPPED.search(text) or PLAIN.search(text.removeprefix("ERR "))
    return found[1] if found else "ERR"


def remedy(error: Exception) -> Remedy:
    """Return the remedy for an error of a command, raised by redis-py or by the operating system."""
    code = code_of(error)
    if code in CODES:
        return CODES[code]
    if isinstance(error, exceptions.ResponseError):
        return Remedy.NONE if HOPELESS.search(str(error)) else Remedy.UNKNOWN
    network = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.InvalidResponse, OSError)
    return Remedy.RECONNECT if isinstance(error, network) else Remedy.NONE


def one_line(error: Exception) -> str:
    """Return the error as one line of text with its code."""
    text, code = " ".join(str(error).split()), code_of(error)
    if not text:
        return "no answer" if isinstance(error, TimeoutError) else type(error).__name__
    return text if code in ("", "ERR") or code in text else f"{code} {text}"
