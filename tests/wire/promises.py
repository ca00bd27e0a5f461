"""What `GatewaySide.promise` does, once more and in plain Python, on any clock."""

from __future__ import annotations

import math

from engine.wire.bus import Terms
from engine.wire.scripts import PROMISE_MS, PUNCTUAL_MS


class Book:
    def __init__(self) -> None:
        self.due: dict[str, int] = {}  # request -> unix ms
        self.till: dict[str, float] = {}  # tenant -> unix ms
        self.weights: dict[str, float] = {}

    def promise(self, name: str, tokens: int, terms: Terms, now: int, tenant: str = "", weight: float = 1.0) -> int:
        """ms until it may come, 0 for now, -1 for no promise."""
        self.due = {known: due for known, due in self.due.items() if due > now - PROMISE_MS}
        if name in self.due:
            left = self.due[name] - now
            if left <= PUNCTUAL_MS:
                del self.due[name]
                return 0
            return left
        self.till = {known: till for known, till in self.till.items() if till > now}
        self.weights[tenant] = weight
        ahead = max(now + terms.least_ms, self.till.get(tenant, 0.0)) - now
        if ahead > terms.most_ms:
            return -1
        low, high = terms.shares
        share = (low + (high - low) * ahead / terms.most_ms) * weight
        share /= weight + sum(self.weights[other] for other in self.till if other != tenant)
        pause = 1000 * math.ceil(ahead / 1000)
        self.due[name] = now + pause
        self.till[tenant] = min(now + ahead + 1000 * tokens / (terms.pace * share), now + 2 * terms.most_ms)
        return pause
