"""Requests and output tokens by LoRA adapter, under a bounded number of names.

    ended sequences ──> has a name ────────────────────────────────> its own series
                    └─> has none: more requests than twice those of the least used name ──> takes its place
                              └─> fewer ──> series `other`

A deployment may have 10,000 adapters, and each series costs Prometheus memory for hours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from quire.engine.adapters.counts import AdapterCounts
from quire.engine.core.limits import Outputs
from quire.engine.observers.turn_record import TurnRecord

MOST_NAMES = 32  # names with a series of their own
MOST_COUNTED = 1024  # names without one whose requests are counted
OTHER = "other"


class AdapterUse:
    """Counts of the adapters of one engine.  O(sequences that ended) per turn, without adapters nothing."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {OTHER: 0}  # ended requests by adapter name
        self.tokens: dict[str, int] = {OTHER: 0}  # output tokens by adapter name
        self._unnamed: Counter[str] = Counter()  # requests of names without a series

    def follow(self, outputs: Outputs) -> None:
        """Count the sequences that ended here."""
        for event in outputs.events:
            if event.kind == "ended" and event.request.adapter and event.reason is not None:
                name = self._series(event.request.adapter.rpartition("@")[0], new=event.index == 0)
                self.requests[name] += event.index == 0  # a request ends once with each of its choices
                self.tokens[name] += event.tokens

    def _series(self, name: str, *, new: bool) -> str:
        """Return the series of a name.  `new`: one more request of it ended."""
        if name in self.requests:
            return name
        if len(self.requests) <= MOST_NAMES:
            return self._begin(name)
        self._unnamed[name] += new
        least = min((one for one in self.requests if one != OTHER), key=self.requests.__getitem__)
        if self._unnamed[name] > 2 * self.requests[least]:
            self.requests.pop(least)
            self.tokens.pop(least)
            return self._begin(name)
        if len(self._unnamed) > MOST_COUNTED:
            self._unnamed = Counter(dict(self._unnamed.most_common(MOST_COUNTED // 2)))
        return OTHER

    def _begin(self, name: str) -> str:
        self._unnamed.pop(name, None)
        self.requests[name] = self.tokens[name] = 0
        return name


class LoraFigures:
    """All that the metrics of one engine say of LoRA adapters."""

    def __init__(self) -> None:
        self.slots = 0  # adapters whose sequences may run at once
        self.waiting = 0  # sequences that wait for an adapter
        self.counts: Callable[[], AdapterCounts] = AdapterCounts
        self.use = AdapterUse()

    def observe(self, record: TurnRecord) -> None:
        self.waiting, self.counts = record.gated_by_adapters, record.adapter_counts
        self.use.follow(record.outputs)
