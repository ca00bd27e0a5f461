"""The spare engine of `quire serve`, and the fork server that makes spares (engine/process/fork_server.py).

    no spare ── prepare() ──> being forked ──> idle ── promote() ──> serves; the next spare is being forked

The first spare takes as long as the imports of the fork server; every later spare takes a fraction of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

from quire.engine.common import child_python
from quire.engine.common.embedded_redis import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 64  # maximum length of a message from the fork server: "ready", or a PID
# Without this, numpy's BLAS, which engines do not use, would start threads at import; threads do not survive a fork.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


class ForkedProcess:
    """A child of this process that another process forked, with the interface of asyncio.subprocess.Process."""

    def __init__(self, pid: int, stdin: int) -> None:
        """`stdin`: writable descriptor of its standard input.  Needs a running event loop."""
        self.pid, self.returncode = pid, None
        self._stdin = stdin
        self._ended = asyncio.Event()
        self._handle = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._handle, self._reap)

    returncode: int | None  # negative: minus the number of the signal that killed it

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        self.close_stdin()
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()

    async def wait(self) -> int:
        """Wait until the process ends.  Returns its exit status."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def take_over(self) -> None:
        """Make the spare begin serving."""
        with contextlib.suppress(OSError):  # the spare has just ended
            os.write(self._stdin, b"now\n")
        self.close_stdin()
        raise_priority(self.pid)

    def close_stdin(self) -> None:
        """Close the process's standard input.  A second call does nothing."""
        descriptor, self._stdin = self._stdin, -1
        if descriptor >= 0:
            os.close(descriptor)


class Spares:
    """Keeps one spare engine."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """`words`: command-line arguments with which Python starts the fork server."""
        self._words, self._environment = words, environment
        self._server: asyncio.subprocess.Process | None = None
        self._line: socket.socket | None = None  # socket to the fork server
        self._ready = False  # the fork server has imported all modules
        self._spare: asyncio.Task[ForkedProcess | None] | None = None

    async def prepare(self) -> None:
        """Begin to fork a spare, unless there is one.

        Starts the fork server if necessary.  Does not wait for the spare."""
        if self._spare is not None and not self._spare.done():
            return
        if self._spare is not None and (spare := self._spare.result()) is not None and spare.returncode is None:
            return
        if self._server is None or self._server.returncode is not None:
            await self._start_server()
        self._spare = asyncio.create_task(self._fork())

    async def promote(self) -> ForkedProcess | None:
        """Let the spare serve, and return it; None if no spare is alive.  Waits if the spare is still being forked."""
        task, self._spare = self._spare, None
        if task is None:
            return None
        if not task.done() and not self._ready and self._line is not None and self._server is not None:
            with contextlib.suppress(OSError):
                self._line.send(b"hurry")
            raise_priority(self._server.pid)
        spare = await task
        if spare is None or spare.returncode is not None:
            return None
        spare.take_over()
        return spare

    def stop(self) -> None:
        """Kill the fork server: promote() then returns soon."""
        if self._server is not None and self._server.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._server.kill()

    async def close(self) -> None:
        """Kill the fork server and the spare, and wait until they have ended."""
        self.stop()
        task, self._spare = self._spare, None
        if task is not None and (spare := await task) is not None:
            spare.send_signal(signal.SIGKILL)
            await spare.wait()
        if self._server is not None:
            await self._server.wait()
        if self._line is not None:
            self._line.close()

    async def _start_server(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setblocking(False)
        self._ready = False
        with theirs:
            self._server = await asyncio.create_subprocess_exec(
                *child_python.command(*self._words),
                stdin=theirs.fileno(),
                stdout=sys.stderr,
                env={**self._environment, **ONE_THREAD},
                process_group=0,
                preexec_fn=die_with_parent(),
            )

    async def _fork(self) -> ForkedProcess | None:
        """Fork a new spare.  Returns None if the fork server ends before that."""
        loop, line = asyncio.get_running_loop(), self._line
        assert line is not None
        reader, writer = os.pipe()
        pid = b""
        try:
            if not self._ready:
                self._ready = bool(await loop.sock_recv(line, MESSAGE_BYTES))
            if self._ready:
                with adopting_orphans():
                    socket.send_fds(line, [b"fork"], [reader])
                    pid = await loop.sock_recv(line, MESSAGE_BYTES)
            return ForkedProcess(int(pid), writer) if pid else None
        except OSError:  # the fork server has ended
            return None
        finally:
            os.close(reader)
            if not pid:
                os.close(writer)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """A context in which this process becomes the parent of descendants whose own parent ends (a subreaper)."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def raise_priority(pid: int) -> None:
    """Give a spare or the fork server, which begin at a low CPU priority, that of this process, if it is allowed."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0))
