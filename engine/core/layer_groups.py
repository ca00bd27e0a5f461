"""Layer groups: sliding-window layers have their own block tables, and free the blocks that the window has passed.

    tokens           0 ..................................... computed
    full layers      [ 0][ 1][ 2][ 3][ 4][ 5][ 6][ 7][ 8][ 9]           Sequence.table
    window layers     '--- passed, released ---'[70][71][72]            Sequence.windows[group]
                                               '- window + chunk -'

  * Every group has a BlockPool.  Block ids of window groups follow those of full layers, so the edits, copies, swaps
    and poison of a plan can name blocks of any group without further fields.
  * A table index means the same tokens in every table.  Entries before `WindowTable.first` do not exist in the
    scheduler's table, and are stale in the executor's table, which never reads them.
  * Between two plans a sequence holds at most `WindowGroup.blocks_per_sequence` blocks of a group, at any length.
    A plan adds the blocks of its own tokens.  A sequence reserves these blocks once, or those of its maximum length if
    they are fewer, so window blocks never run out (window_reservations.py).  Admission, forecast and preemption count
    only blocks of full layers.
  * A prefix hit ends at the last position at which every group has its last window cached.  Passed blocks stay cached
    until the pool needs them; blocks outside the windows before an anchor are evicted first (window_pool.py).
  * Beams keep all their window blocks, because a re-fork may return to any of them.

Models without sliding windows use the base class `LayerGroups`, which does nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from quire.engine.core.batch import Batch
from quire.engine.core.blocks import AccountingError, BlockPool
from quire.engine.core.plan import WindowGroup
from quire.engine.core.sequence import Sequence as Seq
from quire.engine.core.sequence import State, WindowTable
from quire.engine.core.window_pool import WindowPool
from quire.engine.core.window_reservations import WindowReservations

Copies = list[tuple[int, int]]  # (from block, to block), ids as in plans
Edits = list[tuple[int, int, int]]  # (slot, table index, block)


class LayerGroups:
    """The layer groups of a model whose layers all attend to every token: one table per sequence, nothing to do."""

    pools: Sequence[WindowPool] = ()  # one per window group
    reservations = WindowReservations([], [], 1)  # without window groups every sequence fits

    # ------------------------------------------------------------------------------------------------------ admission

    def hit(self, seq: Seq, blocks: list[int]) -> list[int]:
        """Return the cached blocks of a prefix up to the last position whose windows are cached, too."""
        return blocks

    # ------------------------------------------------------------------------------------------- tables of a sequence

    def begin_plan(self) -> None:
        """Release the window blocks that the last plan's tokens have pushed out of their windows."""

    def begin(self, seq: Seq) -> None:
        """Build the window tables of a sequence that starts with cached or swapped-in blocks in its table."""

    def resume(self, seq: Seq) -> None:
        """Add the complete window tables of a sequence to the plan: the executor has none for its new slot."""

    def advance(self, seq: Seq, position: int) -> None:
        """Release the blocks that the window has passed when the sequence computes the token at `position` next."""

    def grow(self, seq: Seq, count: int) -> None:
        """Append `count` blocks to each window table of the sequence."""

    def copy(self, seq: Seq, index: int) -> None:
        """Replace the block at a table index by a private copy, as `PlanEdits.copy` does in the full layers' table."""

    def fork(self, leader: Seq, sibling: Seq) -> None:
        """Let a sibling share the window blocks of its leader, whose prompt is planned."""

    def share(self, source: Seq, count: int, seq: Seq) -> None:
        """Replace the window tables of a beam by the first `count` blocks of another beam's tables."""

    def truncate(self, seq: Seq) -> None:
        """Release the window blocks beyond the length of the full layers' table."""

    def seal(self, seq: Seq, index: int, digest: bytes) -> None:
        """Add the window blocks at a table index to the prefix cache."""

    def release(self, seq: Seq) -> None:
        """Release every window block of the sequence, host blocks included, and its reservation."""

    def fits_host(self, seq: Seq) -> bool:
        """Return whether host memory has free blocks for the window blocks of the sequence."""
        return True

    def swap_out(self, seq: Seq) -> Copies:
        """Release the window blocks of a sequence.  Return the copies (block, host block) that save their content."""
        return []

    def swap_in(self, seq: Seq, hits: int) -> Copies:
        """Return the copies (host block, block) that bring the window blocks of a sequence back.

        Returns no copies if the `hits` cached blocks at the beginning of its table cover all computed tokens: `begin`
        then takes the window blocks from the cache."""
        return []

    # ---------------------------------------------------------------------------------------------------------- plans

    def drop(self, seq: Seq) -> None:
        """Drop the edits of a preempted sequence's window tables."""

    def edits(self) -> tuple[Copies, Edits, list[int]]:
        """Return (copies, edits, freed blocks) of the plan being built; each freed block is returned once."""
        return [], [], []

    def clear(self) -> None:
        """Release the source blocks of the plan's copies, once the plan is made."""

    # --------------------------------------------------------------------------------------------------------- faults

    def forget(self, seq: Seq) -> None:
        """Remove a sequence's window blocks from the prefix cache: their content may be wrong."""

    def forget_all(self) -> None:
        """Empty the prefix cache."""

    def step_failed(self, committed: int) -> None:
        """Remove the blocks that plans after step `committed` sealed from the cache: these plans have not run."""

    def check(self, live: Iterable[Seq]) -> None:
        """Compare all window blocks with all window tables.  Raises AccountingError."""


