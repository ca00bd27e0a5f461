"""Allocation: how a sequence gets its blocks.

`Paged`: as it grows; full blocks are shared with every sequence that has the same prefix.  `register` adds another
policy for an admission mode from outside: `loadtest/studies/baselines.py` has static allocation.
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
    """Decides which blocks a sequence starts with, and which of them the prefix cache can find."""

    shares_prompt: bool  # choices of a request share one prefill

    def __init__(self, pool: BlockPool, limits: Limits) -> None: ...

    def cached_prefix(self, seq: Sequence) -> list[int]:
        """Cached blocks of the longest prefix, without the last token: computing that one gives the first logits."""

    def start_table(self, seq: Sequence, hits: list[int]) -> list[int]:
        """Take the blocks that the sequence starts with, `hits` first."""

    def seal(self, seq: Sequence, end: int) -> int | None:
        """Let other sequences find the block that ends at token `end`, a multiple of the block size.

        The tokens up to there are known and computed.  Returns the block; None: nothing is cached."""

    def may_hold(self, seq: Sequence, gone: Iterable[Sequence] = ()) -> bool:
        """Return whether window layers can hold a sequence and its siblings, once those in `gone` have left."""

    def table_blocks(self, seq: Sequence, computed: int) -> int:
        """Return the number of blocks that a sequence must hold once `computed` of its tokens are computed."""


class Paged:
    """Blocks on demand, shared by prefix."""

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


OTHERS: dict[str, type[AllocationPolicy]] = {}  # admission mode -> its allocation, if that is not Paged


def register(mode: str, policy: type[AllocationPolicy]) -> None:
    """Give sequences of an admission mode their blocks in another way, for schedulers built from now on."""
    OTHERS[mode] = policy


def shares_blocks(mode: str) -> bool:
    """Return whether sequences of an admission mode can share blocks, which beam search needs."""
    return OTHERS.get(mode, Paged).shares_prompt


def allocation_policy(
    pool: BlockPool, limits: Limits, checkpoints: CheckpointPolicy, layers: LayerGroups
) -> AllocationPolicy:
    """Build the policy of the admission mode that `limits` names."""
    other = OTHERS.get(limits.admission)
    return Paged(pool, limits, checkpoints, layers) if other is None else other(pool, limits)
