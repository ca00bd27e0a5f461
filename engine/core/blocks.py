"""BlockPool: the KV cache's physical blocks, managed as an operating system manages page frames.

Every block is in exactly one of three states:

    free   holds no cached prefix         allocate() takes free blocks first
    idle   no table contains it, but it   lookup() and acquire() can reuse it; allocate() evicts an idle block when no
           holds a cached prefix          free block is left, and policy/eviction.py chooses which
    held   refs >= 1                      one reference for every table that contains it

           allocate                  release, last ref, sealed
    free ------------> held ---------------------------------> idle
      ^                 ^  |                                    | |
      |   release, last |  +--- acquire: one more reference     | |
      +--- ref, unsealed+---------------- acquire --------------+ |
      +--------------------- evicted by allocate, or forgotten ---+

The automatic prefix cache: a block that is *sealed* (full, its tokens known) can be found again by a digest.  A block's
digest covers its own tokens and all tokens before it, so equal digests mean equal prefixes of one model and salt.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import chain, islice

from quire.engine.core.policy.eviction import FairEviction


class OutOfBlocks(Exception):
    """allocate() was called for more blocks than are available; nothing was allocated."""


class AccountingError(Exception):
    """The block accounting is inconsistent; the message names the block.  Always a bug of the engine."""


class Leak(AccountingError):
    """A block is neither held nor available: no request can use it until a restart."""


class DoubleFree(AccountingError):
    """A held block was released, or will be released too early: the next sequence that gets it would overwrite it."""


def root_digest(fingerprint: str, salt: str, adapter: str = "") -> bytes:
    """Return the digest with which every chain of one model, salt and adapter begins; other chains share no digest.

    `adapter`: digest of a LoRA adapter's files, because an adapter changes keys and values; "": no adapter."""
    key = blake2b(adapter.encode(), digest_size=32).digest() if adapter else b""
    return blake2b(f"{len(fingerprint)}:{fingerprint}{salt}".encode(), digest_size=32, key=key).digest()


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of one full block; `parent`: digest of the block before it.

    The hash is cryptographic, so that a tenant cannot forge a cache hit."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=32).digest()


