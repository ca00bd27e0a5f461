"""An engine that writes no token log, to measure what that costs: `python -m tests.system.unlogged engine-options...`.
What it has begun is lost with it."""

from __future__ import annotations

import sys

from quire.engine import __main__ as program
from quire.engine.wire import token_log
from quire.engine.wire.messages import TokenBatch


class Nothing(token_log.Journal):
    """Keeps nothing and enters nothing."""

    def add(self, batches: list[tuple[str, TokenBatch]], finished: list[str]) -> None:
        pass

    def due(self, batches: list[tuple[str, TokenBatch]]) -> token_log.Entries:
        return token_log.Entries([], b"", [], True, [])


if __name__ == "__main__":
    token_log.Journal = Nothing  # type: ignore[misc]
    sys.exit(program.main())
