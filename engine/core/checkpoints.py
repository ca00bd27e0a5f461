"""Checkpoints: copies of recurrent state (Mamba and the like), which a prefix hit needs in addition to cached blocks.

A sequence of a model with recurrent layers has a live state in its slot.  To start at a position after a cached prefix,
a sequence needs a copy of the state at this position.  The scheduler keeps copies

    at anchors        the last full block before the end of each turn of the prompt (`Generate.anchors`)
    at junctions      where a prompt diverges from a chain of cached blocks: other prompts may diverge there, too
    in long prompts   every 128 tokens while most slots of the state pool are free, every 1,024 while any is
    in the answer     one per sequence, at its last full block; it is replaced as the answer grows

    tokens   |------------ cached blocks ------------|
    states   ^ empty            ^ checkpoint         ^ junction: saved by the first prompt that diverges here
             '---- the hit -----'- computed again ---'

A prefix hit ends at the last position that has all blocks and a checkpoint.  A slice of a prompt lists the checkpoints
to save on its way (`Slice.keep`).  The states of decoding slots are copied before the step runs (`StepPlan.keep`).

Models with only attention layers use `NoCheckpoints`, which saves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from quire.engine.core.blocks import BlockPool
from quire.engine.core.sequence import Sequence
from quire.engine.core.state_pool import StateCounts, StatePool

# Tokens between checkpoints of a prompt, while more than 1/MOSTLY_FREE of the state slots are free, and while any is.
DENSE, SPARSE = 128, 1024
MOSTLY_FREE = 2


class CheckpointPolicy(Protocol):
    """Decides which recurrent states to save, and which checkpoint a sequence begins with."""

    counts: StateCounts  # counters for metrics

    def hit(self, seq: Sequence, blocks: list[int]) -> list[int]:
        """Return the cached blocks of a prefix up to the last position that has a checkpoint."""

    def begin(self, seq: Sequence) -> int:
        """Return the checkpoint with which a sequence starts after `computed` cached tokens; -1: the empty state."""

    def keep(self, seq: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        """Return the (position, checkpoint) pairs that a slice from `start` to `end` saves."""

    def keep_answer(self, seq: Sequence) -> None:
        """Save the state of a decoding sequence that has filled a block."""

    def park(self, seq: Sequence) -> bool:
        """Save the state of a sequence that pauses without a batch slot.  Return False if no state slot can be
        taken."""

    def unpark(self, seq: Sequence) -> int:
        """Return the checkpoint with which a paused sequence resumes; -1: the model has no recurrent state."""

    def release(self, seq: Sequence) -> None:
        """Free the state saved for a sequence that gives up its blocks."""

    def forget(self, seq: Sequence) -> None:
        """Drop the checkpoints of a sequence whose computed values may be wrong."""

    def step_failed(self, committed: int) -> None:
        """Drop the checkpoints of all plans after step `committed`, which have not run."""

    def forget_all(self) -> None:
        """Drop all checkpoints."""

    def issue(self) -> list[tuple[int, int]]:
        """Publish the plan's checkpoints.  Return its (slot, checkpoint) copies, once."""

    def check(self, live: Iterable[Sequence]) -> None:
        """Compare the state pool with all sequences.  Raises AccountingError."""


class NoCheckpoints:
    """Policy of models without recurrent layers: nothing to save."""

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
    """Policy of models with recurrent layers."""

    def __init__(self, pool: BlockPool, states: StatePool, fingerprint: str) -> None:
        self.states, self.counts = states, states.counts
        self._pool, self._fingerprint, self._size = pool, fingerprint, pool.block_size
        self._moves: list[tuple[int, int]] = []  # (batch slot, state slot) copies of the plan being built
        self._step = 0  # number of plans issued

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
        """Return the positions after `computed` at which to save checkpoints; all are ends of full prompt blocks."""
        if not self._pool.caching:
            return set()
        size, first = self._size, seq.computed
        last = (seq.known - 1) // size * size  # a prefix hit leaves at least one token to compute
        wanted = {anchor // size * size for anchor in seq.request.anchors} | {seq.junction}
        if step := self._stride():
            wanted |= set(range(first // step * step + step, last + 1, step))
        return {position for position in wanted if first < position <= last}

    def _stride(self) -> int:
        """Return the tokens between regular checkpoints of a long prompt; 0: save none, since no state slot is free."""
        if self.states.free > self.states.total // MOSTLY_FREE:
            return max(DENSE, self._size) // self._size * self._size
        return max(SPARSE, self._size) // self._size * self._size if self.states.free else 0

    def _write(self, seq: Sequence, position: int, place: int) -> int:
        """Let the plan being built save a checkpoint.  `place`: a state slot taken before; -1: take one.

        Returns the state slot; -1: the checkpoint exists already, or no state slot can be taken."""
        digest = self._digest(seq, position // self._size)
        if place < 0 and (self.states.find(digest) >= 0 or (place := self.states.take()) < 0):
            return -1
        self.states.write(place, digest, position, position - seq.kept_at, self._step + 1)
        seq.kept_at = position
        return place

    def _digest(self, seq: Sequence, blocks: int) -> bytes:
        """Return the chain digest of the first `blocks` blocks of a sequence; `blocks` >= 1."""
        return seq.digest(blocks - 1, self._fingerprint, self._size)


def checkpoint_policy(pool: BlockPool, states: StatePool | None, fingerprint: str) -> CheckpointPolicy:
    """Build the checkpoint policy of a model.  `states`: its state pool; None: the model has no recurrent layers."""
    return NoCheckpoints() if states is None else Checkpoints(pool, states, fingerprint)