class BlockPool:
    """Sole owner of the free list, reference counts and digest index.  Callers own the block tables.

    Every operation takes O(blocks in its arguments).  Not thread-safe: the engine loop owns it.
    """

    def __init__(self, total: int, block_size: int, *, caching: bool = True, note_discarded: bool = False) -> None:
        self.total = total
        self.block_size = block_size  # tokens
        self.caching = caching
        self.discarded: list[int] = []  # with note_discarded: blocks freed since a caller last emptied this list
        self.note_evicted = False  # set by the caller that reads and empties `evicted`
        self.evicted: list[bytes] = []  # with note_evicted: digests removed from the cache since it was last emptied
        self.note_discarded = note_discarded
        self._refs = array("i", bytes(total * array("i").itemsize))
        self._free = list(range(total - 1, -1, -1))  # a stack: the block freed last may still be in the L2 cache
        self._idle: OrderedDict[int, None] = OrderedDict()  # idle blocks in eviction order, see FairEviction.choose
        self._eviction = FairEviction(total)
        self._digest: list[bytes | None] = [None] * total
        self._sealed = bytearray(total)  # per block, 1 if `_digest` has a digest
        self._index: dict[bytes, int] = {}
        # Running totals, updated by each operation; check() compares them with the blocks.
        self._held = 0  # held blocks
        self._named = 0  # references of all blocks

    @property
    def available(self) -> int:
        """Number of blocks that allocate() can return: free and idle blocks."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def lookup(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of a digest chain.

        Takes no reference: call acquire() before the next allocation can evict them."""
        found = []
        for digest in digests:
            if (block := self._index.get(digest)) is None:
                break
            found.append(block)
        return found

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, for a prefix hit or a fork."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._idle[block]
                self._held += 1
            self._refs[block] += 1
            self._named += 1

    def acquire_prefix(self, blocks: Iterable[int], tenant: str = "", weight: float = 1.0) -> None:
        """acquire() blocks that lookup() found for a request of this tenant; eviction counts them as used by it."""
        for block in blocks:
            self._eviction.found(block, tenant, weight)
        self.acquire(blocks)

    def idle_among(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are idle: acquire() would lower `available` by this number."""
        return sum(self._refs[block] == 0 for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with undefined content and one reference each.

        Raises OutOfBlocks if fewer are available; nothing is allocated then."""
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks requested, {self.available} of {self.total} available")
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block = self._eviction.choose(self._idle, self._digest)
                del self._idle[block]
                self._unseal(block)
            self._refs[block] = 1
            taken.append(block)
        self._held += count
        self._named += count
        return taken

    def has_run(self, count: int) -> bool:
        """Return whether allocate_run() would succeed.  O(total) if at least `count` blocks are free."""
        return count <= len(self._free) and self._first_run(count) >= 0

    def allocate_run(self, count: int) -> list[int]:
        """Allocate the first `count` consecutive free blocks, as an allocator without block tables must.

        Evicts no cached block.  O(total).  Raises OutOfBlocks if no run is long enough, even if `count` are free."""
        first = self._first_run(count)
        if first < 0:
            raise OutOfBlocks(f"{count} consecutive blocks requested, {len(self._free)} of {self.total} free in all")
        run = range(first, first + count)
        self._free = [block for block in self._free if block not in run]
        for block in run:
            self._refs[block] = 1
        self._held += count
        self._named += count
        return list(run)

    def release(self, table: Sequence[int]) -> None:
        """Drop one reference from each block of a table.

        The last block is released first, so that eviction takes the end of a prefix before its beginning."""
        for block in reversed(table):
            if self._refs[block] <= 0:
                raise DoubleFree(f"block {block} released more often than it was taken")
            self._refs[block] -= 1
            self._named -= 1
            if self._refs[block] == 0:
                self._held -= 1
                if self._digest[block] is None:
                    self._discard(block)
                else:
                    self._idle[block] = None

    def refs(self, block: int) -> int:
        """Return how many tables contain the block.  A block in several tables must be copied before it is written."""
        return self._refs[block]

    def views(self) -> tuple[memoryview, memoryview]:
        """Return zero-copy, read-only views of all blocks: reference counts (int32), and whether sealed (1 byte).

        A sealed block without references is idle.  The views show later changes of the pool."""
        return memoryview(self._refs).toreadonly(), memoryview(self._sealed).toreadonly()

    def held_only_by(self, tables: Sequence[Sequence[int]], but: Sequence[int]) -> int:
        """Return how many blocks, except those in `but`, would be free if all `tables` were released.  O(entries)."""
        counts, others = Counter(chain.from_iterable(tables)), set(but)
        return sum(self._refs[block] == count and block not in others for block, count in counts.items())

    def shared_prefix(self, table: Sequence[int]) -> int:
        """Estimate how many blocks at the beginning of a table are in other tables, too.  O(log blocks).

        Tables usually share a prefix.  The estimate is wrong if two sequences computed the same block at once: each
        keeps its own block, and they may share later blocks.  `certain_prefix` is exact."""
        refs = self._refs
        if not table or refs[table[0]] == 1:
            return 0
        return bisect_left(table, True, key=lambda block: refs[block] == 1)

    def certain_prefix(self, table: Sequence[int]) -> int:
        """Return how many blocks at the beginning of a table are also in other tables.  O(blocks)."""
        refs = self._refs
        return next((at for at, block in enumerate(table) if refs[block] == 1), len(table))

    def seal(self, block: int, digest: bytes, tenant: str = "", weight: float = 1.0) -> None:
        """Add a full block to the prefix cache, unless another block with the same digest is cached already.

        The block counts as cached by `tenant`; `weight`: the tenant's share of the cache relative to other tenants'."""
        if self.caching and self._digest[block] is None and digest not in self._index:
            self._index[digest] = block
            self._digest[block] = digest
            self._sealed[block] = 1
            self._eviction.cached(block, digest, tenant, weight)

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove blocks with wrong content from the prefix index.  Block tables that contain them do not change."""
        for block in blocks:
            self._unseal(block)
            if block in self._idle:
                del self._idle[block]
                self._discard(block)

    def forget_all(self, most: int | None = None) -> bool:
        """Empty the prefix cache, or remove at most `most` blocks.  Returns whether it is empty.  O(removed blocks).

        Idle blocks are freed least recently used first, whatever the order in which a step sealed them."""
        self.forget(idle := list(islice(self._idle, most)))
        self.forget(list(islice(self._index.values(), None if most is None else most - len(idle))))
        return not self._index

    def check(self, tables: Iterable[Sequence[int]], blocks: range | None = None) -> None:
        """Compare the given blocks (None: all), and all totals, with the live block tables.

        Takes O(len(blocks)), and O(all blocks) of counting in C: 20 ms for 16,384 of 100,000 blocks.
        Raises AccountingError naming the block."""
        named = Counter(chain.from_iterable(tables))
        places = Counter(self._free)
        for block in range(self.total) if blocks is None else blocks:
            self._check_block(block, named[block])
            free = self._refs[block] == 0 and block not in self._idle
            if places[block] > free:
                raise DoubleFree(f"block {block} is {places[block]} times in the free list, not {free:d} times")
            if places[block] < free:
                raise Leak(f"block {block} is neither held nor idle, and not in the free list")
        self._check_sums(named.total())
        if len(self._index) != self.total - self._digest.count(None):
            raise AccountingError("the prefix index has a block that is not sealed")
        if fault := self._eviction.check(self._digest):
            raise AccountingError(f"the counts of the eviction policy are wrong: {fault}")

    def _check_sums(self, named: int) -> None:
        """Check that each block is free, idle or held, and that the tables have `named` entries in total.  O(1).

        Raises AccountingError."""
        free, idle = len(self._free), len(self._idle)
        sums = f"{free} blocks free, {idle} idle and {self._held} held make {free + idle + self._held} of {self.total}"
        if free + idle + self._held > self.total:
            raise DoubleFree(sums)
        if free + idle + self._held < self.total:
            raise Leak(sums)
        if self._named != named:
            kind = Leak if self._named > named else DoubleFree
            raise kind(f"the pool counts {self._named} references to blocks, the tables have {named}")

    def _check_block(self, block: int, named: int) -> None:
        """Check one block; `named`: number of tables that contain it.  O(1).  Raises AccountingError."""
        refs, digest = self._refs[block], self._digest[block]
        if refs != named:
            kind = Leak if refs > named else DoubleFree
            raise kind(f"block {block} has a reference count of {refs}, but is in {named} tables")
        if refs and block in self._idle:
            raise DoubleFree(f"block {block} has {refs} references and is idle")
        if self._sealed[block] != (digest is not None):
            raise AccountingError(f"block {block} counts as {'' if self._sealed[block] else 'not '}sealed, wrongly")
        if digest is not None and self._index.get(digest) != block:
            raise AccountingError(f"block {block} is sealed; the index has {self._index.get(digest)} for its digest")
        if digest is None and block in self._idle:
            raise AccountingError(f"block {block} is idle, but holds no cached prefix")
        if digest is not None and not refs and block not in self._idle:
            raise AccountingError(f"block {block} holds a cached prefix, but is neither held nor idle")

    def _first_run(self, count: int) -> int:
        """Return the first block of the lowest run of `count` consecutive free blocks; -1: there is none."""
        free = bytearray(self.total)
        for block in self._free:
            free[block] = 1
        return free.find(b"\x01" * count)

    def _unseal(self, block: int) -> None:
        if (digest := self._digest[block]) is not None:
            del self._index[digest]
            self._digest[block] = None
            self._sealed[block] = 0
            self._eviction.uncached(block)
            if self.note_evicted:
                self.evicted.append(digest)

    def _discard(self, block: int) -> None:
        self._free.append(block)
        if self.note_discarded:
            self.discarded.append(block)


class HostPool:
    """Blocks of host memory, which keep the KV cache of swapped sequences.

    A block is free or held by exactly one sequence, so blocks need no reference counts.  The lowest free blocks are
    allocated first, so that a sequence mostly gets consecutive blocks, which one copy can move."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self._free = list(range(total))  # a heap
        self._held: set[int] = set()

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with undefined content.  O(count log total).

        Raises OutOfBlocks if fewer are free; nothing is allocated then."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} host blocks requested, {len(self._free)} of {self.total} available")
        taken = [heappop(self._free) for _ in range(count)]
        self._held.update(taken)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Free blocks that a sequence holds."""
        for block in blocks:
            if block not in self._held:
                raise DoubleFree(f"host block {block} released more often than it was taken")
            self._held.remove(block)
            heappush(self._free, block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the pool with all tables of host blocks.  Raises AccountingError naming the block.

        O(total), in C unless there is an error."""
        named = Counter(chain.from_iterable(tables))
        free, held = set(self._free), self._held
        each_once = len(free) == len(self._free) and named.total() == len(named)
        if not (each_once and named.keys() == held and free | held == set(range(self.total)) and not free & held):
            self._find_error(named)
        if len(named) > len(self._held):
            raise AccountingError(f"host blocks {sorted(named.keys() - self._held)} do not exist")
        self._check_sums(sum(named.values()))

    def _find_error(self, named: Counter[int]) -> None:
        """Check block by block.  `named`: number of tables for each block.  Raises AccountingError naming the block."""
        places = Counter(self._free)
        for block in range(self.total):
            holders, held = named[block], block in self._held
            if holders != held:
                kind = Leak if held and not holders else DoubleFree
                raise kind(f"host block {block} is in {holders} tables and {'held' if held else 'free'}")
            if places[block] + held != 1:
                kind = Leak if places[block] + held == 0 else DoubleFree
                raise kind(f"host block {block} is {places[block]} times in the free list, held: {held}")

    def _check_sums(self, named: int) -> None:
        """Check the totals; `named`: entries of all host tables.  O(1).  Raises AccountingError."""
        free, held = len(self._free), len(self._held)
        if free + held != self.total or held != named:
            kind = DoubleFree if free + held > self.total or held < named else Leak
            raise kind(f"{free} host blocks free and {held} held, of {self.total}; tables have {named}")
