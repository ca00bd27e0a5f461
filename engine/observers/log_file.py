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
from typing import BinaryIO

from quire.engine.common.private_files import open_private, restrict_file

log = logging.getLogger("quire.engine")

CLOSE_S = 10.0  # maximum seconds to wait for the disk when the log is closed
# Maximum records that wait for the disk, and maximum bytes that they keep in memory.  Further records are dropped.
QUEUE, QUEUE_BYTES = 10_000, 64 << 20


class LogFile:
    """Appends records to FILE.  When FILE has half of the maximum size, it is renamed to FILE.1, which is replaced.

    write() never waits and never raises.  While the disk is full, records are dropped and counted, and the program's
    log has one line when this begins and one when it ends.  If another program renames or truncates FILE, as logrotate
    does, later records are in a new or empty FILE."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Start a new FILE; an existing FILE is renamed to FILE.1.  Both files together stay below `max_bytes`.

        Raises OSError."""
        self._path, self._max_bytes = path, max_bytes
        self._queue: queue.Queue[tuple[Callable[[], bytes], int] | None] = queue.Queue(QUEUE)
        self._refused = self._unwritten = 0  # records dropped since start: the queue was full; the disk failed
        self._queued_bytes = self._taken_bytes = 0  # bytes since start, written by write() and by the writer thread
        if path.exists() and not path.is_file():
            raise FileExistsError(errno.EEXIST, "not a regular file", str(path))  # opening a pipe could block the start
        if path.exists():
            os.replace(path, self.previous)
            restrict_file(self.previous)
        self._file: BinaryIO | None = None
        self._open()
        self._thread = threading.Thread(target=self._run, name=f"log {path.name}", daemon=True)
        self._thread.start()

    @property
    def previous(self) -> Path:
        return self._path.with_name(self._path.name + ".1")

    @property
    def dropped(self) -> int:
        """Number of records dropped since start."""
        return self._refused + self._unwritten

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
            self._refused += 1

    def close(self) -> None:
        """Write the waiting records, for at most CLOSE_S, because the disk may hang."""
        end = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            log.error("%s lacks its last lines: the disk did not take them in %g s", self._path, CLOSE_S)

    def _open(self, *, empty: bool = True) -> None:
        """Open FILE, then close the file that was open before.  Raises OSError; that file stays open then."""
        before, self._file = self._file, open_private(self._path, empty=empty)
        self._size = os.fstat(self._file.fileno()).st_size
        if before is not None:
            before.close()

    def _run(self) -> None:
        missing = 0  # records dropped since the disk failed
        while (record := self._queue.get()) is not None:
            encode, size = record
            try:
                self._append(encode())
            except OSError as error:
                if not missing:
                    log.error("%s lacks records from here on: %s", self._path, error)
                missing += 1
                self._unwritten += 1
            else:
                if missing:
                    log.warning("%s takes records again, %d are missing", self._path, missing)
                missing = 0
            del record, encode  # free the record's memory before the next wait
            self._taken_bytes += size
        if self._file is not None:
            self._file.close()

    def _append(self, data: bytes) -> None:
        """Append one record, to a new file if this file is full or has been renamed.  Raises OSError."""
        if self._size > self._max_bytes // 2:
            # The file may be gone: another program has renamed it, or it could not be opened.
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._path, self.previous)
            self._open()
        elif self._moved():
            self._open(empty=False)
        assert self._file is not None
        number = self._file.fileno()
        if (written := os.write(number, data)) < len(data):  # the disk is full; a part of a line would spoil the next
            os.ftruncate(number, os.fstat(number).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def _moved(self) -> bool:
        """Return whether FILE is no longer the open file.  Raises OSError."""
        assert self._file is not None
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return True
