"""WindowPool: the KV-cache blocks of layers whose queries see only the last `window` tokens.

A block that the window has passed is released.  If it is sealed, it stays in the prefix cache, so that a prompt which
shares this prefix can reuse it.  The order of eviction:

    tokens     0 ..... turn boundary ............. end of prompt ......... end of answer
    blocks     [x][x][A][A][x][x][x][x][x][x][x][x][A][A][x][x][x][x][x][x][A][A]

    x   in no window before an anchor: evicted first
    A   in the window before an anchor, where another prompt may diverge: evicted last, least recently used first

Anchors are the turn boundaries in the request (`Generate.anchors`), the end of the prompt, the position at which the
prompt diverged from a chain of cached blocks, and the end of the answer.
"""

from __future__ import annotations

from quire.engine.core.blocks import BlockPool, HostPool
from quire.engine.core.plan import WindowGroup
from quire.engine.core.sequence import Sequence


class WindowPool(BlockPool):
    """The BlockPool of one window group, with a HostPool for its swapped blocks.

    Both pools number their blocks from 0.  In plans, block b has the id `first_id + b`, and host block b has the id
    `first_host_id + b`."""

    def __init__(self, group: WindowGroup, first_id: int, first_host_id: int, full: BlockPool) -> None:
        """`full`: the pool of the full-attention layers, whose settings this pool copies."""
        super().__init__(group.blocks, full.block_size, caching=full.caching, note_discarded=full.note_discarded)
        self.block_bytes = group.block_bytes
        self.window, self.first_id, self.first_host_id = group.window, first_id, first_host_id
        self.host = HostPool(group.host_blocks)

    def find(self, digest: bytes) -> int:
        """Return the cached block with a digest; -1: there is none."""
        return self._index.get(digest, -1)

    def first_read(self, seq: Sequence, position: int) -> int:
        """Return the first table index that a sequence still reads when it computes `position` next.

        0 for beams, because a re-fork may return to any token."""
        return 0 if seq.request.beams is not None else self.first_index(position)

    def first_index(self, position: int) -> int:
        """Return the table index of the first block that a query at `position` reads."""
        return max(0, position + 1 - self.window) // self.block_size

    def pass_by(self, seq: Sequence, first: int, blocks: list[int]) -> None:
        """Release blocks that the window has passed; `first`: the table index of the first of them."""
        self.release(blocks)
        kept = self._anchored(seq)
        for index, block in enumerate(blocks, first):
            if block in self._idle and not any(index in window for window in kept):
                self._idle.move_to_end(block, last=False)

    def host_ids(self, blocks: list[int]) -> list[int]:
        """Return the plan ids of blocks of the host pool."""
        return [self.first_host_id + block for block in blocks]

    def ids(self, blocks: list[int]) -> list[int]:
        """Return the ids that step plans use for blocks of this pool."""
        return [self.first_id + block for block in blocks]

    def take_discarded(self) -> list[int]:
        """Return the blocks freed since the last call, by the ids that step plans use."""
        discarded, self.discarded = self.discarded, []
        return self.ids(discarded)

    def _anchored(self, seq: Sequence) -> list[range]:
        """Return the table indices of the windows before each anchor of a sequence.

        A window ends one token before its anchor: a prompt that ends there computes this token for its first logits."""
        size = self.block_size
        anchors = {*seq.request.anchors, seq.prompt_len, seq.junction} - {0}
        return [range(self.first_index((anchor - 1) // size * size), anchor // size) for anchor in anchors]
