"""Checkpoints: what the scheduler does about recurrent state, next to the blocks of the KV cache.

A sequence of a model with recurrent layers has a live state in its slot.  To resume from another position than its
last token it needs a copy of the state there.  Copies are kept

    at anchors        the last full block before the end of each turn of the prompt (`Generate.anchors`)
    at junctions      where a prompt leaves a chain of cached blocks: another one may leave it there, too
    every STEP tokens of a prompt: every 128 while most places are free, every 1,024 while any is
    in the answer     at the end of each block, one per sequence, which moves along

    tokens   |------------ cached blocks ------------|
    states   ^ empty            ^ checkpoint         ^ junction: kept by the first prompt that leaves here
             '---- the hit -----'- computed again ---'

A prefix is found up to the longest position that has all blocks and a checkpoint.  A slice of a prompt names what it
keeps on its way (`Slice.keep`).  Slots that decode are copied at the beginning of a plan (`StepPlan.keep`).

Models of attention layers have `NoCheckpoints`: nothing is kept, and no plan differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from quire.engine.core.blocks import BlockPool
from quire.engine.core.sequence import Sequence
from quire.engine.core.state_pool import StateCounts, StatePool

DENSE, SPARSE = 128, 1024  # tokens between checkpoints of a prompt: while most places are free, and while any is
MOSTLY_FREE = 2  # most: more than 1/MOSTLY_FREE of the places


class CheckpointPolicy(Protocol):
    """Decides which states to keep, and the one that a sequence begins with."""

    counts: StateCounts  # counters for metrics

    def hit(self, seq: Sequence, blocks: list[int]) -> list[int]:
        """Return those of the cached blocks of a prefix that the sequence can begin with."""

    def begin(self, seq: Sequence) -> int:
        """The sequence starts with `computed` tokens.  Return the checkpoint that its slot begins with; -1: the empty
        state."""

    def keep(self, seq: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        """Return (position, checkpoint) of what a slice from `start` to `end` keeps."""

    def keep_answer(self, seq: Sequence) -> None:
        """A decoding sequence has filled a block: keep its state."""

    def park(self, seq: Sequence) -> bool:
        """The sequence leaves its slot and keeps its blocks.  Return whether its state is kept as well."""

    def unpark(self, seq: Sequence) -> int:
        """The sequence gets a slot again.  Return the checkpoint that the slot begins with; -1: models without one."""

    def release(self, seq: Sequence) -> None:
        """The sequence gives up its blocks, and with them the state that was kept for it."""

    def forget(self, seq: Sequence) -> None:
        """What the sequence computed is not to be trusted."""

    def step_failed(self, committed: int) -> None:
        """No plan after step `committed` has run."""

    def forget_all(self) -> None:
        """Empty the cache of checkpoints."""

    def issue(self) -> list[tuple[int, int]]:
        """The plan is made: return its (slot, checkpoint) copies, once."""

    def check(self, live: Iterable[Sequence]) -> None:
        """Check every place against every sequence.  Raises AccountingError."""


class NoCheckpoints:
    """Models whose layers all attend: blocks are all there is."""

    counts = StateCounts()

    def hit(self, seq: Sequence, blocks: list[int]) -> list[int]:
        return blocks

    def begin(self, seq: Sequence) -> int:
        return -1

    def keep(self, seq: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        return []

    def keep_answer(self, seq: Sequence) -> None:
        pass

    def park(self, seq: Sequence) -> bool:
        return True

    def unpark(self, seq: Sequence) -> int:
        return -1

    def release(self, seq: Sequence) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass

    def step_failed(self, committed: int) -> None:
        pass

    def forget_all(self) -> None:
        pass

    def issue(self) -> list[tuple[int, int]]:
        return []

    def check(self, live: Iterable[Sequence]) -> None:
        pass


class Checkpoints:
    """Models with recurrent layers."""

    def __init__(self, pool: BlockPool, states: StatePool, fingerprint: str) -> None:
        self.states, self.counts = states, states.counts
        self._pool, self._fingerprint, self._size = pool, fingerprint, pool.block_size
        self._moves: list[tuple[int, int]] = []  # (slot, place), of the plan in the making
        self._step = 0  # plans issued

    def hit(self, seq: Sequence, blocks: list[int]) -> list[int]:
        seq.junction = len(blocks) * self._size
        for count in range(len(blocks), 0, -1):
            if self.states.find(self._digest(seq, count)) >= 0:
                return blocks[:count]
        return []

    def begin(self, seq: Sequence) -> int:
        seq.to_keep, seq.kept_at = sorted(self._positions(seq), reverse=True), seq.computed
        if not seq.computed:
            return -1
        place = self.states.find(self._digest(seq, seq.computed // self._size))
        self.states.pin(place)
        return place

    def keep(self, seq: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        kept = []
        while seq.to_keep and seq.to_keep[-1] <= end:
            position = seq.to_keep.pop()
            if position > start and (place := self._write(seq, position, -1)) >= 0:
                kept.append((position, place))
        return kept

    def keep_answer(self, seq: Sequence) -> None:
        position = seq.computed
        if not self._pool.caching or position % self._size or position > seq.known:
            return
        place = self._write(seq, position, self.states.retake(seq.checkpoint) if seq.checkpoint else -1)
        if place >= 0:
            seq.checkpoint = self._digest(seq, position // self._size)
            self._moves.append((seq.slot, place))

    def park(self, seq: Sequence) -> bool:
        if (place := self.states.take()) < 0:
            return False
        self.states.hold(place)
        self._moves.append((seq.slot, place))
        seq.parked = place
        return True

    def unpark(self, seq: Sequence) -> int:
        place, seq.parked = seq.parked, -1
        self.states.release(place)
        return place

    def release(self, seq: Sequence) -> None:
        seq.to_keep, seq.checkpoint = [], b""
        if seq.parked >= 0:
            self.states.release(seq.parked)
            seq.parked = -1

    def forget(self, seq: Sequence) -> None:
        self.states.forget(seq.digests)

    def step_failed(self, committed: int) -> None:
        self._moves = []
        self.states.abandon(committed)

    def forget_all(self) -> None:
        self.states.forget_all()

    def issue(self) -> list[tuple[int, int]]:
        self.states.issue()
        self._step += 1
        moves, self._moves = self._moves, []
        return moves

    def check(self, live: Iterable[Sequence]) -> None:
        self.states.check([seq.parked for seq in live if seq.parked >= 0])

    def _positions(self, seq: Sequence) -> set[int]:
        """Positions behind `computed` that are worth a checkpoint: ends of blocks that the prompt fills."""
        if not self._pool.caching:
            return set()
        size, first = self._size, seq.computed
        last = (seq.known - 1) // size * size  # a prefix that is found leaves at least one token to compute
        wanted = {anchor // size * size for anchor in seq.request.anchors} | {seq.junction}
        if step := self._stride():
            wanted |= set(range(first // step * step + step, last + 1, step))
        return {position for position in wanted if first < position <= last}

    def _stride(self) -> int:
        """Tokens between checkpoints that nothing but the prompt's length asks for; 0: none are kept."""
        if self.states.free > self.states.total // MOSTLY_FREE:
            return max(DENSE, self._size) // self._size * self._size
        return max(SPARSE, self._size) // self._size * self._size if self.states.free else 0

    def _write(self, seq: Sequence, position: int, place: int) -> int:
        """Let the plan in the making write a taken place, or one that it takes (-1).  Returns the place; -1: none."""
        digest = self._digest(seq, position // self._size)
        if place < 0 and (self.states.find(digest) >= 0 or (place := self.states.take()) < 0):
            return -1
        self.states.write(place, digest, position, position - seq.kept_at, self._step + 1)
        seq.kept_at = position
        return place

    def _digest(self, seq: Sequence, blocks: int) -> bytes:
        """The chain digest of the first `blocks` blocks of a sequence, at least one."""
        return seq.digest(blocks - 1, self._fingerprint, self._size)


def checkpoint_policy(pool: BlockPool, states: StatePool | None, fingerprint: str) -> CheckpointPolicy:
    """Build the policy of a model with recurrent state, or without (None)."""
    return NoCheckpoints() if states is None else Checkpoints(pool, states, fingerprint)
