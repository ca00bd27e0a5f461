"""An engine that writes no token log, to measure what that costs: `python -m tests.system.unlogged engine-options...`.
What it has begun is lost with it."""

from __future__ import annotations

import sys

from engine import __main__ as program
from engine.wire import tokenlog
from engine.wire.messages import TokenBatch

NOTHING = tokenlog.Entries([], b"", [])


def entries(batches: list[tuple[str, TokenBatch]]) -> tokenlog.Entries:
    return NOTHING


if __name__ == "__main__":
    tokenlog.entries = entries
    sys.exit(program.main())
