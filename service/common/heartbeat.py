"""Heartbeats from a gateway's event loop to its supervisor, which restarts a gateway whose loop hangs."""

from __future__ import annotations

import asyncio

from quire.engine.common import readiness

BEAT_S = 1.0


class Heartbeat:
    """Sends a heartbeat every BEAT_S from the event loop, so that a blocked loop sends none."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Send a heartbeat now, and then every BEAT_S.  Needs a running event loop."""
        readiness.notify_alive()
        self._handle = asyncio.get_running_loop().call_later(BEAT_S, self.start)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
