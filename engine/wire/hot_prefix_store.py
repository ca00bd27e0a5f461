"""The hot-prefix store: the most-hit prefixes of an engine's cache, for the next engine that starts.

Engines with the same model fingerprint share a key; the last write wins.  Reading deletes the key, so a prefix that
crashes an engine is not computed again at the next start.  An engine that survives writes the prefixes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec

from quire.engine.wire import link
from quire.engine.wire.link import Link
from quire.engine.wire.messages import HotPrefix
from quire.engine.wire.scripts import REQUESTS_WAIT

TTL_MS = 600_000  # lifetime of the stored prefixes after the last write
MAX_PREFIXES = 128  # maximum stored prefixes
MAX_BYTES = 1 << 20  # maximum bytes of stored tokens and salts: 262,144 tokens


def bounded(prefixes: Sequence[HotPrefix]) -> list[HotPrefix]:
    """Return as many of the first prefixes as fit MAX_PREFIXES and MAX_BYTES."""
    sizes = accumulate(len(prefix.tokens) + len(prefix.cache_salt.encode()) for prefix in prefixes)
    return [prefix for prefix, size in zip(prefixes[:MAX_PREFIXES], sizes, strict=False) if size <= MAX_BYTES]


class HotPrefixStore:
    """One engine's access to the store."""

    def __init__(self, link: Link) -> None:
        self._link, self._key = link, f"{link.prefix}hot_prefixes:"

    async def write(self, fingerprint: str, prefixes: Sequence[HotPrefix]) -> None:
        """Replace the stored prefixes, within the bounds.  `prefixes`: hottest first.  Raises BusDown."""
        value = msgspec.msgpack.encode(bounded(prefixes))
        await self._link.retry(
            partial(self._link.redis.set, self._key + fingerprint, value, px=TTL_MS), link.PATIENCE_S
        )

    async def take(self, fingerprint: str) -> list[HotPrefix]:
        """Read and delete the stored prefixes, hottest first.  Raises BusDown, and ValueError for unreadable data."""
        value: Any = await self._link.retry(partial(self._link.redis.getdel, self._key + fingerprint), link.PATIENCE_S)
        try:
            return msgspec.msgpack.decode(value, type=list[HotPrefix]) if value else []
        except msgspec.DecodeError as error:
            raise ValueError(f"unreadable hot prefixes in Redis: {error}") from None

    async def requests_wait(self) -> bool:
        """Return whether requests wait while no serving engine has free capacity.  Raises BusDown."""
        return bool(await self._link.run_script(REQUESTS_WAIT))
