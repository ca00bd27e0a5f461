"""The last known state of the engines and of the shared queue, from Redis.

    snapshots from Redis --record_reading--> FleetView --fleet()--> admission, /ready, metrics
    replies to submits --record_queue------^

Engines' clocks may be wrong.  So an engine's report gets a time stamp of this process's clock when it changes.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from quire.engine.wire.clock import steady_ms
from quire.engine.wire.messages import EngineLoad
from quire.engine.wire.records import Fleet, Queue


class FleetView:
    """The last known load of each live engine, and of the queue."""

    def __init__(self, now_ms: Callable[[], int] = steady_ms) -> None:
        """`now_ms`: this process's clock, unix milliseconds."""
        self._now_ms = now_ms
        # engine -> (time_ms on the engine's clock, load with time_ms on this process's clock)
        self._loads: dict[str, tuple[int, EngineLoad]] = {}
        self._exchanged_ms: dict[str, int] = {}  # engine -> unix time of its last sync, on this process's clock
        self._queue = Queue(queued=0, queued_tokens=0, free_tokens=0, tenants={})
        self._queue_ms = 0  # when `_queue` was read, on this process's clock
        self._quarantined = 0  # number of quarantined requests in the last full snapshot

    def record_load(self, load: EngineLoad) -> None:
        """Store an engine's load.  A report with an unchanged `time_ms` does not count as a sign of life."""
        known = self._loads.get(load.engine)
        if known is None or known[0] != load.time_ms:
            ours = msgspec.structs.replace(load, time_ms=self._now_ms())
            self._loads[load.engine] = (load.time_ms, ours)
            self._exchanged_ms[load.engine] = ours.time_ms

    def record_queue(self, queue: Queue) -> None:
        """Store the state of the queue that a submit returned, which contains only the submitting tenant."""
        tenants = self._queue.tenants | queue.tenants
        self._queue, self._queue_ms = msgspec.structs.replace(queue, tenants=tenants), self._now_ms()

    def record_reading(self, fleet: Fleet) -> None:
        """Store a full snapshot, and forget engines that it lacks: their leases have lapsed."""
        for load in fleet.engines:
            self.record_load(load)
        for engine in self._loads.keys() - {load.engine for load in fleet.engines}:
            del self._loads[engine]
        ahead_ms = self._now_ms() - fleet.time_ms  # how far this process's clock is ahead of the snapshot's
        self._exchanged_ms = {engine: time_ms + ahead_ms for engine, time_ms in fleet.exchanged_ms.items()}
        self._queue, self._queue_ms = (
            Queue(fleet.queued, fleet.queued_tokens, fleet.free_tokens, fleet.tenants, fleet.on_time, fleet.late),
            self._now_ms(),
        )
        self._quarantined = fleet.quarantined

    def fleet(self) -> Fleet:
        """Return the queue, and the engines with a live lease; `time_ms` is on this process's clock."""
        queue = self._queue
        return Fleet(
            [load for _, load in self._loads.values()],
            queue.queued,
            queue.queued_tokens,
            self._queue_ms,
            queue.free_tokens,
            queue.tenants,
            quarantined=self._quarantined,
            exchanged_ms=dict(self._exchanged_ms),
            on_time=queue.on_time,
            late=queue.late,
        )

    @property
    def serving(self) -> bool:
        """Whether a live engine takes new requests."""
        return not all(load.draining for _, load in self._loads.values())

    @property
    def fingerprint(self) -> str | None:
        """Value of `system_fingerprint` in answers: it changes when the weights change.  None: no engine is known."""
        return next((f"fp_{load.fingerprint[:16]}" for _, load in self._loads.values()), None)
