"""Load the Lua scripts in `redis/`, which make all changes of Quire's shared state.

A script's source consists of the functions of `redis/shared/` that it uses, then the script's own file:

    local P ... local call ...  |  return (function() local function now_ms() ...  |  submit.lua  |  end)()

Redis creates every function of a script again for each call, which takes 0.1 to 0.2 us per function.  Part of this time
is Lua's linear search for the variables that a function captures, the latest first.  So the loader replaces the names
of `layout.py` by their values.  It puts P and call, which nearly all functions use, into an enclosing function, where
the search takes one step.

The first lines of each script document its arguments and its reply.  The keys are in `redis/KEYS.md`.
"""

from __future__ import annotations

import hashlib
import re
from importlib import resources
from typing import NamedTuple

from quire.engine.wire import layout

FILES = resources.files("quire.engine.wire") / "redis"
# In order of dependency: each file uses only functions of earlier files.
SHARED = (
    "base",
    "log",
    "queue",
    "turns",
    "listeners",
    "endings",
    "lanes",
    "engines",
    "lacking",
    "locality",
    "quotas",
    "responses",
    "sync_log",
    "sync_claim",
    "sync_renew",
)


def constants() -> dict[str, int]:
    """Return the constants of `layout.py`, name -> value."""
    return {name: value for name, value in vars(layout).items() if name.isupper() and isinstance(value, int)}


def _read(name: str) -> str:
    return (FILES / f"{name}.lua").read_text(encoding="utf-8")


def with_numbers(source: str) -> str:
    """Replace the names of `layout.py` in a source by their values."""
    numbers = constants()
    return re.sub(r"\b[A-Z_]+\b", lambda word: str(numbers.get(word[0], word[0])), source)


class Definition(NamedTuple):
    """A variable or function of `redis/shared/`, without the comments before it."""

    name: str
    text: str


def definitions(source: str) -> list[Definition]:
    """Return the definitions of a shared file: a variable is one line, a function ends at `end` in the first column."""
    found = re.findall(r"^(local function (\w+)\(.*?^end$|local (\w+).*?$)", source, re.MULTILINE | re.DOTALL)
    return [Definition(function or constant, text) for text, function, constant in found]


PRELUDE = [definition for name in SHARED for definition in definitions(with_numbers(_read(f"shared/{name}")))]
ENCLOSING = ("P", "call")


def used(body: str) -> list[Definition]:
    """Return the shared definitions that a script's source uses, directly or through other definitions."""
    words, found = set(re.findall(r"\w+", body)), list[Definition]()
    for definition in reversed(PRELUDE):
        if definition.name in words:
            words.update(re.findall(r"\w+", definition.text))
            found.append(definition)
    return found[::-1]


class Script:
    """A script's Lua source with the shared definitions that it uses, and its SHA-1 for EVALSHA."""

    def __init__(self, body: str) -> None:
        found = used(body)
        outer = [one.text for one in found if one.name in ENCLOSING]
        inner = [one.text for one in found if one.name not in ENCLOSING]
        self.source = "\n".join([*outer, "return (function()", *inner, with_numbers(body), "end)()"])
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


def load(name: str) -> Script:
    """Return the script `redis/NAME.lua`."""
    return Script(_read(name))


# Run by both sides when they open.
MEET = load("meet")
# Run by gateways.
SUBMIT, PLACES, CANCEL, KEEP = load("submit"), load("places"), load("cancel"), load("keep")
ADOPT, FLEET, ATTACH, READ_LOG = load("adopt"), load("fleet"), load("attach"), load("read_log")
FIND_DUPLICATE, RELEASE, SETTLE = load("find_duplicate"), load("release"), load("settle")
QUARANTINED = load("quarantined")
RESET_PREFIX_CACHES = load("reset_prefix_caches")
QUOTA_TAKE, QUOTA_RETURN = load("quota_take"), load("quota_return")
RESPONSE_PUT, RESPONSE_GET = load("response_put"), load("response_get")
RESPONSE_DROP, RESPONSE_LEASE = load("response_drop"), load("response_lease")
ADAPTER_PUT, ADAPTER_GET, ADAPTER_DROP = load("adapter_put"), load("adapter_get"), load("adapter_drop")
# Run by engines.
OPEN, CLOSE, OTHERS = load("open"), load("close"), load("others")
REJOIN, SYNC = load("rejoin"), load("sync")
REQUESTS_WAIT = load("requests_wait")

# Commands of Redis that the scripts and their callers need.
COMMANDS = sorted(
    {"EVAL", "EVALSHA", "EXISTS", "INFO", "SUBSCRIBE"}.union(
        *(re.findall(r"\bcall\('([A-Z]+)'", one.source) for one in list(globals().values()) if isinstance(one, Script))
    )
)
