"""Requests that arrive while no engine takes requests: they wait here, and join a lane when one does.

    arrival --> engine takes requests? -- yes --> limits, admission, lane
                  no: wait, at most --takeover-wait-s, the request's timeout and X-Max-Queue-Wait --> 503 no_engine

An engine's limits decide whether a request can be served at all, so nothing is queued before one is known.  A request
that waits here is a task of its gateway and nothing else: a client that leaves costs no more than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from quire.service.common.refusal import limit_refusal

RETRY_S = 5.0  # pause for clients beyond the bound


class EngineWait:
    """The requests of this gateway that wait for an engine."""

    def __init__(self, longest_s: float, most: int) -> None:
        """`longest_s`: seconds that a request waits at most.  `most`: requests that may wait."""
        self._longest_s, self._most = longest_s, most
        self._serving = asyncio.Event()  # set while an engine takes new requests
        self._since: dict[object, float] = {}  # one entry for each request that waits, in order of arrival

    def record(self, *, serving: bool) -> None:
        """Store whether an engine takes new requests; if so, all requests continue, in order of arrival."""
        if serving:
            self._serving.set()
        else:
            self._serving.clear()

    async def wait(self, longest_s: float) -> float:
        """Wait until an engine takes requests, `longest_s` seconds at most; return the seconds waited.

        Raises Refusal if too many requests wait."""
        if self._serving.is_set() or (left_s := min(self._longest_s, longest_s)) <= 0:
            return 0.0
        if len(self) >= self._most:
            message = f"the queue is full: {len(self)} requests wait for an engine"
            raise limit_refusal("queued", message, self._most, retry_after_s=RETRY_S)
        began, entry = time.monotonic(), object()
        self._since[entry] = began
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._serving.wait()
        finally:
            del self._since[entry]
        return time.monotonic() - began

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._since)

    @property
    def oldest_s(self) -> float:
        """Seconds that the oldest of them has waited; 0: none waits."""
        return time.monotonic() - next(iter(self._since.values())) if self._since else 0.0
