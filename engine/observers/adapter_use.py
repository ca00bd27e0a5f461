"""Counts of requests and output tokens per LoRA adapter, with a bounded number of metric series.

    ended sequences ──> its adapter has a series ──> counts there
                    └─> no series, more than twice the requests of the least used series ──> replaces that series
                              └─> fewer requests ──> series `(other)`

A deployment may have 10,000 adapters, and each series takes memory in Prometheus for hours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from quire.engine.adapters.counts import AdapterCounts
from quire.engine.core.limits import Outputs
from quire.engine.observers.turn_record import TurnRecord

MAX_NAMES = 32  # maximum adapters with their own series
MAX_COUNTED = 1024  # maximum adapters without a series whose requests are counted
OTHER = "(other)"  # no adapter has a name with parentheses


class AdapterUse:
    """Counts per adapter of one engine.  Takes O(ended sequences) per turn."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {OTHER: 0}  # ended requests by adapter name
        self.tokens: dict[str, int] = {OTHER: 0}  # output tokens by adapter name
        self._unnamed: Counter[str] = Counter()  # ended requests of adapters without a series

    def follow(self, outputs: Outputs) -> None:
        """Count the sequences that ended in this turn."""
        for event in outputs.events:
            if event.kind == "ended" and event.request.adapter and event.reason is not None:
                name = self._series(event.request.adapter.rpartition("@")[0], new=event.index == 0)
                self.requests[name] += event.index == 0  # count only choice 0, since every choice has an event
                self.tokens[name] += event.tokens

    def _series(self, name: str, *, new: bool) -> str:
        """Return the series of an adapter name.  `new`: a request of this adapter has ended."""
        if name in self.requests:
            return name
        if len(self.requests) <= MAX_NAMES:
            return self._begin(name)
        self._unnamed[name] += new
        least = min((one for one in self.requests if one != OTHER), key=self.requests.__getitem__)
        if self._unnamed[name] > 2 * self.requests[least]:
            self.requests.pop(least)
            self.tokens.pop(least)
            return self._begin(name)
        if len(self._unnamed) > MAX_COUNTED:
            self._unnamed = Counter(dict(self._unnamed.most_common(MAX_COUNTED // 2)))
        return OTHER

    def _begin(self, name: str) -> str:
        self._unnamed.pop(name, None)
        self.requests[name] = self.tokens[name] = 0
        return name


class LoraFigures:
    """Values of the LoRA metrics of one engine."""

    def __init__(self) -> None:
        self.slots = 0  # adapters whose sequences may run at once
        self.waiting = 0  # sequences that wait for an adapter
        self.counts: Callable[[], AdapterCounts] = AdapterCounts
        self.use = AdapterUse()

    def observe(self, record: TurnRecord) -> None:
        self.waiting, self.counts = record.gated_by_adapters, record.adapter_counts
        self.use.follow(record.outputs)
