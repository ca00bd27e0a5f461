"""Loaded adapters without references, and which one to evict: the least frequently used, with ageing.

    release ──> add() ── add() again, or hold: remove()
                  └── memory is needed: pop() returns the adapter with the lowest score

A score is the number of uses; the weight of a use halves after HALF_LIFE further uses of any adapter.  With LRU, single
requests for rarely used adapters would evict adapters that are used every few seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator

HALF_LIFE = 512  # uses of all adapters after which a use counts half
MAX_SCORES = 16_384  # adapters with a score, evicted ones included; the least recently used one is forgotten


class KeptAdapters:
    """The evictable adapters, and the scores of all adapters.  Each method takes O(log n), amortised."""

    def __init__(self) -> None:
        self._uses = 0
        # Adapter -> log2 of its score times 2^(uses / HALF_LIFE), used longest ago first.  This value changes only when
        # the adapter is used, and then it grows.
        self._scores: OrderedDict[str, float] = OrderedDict()
        self._kept: dict[str, None] = {}
        self._heap: list[tuple[float, str]] = []  # one entry per adapter in `_queued`; its score may have grown since
        self._queued: set[str] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def note_use(self, adapter: str) -> None:
        """Count a use of an adapter, kept or not."""
        self._uses += 1
        now = self._uses / HALF_LIFE
        score = self._scores.pop(adapter, None)
        self._scores[adapter] = now if score is None else now + math.log2(1 + 2 ** (score - now))
        if len(self._scores) > MAX_SCORES:
            self._scores.popitem(last=False)

    def add(self, adapter: str) -> None:
        """Make the adapter evictable: `pop` may return it."""
        self._kept[adapter] = None
        if adapter not in self._queued:
            self._queued.add(adapter)
            heapq.heappush(self._heap, (self._score(adapter), adapter))

    def remove(self, adapter: str) -> None:
        """Make the adapter not evictable; harmless if it is not kept."""
        self._kept.pop(adapter, None)

    def pop(self) -> str:
        """Remove the adapter with the lowest score and return it.  Raises IndexError if none is kept."""
        while True:
            score, adapter = heapq.heappop(self._heap)
            self._queued.remove(adapter)
            if adapter not in self._kept:
                continue
            if score < self._score(adapter):  # it was used since
                self.add(adapter)
                continue
            del self._kept[adapter]
            return adapter

    def _score(self, adapter: str) -> float:
        return self._scores.get(adapter, -math.inf)
