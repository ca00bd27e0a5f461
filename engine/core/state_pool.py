"""StatePool: memory for copies of recurrent state, the counterpart of BlockPool for recurrent layers.

The live state of a sequence belongs to its slot and is not allocated here.  The pool has `total` state slots ("places"
in code); each can store one copy of a state, and is in one of four states:

    free     stores no copy
    pending  the plan being built writes it         published when the plan is issued
    cached   a prompt with this prefix can start here found by the chain digest of the prefix's last block
    held     the state of a paused sequence, which has no slot

           take                 publish (plan issued)
    free --------> pending --------------------------> cached
      ^              | hold                              |
      |              v                                   |
      +---release-- held                                 |
      +------------- evicted by take, or forgotten ------+

A place that the plan being built reads is pinned, so that other copies of the plan do not overwrite it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.engine.core.blocks import AccountingError, DoubleFree, Leak
from quire.engine.core.policy.state_eviction import StateEviction


class Checkpoint(msgspec.Struct):
    """A copy of a recurrent state at one position of a prefix."""

    digest: bytes  # chain digest of the blocks before the position
    position: int  # number of tokens before the position
    saved: int  # tokens that a hit saves, compared with the previous checkpoint of the same sequence
    step: int  # step of the plan that wrote it
    used: int = 0  # value of the pool's clock when it was last found or written
    hits: int = 0  # number of sequences that began with it


class StateCounts(msgspec.Struct):
    """Counts of a state pool, for metrics."""

    cached: int = 0  # checkpoints in the cache now
    kept: int = 0  # checkpoints published since the start
    evicted: int = 0  # checkpoints evicted since the start


class StatePool:
    """Sole owner of the places.  Not thread-safe: the engine loop owns it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.counts = StateCounts()
        self._free = list(range(total - 1, -1, -1))
        self._pending: dict[int, Checkpoint | None] = {}  # taken places; None: not written yet
        self._cached: dict[int, Checkpoint] = {}
        self._held: set[int] = set()
        self._leaving: list[int] = []  # held places to free when the plan being built is issued
        self._pinned: set[int] = set()
        self._index: dict[bytes, int] = {}
        self._clock = 0
        self._eviction = StateEviction()

    @property
    def free(self) -> int:
        """Number of places that `take` can return without an eviction."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of checkpoints in the cache."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """Number of saved states of paused sequences."""
        return len(self._held)

    def find(self, digest: bytes) -> int:
        """Return the place of the checkpoint with a digest; -1: there is none."""
        return self._index.get(digest, -1)

    def pin(self, place: int) -> None:
        """Protect a cached checkpoint, with which a sequence of the plan being built begins, and count the hit."""
        checkpoint = self._cached[place]
        self._pinned.add(place)
        self._clock += 1
        checkpoint.used = self._clock
        checkpoint.hits += 1

    def take(self) -> int:
        """Take a place for the plan being built to write; may evict a checkpoint.  -1: no place can be taken."""
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
        """Publish a taken place under a digest when the plan is issued, unless the digest is cached by then."""
        self._pending[place] = Checkpoint(digest, position, saved, step)

    def retake(self, digest: bytes) -> int:
        """Take the place of a checkpoint to overwrite it; -1: it was evicted, or a sequence has begun with it."""
        place = self._index.get(digest, -1)
        if place < 0 or place in self._pinned or self._cached[place].hits:
            return -1
        self._unpublish(place)
        self._pending[place] = None
        return place

    def hold(self, place: int) -> None:
        """Mark a taken place as held by a paused sequence."""
        del self._pending[place]
        self._held.add(place)

    def release(self, place: int) -> None:
        """Free a held place when the plan being built is issued, because this plan may still read it."""
        if place not in self._held or place in self._leaving:
            raise DoubleFree(f"state {place} released more often than it was taken")
        self._leaving.append(place)

    def issue(self) -> None:
        """Publish the checkpoints of the plan that was issued: the next plan can find them."""
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
        """Remove the checkpoints with these digests, because their content may be wrong."""
        for digest in digests:
            if (place := self._index.get(digest)) is not None:
                self._unpublish(place)
                self._free.append(place)

    def abandon(self, step: int) -> None:
        """Remove the checkpoints of all plans after `step` and of the plan being built: they have not run."""
        self._free += self._pending
        self._pending.clear()
        self.forget([each.digest for each in self._cached.values() if each.step > step])

    def forget_all(self) -> None:
        """Remove every checkpoint."""
        self.forget(list(self._index))

    def check(self, held: Iterable[int]) -> None:
        """Compare the pool with the places that paused sequences hold.  O(total).

        Raises AccountingError, which names the place."""
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
