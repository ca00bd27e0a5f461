"""The hot-prefix store: what an engine found in its prefix cache most often, for the next engine that starts.

    key                         type    what                                   goes away
    hot_prefixes:FINGERPRINT    string  msgpack list of HotPrefix, hottest     TTL_MS after the last write,
                                        first, at most MOST and MOST_BYTES     and when an engine reads it

Engines of one model fingerprint share the key; the last write counts.  Reading deletes the key, so an engine that dies
of a prefix does not meet that prefix at its next start.  An engine that survives writes the prefixes back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import msgspec

from engine.wire.messages import HotPrefix
from engine.wire.scripts import Script

TTL_MS = 600_000
MOST = 128  # prefixes
MOST_BYTES = 1 << 20  # of their tokens and salts: a quarter of a million tokens
LONGEST = 32_768  # tokens of one prefix; of a longer one its beginning is kept

# fingerprint, value
WRITE = Script(f"call('SET', P .. 'hot_prefixes:' .. ARGV[1], ARGV[2], 'PX', {TTL_MS})")

# fingerprint: the value, or nothing
TAKE = Script("""
local key = P .. 'hot_prefixes:' .. ARGV[1]
local value = call('GET', key)
call('DEL', key)
return value
""")

# 1 if a request waits that the serving engines have no room for
REQUESTS_WAIT = Script("""
local waiting = call('HLEN', P .. 'waiting') + call('ZCARD', P .. 'suspects')
return waiting > 0 and room() == 0 and 1 or 0
""")


class RunScript(Protocol):
    """Runs a script; raises BusDown when it did not succeed in time."""

    def __call__(self, script: Script, *args: bytes | str | int) -> Awaitable[Any]: ...


def bounded(prefixes: Sequence[HotPrefix]) -> list[HotPrefix]:
    """Return the first prefixes that stay within MOST and MOST_BYTES together."""
    kept: list[HotPrefix] = []
    left = MOST_BYTES
    for prefix in prefixes:
        left -= len(prefix.tokens) + len(prefix.cache_salt.encode())
        if left < 0 or len(kept) == MOST:
            break
        kept.append(prefix)
    return kept


class HotPrefixStore:
    """One engine's access to the store."""

    def __init__(self, run: RunScript) -> None:
        self._run = run

    async def write(self, fingerprint: str, prefixes: Sequence[HotPrefix]) -> None:
        """Replace what is stored, within the bounds.  `prefixes`: hottest first.  Raises BusDown."""
        await self._run(WRITE, fingerprint, msgspec.msgpack.encode(bounded(prefixes)))

    async def take(self, fingerprint: str) -> list[HotPrefix]:
        """Read and delete what is stored, hottest first.  Raises BusDown, and ValueError for anything unreadable."""
        value = await self._run(TAKE, fingerprint)
        try:
            return msgspec.msgpack.decode(value, type=list[HotPrefix]) if value else []
        except msgspec.DecodeError as error:
            raise ValueError(f"unreadable hot prefixes in Redis: {error}") from None

    async def requests_wait(self) -> bool:
        """Return whether a request waits that the serving engines have no room for.  Raises BusDown."""
        return bool(await self._run(REQUESTS_WAIT))
