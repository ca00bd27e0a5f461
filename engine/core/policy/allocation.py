"""Allocation: how a sequence gets its KV-cache blocks.

`Paged` allocates blocks as the sequence grows, and shares full blocks between sequences with the same prefix.
`register` adds another policy for an admission mode: `loadtest/studies/baselines.py` registers static allocation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from quire.engine.core.blocks import BlockPool
from quire.engine.core.checkpoints import CheckpointPolicy
from quire.engine.core.layer_groups import LayerGroups
from quire.engine.core.limits import Limits
from quire.engine.core.sequence import Sequence


class AllocationPolicy(Protocol):
    """Chooses the blocks with which a sequence starts, and adds full blocks to the prefix cache."""

    shares_prompt: bool  # whether the choices of a request share one prefill

    def __init__(self, pool: BlockPool, limits: Limits) -> None: ...

    def cached_prefix(self, seq: Sequence) -> list[int]:
        """Return the cached blocks of the longest prefix.

        The last token is left out, because computing it gives the first logits."""

    def start_table(self, seq: Sequence, hits: list[int]) -> list[int]:
        """Return the block table with which a sequence starts; it begins with `hits`, and holds references to them."""

    def seal(self, seq: Sequence, end: int) -> int | None:
        """Add the block that ends at token `end`, a multiple of the block size, to the prefix cache.

        All tokens before `end` must be known and planned.  Returns the block; None: the prefix cache is off."""

    def may_hold(self, seq: Sequence, gone: Iterable[Sequence] = ()) -> bool:
        """Return whether window layers have blocks for a sequence and its siblings, once `gone` are preempted."""

    def table_blocks(self, seq: Sequence, computed: int) -> int:
        """Return the number of blocks that a sequence must hold when `computed` of its tokens are computed."""


class Paged:
    """Allocates blocks on demand, and shares blocks of common prefixes."""

    shares_prompt = True

    def __init__(self, pool: BlockPool, limits: Limits, checkpoints: CheckpointPolicy, layers: LayerGroups) -> None:
        self._pool, self._fingerprint, self._checkpoints = pool, limits.fingerprint, checkpoints
        self._layers = layers

    def cached_prefix(self, seq: Sequence) -> list[int]:
        if not self._pool.caching or seq.request.sampling.prompt_logprobs >= 0:
            return []
        size, fingerprint = self._pool.block_size, self._fingerprint
        blocks = self._pool.lookup(seq.digest(i, fingerprint, size) for i in range((seq.known - 1) // size))
        return self._layers.hit(seq, self._checkpoints.hit(seq, blocks))

    def start_table(self, seq: Sequence, hits: list[int]) -> list[int]:
        self._pool.acquire_prefix(hits, seq.request.tenant, seq.request.weight)
        return list(hits)

    def seal(self, seq: Sequence, end: int) -> int | None:
        if not self._pool.caching:
            return None
        place, request = end // self._pool.block_size - 1, seq.request
        digest = seq.digest(place, self._fingerprint, self._pool.block_size)
        self._pool.seal(seq.table[place], digest, request.tenant, request.weight)
        self._layers.seal(seq, place, digest)
        return seq.table[place]

    def may_hold(self, seq: Sequence, gone: Iterable[Sequence] = ()) -> bool:
        return self._layers.reservations.may_hold(seq, gone)

    def table_blocks(self, seq: Sequence, computed: int) -> int:
        return -(-computed // self._pool.block_size)


OTHERS: dict[str, type[AllocationPolicy]] = {}  # admission mode -> allocation policy, for modes that do not use Paged


def register(mode: str, policy: type[AllocationPolicy]) -> None:
    """Set the allocation policy of an admission mode, for schedulers built from now on."""
    OTHERS[mode] = policy


def shares_blocks(mode: str) -> bool:
    """Return whether sequences can share blocks in an admission mode; beam search needs it."""
    return OTHERS.get(mode, Paged).shares_prompt


def allocation_policy(
    pool: BlockPool, limits: Limits, checkpoints: CheckpointPolicy, layers: LayerGroups
) -> AllocationPolicy:
    """Build the allocation policy of the admission mode `limits.admission`."""
    other = OTHERS.get(limits.admission)
    return Paged(pool, limits, checkpoints, layers) if other is None else other(pool, limits)
