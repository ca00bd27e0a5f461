"""Commands of an operator on the shared state: quarantine, prefix caches, and a probe whether Redis takes writes."""

from __future__ import annotations

from functools import partial

import msgspec

from quire.engine.wire import link
from quire.engine.wire.link import Link
from quire.engine.wire.messages import Generate
from quire.engine.wire.records import Quarantined
from quire.engine.wire.scripts import QUARANTINED, RESET_PREFIX_CACHES


class Operations:
    """Commands of an operator, over the connection of a gateway."""

    def __init__(self, to: Link) -> None:
        self._link = to

    async def probe(self) -> None:
        """Write a small key, to check that Redis has memory and accepts writes.  Raises BusDown after PROBE_S."""
        key = f"{self._link.prefix}probe"
        await self._link.retry(partial(self._link.redis.set, key, "", px=link.BLOCK_MS), link.PROBE_S)

    async def quarantined(self, drop: str = "") -> list[Quarantined]:
        """Delete the quarantined request with id `drop`, if given, and return the remaining ones, oldest first.

        Raises BusDown after PATIENCE_S."""
        decode = msgspec.msgpack.Decoder(Generate).decode
        return [
            Quarantined(decode(payload), int(attempts), int(tokens), engine.decode(), int(time_ms))
            for payload, attempts, tokens, engine, time_ms in await self._link.run_script(QUARANTINED, drop)
        ]

    async def reset_prefix_caches(self) -> list[str]:
        """Send every engine with a live lease the command to empty its prefix cache; return the names of these engines.

        Each engine empties its cache between two steps, after its next sync.  Raises BusDown after PATIENCE_S."""
        return [engine.decode() for engine in await self._link.run_script(RESET_PREFIX_CACHES)]
