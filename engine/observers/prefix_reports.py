"""Prefix reports: the cached prefixes that an engine publishes, and its backlog of prompt tokens to compute.

    TurnRecord --HeldPrefixes--> gained, lost --> BusThread --PrefixReport--> EngineSide.sync --> prefixes:ENGINE
    claims, deltas --PromptBacklog--> tokens ----^

A claim adds the request's prefixes to the engine's published ones at once (engine/wire/redis/shared/locality.lua).
When the request ends, HeldPrefixes checks which of its prefixes are really cached, and publishes corrections.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from quire.engine.core.blocks import BlockPool
from quire.engine.core.limits import Event, Outputs
from quire.engine.executor.grammar_store import HeldAdapters
from quire.engine.observers.turn_record import TurnRecord
from quire.engine.wire.prefixes import LENGTHS, MAX_HELD, adapter_digest, split


class PrefixSink(Protocol):
    """The receiver of changes of the prefix cache."""

    def put_prefixes(self, gained: list[bytes], lost: list[bytes]) -> None:
        """Publish that the cache now has the prefixes `gained`, and not the prefixes `lost`.  Never blocks."""


class HeldPrefixes:
    """Observer that keeps track of which prefix digests are cached, at most MAX_HELD.

    Beyond this number the least recently used digests are dropped, and the longest prefixes of a prompt first.  A turn
    takes O(ended requests + evicted blocks)."""

    def __init__(self, pool: BlockPool, sink: PrefixSink) -> None:
        """`pool` records its evictions from now on, and this observer reads them."""
        self._pool, self._sink = pool, sink
        pool.note_evicted = True
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()  # pool's digest of the last block -> published digest

    def observe(self, record: TurnRecord) -> None:
        self.follow(record.outputs)

    def follow(self, outputs: Outputs) -> None:
        """Process the requests that have ended and the blocks that were evicted since the last call."""
        gained: dict[bytes, None] = {}
        lost: dict[bytes, None] = {}
        for event in outputs.events:
            if event.kind == "ended" and event.request.prefixes:
                self._judge(event, gained, lost)
        evicted, self._pool.evicted = self._pool.evicted, []
        for digest in evicted:
            # Another block may have been sealed with this digest since.
            if digest in self._digests and not self._pool.lookup([digest]):
                _move(self._digests.pop(digest), lost, gained)
        while len(self._digests) > MAX_HELD:
            _move(self._digests.popitem(last=False)[1], lost, gained)
        if gained or lost:
            self._sink.put_prefixes(list(gained), list(lost))

    def _judge(self, event: Event, gained: dict[bytes, None], lost: dict[bytes, None]) -> None:
        """Check which prefixes of an ended request are cached.

        The shortest prefix becomes the most recently used one, because engines look it up first: without it the longer
        prefixes would not be found."""
        size, blocks = self._pool.block_size, event.digests
        prefixes = list(zip(LENGTHS, split(event.request.prefixes), strict=False))
        for length, digest in reversed(prefixes):
            place = length // size - 1
            if place >= len(blocks) or not self._pool.lookup([blocks[place]]):
                _move(digest, lost, gained)
            else:
                if blocks[place] not in self._digests:
                    self._digests[blocks[place]] = digest
                    _move(digest, gained, lost)
                self._digests.move_to_end(blocks[place])


def _move(digest: bytes, into: dict[bytes, None], out_of: dict[bytes, None]) -> None:
    into[digest] = None
    out_of.pop(digest, None)


class HeldAdapterReports:
    """Observer that publishes the LoRA adapters in host memory, together with the prefix digests."""

    def __init__(self, store: HeldAdapters, sink: PrefixSink) -> None:
        self._store, self._sink = store, sink

    def observe(self, record: TurnRecord) -> None:
        gained, lost = self._store.changes()
        if gained or lost:
            self._sink.put_prefixes(list(map(adapter_digest, gained)), list(map(adapter_digest, lost)))


class PromptBacklog:
    """Counts the uncached prompt tokens of claimed requests that have not produced a token yet."""

    def __init__(self) -> None:
        self.tokens = 0
        self._open: dict[str, int] = {}

    def add(self, request_id: str, tokens: int) -> None:
        """Add a claimed request with `tokens` uncached prompt tokens."""
        self.remove([request_id])
        self._open[request_id] = tokens
        self.tokens += tokens

    def remove(self, ids: Iterable[str]) -> None:
        """Remove requests that have produced a token or ended.  Unknown ids are ignored."""
        if self._open:
            for request_id in ids:
                self.tokens -= self._open.pop(request_id, 0)
