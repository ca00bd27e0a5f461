"""A plain Python model of the retry promises that `promise.lua` gives, on any clock."""

from __future__ import annotations

import math
from collections import Counter

from engine.wire.layout import CAME_OUTLIERS, CAME_S, PROMISE_MS, PUNCTUAL_MS
from engine.wire.records import RetryTerms


class Book:
    def __init__(self) -> None:
        self.due: dict[str, int] = {}  # request -> unix ms
        self.till: dict[str, float] = {}  # tenant -> unix ms
        self.parts: dict[str, tuple[str, float]] = {}  # request -> its tenant, ms it takes of what that was promised
        self.weights: dict[str, float] = {}
        self.came: Counter[int] = Counter()  # second -> prompt tokens that came for the first time

    def submit(self, name: str, tokens: int, now: int) -> None:
        """It is let in."""
        self.parts.pop(name, None)
        if self.due.pop(name, None) is None:
            self.came[now // 1000] += tokens

    def newcomers(self, now: int) -> float:
        """Prompt tokens per second."""
        seconds = sorted(self.came[now // 1000 - i] for i in range(1, CAME_S + 1))
        kept = seconds[CAME_OUTLIERS:-CAME_OUTLIERS]
        return sum(kept) / len(kept)

    def promise(
        self,
        name: str,
        tokens: int,
        terms: RetryTerms,
        now: int,
        tenant: str = "",
        weight: float = 1.0,
        *,
        broken: bool = False,
    ) -> int:
        """ms until it may come, 0 for now, -1 for no promise."""
        for missed in [known for known, due in self.due.items() if due <= now - PROMISE_MS]:
            del self.due[missed]
            whose, part = self.parts.pop(missed)
            if whose in self.till:
                self.till[whose] -= part
        if name in self.due:
            left = self.due[name] - now
            if left > PUNCTUAL_MS:
                return left
            if not broken:
                return 0
            del self.due[name]
        else:
            self.came[now // 1000] += tokens
        self.till = {known: till for known, till in self.till.items() if till > now}
        self.weights[tenant] = weight
        ahead = max(now + terms.least_ms, self.till.get(tenant, 0.0)) - now
        if ahead > terms.most_ms:
            return -1
        low, high = terms.least_shares
        share = max(1 - self.newcomers(now) / terms.full_pace, low + (high - low) * ahead / terms.most_ms)
        share *= weight / (weight + sum(self.weights[other] for other in self.till if other != tenant))
        pause = 1000 * math.ceil(ahead / 1000)
        self.due[name] = now + pause
        self.till[tenant] = min(now + ahead + 1000 * tokens / (terms.pace * share), now + 2 * terms.most_ms)
        self.parts[name] = tenant, self.till[tenant] - now - ahead
        return pause
