"""Reads the state of engines and queue (the fleet) from Redis every `fleet_s` seconds, then does periodic upkeep.

    Redis --snapshot--> FleetView --> admission, /ready, metrics
                  `--> requests that wait for an engine, queue positions, usage ledger, retention of token logs

It also stores the reason why Redis cannot be used.  While there is such a reason, `Streams` refuses new requests.
"""

from __future__ import annotations

import asyncio
import time

from quire.engine.wire.clock import steady_ms
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.link import BusDown
from quire.service.common.metrics import BACKLOG, CLOCK_SKEW, REDIS_SECONDS, Telemetry
from quire.service.config import GatewayConfig
from quire.service.delivery.engine_wait import EngineWait
from quire.service.delivery.fleet_view import FleetView
from quire.service.delivery.queue_updates import QueueUpdates
from quire.service.delivery.submissions import Submissions
from quire.service.delivery.usage_ledger import UsageLedger


class FleetWatch:
    """Reads the state of engines and queue from Redis, and reports failures of Redis."""

    def __init__(
        self,
        bus: GatewaySide,
        config: GatewayConfig,
        telemetry: Telemetry,
        view: FleetView,
        submissions: Submissions,
        updates: QueueUpdates,
        ledger: UsageLedger,
    ) -> None:
        self._bus, self._telemetry, self._view = bus, telemetry, view
        self._submissions, self._updates, self._ledger = submissions, updates, ledger
        self._interval_s = config.fleet_s
        self.engine_wait = EngineWait(config.takeover_wait_s, config.max_queued)
        self.readings = 0  # number of snapshots since the start
        self._missed = False  # True if open requests may lack tokens that the token logs have
        # Why Redis cannot be used: one line per kind of call that failed, until a call of this kind succeeds.
        self._troubles = {"fleet": "the engines have not been looked up yet"}

    async def run(self) -> None:
        """Read the fleet's state every `fleet_s` seconds, forever."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.refresh()
            self.readings += 1

    async def refresh(self) -> None:
        """Read the fleet's state once, then do the upkeep.  Failures of Redis are stored in `trouble`, not raised."""
        began = time.monotonic()
        try:
            fleet = await self._bus.fleet()
        except BusDown as error:
            self._troubles["fleet"] = str(error)
            return
        self._telemetry.observe(REDIS_SECONDS, time.monotonic() - began, "fleet")
        self._view.record_reading(fleet)
        self._missed = self._missed or fleet.forgotten
        self.engine_wait.record(serving=self._view.serving)
        await self._updates.refresh(steady_ms())
        self._troubles.pop("fleet", None)
        self._record_metrics()
        await self._maintain()
        await self._probe()

    def _record_metrics(self) -> None:
        self._telemetry.record_fleet(self._view.fleet())
        self._telemetry.record_engine_wait(len(self.engine_wait), self.engine_wait.oldest_s)
        self._telemetry.set(BACKLOG, self._submissions.backlog.held)
        self._telemetry.set(CLOCK_SKEW, self._bus.clock.skew_s)

    async def _maintain(self) -> None:
        """Read missed tokens from the logs, write the usage ledger, and extend the TTL of logs that clients read."""
        try:
            if self._missed:
                await self._submissions.listen_again()
                self._missed = False
            await self._ledger.write()
            await self._submissions.extend_retention()
            self._troubles.pop("ledger", None)
        except BusDown as error:
            self._troubles["ledger"] = str(error)

    async def _probe(self) -> None:
        """After a failed submit, test whether Redis accepts writes again.  Until it does, requests are refused."""
        if "submit" in self._troubles:
            try:
                await self._bus.operations.probe()
                del self._troubles["submit"]
            except BusDown as error:
                self.record_failed_submit(error)

    def record_failed_submit(self, error: BusDown) -> None:
        """Store why Redis did not take a request."""
        self._troubles["submit"] = str(error)

    @property
    def trouble(self) -> str | None:
        """Why Redis cannot be used, in one line; None while it works."""
        return next(iter(self._troubles.values()), None)

    @property
    def max_model_len(self) -> int | None:
        """The smallest context of the live engines, in tokens; None without an engine."""
        return min((load.max_model_len for load in self._view.fleet().engines), default=None)

    @property
    def fingerprint(self) -> str | None:
        """Value of `system_fingerprint` in answers.  It changes when the model's weights change."""
        return self._view.fingerprint
