"""The waiting queue: sequences without blocks, in the order in which they start."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from quire.engine.core.blocks import AccountingError
from quire.engine.core.sequence import Sequence, State


class WaitingQueue:
    """Queue of sequences to start: first preempted sequences, then new ones, each by `order`.

    A new sequence can overtake a preempted one, and take blocks that it needs, only for fairness between tenants."""

    def __init__(self) -> None:
        self.tokens = 0  # known tokens of all waiting sequences, counted when each one joined or grew
        self.fork_blocks = 0  # blocks that siblings of waiting leaders take at their forks
        self._queue: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def add(self, seq: Sequence) -> None:
        """Insert a sequence in queue order.  O(1) at the end of the queue, else O(sequences)."""
        seq.state = State.WAITING
        seq.queued_tokens, seq.queued_forks = seq.known, seq.sibling_blocks
        self.tokens += seq.queued_tokens
        self.fork_blocks += seq.queued_forks
        queue, place = self._queue, _place(seq)
        if not queue or _place(queue[-1]) < place:
            queue.append(seq)
        else:
            queue.insert(next(i for i, other in enumerate(queue) if _place(other) > place), seq)

    def grown(self, seq: Sequence) -> None:
        """Update the counts of a waiting sequence: a step in flight when it was queued has added forced tokens.

        The single token that such a step samples needs no update: the counts allow one more block per sequence."""
        if seq.queued_tokens:
            self.tokens += seq.known - seq.queued_tokens
            self.fork_blocks += seq.sibling_blocks - seq.queued_forks
            seq.queued_tokens, seq.queued_forks = seq.known, seq.sibling_blocks

    def remove(self, seq: Sequence) -> None:
        """Remove a waiting sequence."""
        self._queue.remove(seq)
        self.tokens -= seq.queued_tokens
        self.fork_blocks -= seq.queued_forks
        seq.queued_tokens = seq.queued_forks = 0

    def check(self) -> None:
        """Raise AccountingError unless the counts agree with the queue."""
        if self.tokens != sum(seq.queued_tokens for seq in self._queue):
            raise AccountingError(f"{self.tokens} tokens are counted as waiting")
        if self.fork_blocks != sum(seq.queued_forks for seq in self._queue):
            raise AccountingError(f"{self.fork_blocks} blocks are counted for siblings of waiting sequences")


def _place(seq: Sequence) -> tuple[bool, tuple[int, tuple[int, int]]]:
    return not seq.started_before, seq.order
