"""A log file of bounded size, written by a thread of its own: the request log.

the loop --write()--> queue --> writer thread --> FILE, and FILE.1 before it
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from quire.engine.common.private_files import open_private, restrict_file

log = logging.getLogger("quire.engine")

CLOSE_S = 10.0  # longest wait for the disk when the log is closed
# Most records that wait for the disk, and most bytes of memory that they keep alive.  Others are dropped and counted.
QUEUE, QUEUE_BYTES = 10_000, 64 << 20


class LogFile:
    """Appends records to FILE, within an allowance.

    FILE becomes FILE.1, in the place of the one before, at half the allowance.

    write() never waits and never raises.  A full disk ends the log, with one line in the program's log, and not the
    engine."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Start a new FILE; an existing one becomes FILE.1.  All files together stay below `max_bytes`.

        Raises OSError."""
        self._path, self._max_bytes = path, max_bytes
        self._queue: queue.Queue[tuple[Callable[[], bytes], int] | None] = queue.Queue(QUEUE)
        self.dropped = 0  # records since start, because the queue was full
        self._queued_bytes = self._taken_bytes = 0  # bytes since start; only write() and only the thread change them
        if path.exists() and not path.is_file():
            raise FileExistsError(errno.EEXIST, "not a regular file", str(path))  # a pipe could stop the start
        if path.exists():
            os.replace(path, self.previous)
            restrict_file(self.previous)
        self._open()
        self._thread = threading.Thread(target=self._run, name=f"log {path.name}", daemon=True)
        self._thread.start()

    @property
    def previous(self) -> Path:
        return self._path.with_name(self._path.name + ".1")

    def write(self, encode: Callable[[], bytes], size: int) -> None:
        """Append the record that `encode` returns; it runs on the writer thread.

        `size`: bytes of memory that `encode` keeps alive, estimated.  A record of any size may wait alone."""
        waiting = self._queued_bytes - self._taken_bytes
        try:
            if waiting and waiting + size > QUEUE_BYTES:
                raise queue.Full
            self._queue.put_nowait((encode, size))
            self._queued_bytes += size
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what has gathered, for CLOSE_S at most: the disk may have stopped."""
        end = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            log.error("%s lacks its last lines: the disk did not take them in %g s", self._path, CLOSE_S)

    def _open(self) -> None:
        self._file = open_private(self._path)
        self._size = 0

    def _run(self) -> None:
        ended = False
        while (record := self._queue.get()) is not None:
            encode, size = record
            try:
                if not ended:
                    self._append(encode())
            except OSError as error:
                ended = True
                log.error("%s ends here: %s", self._path, error)
            del record, encode  # what it kept alive is freed before the next wait
            self._taken_bytes += size
        try:
            self._file.close()  # writes what is still buffered
        except OSError as error:
            if not ended:
                log.error("%s ends here: %s", self._path, error)

    def _append(self, data: bytes) -> None:
        """Write one record, then start a new file if this one is full.  Raises OSError."""
        self._file.write(data)
        self._size += len(data)
        if self._size > self._max_bytes // 2:
            self._file.close()
            os.replace(self._path, self.previous)
            self._open()
        elif self._queue.empty():
            self._file.flush()
