"""Make writes to standard output and standard error non-blocking, so that a stopped log reader cannot stop a server.

    print, logging, warnings --> QueuedStream in place of sys.stderr --> queue --> writer thread --> file descriptor 2

The reader of a server's log may stop reading: a log collector hangs, or a terminal is paused.  Then the pipe fills up
(64 KiB on Linux) and write() blocks.  A gateway that calls write() on its event loop would answer no request any more.

So the process only appends its lines to a queue in memory.  A thread per stream writes them to the file descriptor, and
only that thread blocks.  A queue holds at most MAX_LINES lines and MAX_BYTES bytes.  When it is full, new lines are
dropped and counted until half of the queue is free again.  Then the log gets one line with the number of dropped lines.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TextIO

MAX_LINES, MAX_BYTES = 10_000, 4 << 20  # bounds of one stream's queue: lines, bytes
WRITE_BYTES = 1 << 16  # maximum bytes per write: the capacity of a pipe
# Maximum characters of an incomplete line that a stream keeps; longer text is queued as if the line had ended.
MAX_LINE_CHARS = 1 << 18
DRAIN_S = 2.0  # maximum seconds that an ending process waits for queued lines to be written

Notice = Callable[[int], str]  # number of dropped lines -> the line that reports them


def plain_notice(count: int) -> str:
    """Return the text that reports `count` dropped lines."""
    return f"{count} log lines were dropped: the reader of this log was too slow, or had stopped"


class QueuedWriter:
    """Writes to a file descriptor from a thread of its own.  write() never waits and never raises."""

    def __init__(self, descriptor: int, notice: Notice = plain_notice) -> None:
        self.notice = notice
        self.dropped = 0  # lines since start
        self._descriptor = descriptor
        self._changed = threading.Condition()  # its lock is reentrant: a finalizer may log while this thread logs
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._writing = False  # the thread has taken lines that are not written yet
        self._full = False  # lines are dropped, from when the queue was full until half of it is free
        self._unreported = 0  # dropped lines that no notice has reported
        self._failing = False  # the last write failed: no notice until one succeeds
        self._thread: threading.Thread | None = None

    def write(self, data: bytes) -> None:
        """Queue `data`, which is one line or several."""
        with self._changed:
            if self._full or len(self._queue) >= MAX_LINES or self._bytes + len(data) > MAX_BYTES:
                self._full = bool(self._queue)  # a single line that exceeds an empty queue blocks no further lines
                lines = max(1, data.count(b"\n"))
                self.dropped += lines
                self._unreported += lines
                return
            self._report()
            self._append(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, seconds: float = DRAIN_S) -> bool:
        """Wait until all lines are written, for at most `seconds`.  Returns whether all were written."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._writing), seconds)

    def _append(self, data: bytes) -> None:
        self._queue.append(data)
        self._bytes += len(data)

    def _report(self) -> None:
        if self._unreported and not self._failing:
            self._append(f"{self.notice(self._unreported)}\n".encode())
            self._unreported = 0

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                taken = self._take()
            lost = self._put(taken)
            with self._changed:
                self._writing, self._failing = False, bool(lost)
                self.dropped += lost
                self._unreported += lost
                self._full = self._full and (len(self._queue) > MAX_LINES // 2 or self._bytes > MAX_BYTES // 2)
                if not self._full:
                    self._report()
                self._changed.notify_all()

    def _take(self) -> bytes:
        taken = [self._queue.popleft()]
        size = len(taken[0])
        while self._queue and size + len(self._queue[0]) <= WRITE_BYTES:
            taken.append(self._queue.popleft())
            size += len(taken[-1])
        self._bytes -= size
        self._writing = True
        return b"".join(taken)

    def _put(self, data: bytes) -> int:
        """Write all of `data`, blocking.  Returns the number of lines lost because of a full disk or a closed pipe."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # another process has made the terminal or the pipe non-blocking
                select.select([], [self._descriptor], [], 1.0)
            except OSError:
                return max(1, bytes(view).count(b"\n"))
        return 0


class QueuedStream(io.TextIOBase):
    """A text stream over a QueuedWriter, which replaces sys.stdout or sys.stderr.

    write() queues complete lines.  It keeps an incomplete line until the line ends, flush() is called, or it has
    MAX_LINE_CHARS.  flush() does not wait for the writer thread, because print(flush=True) and logging handlers call it
    on event loops."""

    def __init__(self, original: TextIO, notice: Notice = plain_notice) -> None:
        self.original = original
        self.queue = QueuedWriter(original.fileno(), notice)
        self._lock = threading.RLock()
        self._rest = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a constant in typeshed
        return self.original.encoding

    def write(self, text: str) -> int:
        with self._lock:
            lines, end, self._rest = (self._rest + text).rpartition("\n")
            if end:
                self.queue.write(self._encode(lines + end))
            if len(self._rest) > MAX_LINE_CHARS:
                self.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            rest, self._rest = self._rest, ""
            if rest:
                self.queue.write(self._encode(rest))

    def fileno(self) -> int:
        return self.original.fileno()

    def isatty(self) -> bool:
        return self.original.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def _encode(self, text: str) -> bytes:
        return text.encode(self.encoding, "backslashreplace")


def install(notice: Notice = plain_notice) -> None:
    """Replace sys.stdout and sys.stderr by queued streams, for the rest of the process.

    A stream that is closed, or that something else has replaced already, stays as it is."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, QueuedStream):
            stream.queue.notice = notice
        elif stream is not None and stream is getattr(sys, f"__{name}__"):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
                setattr(sys, name, QueuedStream(stream, notice))
    atexit.register(drain)


def drain(seconds: float = DRAIN_S) -> None:
    """Wait until all printed and logged lines are written, for at most `seconds`.  Call it at the end of a process."""
    end = time.monotonic() + seconds
    for stream in _installed():
        stream.flush()
        stream.queue.drain(max(0.0, end - time.monotonic()))


def dropped_lines() -> int:
    """Return the number of lines that this process has dropped since it started."""
    return sum(stream.queue.dropped for stream in _installed())


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """A context in which sys.stdout and sys.stderr are queued streams; they are drained at its end."""
    before = sys.stdout, sys.stderr
    install()
    try:
        yield
    finally:
        drain()
        sys.stdout, sys.stderr = before


def descriptor_for_crashes() -> int:
    """Return a descriptor of standard error whose writes never block, for code that cannot use a queue.

    If standard error is a pipe, the pipe is opened again, because flags of the descriptor would affect all processes
    that share it.  Otherwise returns 2."""
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(2).st_mode):
            return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return 2


def _installed() -> list[QueuedStream]:
    return [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, QueuedStream)]
