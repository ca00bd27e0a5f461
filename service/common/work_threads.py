"""Threads for the work on requests whose size would hold the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LONG_BYTES = 256 * 1024  # larger requests share one thread, so that they never delay shorter ones for seconds


class WorkThreads:
    """Two pools: one for short requests, one for long ones."""

    def __init__(self, inline_bytes: int, name: str) -> None:
        """`inline_bytes`: work on larger requests runs on a thread.  `name`: prefix of the threads' names."""
        self._inline = inline_bytes
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix=name)
        self._long_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name} long")

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` for a request of `size` bytes: inline if it is short, else on a thread.

        Native code lets the event loop run meanwhile if it releases the interpreter, as the tokenizer does.  Python
        code on the thread lets it run every GIL_SWITCH_S (app.py)."""
        if size <= self._inline:
            return work(*args, **kwargs)
        pool = self._pool if size <= LONG_BYTES else self._long_pool
        return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *args, **kwargs))
