"""WindowPool: the blocks of layers whose queries see the last `window` tokens only.

A block that every window has passed is released.  Sealed, it stays in the cache, and a prompt that leaves the sequence
there can begin with it.  Which of them are overwritten first:

    tokens     0 ..... turn boundary ............. end of prompt ......... end of answer
    blocks     [x][x][A][A][x][x][x][x][x][x][x][x][A][A][x][x][x][x][x][x][A][A]

    x   in no window before an anchor: overwritten before all others
    A   in the window before an anchor: a place where another prompt may leave.  Least recently used first

Anchors are the turn boundaries that the gateway names (`Generate.anchors`), the end of the prompt, the place where it
left a chain of cached blocks, and the end of the answer, whose blocks are released by its end.
"""

from __future__ import annotations

from quire.engine.core.blocks import BlockPool, HostPool
from quire.engine.core.plan import WindowGroup
from quire.engine.core.sequence import Sequence


class WindowPool(BlockPool):
    """A BlockPool of one window group, and its blocks in host memory.

    Both number their blocks from 0.  Plans name block b `first_id + b`, and host block b `first_host_id + b`."""

    def __init__(self, group: WindowGroup, first_id: int, first_host_id: int, full: BlockPool) -> None:
        """`full`: the pool of the layers without a window, which has the same settings."""
        super().__init__(group.blocks, full.block_size, caching=full.caching, note_discarded=full.note_discarded)
        self.block_bytes = group.block_bytes
        self.window, self.first_id, self.first_host_id = group.window, first_id, first_host_id
        self.host = HostPool(group.host_blocks)

    def find(self, digest: bytes) -> int:
        """Return the block that is sealed under a digest; -1: there is none."""
        return self._index.get(digest, -1)

    def first_read(self, seq: Sequence, position: int) -> int:
        """Return the first table index that a sequence still needs when it computes `position` next.

        Beams may return to any token."""
        return 0 if seq.request.beams is not None else self.first_index(position)

    def first_index(self, position: int) -> int:
        """Return the index of the first block of a sequence that a query at `position` reads."""
        return max(0, position + 1 - self.window) // self.block_size

    def pass_by(self, seq: Sequence, first: int, blocks: list[int]) -> None:
        """Release blocks of a sequence, from table index `first` on, which its window has passed."""
        self.release(blocks)
        kept = self._anchored(seq)
        for index, block in enumerate(blocks, first):
            if block in self._idle and not any(index in window for window in kept):
                self._idle.move_to_end(block, last=False)

    def host_ids(self, blocks: list[int]) -> list[int]:
        """Return the ids, as in plans, of blocks of the host pool."""
        return [self.first_host_id + block for block in blocks]

    def ids(self, blocks: list[int]) -> list[int]:
        """Return the ids, as in plans, of blocks of this pool."""
        return [self.first_id + block for block in blocks]

    def take_discarded(self) -> list[int]:
        """Return the ids, as in plans, of blocks whose content became garbage, once."""
        discarded, self.discarded = self.discarded, []
        return self.ids(discarded)

    def _anchored(self, seq: Sequence) -> list[range]:
        """Table indices of the windows before the anchors of a sequence.

        A prompt that ends at an anchor begins one token before it, at the latest, for its first logits."""
        size = self.block_size
        anchors = {*seq.request.anchors, seq.prompt_len, seq.junction} - {0}
        return [range(self.first_index((anchor - 1) // size * size), anchor // size) for anchor in anchors]
