"""StatePool: places for copies of recurrent state, next to the BlockPool.

A slot has one live state, whose place is the slot itself: nothing allocates it.  What is allocated are the copies.
Every place is in exactly one of four states:

    free     nothing worth keeping
    pending  the plan in the making writes it         published when the plan is issued
    cached   a prefix that ends here can be resumed   found by the chain digest of its last block
    held     the state of a paused sequence, which has no slot

           take                 publish (plan issued)
    free --------> pending --------------------------> cached
      ^              | hold                              |
      |              v                                   |
      +---release-- held                                 |
      +------------- evicted by take, or forgotten ------+

A place that the plan in the making reads is pinned: the plan's other copies must not overwrite it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.engine.core.blocks import AccountingError, DoubleFree, Leak
from quire.engine.core.policy.state_eviction import StateEviction


class Checkpoint(msgspec.Struct):
    """A cached copy of a state."""

    digest: bytes  # chain digest of the blocks before it
    position: int  # tokens before it
    saved: int  # tokens computed again if a hit had to use the checkpoint before it
    step: int  # the plan that wrote it
    used: int = 0  # the pool's clock when it was found or written last
    hits: int = 0  # sequences that began with it


class StateCounts(msgspec.Struct):
    """What a pool of states has done and has, for metrics."""

    cached: int = 0  # checkpoints that a prompt can begin with now
    kept: int = 0  # checkpoints published since the start
    evicted: int = 0  # checkpoints overwritten by others since the start


class StatePool:
    """Sole owner of the places.  Not thread-safe: the engine loop owns it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.counts = StateCounts()
        self._free = list(range(total - 1, -1, -1))
        self._pending: dict[int, Checkpoint | None] = {}  # None: taken, and neither cached nor held yet
        self._cached: dict[int, Checkpoint] = {}
        self._held: set[int] = set()
        self._leaving: list[int] = []  # held until the plan in the making is issued
        self._pinned: set[int] = set()
        self._index: dict[bytes, int] = {}
        self._clock = 0
        self._eviction = StateEviction()

    @property
    def free(self) -> int:
        """Places that `take` gets without an eviction."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Checkpoints that can be found."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """States of paused sequences."""
        return len(self._held)

    def find(self, digest: bytes) -> int:
        """The place of the checkpoint under a digest; -1: there is none."""
        return self._index.get(digest, -1)

    def pin(self, place: int) -> None:
        """A sequence begins with this cached checkpoint in the plan in the making."""
        checkpoint = self._cached[place]
        self._pinned.add(place)
        self._clock += 1
        checkpoint.used = self._clock
        checkpoint.hits += 1

    def take(self) -> int:
        """A place to write in the plan in the making; a checkpoint may be evicted for it.  -1: none."""
        if self._free:
            place = self._free.pop()
        else:
            places = ((place, each) for place, each in self._cached.items() if place not in self._pinned)
            place = self._eviction.choose(places)
            if place < 0:
                return -1
            self._unpublish(place)
            self.counts.evicted += 1
        self._pending[place] = None
        return place

    def write(self, place: int, digest: bytes, position: int, saved: int, step: int) -> None:
        """Publish a taken place under a digest once the plan is issued.  A digest that is cached by then stays."""
        self._pending[place] = Checkpoint(digest, position, saved, step)

    def retake(self, digest: bytes) -> int:
        """Take the place of a checkpoint that no sequence has begun with; -1: it is gone, or has been found."""
        place = self._index.get(digest, -1)
        if place < 0 or place in self._pinned or self._cached[place].hits:
            return -1
        self._unpublish(place)
        self._pending[place] = None
        return place

    def hold(self, place: int) -> None:
        """Give a taken place to a paused sequence."""
        del self._pending[place]
        self._held.add(place)

    def release(self, place: int) -> None:
        """Free a held place once the plan in the making is issued: it may still read it."""
        if place not in self._held or place in self._leaving:
            raise DoubleFree(f"state {place} released more often than it was taken")
        self._leaving.append(place)

    def issue(self) -> None:
        """The plan in the making is out: what it writes can be found from the next one on."""
        for place, checkpoint in self._pending.items():
            if checkpoint is None or checkpoint.digest in self._index:
                self._free.append(place)
                continue
            self._clock += 1
            checkpoint.used = self._clock
            self._cached[place] = checkpoint
            self._index[checkpoint.digest] = place
            self.counts.kept += 1
        self._pending.clear()
        self._held.difference_update(self._leaving)
        self._free += self._leaving
        self._leaving.clear()
        self._pinned.clear()
        self.counts.cached = len(self._cached)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Remove checkpoints: what was computed is wrong, or no block finds it."""
        for digest in digests:
            if (place := self._index.get(digest)) is not None:
                self._unpublish(place)
                self._free.append(place)

    def abandon(self, step: int) -> None:
        """No plan after `step` has run, and the one in the making is given up: remove what they have written."""
        self._free += self._pending
        self._pending.clear()
        self.forget([each.digest for each in self._cached.values() if each.step > step])

    def forget_all(self) -> None:
        """Remove every checkpoint."""
        self.forget(list(self._index))

    def check(self, held: Iterable[int]) -> None:
        """Check against the places that paused sequences hold.  Raises AccountingError naming the place.  O(total)."""
        owned = list(held)
        if len(owned) != len(set(owned)):
            raise DoubleFree(f"two sequences hold one state: {sorted(owned)}")
        leaving = set(self._leaving)
        if set(owned) != self._held - leaving:
            missing, extra = self._held - leaving - set(owned), set(owned) - self._held
            kind = Leak if missing else DoubleFree
            raise kind(f"states {sorted(missing)} are held by no sequence, {sorted(extra)} by one without owning them")
        places = sorted([*self._free, *self._pending, *self._cached, *self._held])
        if places != list(range(self.total)):
            kind = Leak if len(places) < self.total else DoubleFree
            raise kind(f"states {places} are accounted for, of {self.total}")
        for digest, place in self._index.items():
            if place not in self._cached or self._cached[place].digest != digest:
                raise AccountingError(f"state {place} is found under a digest that it does not have")
        if len(self._index) != len(self._cached):
            raise AccountingError(f"{len(self._cached)} checkpoints are cached, {len(self._index)} can be found")

    def _unpublish(self, place: int) -> None:
        del self._index[self._cached.pop(place).digest]
