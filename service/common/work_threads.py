"""Threads for work on large requests, which would block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LONG_BYTES = 256 * 1024  # larger requests share one thread, so that they never delay shorter requests for seconds


class WorkThreads:
    """Two thread pools: one for short requests, one for long requests."""

    def __init__(self, inline_bytes: int, name: str) -> None:
        """`inline_bytes`: work on larger requests runs on a thread.  `name`: prefix of the threads' names."""
        self._inline = inline_bytes
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix=name)
        self._long_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name} long")

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` for a request of `size` bytes: on the event loop if it is short, else on a thread.

        The event loop runs meanwhile if `work` is native code that releases the GIL, as the tokenizer is.  Python code
        on the thread releases the GIL every GIL_SWITCH_S (app.py)."""
        if size <= self._inline:
            return work(*args, **kwargs)
        pool = self._pool if size <= LONG_BYTES else self._long_pool
        return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *args, **kwargs))
