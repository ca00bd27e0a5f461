"""An engine that writes no token log, to measure what that costs: `python -m tests.system.unlogged engine-options...`.
What it has begun is lost with it."""

from __future__ import annotations

import sys

from engine import __main__ as program
from engine.wire import tokenlog
from engine.wire.messages import TokenBatch


class Nothing(tokenlog.Journal):
    """Keeps nothing and enters nothing."""

    def add(self, batches: list[tuple[str, TokenBatch]], finished: list[str]) -> None:
        pass

    def due(self, batches: list[tuple[str, TokenBatch]]) -> tokenlog.Entries:
        return tokenlog.Entries([], b"", [], True, [])


if __name__ == "__main__":
    tokenlog.Journal = Nothing  # type: ignore[misc]
    sys.exit(program.main())