class WindowGroups(LayerGroups):
    """The layer groups of a model with sliding-window layers and layers that attend to every token."""

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[WindowGroup],
        batch: Batch,
        *,
        fingerprint: str,
        host_blocks: int,
        step_tokens: int,
        max_model_len: int,
    ) -> None:
        """`host_blocks`: host blocks of full layers.  `step_tokens`: maximum tokens of a plan."""
        self.pools: list[WindowPool] = []
        at, size = pool.total, pool.block_size
        for group in groups:
            self.pools.append(WindowPool(group, at, host_blocks, pool))
            at += group.blocks
            host_blocks += group.host_blocks
        self._batch, self._fingerprint, self._size = batch, fingerprint, size
        sizes = {"block_size": size, "max_model_len": max_model_len}
        plan = WindowGroup.blocks_per_plan(size, step_tokens, pool.total)
        each = [group.reserved_blocks(**sizes) for group in groups]
        self.reservations = WindowReservations(each, [group.blocks - plan for group in groups], size)
        self._growth: list[tuple[Seq, int, int]] = []  # (sequence, table index, block id)
        self._copies: list[tuple[Seq, int, int]] = []  # (sequence, from id, to id)
        # Per group: source block of a planned copy -> references held until the plan is made.
        self._sources: list[Counter[int]] = [Counter() for _ in groups]
        self._wide: list[Seq] = []  # sequences that grew in the last plan; their tables may exceed the window
        self._sealed: deque[tuple[int, WindowPool, int]] = deque()  # (step, pool, block) sealed by steps in flight

    # ------------------------------------------------------------------------------------------------------ admission

    def hit(self, seq: Seq, blocks: list[int]) -> list[int]:
        count = len(blocks)
        seq.junction = count * self._size
        while count > 0:
            lacking = max(last_lacking(pool, seq, count, self._fingerprint) for pool in self.pools)
            if lacking < 0:
                break
            count = lacking
        return blocks[:count]

    # ------------------------------------------------------------------------------------------- tables of a sequence

    def begin_plan(self) -> None:
        wide, self._wide = self._wide, []
        for seq in wide:
            if seq.windows:
                self.advance(seq, seq.computed_before(self._batch.step + 1))

    def begin(self, seq: Seq) -> None:
        self.reservations.reserve(seq)
        if not seq.windows:
            request, hits = seq.request, len(seq.table)
            for pool in self.pools:
                first = pool.first_read(seq, seq.computed)
                blocks = [pool.find(self._digest(seq, index)) for index in range(first, hits)]
                pool.acquire_prefix(blocks, request.tenant, request.weight)
                seq.windows.append(WindowTable(first, blocks))
        self.resume(seq)

    def resume(self, seq: Seq) -> None:
        for pool, table in zip(self.pools, seq.windows, strict=False):
            self._growth += [(seq, index, block) for index, block in enumerate(pool.ids(table.blocks), table.first)]

    def advance(self, seq: Seq, position: int) -> None:
        for pool, table in zip(self.pools, seq.windows, strict=True):
            if (passed := pool.first_read(seq, position) - table.first) > 0:
                pool.pass_by(seq, table.first, table.blocks[:passed])
                del table.blocks[:passed]
                table.first += passed

    def grow(self, seq: Seq, count: int) -> None:
        for pool, table in zip(self.pools, seq.windows, strict=True):
            for block in pool.allocate(count):
                self._growth.append((seq, table.end, pool.first_id + block))
                table.blocks.append(block)
        if count:
            self._wide.append(seq)

    def copy(self, seq: Seq, index: int) -> None:
        for pool, table, sources in zip(self.pools, seq.windows, self._sources, strict=True):
            source = table.blocks[index - table.first]
            (target,) = pool.allocate(1)
            table.blocks[index - table.first] = target
            sources[source] += 1
            self._copies.append((seq, pool.first_id + source, pool.first_id + target))
            self._growth.append((seq, index, pool.first_id + target))

    def fork(self, leader: Seq, sibling: Seq) -> None:
        for pool, table in zip(self.pools, leader.windows, strict=True):
            first = max(table.first, pool.first_read(leader, leader.computed))
            blocks = table.blocks[first - table.first :]
            pool.acquire(blocks)
            sibling.windows.append(WindowTable(first, blocks))
        self.reservations.share(leader, sibling)
        self.resume(sibling)

    def share(self, source: Seq, count: int, seq: Seq) -> None:
        shared = [WindowTable(0, table.blocks[:count]) for table in source.windows]
        for pool, table, old in zip_longest(self.pools, shared, seq.windows):
            pool.acquire(table.blocks)
            if old is not None:
                pool.release(old.blocks)
        seq.windows = shared

    def truncate(self, seq: Seq) -> None:
        for pool, table in zip(self.pools, seq.windows, strict=True):
            if (excess := table.end - len(seq.table)) > 0:
                pool.release(table.blocks[-excess:])
                del table.blocks[-excess:]

    def seal(self, seq: Seq, index: int, digest: bytes) -> None:
        request = seq.request
        for pool, table in zip(self.pools, seq.windows, strict=True):
            if index >= table.first:
                block = table.blocks[index - table.first]
                pool.seal(block, digest, request.tenant, request.weight)
                self._sealed.append((self._batch.step + 1, pool, block))

    def release(self, seq: Seq) -> None:
        if seq.table:
            self.advance(seq, seq.computed)  # free passed blocks first, so that they are evicted before the last window
        for pool, table in zip(self.pools, seq.windows, strict=False):
            pool.release(table.blocks)
            pool.host.release(table.host)
        seq.windows = []
        self.reservations.leave(seq)

    def fits_host(self, seq: Seq) -> bool:
        tables = zip(self.pools, seq.windows, strict=True)
        return all(pool.host.available >= len(table.blocks) for pool, table in tables)

    def swap_out(self, seq: Seq) -> Copies:
        self.advance(seq, seq.computed)
        # If this plan was to copy a shared block for the sequence, the source block has the content.
        planned = {target: source for owner, source, target in self._copies if owner is seq}
        moves: Copies = []
        for pool, table in zip(self.pools, seq.windows, strict=True):
            kept = pool.ids(table.blocks[: -(-seq.computed // self._size) - table.first])
            table.host = pool.host.allocate(len(kept))
            moves += zip((planned.get(block, block) for block in kept), pool.host_ids(table.host), strict=True)
            pool.release(table.blocks)
            table.blocks = []
        self.reservations.leave(seq)
        return moves

    def swap_in(self, seq: Seq, hits: int) -> Copies:
        whole = hits * self._size >= seq.computed
        moves: Copies = []
        for pool, table in zip(self.pools, seq.windows, strict=True):
            if not whole:
                table.blocks = pool.allocate(len(table.host))
                moves += zip(pool.host_ids(table.host), pool.ids(table.blocks), strict=True)
            pool.host.release(table.host)
            table.host = []
        if whole:
            seq.windows = []
        return moves

    # ---------------------------------------------------------------------------------------------------------- plans

    def drop(self, seq: Seq) -> None:
        self._growth = [edit for edit in self._growth if edit[0] is not seq]
        self._copies = [copy for copy in self._copies if copy[0] is not seq]

    def edits(self) -> tuple[Copies, Edits, list[int]]:
        while self._sealed and self._sealed[0][0] <= self._batch.committed:
            self._sealed.popleft()
        copies = [(source, target) for _, source, target in self._copies]
        edits = [(seq.slot, index, block) for seq, index, block in self._growth]
        return copies, edits, [block for pool in self.pools for block in pool.take_discarded()]

    def clear(self) -> None:
        for pool, sources in zip(self.pools, self._sources, strict=True):
            pool.release(list(sources.elements()))
            sources.clear()
        self._growth, self._copies = [], []

    # --------------------------------------------------------------------------------------------------------- faults

    def forget(self, seq: Seq) -> None:
        for pool, table in zip(self.pools, seq.windows, strict=False):
            pool.forget(table.blocks)

    def forget_all(self) -> None:
        for pool in self.pools:
            pool.forget_all()

    def step_failed(self, committed: int) -> None:
        for step, pool, block in self._sealed:
            if step > committed:
                pool.forget([block])
        self._sealed.clear()
        self._wide = []

    def check(self, live: Iterable[Seq]) -> None:
        live = list(live)
        for at, pool in enumerate(self.pools):
            pool.check([seq.windows[at].blocks for seq in live if seq.windows])
            pool.host.check([seq.windows[at].host for seq in live if seq.windows])
        self.reservations.check(live)
        wide = set(map(id, self._wide))
        for seq in live:
            for pool, table in zip(self.pools, seq.windows if seq.table else [], strict=False):
                self._check_table(seq, pool, table, wide=id(seq) in wide)
            has_tables = seq.table or seq.host or seq.state is State.PREFILLING
            if len(seq.windows) != (len(self.pools) if has_tables else 0):
                raise AccountingError(f"{seq.request.id}, {seq.state.value}, has {len(seq.windows)} window tables")

    def _check_table(self, seq: Seq, pool: WindowPool, table: WindowTable, *, wide: bool) -> None:
        """Check the length of one window table.  `wide`: it grew in the last plan, and the next plan trims it."""
        name, computed = seq.request.id, seq.computed_before(self._batch.step + 1)
        if table.end != len(seq.table):
            raise AccountingError(f"{name}: a table of window {pool.window} ends at {table.end}, not {len(seq.table)}")
        if table.first > pool.first_read(seq, computed):
            raise AccountingError(f"{name}: block {table.first - 1} of window {pool.window} was released too early")
        seen = min(computed, max(0, len(seq.table) - 1) * self._size)  # at most the position of the last advance()
        if not wide and table.first < pool.first_read(seq, seen):
            raise AccountingError(f"{name}: block {table.first} of window {pool.window} is passed and still held")

    def _digest(self, seq: Seq, index: int) -> bytes:
        return seq.digest(index, self._fingerprint, self._size)


def last_lacking(pool: WindowPool, seq: Seq, count: int, fingerprint: str) -> int:
    """Return the last table index that a window ending after `count` blocks needs and that is not cached; -1: none."""
    size = pool.block_size
    wanted = range(count - 1, pool.first_read(seq, count * size) - 1, -1)
    return next((index for index in wanted if pool.find(seq.digest(index, fingerprint, size)) < 0), -1)
