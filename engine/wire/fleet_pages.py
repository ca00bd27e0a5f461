"""What a gateway knows of the engines, from readings that return one page of them and only what has changed.

    pages, in the order of names:   [e0 ... e255]  [e256 ... e511]  [e512 ... e700]  then the first again
    a reading:                            ^ leases whose number is beyond the last change that the gateway has read

A page's reply counts its engines.  So a gateway notices that one has left, and reads that page again as a whole.  A
fleet of one page is read completely each time, a larger one within PASS_MS.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from quire.engine.wire.messages import EngineLoad

PASS_MS = 1_000  # a reading continues until all pages are read, if the first one was read so long ago
LEASE_HEAD = struct.Struct(">dd")  # number of the change, unix ms of the sync; the load follows

_decode = msgspec.msgpack.Decoder(EngineLoad).decode


class FleetPage(NamedTuple):
    """What one reading returns of the engines: see `redis/fleet.lua`."""

    leases: list[bytes]
    following: bytes  # name of the page's last engine; b"": no page follows
    engines: int  # number of engines in the page, changed or not
    last_change: int  # number of the last change of any engine
    known: bool  # Redis remembers the last heartbeat; else this is the first page, with all its leases
    time_ms: int  # unix time of the reading


class FleetPages:
    """The engines with a lease, as of the readings so far."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[EngineLoad, int]] = {}  # name -> load, unix ms of the sync that brought it
        self.start_afresh()

    def start_afresh(self) -> None:
        """Forget how far the readings came: the next ones return every lease, beginning with the first page."""
        self._after = b""
        # Last change at the time when a page was read, by the name before that page: of the last pass and of this one.
        self._read: dict[bytes, int] = {}
        self._reading: dict[bytes, int] = {}
        self._pass_ms = 0  # unix time at which the first page of this pass was read
        self._reread = False  # all leases of the page, because an engine of it has left
        self._passes = 0  # since the readings began afresh

    def position(self) -> tuple[bytes, int]:
        """Return what the next reading asks for: the name before its page, and the last change known of the page."""
        if self._reread:
            return self._after, 0
        # After a shift a page may have no entry: the first page was read before all others.
        return self._after, self._read.get(self._after, self._read.get(b"", 0))

    def record(self, page: FleetPage) -> None:
        """Store a reply to `position()`."""
        everything = self.position()[1] == 0
        if not page.known:
            self.start_afresh()
            everything = True
        if not self._after:
            self._pass_ms = page.time_ms
        within = {name for name in self._known if self._after < name and (not page.following or name <= page.following)}
        changed = dict(map(_read_lease, page.leases))
        for name in within - changed.keys() if everything else ():
            del self._known[name]
        self._known.update(changed)
        self._reread = not everything and len(within | changed.keys()) != page.engines
        if self._reread:
            return
        self._reading[self._after] = page.last_change
        self._after = page.following
        if not page.following:
            self._read, self._reading = self._reading, {}
            self._passes += 1

    def complete(self, now_ms: int) -> bool:
        """Return whether every page has been read, each one lately.  `now_ms`: unix time of the last reading."""
        if not self._passes or self._reread:
            return False
        return not self._after or now_ms - self._pass_ms < PASS_MS

    def loads(self) -> list[EngineLoad]:
        """Return the engines' loads, in no order."""
        return [load for load, _ in self._known.values()]

    def exchanged_ms(self) -> dict[str, int]:
        """Return the unix time of the sync that brought each load."""
        return {load.engine: time_ms for load, time_ms in self._known.values()}


def _read_lease(lease: bytes) -> tuple[bytes, tuple[EngineLoad, int]]:
    _, time_ms = LEASE_HEAD.unpack_from(lease)
    load = _decode(memoryview(lease)[LEASE_HEAD.size :])
    return load.engine.encode(), (load, int(time_ms))
