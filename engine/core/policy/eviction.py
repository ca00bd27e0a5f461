"""Eviction: which cached block is overwritten when no block is free.

Evicts cached, unreferenced blocks in LRU order, except that a tenant that caches more than its share cannot evict the
reused prefixes of other tenants.  The least recently used block is moved to the end of the order, for another round, if

    its tenant caches less than its share   by weight, among the tenants that have cached blocks
    and its tenant has reused the block     a request hit it, or recomputed it soon after its eviction
    and it has had fewer than ROUNDS        so blocks that a tenant no longer uses are evicted in the end

    head                                                        tail
    [quiet] [flood] [flood] [quiet] [flood] ............ [flood]
      |        '-- evicted                                  ^
      '------------- another round ------------------------'

With one tenant this is plain LRU.  The tenant is `Generate.tenant`, not `cache_salt`, because clients choose salts
freely.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import compress

ROUNDS = 16  # maximum extra rounds of a block after its last use
MAX_MOVES = 1_024  # maximum blocks that one eviction moves to the end, about 0.1 ms
REMEMBERED = 4  # digests of evicted blocks are remembered, at most total blocks / REMEMBERED


class CachedBlocks:
    """Cached blocks of one tenant."""

    __slots__ = ("count", "weight")

    def __init__(self) -> None:
        self.count = 0  # cached blocks, idle and held
        self.weight = 0.0  # the tenant's fairness weight


class FairEviction:
    """Chooses the block to evict.  The block pool reports every change of a cached block.

    Each call takes O(1).  `choose` takes O(1) on average, since a block gets at most ROUNDS rounds after each use."""

    def __init__(self, total: int) -> None:
        """`total`: blocks of the pool."""
        self._tenants: dict[str, CachedBlocks] = {}  # tenants with cached blocks
        self._of: list[str] = [""] * total  # block -> tenant that cached it
        self._used_again = bytearray(total)  # block -> 1 if its tenant has used it more than once
        self._rounds = bytearray(total)  # block -> extra rounds since its last use
        self._count = 0  # cached blocks of all tenants
        self._weight = 0.0  # sum of the tenants' weights
        # Digests of evicted blocks whose tenants were below their share, oldest first.
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._remembered = max(1, total // REMEMBERED)

    def cached(self, block: int, digest: bytes, tenant: str, weight: float) -> None:
        """Record that a held block entered the prefix index.  `weight`: the tenant's weight."""
        self._add(block, tenant, weight)
        self._used_again[block] = digest in self._evicted
        if self._used_again[block]:
            del self._evicted[digest]

    def uncached(self, block: int) -> None:
        """Record that a block left the prefix index."""
        owner = self._tenants[self._of[block]]
        owner.count -= 1
        self._count -= 1
        if not owner.count:
            del self._tenants[self._of[block]]
            self._weight = sum(other.weight for other in self._tenants.values())  # avoids accumulated rounding errors

    def found(self, block: int, tenant: str, weight: float) -> None:
        """Record that a request of `tenant` found a block in the prefix index.

        The block counts for this tenant from now on; a warm-up may have filled it (engine/process/hot_prefixes.py)."""
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
        """Return the block to evict.  `idle`: idle blocks, least recently used first, not empty; blocks that get
        another round move to its end.  `digests`: digest per block, None for blocks that are not cached."""
        if len(self._tenants) == 1:
            return next(iter(idle))
        block = next(iter(idle))
        for _ in range(MAX_MOVES):
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
        """Compare the counts with the cached blocks.  Returns an error text; "": the counts are right."""
        counts = Counter(compress(self._of, digests))
        noted = {tenant: owner.count for tenant, owner in self._tenants.items()}
        return "" if counts == noted and self._count == counts.total() else f"{noted} cached blocks, not {dict(counts)}"

    def _remember(self, digest: bytes) -> None:
        self._evicted[digest] = None
        if len(self._evicted) > self._remembered:
            self._evicted.popitem(last=False)
