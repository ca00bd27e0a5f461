"""FairList: a work list shared by tenants: weighted round robin between tenants, first come first served within one.

    add("loud", a b c d), add("small", x)   ->   pop: a x b c d        with equal weights

The first item of a new tenant waits for at most one item of each other tenant of the same weight, however many items
these tenants have added.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")


class FairList(Generic[Key]):
    """Items of work, as keys, per tenant.  Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Key, None]] = {}  # items per tenant, in order of arrival
        # Tenant -> virtual time of its next turn.  A turn takes 1 / weight.
        self._next: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._now = 0.0  # virtual time of the last turn
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, tenant: str, key: Key, weight: float = 1.0) -> None:
        """Append a key to a tenant's work; a key that is already waiting keeps its place.  `weight` > 0."""
        self._weights[tenant] = weight
        if tenant not in self._waiting:
            self._waiting[tenant] = {}
            self._next[tenant] = max(self._next.get(tenant, 0.0), self._now)
        if key not in self._waiting[tenant]:
            self._waiting[tenant][key] = None
            self._count += 1

    def discard(self, tenant: str, key: Key) -> None:
        """Remove a key from a tenant's work; unknown keys are ignored."""
        if key in (work := self._waiting.get(tenant, {})):
            del work[key]
            self._count -= 1
            if not work:
                self._leave(tenant)

    def pop(self) -> Key | None:
        """Remove and return the next key; None: the list is empty.  O(tenants with work)."""
        if not self._waiting:
            return None
        tenant = min(self._waiting, key=self._next.__getitem__)  # ties: the tenant that joined first
        key = next(iter(self._waiting[tenant]))
        self._now = self._next[tenant]
        self._next[tenant] += 1 / self._weights[tenant]
        self.discard(tenant, key)
        return key

    def _leave(self, tenant: str) -> None:
        """Remove a tenant without work.  Its next turn is remembered, so that rejoining at once gains it nothing."""
        del self._waiting[tenant], self._weights[tenant]
        if len(self._next) > 16 + 2 * len(self._waiting):
            self._next = {name: at for name, at in self._next.items() if name in self._waiting or at > self._now}
