"""A list of work that tenants take turns in: weighted round robin, first come first served within a tenant.

    add("loud", a b c d), add("small", x)   ->   pop: a x b c d        with equal weights

A tenant that joins goes behind what each other tenant has had already and before anything else of theirs.  So its first
piece of work waits for at most one of each tenant of its weight that is ahead, however much these have added.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")


class FairList(Generic[Key]):
    """Work of tenants, as keys.  Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Key, None]] = {}  # items per tenant, in order of arrival
        # By tenant: virtual time at which its next turn comes.  A turn takes 1 / weight.
        self._next: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._now = 0.0  # virtual time of the last turn
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, tenant: str, key: Key, weight: float = 1.0) -> None:
        """Append a key to a tenant's work; one that waits there already stays where it is.  `weight` is above 0."""
        self._weights[tenant] = weight
        if tenant not in self._waiting:
            self._waiting[tenant] = {}
            self._next[tenant] = max(self._next.get(tenant, 0.0), self._now)
        if key not in self._waiting[tenant]:
            self._waiting[tenant][key] = None
            self._count += 1

    def discard(self, tenant: str, key: Key) -> None:
        """Remove a key from a tenant's work; harmless when it is not there."""
        if key in (work := self._waiting.get(tenant, {})):
            del work[key]
            self._count -= 1
            if not work:
                self._leave(tenant)

    def pop(self) -> Key | None:
        """Remove and return the key whose turn it is; None: there is none.  O(tenants with work)."""
        if not self._waiting:
            return None
        tenant = min(self._waiting, key=self._next.__getitem__)  # ties: the tenant that joined first
        key = next(iter(self._waiting[tenant]))
        self._now = self._next[tenant]
        self._next[tenant] += 1 / self._weights[tenant]
        self.discard(tenant, key)
        return key

    def _leave(self, tenant: str) -> None:
        """Forget a tenant without work, but not that it had its turn: it gains nothing by coming back at once."""
        del self._waiting[tenant], self._weights[tenant]
        if len(self._next) > 16 + 2 * len(self._waiting):
            self._next = {name: at for name, at in self._next.items() if name in self._waiting or at > self._now}
