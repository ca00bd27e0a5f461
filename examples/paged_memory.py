"""Paged KV-cache memory without a model: sequences grow, share blocks, copy on write and leave.

python examples/paged_memory.py        (no GPU, no torch)

`BlockTables` is small because the real allocator does the work: engine.core.blocks.BlockPool, which an engine uses for
the blocks of its GPU.  Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, sections 4.2 and 4.4.
"""

from __future__ import annotations

from quire.engine.core.blocks import BlockPool


class BlockTables:
    """The block table and the length, in tokens, of each sequence."""

    def __init__(self, blocks: int, block_size: int = 16) -> None:
        self.pool = BlockPool(blocks, block_size)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def register(self, name: str, tokens: int) -> list[int]:
        """Add a sequence with a prompt of `tokens` tokens; return its table.  Raises OutOfBlocks, changing nothing."""
        self.tables[name] = self.pool.allocate(-(-tokens // self.pool.block_size))
        self.lengths[name] = tokens
        return self.tables[name]

    def append(self, name: str) -> tuple[int, int] | None:
        """Allocate a slot for one more token.  Return (from block, to block) if the last block has to be copied first.

        That is needed if another sequence shares it (copy on write).  Raises OutOfBlocks, changing nothing."""
        table, place = self.tables[name], self.lengths[name] % self.pool.block_size
        copied = None
        if place == 0:
            table += self.pool.allocate(1)
        elif self.pool.refs(table[-1]) > 1:
            copied = table[-1], self.pool.allocate(1)[0]
            self.pool.release([table[-1]])
            table[-1] = copied[1]
        self.lengths[name] += 1
        return copied

    def fork(self, name: str, other: str) -> None:
        """Add a sequence that continues `name`: it shares every block, and none is copied."""
        self.pool.acquire(self.tables[name])
        self.tables[other], self.lengths[other] = list(self.tables[name]), self.lengths[name]

    def free(self, name: str) -> None:
        """Remove a sequence.  Blocks that others share stay."""
        self.pool.release(self.tables.pop(name))
        del self.lengths[name]

    def address(self, name: str, token: int) -> tuple[int, int]:
        """Return (block, index in it) of a token's keys and values.  Raises IndexError past the end."""
        if not 0 <= token < self.lengths[name]:
            raise IndexError(f"token {token} of {name}, which has {self.lengths[name]}")
        return self.tables[name][token // self.pool.block_size], token % self.pool.block_size


def main() -> None:
    memory = BlockTables(blocks=64)

    def report(what: str) -> None:
        used = memory.pool.total - memory.pool.available
        tokens = sum(memory.lengths.values())
        print(f"{what:<34}{used:>3} blocks used, {tokens:>3} tokens of {len(memory.tables)} sequences")

    report("empty")
    print(f"  300 tokens take {len(memory.register('a', 300))} blocks of 16")
    report("register a")
    print(f"  17 tokens take {len(memory.register('b', 17))}")
    report("register b")
    block, place = memory.address("a", 299)
    print(f"  token 299 of a: block {block} (the 19th of its table), place {place}")
    memory.fork("a", "c")
    report("fork a into c")
    for name in ("a", "c"):
        copied = memory.append(name)
        print(
            f"  {name} appends: " + (f"block {copied[0]} is copied to {copied[1]}" if copied else "nothing is copied")
        )
    report("append to a and to c")
    memory.free("a")
    report("free a: c keeps 18 shared blocks")
    for name in ("b", "c"):
        memory.free(name)
    report("free b and c")


if __name__ == "__main__":
    main()
