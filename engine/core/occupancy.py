"""How much of the allocated KV cache holds tokens.  A token's place within a block is a KV position here."""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine.core.batch import Batch
from quire.engine.core.blocks import BlockPool
from quire.engine.core.open_requests import OpenRequests
from quire.engine.core.sequence import Sequence


class Occupancy:
    """How full the blocks of all tables are now, for metrics and tools.  O(sequences) or more: ask seldom."""

    def __init__(self, pool: BlockPool, batch: Batch, requests: OpenRequests) -> None:
        self._pool, self._batch, self._requests = pool, batch, requests

    def used_positions(self) -> tuple[int, int]:
        """(KV positions that hold tokens, KV positions allocated) over all tables, shared blocks counted once."""
        return used_positions(self._requests.live(), self._batch.step + 1, self._pool.block_size)

    def wasted_positions(self) -> int:
        """KV positions allocated that hold no token."""
        return wasted_positions(self._requests.live(), self._batch.step + 1, self._pool.block_size)

    def shared_fraction(self) -> float:
        """1 - blocks held / entries of all block tables; 0: nothing is shared."""
        return shared_fraction(self._requests.live(), self._pool.total - self._pool.available)


def used_positions(live: Iterable[Sequence], step: int, block_size: int) -> tuple[int, int]:
    """(positions with a token, positions allocated) over all tables when `step` begins; shared blocks count once."""
    filled: dict[int, int] = {}
    for seq in live:
        computed = seq.computed_before(step)
        for i, block in enumerate(seq.table):
            filled[block] = max(filled.get(block, 0), min(block_size, computed - i * block_size))
    return sum(filled.values()), len(filled) * block_size


def wasted_positions(live: Iterable[Sequence], step: int, block_size: int) -> int:
    """Positions allocated that hold no token when `step` begins.  All of them are in last blocks; one that a fork
    shares counts once.  O(sequences)."""
    open_ends = {}
    for seq in live:
        if seq.table:
            open_ends[seq.table[-1]] = len(seq.table) * block_size - seq.computed_before(step)
    return sum(open_ends.values())


def shared_fraction(live: Iterable[Sequence], held: int) -> float:
    """Return 1 - blocks held / entries of all block tables, from 0: nothing is shared.  O(sequences).

    Forks, groups and cached prefixes share blocks; `held` counts each block once.  Source: section 6.3 of Kwon et al.,
    "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023."""
    entries = sum(len(seq.table) for seq in live)
    return max(0.0, 1 - held / entries) if entries else 0.0
