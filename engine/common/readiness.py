"""Notifications from a process to its supervisor, in systemd's protocol (sd_notify).

When a process is ready, it sends the datagram "READY=1" to the unix socket in the variable NOTIFY_SOCKET.  A gateway
then sends "WATCHDOG=1" every second.  So the same process runs under `quire serve` and under a systemd unit with
Type=notify, and WatchdogSec= for a gateway.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

VARIABLE = "NOTIFY_SOCKET"
READY, ALIVE = b"READY=1", b"WATCHDOG=1"


def notify_ready() -> None:
    """Notify the supervisor, if there is one, that this process is ready.  Errors are ignored."""
    _notify(READY)


def notify_alive() -> None:
    """Send a heartbeat to the supervisor, if there is one.  Never waits."""
    _notify(ALIVE)


def _notify(word: bytes) -> None:
    if address := os.environ.get(VARIABLE):
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.connect("\0" + address[1:] if address.startswith("@") else address)
                sender.send(word, socket.MSG_DONTWAIT)  # the socket's queue is full if the supervisor is stopped
        except OSError:
            return


class ReadinessListener:
    """Receives a child's notifications, in the supervisor.  `address`: the child's value of VARIABLE."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-ready-")
        self.address = str(Path(self._folder.name) / "s")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(self.address)
        self.beats = 0  # heartbeats read so far

    def is_ready(self) -> bool:
        """Return whether the child has become ready since the last call, and count its heartbeats.  Never waits."""
        found = False
        try:
            while True:
                words = self._socket.recv(4096).split(b"\n")
                found |= READY in words
                self.beats += ALIVE in words
        except BlockingIOError:
            return found

    def close(self) -> None:
        self._socket.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
