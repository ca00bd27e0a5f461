"""Swap for models with window groups: one `Swap` per KV group, selected by the block ids of plans."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from quire.engine.executor.swap import Swap

Pairs = list[tuple[int, int]]


class GroupedSwap:
    """Passes each pair (source block, target block) of a plan to the `Swap` of its KV group."""

    def __init__(self, swaps: list[Swap], blocks: list[int]) -> None:
        """`swaps`, `blocks` (their number): one per KV group; the group of full-attention layers is first."""
        self._swaps = swaps
        self._first = [0, *accumulate(blocks)]
        self._first_host = [0, *accumulate(swap.host_blocks for swap in swaps)]
        self.host_blocks = swaps[0].host_blocks
        self.window_host_blocks = [swap.host_blocks for swap in swaps[1:]]

    def out(self, pairs: Pairs) -> None:
        """Copy block -> host block for each pair."""
        for group, own in enumerate(self._split(pairs, self._first, self._first_host)):
            if own:
                self._swaps[group].out(own)

    def back(self, pairs: Pairs) -> None:
        """Copy host block -> block for each pair."""
        for group, own in enumerate(self._split(pairs, self._first_host, self._first)):
            if own:
                self._swaps[group].back(own)

    def moved(self) -> tuple[int, float]:
        """Return (bytes, seconds) of the copies completed since the last call."""
        parts = [swap.moved() for swap in self._swaps]
        return sum(size for size, _ in parts), sum(seconds for _, seconds in parts)

    def measure(self) -> float:
        """Measure the bandwidth of swaps in bytes/s, with blocks of full-attention layers."""
        return self._swaps[0].measure()

    @staticmethod
    def _split(pairs: Pairs, sources: list[int], targets: list[int]) -> list[Pairs]:
        """Return the pairs of each group, with block ids that count from the group's first block."""
        found: list[Pairs] = [[] for _ in sources[1:]]
        for source, target in pairs:
            group = bisect_right(sources, source) - 1
            found[group].append((source - sources[group], target - targets[group]))
        return found
