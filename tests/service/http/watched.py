"""Watch an event loop for stalls: `python -m tests.service.http.watched FILE [gateway options]`.

With options it runs the gateway and watches its loop; without, it runs an idle loop as the control.  Each time the loop
did not run for GAP_S it appends a line to FILE: the gap's start and end on the machine's monotonic clock, and the CPU
seconds that the process used in it.  `Gaps` reads both files.

A gap of the gateway counts as a stall only as far as the process computed meanwhile and the control loop ran: a busy
machine delays both loops alike.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TextIO

TICK_S = 0.002
GAP_S = 0.010


async def watch(out: TextIO) -> None:
    last, cpu = time.monotonic(), time.process_time()
    while True:
        await asyncio.sleep(TICK_S)
        now, used = time.monotonic(), time.process_time()
        if now - last > GAP_S:
            out.write(f"{last:.6f} {now:.6f} {used - cpu:.6f}\n")
        last, cpu = now, used


Gap = tuple[float, float, float]


class Gaps:
    """The gaps of a watched loop and of its control, as far as their files go."""

    def __init__(self, watched: Path, control: Path) -> None:
        self._watched, self._control = watched, control

    @staticmethod
    def _read(path: Path) -> list[Gap]:
        lines = path.read_text().split("\n")[:-1]
        return [(float(a), float(b), float(c)) for a, b, c in (line.split() for line in lines)]

    def longest(self, start: float, end: float) -> float:
        """Seconds of the longest stall that overlaps `start` to `end`."""
        control = self._read(self._control)
        longest = 0.0
        for begins, ends, cpu in self._read(self._watched):
            if ends < start or begins > end:
                continue
            waited = sum(max(0.0, min(ends, b) - max(begins, a)) for a, b, _ in control)
            longest = max(longest, min(ends - begins - waited, cpu))
        return longest


def main() -> None:
    path, *options = sys.argv[1:]
    file = open(path, "a", buffering=1)  # noqa: SIM115  (as long as the process lives)
    if not options:
        asyncio.run(watch(file))
        return
    from quire.engine.common import readiness
    from quire.service import app

    tell = readiness.notify_ready

    def started() -> None:
        tell()
        watching.append(asyncio.get_running_loop().create_task(watch(file)))

    watching: list[asyncio.Task[None]] = []
    readiness.notify_ready = started
    app.main(options)


if __name__ == "__main__":
    main()
