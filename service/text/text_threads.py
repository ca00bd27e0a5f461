"""Threads for the work on requests whose size would hold the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Encoding and templates take about a microsecond per four characters.  Larger requests run on a thread, or they would
# hold the event loop for milliseconds.
INLINE_BYTES = 4096
LONG_BYTES = 256 * 1024  # larger requests share one thread, so that they never delay shorter ones for seconds


class TextThreads:
    """Two pools: one for short requests, one for long ones."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")
        self._long_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode long")

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a part of the work on a request whose body has `size` bytes: here when it is short, else on a thread.

        The tokenizer lets the event loop run meanwhile.  Python code on the thread lets it run every few
        milliseconds."""
        if size <= INLINE_BYTES:
            return work(*args, **kwargs)
        pool = self._pool if size <= LONG_BYTES else self._long_pool
        return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *args, **kwargs))
