"""Allocation: how a sequence gets its blocks.

    paged    as it grows; full blocks are shared with every sequence that has the same prefix
    static   all at its start, one contiguous run for its greatest length, shared with no other sequence

Static allocation is the baseline without block tables: it needs no admission mode and never preempts.
"""

from __future__ import annotations

from typing import Protocol

from quire.engine.core.blocks import BlockPool
from quire.engine.core.limits import Limits
from quire.engine.core.sequence import Sequence


class AllocationPolicy(Protocol):
    """Decides which blocks a sequence starts with, and which of them the prefix cache can find."""

    shares_prompt: bool  # the continuations of a request share one prefill

    def admission_mode(self, limits: Limits) -> str:
        """The name of the admission mode that it needs."""

    def cached_prefix(self, seq: Sequence) -> list[int]:
        """Cached blocks of the longest prefix, without the last token: computing that one gives the first logits."""

    def start_table(self, seq: Sequence, hits: list[int]) -> list[int]:
        """Take the blocks that the sequence starts with, `hits` first."""

    def seal(self, seq: Sequence, end: int) -> int | None:
        """Let other sequences find the block that ends at token `end`, a multiple of the block size.

        The tokens up to there are known and computed.  Returns the block; None: nothing is cached."""

    def table_blocks(self, seq: Sequence, computed: int) -> int:
        """Blocks that a sequence has to hold when so many of its tokens are computed."""


class Paged:
    """Blocks on demand, shared by prefix."""

    shares_prompt = True

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self._pool, self._fingerprint = pool, limits.fingerprint

    def admission_mode(self, limits: Limits) -> str:
        return limits.admission

    def cached_prefix(self, seq: Sequence) -> list[int]:
        if not self._pool.caching or seq.request.sampling.prompt_logprobs >= 0:
            return []
        size, fingerprint = self._pool.block_size, self._fingerprint
        return self._pool.lookup(seq.digest(i, fingerprint, size) for i in range((seq.known - 1) // size))

    def start_table(self, seq: Sequence, hits: list[int]) -> list[int]:
        self._pool.acquire_prefix(hits, seq.request.tenant, seq.request.weight)
        return list(hits)

    def seal(self, seq: Sequence, end: int) -> int | None:
        if not self._pool.caching:
            return None
        place, request = end // self._pool.block_size - 1, seq.request
        digest = seq.digest(place, self._fingerprint, self._pool.block_size)
        self._pool.seal(seq.table[place], digest, request.tenant, request.weight)
        return seq.table[place]

    def table_blocks(self, seq: Sequence, computed: int) -> int:
        return -(-computed // self._pool.block_size)


class Static:
    """One run of blocks from start to end."""

    shares_prompt = False

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        """Raises ValueError when the pool caches: nothing is shared, so nothing could be found."""
        if pool.caching:
            raise ValueError("static allocation needs a pool without a prefix cache")
        self._pool = pool

    def admission_mode(self, limits: Limits) -> str:
        return "static"

    def cached_prefix(self, seq: Sequence) -> list[int]:
        return []

    def start_table(self, seq: Sequence, hits: list[int]) -> list[int]:
        return self._pool.allocate_run(seq.greatest_blocks(self._pool.block_size))

    def seal(self, seq: Sequence, end: int) -> int | None:
        return None

    def table_blocks(self, seq: Sequence, computed: int) -> int:
        return seq.greatest_blocks(self._pool.block_size)


ALLOCATION: dict[str, type[Paged] | type[Static]] = {"paged": Paged, "static": Static}


def allocation_policy(pool: BlockPool, limits: Limits) -> AllocationPolicy:
    """Build the policy that `limits` names."""
    return ALLOCATION[limits.allocation](pool, limits)
