"""Occupancy: how much of the allocated KV cache holds tokens.  A KV position is the place of one token in a block."""

from __future__ import annotations

from quire.engine.core.batch import Batch
from quire.engine.core.blocks import BlockPool
from quire.engine.core.layer_groups import LayerGroups
from quire.engine.core.open_requests import OpenRequests


class Occupancy:
    """Computes how full the blocks of all tables are when the next step begins.  O(sequences) or more: call rarely."""

    def __init__(
        self, pool: BlockPool, batch: Batch, requests: OpenRequests, layers: LayerGroups, block_bytes: int
    ) -> None:
        """`block_bytes`: bytes of keys and values per block of the full-attention layers."""
        self._pool, self._batch, self._requests = pool, batch, requests
        self._layers, self._block_bytes = layers, block_bytes

    def group_bytes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return (bytes of blocks that sequences hold, bytes of evictable cached blocks), each per layer group.
        O(groups)."""
        pools = [("full", self._pool, self._block_bytes)]
        pools += [(f"window {pool.window}", pool, pool.block_bytes) for pool in self._layers.pools]
        held = {name: (pool.total - pool.available) * size for name, pool, size in pools}
        return held, {name: pool.idle * size for name, pool, size in pools}

    def used_positions(self) -> tuple[int, int]:
        """Return (KV positions that hold tokens, KV positions allocated) of all tables; shared blocks count once."""
        filled: dict[int, int] = {}
        step, block_size = self._batch.step + 1, self._pool.block_size
        for seq in self._requests.live():
            computed = seq.computed_before(step)
            for i, block in enumerate(seq.table):
                filled[block] = max(filled.get(block, 0), min(block_size, computed - i * block_size))
        return sum(filled.values()), len(filled) * block_size

    def wasted_positions(self) -> int:
        """Return the number of allocated KV positions without a token.

        Only the last block of a table has such positions; a last block that forks share counts once."""
        open_ends = {}
        step = self._batch.step + 1
        for seq in self._requests.live():
            if seq.table:
                open_ends[seq.table[-1]] = len(seq.table) * self._pool.block_size - seq.computed_before(step)
        return sum(open_ends.values())

    def shared_fraction(self) -> float:
        """Return 1 - held blocks / entries of all block tables; 0: no block is shared.

        Forks, beams and cached prefixes share blocks.  Source: section 6.3 of Kwon et al., "Efficient Memory Management
        for Large Language Model Serving with PagedAttention", SOSP 2023."""
        entries = sum(len(seq.table) for seq in self._requests.live())
        held = self._pool.total - self._pool.available
        return max(0.0, 1 - held / entries) if entries else 0.0
