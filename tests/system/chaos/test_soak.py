"""The short soak; and that it finds what it looks for."""

from __future__ import annotations

import pytest

from quire.engine.core.blocks import BlockPool
from tests.system.chaos.soak import soak


@pytest.mark.timeout(300)
def test_thirty_thousand_operations_keep_the_accounting_balanced() -> None:
    soaked, error = soak(30_000, seed=1)
    assert not error
    assert soaked.count >= 30_000
    assert all(soaked.operations[name] > 20 for name in ("accept", "plan", "commit", "abort", "crash", "failed step"))
    assert soaked.tokens > 5_000


def test_an_error_is_reported_with_what_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    release, freed = BlockPool.release, 0

    def leaky(self: BlockPool, table: list[int]) -> object:
        nonlocal freed
        freed += 1
        return release(self, table[1:] if freed > 50 and len(table) > 1 else table)

    monkeypatch.setattr(BlockPool, "release", leaky)
    soaked, error = soak(100_000, seed=1)
    assert soaked.count < 100_000
    assert "--seed=1 --episode=" in error
