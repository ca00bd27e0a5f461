"""A program of ours on a machine whose clock is wrong: `python -m tests.system.skewed FILE MODULE options...`.

FILE says by how many seconds the clock is ahead, and may be written again while the program runs."""

from __future__ import annotations

import runpy
import sys
import threading
import time
from pathlib import Path

from quire.engine.wire import clock

POLL_S = 0.02


def main() -> None:
    _, name, module, *words = sys.argv
    file = Path(name)
    real, real_ns = time.time, time.time_ns
    ahead = float(file.read_text())

    def follow() -> None:
        nonlocal ahead
        while True:
            time.sleep(POLL_S)
            ahead = float(file.read_text() or ahead)

    time.time = lambda: real() + ahead
    time.time_ns = lambda: real_ns() + int(ahead * 1e9)
    threading.Thread(target=follow, daemon=True).start()
    # A process that starts warm has imported these before its clock was wrong.
    clock._STARTED_MS = time.time() * 1000 - time.monotonic() * 1000
    clock.RedisClock.__init__.__defaults__ = (None, time.time)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
