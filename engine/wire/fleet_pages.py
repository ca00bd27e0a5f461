"""A gateway's copy of the engines' loads.  It reads one page of engines at a time, and of these only changed loads.

    pages, in the order of names:   [e0 ... e255]  [e256 ... e511]  [e512 ... e700]  then the first page again
    a reading:                            ^ leases that have changed since the gateway last read this page

A reply also has the number of engines in the page.  If it differs from the gateway's copy, an engine has left, and the
gateway reads all leases of this page.  A fleet of one page is read completely each time, a larger fleet within PASS_MS.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from quire.engine.wire.messages import EngineLoad

PASS_MS = 1_000  # if the current pass began this long ago, fleet() reads all its remaining pages at once
LEASE_HEAD = struct.Struct(">dd")  # beginning of a lease: version, unix ms of the sync

_decode = msgspec.msgpack.Decoder(EngineLoad).decode


class FleetPage(NamedTuple):
    """The reply of one reading about the engines of a page; see `redis/fleet.lua`."""

    leases: list[bytes]
    following: bytes  # name of the page's last engine; b"": this is the last page
    engines: int  # number of engines in the page, changed or not
    last_change: int  # highest lease version of all engines
    known: bool  # Redis has this gateway's last heartbeat; False: this is the first page, with all its leases
    time_ms: int  # unix time of the reading


class FleetPages:
    """The loads of the engines with a lease, as of the last readings."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[EngineLoad, int]] = {}  # name -> load, unix ms of the sync that brought it
        self.start_afresh()

    def start_afresh(self) -> None:
        """Read every lease again, beginning with the first page."""
        self._after = b""  # name of the engine before the next page
        # Engine name before a page -> highest lease version when the page was read, in the last and in this pass.
        self._read: dict[bytes, int] = {}
        self._reading: dict[bytes, int] = {}
        self._pass_ms = 0  # unix time at which the first page of this pass was read
        self._reread = False  # whether to read all leases of the page, because one of its engines has left
        self._passes = 0  # complete passes since start_afresh()

    def position(self) -> tuple[bytes, int]:
        """Return (engine name before the next page, highest lease version at the last reading of this page)."""
        if self._reread:
            return self._after, 0
        # If page boundaries have moved, a page may have no entry; the first page's number is a safe lower bound.
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
        """Return whether every page has been read recently enough.  `now_ms`: unix time of the last reading."""
        if not self._passes or self._reread:
            return False
        return not self._after or now_ms - self._pass_ms < PASS_MS

    def loads(self) -> list[EngineLoad]:
        """Return the engines' loads, in arbitrary order."""
        return [load for load, _ in self._known.values()]

    def exchanged_ms(self) -> dict[str, int]:
        """Return the unix time of the sync that brought each load."""
        return {load.engine: time_ms for load, time_ms in self._known.values()}


def _read_lease(lease: bytes) -> tuple[bytes, tuple[EngineLoad, int]]:
    _, time_ms = LEASE_HEAD.unpack_from(lease)
    load = _decode(memoryview(lease)[LEASE_HEAD.size :])
    return load.engine.encode(), (load, int(time_ms))
