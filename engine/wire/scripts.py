"""Load the Lua scripts in `redis/`, in which all of Quire's state changes.

A script's source is the constants of `layout.py`, then the functions of `redis/shared/`, then the script's own file:

    local EXPIRY_MS = 60000 ...  |  base.lua  log.lua  ...  engines.lua  |  submit.lua

The first lines of each file say what its arguments mean and what it returns.  The keys are in `redis/KEYS.md`.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from engine.wire import layout

FILES = resources.files("engine.wire") / "redis"
# Each uses only those before it.
SHARED = ("base", "log", "queue", "listeners", "endings", "lanes", "engines", "locality", "quotas", "responses")


def constants() -> dict[str, int]:
    """Return every number of `layout.py` by its name."""
    return {name: value for name, value in vars(layout).items() if name.isupper() and isinstance(value, int)}


def _read(name: str) -> str:
    return (FILES / f"{name}.lua").read_text(encoding="utf-8")


PRELUDE = "\n".join(
    [*(f"local {name} = {value}" for name, value in constants().items()), *(_read(f"shared/{name}") for name in SHARED)]
)


class Script:
    """A script's Lua source behind the constants and shared functions, and the SHA-1 by which the server knows it."""

    def __init__(self, body: str) -> None:
        self.source = PRELUDE + body
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


def load(name: str) -> Script:
    """Return the script `redis/NAME.lua`."""
    return Script(_read(name))


# Both sides run MEET when they open.
MEET = load("meet")
# The gateway's side.
SUBMIT, PLACES, CANCEL, KEEP = load("submit"), load("places"), load("cancel"), load("keep")
ADOPT, FLEET, ATTACH, READ_LOG = load("adopt"), load("fleet"), load("attach"), load("read_log")
FIND_DUPLICATE, RELEASE, SETTLE = load("find_duplicate"), load("release"), load("settle")
QUARANTINED = load("quarantined")
RESET_PREFIX_CACHES = load("reset_prefix_caches")
QUOTA_TAKE, QUOTA_RETURN = load("quota_take"), load("quota_return")
RESPONSE_PUT, RESPONSE_GET = load("response_put"), load("response_get")
RESPONSE_DROP, RESPONSE_LEASE = load("response_drop"), load("response_lease")
# The engine's side.
OPEN, CLOSE, OTHERS = load("open"), load("close"), load("others")
REJOIN, EXCHANGE = load("rejoin"), load("exchange")
REQUESTS_WAIT = load("requests_wait")
