"""How a process tells whoever supervises it that it is up: systemd's protocol (sd_notify), of which we speak one word.

A datagram "READY=1" to the unix socket that the variable NOTIFY_SOCKET names.  So the same process runs under `quire
serve` and under a systemd unit of Type=notify.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

VARIABLE = "NOTIFY_SOCKET"
WORD = b"READY=1"


def notify_ready() -> None:
    """Say so to the supervisor, if there is one.  Never fails: without it the process serves all the same."""
    if address := os.environ.get(VARIABLE):
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.connect("\0" + address[1:] if address.startswith("@") else address)
                sender.send(WORD)
        except OSError:
            return


class ReadinessListener:
    """The supervisor's end for one child: `address` goes into its VARIABLE."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-ready-")
        self.address = str(Path(self._folder.name) / "s")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(self.address)

    def heard(self) -> bool:
        """Whether a child has told since the last call."""
        found = False
        try:
            while True:
                found |= WORD in self._socket.recv(4096).split(b"\n")
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
