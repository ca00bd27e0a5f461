"""LogFile: a log file of bounded size with its own writer thread; used for the request log.

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

CLOSE_S = 10.0  # maximum seconds to wait for the disk when the log is closed
# Maximum records that wait for the disk, and maximum bytes that they keep in memory.  Further records are dropped.
QUEUE, QUEUE_BYTES = 10_000, 64 << 20


class LogFile:
    """Appends records to FILE.  When FILE has half of the maximum size, it is renamed to FILE.1, which is replaced.

    write() never waits and never raises.  A full disk ends only this log, with one line in the program's log."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Start a new FILE; an existing FILE is renamed to FILE.1.  Both files together stay below `max_bytes`.

        Raises OSError."""
        self._path, self._max_bytes = path, max_bytes
        self._queue: queue.Queue[tuple[Callable[[], bytes], int] | None] = queue.Queue(QUEUE)
        self.dropped = 0  # records dropped since start because the queue was full
        self._queued_bytes = self._taken_bytes = 0  # bytes since start, written by write() and by the writer thread
        if path.exists() and not path.is_file():
            raise FileExistsError(errno.EEXIST, "not a regular file", str(path))  # opening a pipe could block the start
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
        """Append the record that `encode` returns; `encode` runs on the writer thread.

        `size`: estimated bytes of memory that `encode` keeps alive.  A single record may exceed QUEUE_BYTES."""
        waiting = self._queued_bytes - self._taken_bytes
        try:
            if waiting and waiting + size > QUEUE_BYTES:
                raise queue.Full
            self._queue.put_nowait((encode, size))
            self._queued_bytes += size
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write the waiting records, for at most CLOSE_S, because the disk may hang."""
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
            del record, encode  # free the record's memory before the next wait
            self._taken_bytes += size
        try:
            self._file.close()  # writes the buffered rest
        except OSError as error:
            if not ended:
                log.error("%s ends here: %s", self._path, error)

    def _append(self, data: bytes) -> None:
        """Write one record, then start a new file if this file is full.  Raises OSError."""
        self._file.write(data)
        self._size += len(data)
        if self._size > self._max_bytes // 2:
            self._file.close()
            os.replace(self._path, self.previous)
            self._open()
        elif self._queue.empty():
            self._file.flush()
