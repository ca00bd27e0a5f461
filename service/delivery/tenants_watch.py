"""Reloads the tenants file when it changes, so that a revoked API key stops working without a gateway restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator

from quire.service.api.tenants import Tenants, TenantsError

log = logging.getLogger("quire.gateway")

LOOK_S = 2.0  # seconds between two checks of the file; a check is one `stat` call


class TenantsWatch:
    """Watches the tenants file.  If a new version is invalid, the keys and tenants read before stay in use."""

    def __init__(self, tenants: Tenants, path: str, look_s: float = LOOK_S) -> None:
        self._tenants, self._path, self._look_s = tenants, path, look_s
        self._seen = self._identity()
        self._asked = asyncio.Event()  # set by SIGUSR1: reload the file now, even if it has not changed

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """A context in which the file is watched.  Without a file (empty path) it does nothing."""
        if not self._path:
            yield
            return
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
            loop.add_signal_handler(signal.SIGUSR1, self._asked.set)
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            loop.remove_signal_handler(signal.SIGUSR1)

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self._look_s)
            identity = await asyncio.to_thread(self._identity)
            if self._asked.is_set() or identity != self._seen:
                self._asked.clear()
                self._seen = identity
                await self._reload()

    async def _reload(self) -> None:
        try:
            count = await asyncio.to_thread(self._tenants.reload)
        except TenantsError as error:
            log.error("the file of tenants has changed and is not used: %s; the keys read before stay valid", error)
        else:
            log.info("read the file of tenants again: %s has %d keys", self._path, count)

    def _identity(self) -> tuple[int, int, int] | None:
        """Return inode, mtime and size of the file; None if it does not exist.

        Symbolic links are followed: Kubernetes replaces a mounted secret by changing a link."""
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size
