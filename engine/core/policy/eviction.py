"""Eviction: which cached block is overwritten when no block is free.

Least recently used first, except that a tenant that caches more than its share cannot evict the warm prefixes of the
others.  The block at the head of the order is kept for another round if

    its tenant caches less than its share   by weight, among the tenants that have cached blocks
    and the tenant uses it again            a request has found it, or computed it again soon after its eviction
    and it has had fewer than ROUNDS        so what a tenant left behind is evicted in the end

    head                                                        tail
    [quiet] [flood] [flood] [quiet] [flood] ............ [flood]
      |        '-- evicted                                  ^
      '------------- another round ------------------------'

With one tenant this is plain LRU.  Tenants are those of requests (`Generate.tenant`), not their `cache_salt`: clients
choose salts freely.
"""

from __future__ import annotations

from collections import OrderedDict

ROUNDS = 16  # most passes of evictions over all idle blocks that a block survives after its last use
MOST_MOVES = 1_024  # blocks that one eviction passes over, about 0.1 ms
REMEMBERED = 4  # digests of evicted blocks are kept for a quarter of the pool's blocks


class CachedBlocks:
    """What one tenant has in the cache."""

    __slots__ = ("count", "weight")

    def __init__(self) -> None:
        self.count = 0  # blocks, idle and held
        self.weight = 0.0


class FairEviction:
    """Chooses the block to evict.  The block pool tells it what happens to cached blocks.

    Each call takes O(1), `choose` on average: a block is passed over at most ROUNDS times after each use."""

    def __init__(self, total: int) -> None:
        """`total`: blocks of the pool."""
        self._tenants: dict[str, CachedBlocks] = {}  # those with cached blocks
        self._of: list[str] = [""] * total  # block -> tenant that cached it
        self._used_again = bytearray(total)  # block -> 1: its tenant has used it more than once
        self._rounds = bytearray(total)  # block -> rounds since its last use
        self._count = 0  # cached blocks
        self._weight = 0.0  # sum over tenants
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # digests, of tenants below their share; oldest first
        self._remembered = max(1, total // REMEMBERED)

    def cached(self, block: int, digest: bytes, tenant: str, weight: float) -> None:
        """Note that a held block entered the prefix index, for a tenant of this weight."""
        self._add(block, tenant, weight)
        self._used_again[block] = digest in self._evicted
        if self._used_again[block]:
            del self._evicted[digest]

    def uncached(self, block: int) -> None:
        """Note that a block left the prefix index."""
        owner = self._tenants[self._of[block]]
        owner.count -= 1
        self._count -= 1
        if not owner.count:
            del self._tenants[self._of[block]]
            self._weight = sum(other.weight for other in self._tenants.values())  # no rounding error stays

    def found(self, block: int, tenant: str, weight: float) -> None:
        """Note that a request found a block in the prefix index.

        The block counts for its tenant from now on: a warm-up may have computed it (engine/process/hot_prefixes.py)."""
        if self._of[block] != tenant:
            self.uncached(block)
            self._add(block, tenant, weight)
        self._used_again[block] = 1
        self._rounds[block] = 0

    def _add(self, block: int, tenant: str, weight: float) -> None:
        if (owner := self._tenants.get(tenant)) is None:
            owner = self._tenants[tenant] = CachedBlocks()
        self._weight += weight - owner.weight
        owner.weight = weight
        owner.count += 1
        self._count += 1
        self._of[block] = tenant
        self._rounds[block] = 0

    def choose(self, idle: OrderedDict[int, None], digests: list[bytes | None]) -> int:
        """Return the block to evict.  `idle`: never empty, least recently used first; blocks with another round move
        to its end.  `digests`: of all blocks."""
        if len(self._tenants) == 1:
            return next(iter(idle))
        block = next(iter(idle))
        for _ in range(MOST_MOVES):
            owner = self._tenants[self._of[block]]
            below_share = owner.count * self._weight < owner.weight * self._count
            if not (below_share and self._used_again[block] and self._rounds[block] < ROUNDS):
                if below_share and (digest := digests[block]) is not None:
                    self._remember(digest)
                return block
            self._rounds[block] += 1
            idle.move_to_end(block)
            block = next(iter(idle))
        return block

    def check(self, digests: list[bytes | None]) -> str:
        """Compare the counts with what is cached.  Returns the fault; "": none."""
        counts: dict[str, int] = {}
        for block, digest in enumerate(digests):
            if digest is not None:
                counts[self._of[block]] = counts.get(self._of[block], 0) + 1
        noted = {tenant: owner.count for tenant, owner in self._tenants.items()}
        return "" if counts == noted and self._count == sum(counts.values()) else f"{noted} cached blocks, not {counts}"

    def _remember(self, digest: bytes) -> None:
        self._evicted[digest] = None
        if len(self._evicted) > self._remembered:
            self._evicted.popitem(last=False)
