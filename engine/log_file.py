"""Log files of bounded size, written by a thread of their own: the flight log and the request log.

the loop --write()--> queue --> writer thread --> FILE, and FILE.1 before it
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("quire.engine")

QUEUE = 10_000  # records that may wait for the disk; beyond it they are dropped, and counted


def no_header() -> bytes:
    return b""


class LogFile:
    """Appends records to FILE; at half the allowance FILE becomes FILE.1, in the place of the one before.

    write() never waits and never raises.  A full disk ends the log, with one line in the program's log, and not the
    engine."""

    def __init__(self, path: Path, max_bytes: int, header: Callable[[], bytes] = no_header) -> None:
        """Start a new FILE; an existing one becomes FILE.1.  Both together stay below `max_bytes`.  `header` returns
        what every file begins with; it runs on the writer thread.  Raises OSError."""
        self._path, self._half, self._header = path, max_bytes // 2, header
        self._queue: queue.Queue[Callable[[], bytes] | None] = queue.Queue(QUEUE)
        self.dropped = 0  # records since start, because the queue was full
        if path.exists():
            os.replace(path, self.previous)
        self._open()
        self._thread = threading.Thread(target=self._run, name=f"log {path.name}", daemon=True)
        self._thread.start()

    @property
    def previous(self) -> Path:
        return self._path.with_name(self._path.name + ".1")

    def write(self, encode: Callable[[], bytes]) -> None:
        """Append the record that `encode` returns; it runs on the writer thread."""
        try:
            self._queue.put_nowait(encode)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what has gathered."""
        self._queue.put(None)
        self._thread.join()

    def _open(self) -> None:
        self._file = self._path.open("wb")
        self._size = 0
        self._append(self._header())

    def _append(self, data: bytes) -> None:
        self._file.write(data)
        self._size += len(data)

    def _run(self) -> None:
        broken = False
        while (encode := self._queue.get()) is not None:
            if broken:
                continue
            try:
                self._append(encode())
                if self._size > self._half:
                    self._file.close()
                    os.replace(self._path, self.previous)
                    self._open()
                elif self._queue.empty():
                    self._file.flush()
            except OSError as error:
                broken = True
                log.error("%s ends here: %s", self._path, error)
        with contextlib.suppress(OSError):
            self._file.close()
