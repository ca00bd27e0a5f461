"""Restarts tasks that a gateway cannot work without, and reports tasks that fail."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

log = logging.getLogger("quire.gateway")

BACKOFF_S = (0.1, 5.0)  # first and maximum pause in seconds before a failed task restarts
DEAD_S = 10.0  # seconds of failures after which a task counts as dead, so that /ping returns 503
GIVE_UP_S = 20.0  # seconds of failures after which the process ends


class Task:
    """A coroutine function that runs forever, and a record of its failures."""

    def __init__(self, name: str, work: Callable[[], Awaitable[None]], progress: Callable[[], int]) -> None:
        """`progress()` returns a number that grows whenever the work succeeds."""
        self.name, self._work, self._progress = name, work, progress
        self._reached = 0  # value of `progress` at the last failure
        self._since = math.inf  # event-loop time of the first failure since the last success
        self._why = ""

    @property
    def failing(self) -> str | None:
        """Why the task fails, in one line; None while it works."""
        return self._why if self._progress() <= self._reached and self._why else None

    def failing_s(self) -> float:
        """Return the seconds since the first failure after the last success; 0 while the task works."""
        return asyncio.get_running_loop().time() - self._since if self.failing else 0.0

    async def keep_running(self) -> None:
        """Run the work, and restart it whenever it fails.  Returns when it has failed for GIVE_UP_S."""
        pause = BACKOFF_S[0]
        while True:
            try:
                await self._work()
                error: BaseException = RuntimeError("it ended by itself")
            except Exception as caught:
                error = caught
            except asyncio.CancelledError as caught:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                error = caught  # something that the task awaited was cancelled, not the task
            if self.failing is None:
                self._since, pause = asyncio.get_running_loop().time(), BACKOFF_S[0]
            self._reached = self._progress()
            self._why = f"{self.name} failed: {' '.join(str(error).split()) or type(error).__name__}"
            log.error("%s failed; restarting it in %.1f s", self.name, pause, exc_info=error)
            if self.failing_s() >= GIVE_UP_S:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, BACKOFF_S[1])


class Supervisor:
    """Keeps tasks running until stop().  If a task fails for GIVE_UP_S, sets `gave_up`; the process should then end."""

    def __init__(self, *tasks: Task) -> None:
        self._tasks = tasks
        self._running: list[asyncio.Task[None]] = []
        self.gave_up = asyncio.Event()

    def start(self) -> None:
        """Start every task.  Needs a running event loop."""
        self._running = [asyncio.create_task(self._keep(task), name=task.name) for task in self._tasks]

    async def stop(self) -> None:
        """Cancel every task."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _keep(self, task: Task) -> None:
        await task.keep_running()
        self.gave_up.set()

    @property
    def trouble(self) -> str | None:
        """Why a task fails, in one line; None while all tasks work."""
        return next((why for task in self._tasks if (why := task.failing)), None)

    @property
    def dead(self) -> bool:
        """Whether a task has failed for DEAD_S."""
        return any(task.failing_s() >= DEAD_S for task in self._tasks)
