"""The pool-state store: the state of each engine's blocks, for gateways whose clients watch the live view.

    gateway  --watch()--> `watch` (WATCH_MS) ----the engine's next sync----> EngineSide.watched
             <--read()--- `pool_state:ENGINE` (STATE_MS) <---write()------------ the engine, a few times per second

While no client watches, neither key exists.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from quire.engine.wire import link
from quire.engine.wire.link import Link
from quire.engine.wire.messages import PoolState

WATCH_MS = 3_000  # engines publish for this long after the last watch(); a gateway calls it every second
STATE_MS = 5_000  # lifetime of a state; a live engine writes its state every second, even during a long step


class PoolStateStore:
    """One process's access to the store."""

    def __init__(self, link: Link) -> None:
        self._link, self._states = link, f"{link.prefix}pool_state:"

    async def watch(self) -> None:
        """Let all engines publish their states for WATCH_MS; the first call wakes idle engines.

        Raises BusDown after PATIENCE_S."""
        before = await self._retry(
            partial(self._link.redis.set, f"{self._link.prefix}watch", "", px=WATCH_MS, get=True)
        )
        if before is None:
            await self._retry(partial(self._link.redis.publish, f"{self._link.prefix}bell", ""))

    async def write(self, state: PoolState) -> None:
        """Replace the stored state of one engine.  Raises BusDown after PATIENCE_S."""
        value = zlib.compress(msgspec.msgpack.encode(state), level=1)
        await self._retry(partial(self._link.redis.set, self._states + state.engine, value, px=STATE_MS))

    async def read(self, engines: Sequence[str]) -> dict[str, PoolState]:
        """Return the states of these engines; engines without a readable state are left out.

        Raises BusDown after PATIENCE_S."""
        if not engines:
            return {}
        values = await self._retry(partial(self._link.redis.mget, [self._states + engine for engine in engines]))
        found = {engine: _decode(value) for engine, value in zip(engines, values, strict=True)}
        return {engine: state for engine, state in found.items() if state is not None}

    async def _retry(self, command: Any) -> Any:
        return await self._link.retry(command, link.PATIENCE_S)


def _decode(value: bytes | None) -> PoolState | None:
    try:
        return msgspec.msgpack.decode(zlib.decompress(value), type=PoolState) if value else None
    except (zlib.error, msgspec.DecodeError):
        return None
