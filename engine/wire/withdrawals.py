"""Withdrawals: requests to end because their clients have left.  One task of the gateway sends them to Redis in
batches.

Even if many streams end at once, each script withdraws at most SCRIPT_COUNT requests, so Redis serves other commands
between two scripts.  The gateway sends each id once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("quire.bus")

SCRIPT_COUNT = 64  # maximum withdrawals per script, which keep Redis busy for 2 to 4 ms

Withdrawal = tuple[str, int]  # (request id, index of a choice, or UNREAD, or FOR_ALL)
UNREAD = -1  # abort all choices, unless another gateway streams them, too
FOR_ALL = -2  # abort all choices, even if other gateways stream them


class Withdrawals:
    """Keeps each withdrawal until Redis has it.  Call all methods on one asyncio loop."""

    def __init__(self, send: Callable[[list[Withdrawal]], Awaitable[bool]]) -> None:
        """`send`: runs one script and returns whether Redis has the withdrawals.  If not, they are kept, and the next
        wake() sends them again."""
        self._send = send
        self._owed: dict[Withdrawal, None] = {}  # withdrawals that Redis does not have yet, oldest first
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._owed)

    def add(self, *withdrawals: Withdrawal) -> None:
        """Add withdrawals that the next wake() sends."""
        self._owed.update(dict.fromkeys(withdrawals))

    def wake(self) -> None:
        """Start the task that sends the pending withdrawals, unless it is running."""
        if self._owed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="withdraw")

    async def sent(self) -> None:
        """Wait until no withdrawal is pending, or the task has given up for now."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def revoke(self, request_id: str) -> None:
        """Do not end this request, because it has a client again.  Waits for a script that may just end it."""
        one = (request_id, UNREAD)
        if one in self._owed:
            await self.sent()
            self._owed.pop(one, None)

    async def close(self) -> None:
        """Stop sending."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while some := list(itertools.islice(self._owed, SCRIPT_COUNT)):
            try:
                if not await self._send(some):
                    return
            except Exception:
                log.exception("%d withdrawals could not be sent and stay pending", len(self._owed))
                return
            for one in some:
                self._owed.pop(one, None)
