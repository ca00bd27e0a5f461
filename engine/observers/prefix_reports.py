"""What an engine publishes about its prefix cache, and what it has still to compute.

    TurnRecord --HeldPrefixes--> gained, lost --> BusThread --PrefixReport--> EngineSide.exchange --> prefixes:ENGINE
    claims, deltas --PromptBacklog--> tokens ----^

A claim makes the engine a holder in Redis at once (engine/wire/redis/shared/locality.lua).  When the request ends, its
prompt is computed or will never be: HeldPrefixes then asks the pool, and corrects what Redis has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from quire.engine.core.blocks import BlockPool
from quire.engine.core.limits import Event, Outputs
from quire.engine.executor.grammar_store import HeldAdapters
from quire.engine.observers.turn_record import TurnRecord
from quire.engine.wire.prefixes import LENGTHS, MOST_HELD, adapter_digest, split


class PrefixSink(Protocol):
    """The receiver of changes of the prefix cache."""

    def put_prefixes(self, gained: list[bytes], lost: list[bytes]) -> None:
        """Publish that the cache finds `gained` and does not find `lost`.  Never blocks."""


class HeldPrefixes:
    """Observer that knows which published digests the prefix cache would find, MOST_HELD at most.

    Beyond that the least recently used leave, of a prompt the longest first.  A turn costs O(requests that ended and
    blocks that were evicted)."""

    def __init__(self, pool: BlockPool, sink: PrefixSink) -> None:
        """From now on `pool` notes what it evicts, and this takes it."""
        self._pool, self._sink = pool, sink
        pool.note_evicted = True
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()  # the pool's digest of the last block -> published one

    def observe(self, record: TurnRecord) -> None:
        self.follow(record.outputs)

    def follow(self, outputs: Outputs) -> None:
        """Take in what ended and what was evicted since the last call."""
        gained: dict[bytes, None] = {}
        lost: dict[bytes, None] = {}
        for event in outputs.events:
            if event.kind == "ended" and event.request.prefixes:
                self._judge(event, gained, lost)
        evicted, self._pool.evicted = self._pool.evicted, []
        for digest in evicted:
            # A block may have been sealed under it again since.
            if digest in self._digests and not self._pool.lookup([digest]):
                _move(self._digests.pop(digest), lost, gained)
        while len(self._digests) > MOST_HELD:
            _move(self._digests.popitem(last=False)[1], lost, gained)
        if gained or lost:
            self._sink.put_prefixes(list(gained), list(lost))

    def _judge(self, event: Event, gained: dict[bytes, None], lost: dict[bytes, None]) -> None:
        """Find out which prefixes of an ended request the cache has.

        The shortest counts as used last: other engines ask for it first, so without it the others would be no use."""
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
    """Observer that publishes which LoRA adapters are in host memory, among the prefixes that the engine holds."""

    def __init__(self, store: HeldAdapters, sink: PrefixSink) -> None:
        self._store, self._sink = store, sink

    def observe(self, record: TurnRecord) -> None:
        gained, lost = self._store.changes()
        if gained or lost:
            self._sink.put_prefixes(list(map(adapter_digest, gained)), list(map(adapter_digest, lost)))


class PromptBacklog:
    """Prompt tokens of claimed requests that have not produced a token yet, without those found in the prefix cache."""

    def __init__(self) -> None:
        self.tokens = 0
        self._open: dict[str, int] = {}

    def add(self, request_id: str, tokens: int) -> None:
        """A request was claimed."""
        self.remove([request_id])
        self._open[request_id] = tokens
        self.tokens += tokens

    def remove(self, ids: Iterable[str]) -> None:
        """These have produced a token, or ended.  Unknown ids are ignored."""
        if self._open:
            for request_id in ids:
                self.tokens -= self._open.pop(request_id, 0)
