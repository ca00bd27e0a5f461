"""The usage ledger: how many tokens of each finished submission were delivered, written to Redis in batches.

Redis counts the generated tokens itself, in the script with which an engine appends them.  The gateway adds the
delivered tokens.
"""

from __future__ import annotations

import logging

from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.records import Usage
from quire.service.common.metrics import DELIVERED_TOKENS, NAMELESS, Telemetry
from quire.service.delivery.open_request import Submission

log = logging.getLogger("quire.usage")

BATCH_COUNT = 100  # submissions written to Redis in one call


class UsageLedger:
    """Collects finished submissions and writes their usage to Redis.

    A submission stays in the list until Redis acknowledges it."""

    def __init__(self, bus: GatewaySide, telemetry: Telemetry) -> None:
        self._bus, self._telemetry = bus, telemetry
        self._finished: list[Submission] = []

    def add(self, submission: Submission) -> None:
        """Add a submission, whose usage the next call of `write` stores."""
        self._finished.append(submission)

    async def write(self) -> None:
        """Write the usage of all collected submissions.

        Raises BusDown; what was not written stays for the next call."""
        while batch := self._finished[:BATCH_COUNT]:
            for usage in await self._bus.settle(
                [(submission.id, submission.tenant, submission.delivered) for submission in batch]
            ):
                record_usage(self._telemetry, usage)
            del self._finished[: len(batch)]


def record_usage(telemetry: Telemetry, usage: Usage) -> None:
    """Count and log the usage of one submission (one prompt of a request) that is over at this gateway.

    If a client resumes the submission at another gateway, that gateway logs a second line with the same id.  The line
    with the larger `delivered_tokens` is the valid one."""
    telemetry.count(DELIVERED_TOKENS, usage.new)
    line = {
        "id": usage.request_id,
        "tenant": usage.tenant or NAMELESS,
        "generated_tokens": usage.generated,
        "delivered_tokens": usage.delivered,
    }
    log.info("usage", extra={"fields": line})
