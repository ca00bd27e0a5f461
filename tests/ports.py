"""Ports of this machine for servers of tests.  Each belongs to one test process, also before its server binds it.

The system gives clients ports from 32,768 on; these lie below.  A lock on a file keeps a port from other test
processes, also while the server that listens on it starts again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

RANDOM = random.SystemRandom()  # not one that tests seed alike
FIRST, LAST = 20_000, 32_000
FOLDER = Path(tempfile.gettempdir()) / "quire-test-ports"


def free_port(*beside: int) -> int:
    """Return a port that nothing listens on; so are those that lie `beside` above it."""
    FOLDER.mkdir(exist_ok=True)
    while True:
        port = RANDOM.randint(FIRST, LAST - max(beside, default=0))
        with contextlib.ExitStack() as locks, contextlib.suppress(OSError):
            for one in (port, *(port + more for more in beside)):
                locks.callback(os.close, lock(one))
                with socket.socket() as probe:
                    probe.bind(("", one))
            locks.pop_all()  # the descriptors stay open, and locked, as long as this process
            return port


def lock(port: int) -> int:
    """Return an open descriptor that holds the lock of a port.  Raises BlockingIOError: another one holds it."""
    descriptor = os.open(FOLDER / str(port), os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor
