"""Hot prefixes: a restarted engine keeps the hit rate of its prefix cache.

    serving:   "started" events --PrefixCounts--> every WRITE_S seconds --> one key in Redis (wire/hot_prefix_store.py)
    starting:  the key --warm()--> prefill, within a share of the pool --> idle cached blocks, then /ready

Warming delays only requests that no other engine has room for.  It is skipped, or ended, while such a request waits.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from engine.bus_thread import BusThread
from engine.core.blocks import chain_digest, root_digest
from engine.core.limits import Event
from engine.core.scheduler import Scheduler
from engine.loop import Engine
from engine.metrics import Telemetry
from engine.orders import LocalBox
from engine.turn_record import Observer, TurnRecord
from engine.wire.hot_prefix_store import LONGEST, MOST, MOST_BYTES, TTL_MS, bounded
from engine.wire.link import BusDown
from engine.wire.messages import FOREVER_MS, Abort, Delta, Generate, HotPrefix, Sampling
from engine.wire.token_log import TOKEN_BYTES

log = logging.getLogger("quire.warming")

WRITE_S = 5.0  # shortest time between two writes
HALF_LIFE_S = TTL_MS / 1000  # of a hit; a prefix is forgotten once its count has fallen below a half


class PrefixCounts:
    """Observer that counts which prefixes requests find in the cache, and writes the hottest to the store."""

    def __init__(self, store: BusThread, fingerprint: str, block_size: int) -> None:
        self._store, self._fingerprint, self._block_size = store, fingerprint, block_size
        self._hits: dict[bytes, float] = {}  # digest of the last block found -> decayed number of requests
        self._prefixes: dict[bytes, HotPrefix] = {}
        self._bytes = 0  # of their tokens
        self._changed = False
        self._written = time.monotonic()

    def observe(self, record: TurnRecord) -> None:
        for event in record.outputs.events:
            if event.kind == "started" and event.digests:
                self._count(event)
        if self._changed and (record.draining or record.marks[-1] - self._written >= WRITE_S):
            self._write(record.marks[-1])

    def add(self, digest: bytes, prefix: HotPrefix) -> None:
        """Count one hit.  A new prefix beyond four times the store's bounds waits for the next write."""
        self._changed = True
        if digest in self._hits:
            self._hits[digest] += 1.0
        elif len(self._hits) < 4 * MOST and self._bytes < 4 * MOST_BYTES:
            self._hits[digest], self._prefixes[digest] = 1.0, prefix
            self._bytes += len(prefix.tokens)

    def _count(self, event: Event) -> None:
        blocks = min(len(event.digests), LONGEST // self._block_size)
        digest = event.digests[blocks - 1]
        self.add(digest, self._prefixes.get(digest) or pack(event.request, blocks * self._block_size))

    def _write(self, now: float) -> None:
        decay = 0.5 ** ((now - self._written) / HALF_LIFE_S)
        self._hits = {digest: hits * decay for digest, hits in self._hits.items() if hits * decay >= 0.5}
        order = sorted(self._hits, key=self._hits.__getitem__, reverse=True)
        kept = bounded([self._prefixes[digest] for digest in order])
        self._store.write_hot_prefixes(self._fingerprint, kept)
        order = order[: len(kept)]
        self._hits = {digest: self._hits[digest] for digest in order}
        self._prefixes = {digest: self._prefixes[digest] for digest in order}
        self._bytes = sum(len(prefix.tokens) for prefix in kept)
        self._changed, self._written = False, now


def pack(request: Generate, length: int) -> HotPrefix:
    """Return the first `length` tokens of a request as a hot prefix."""
    return HotPrefix(struct.pack(f"<{length}I", *request.token_ids[:length]), request.cache_salt)


def fit(prefix: HotPrefix, core: Scheduler, blocks: int) -> tuple[list[int], bytes]:
    """Return tokens and digest of the part of a prefix that `blocks` can hold; no tokens where it is unusable."""
    size, vocab_size = core.pool.block_size, core.limits.vocab_size
    count = min(len(prefix.tokens) // TOKEN_BYTES, core.limits.max_model_len - 1, blocks * size) // size * size
    token_ids = list(struct.unpack_from(f"<{count}I", prefix.tokens))
    if max(token_ids, default=vocab_size) >= vocab_size:
        return [], b""
    digest = root_digest(core.limits.fingerprint, prefix.cache_salt)
    for start in range(0, count, size):
        digest = chain_digest(digest, token_ids[start : start + size])
    return token_ids, digest


def warm(
    engine: Engine,
    store: BusThread,
    telemetry: Telemetry | None = None,
    observers: Iterable[Observer] = (),
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Prefill the stored hot prefixes, before the engine's first turn; from then on, have the engine count its own.

    Takes `warm_seconds` at most, plus the steps then in flight.  The prefixes become idle cached blocks.  An error is
    logged, and the engine starts colder.  `observers` see the turns of the warm-up."""
    config, core, telemetry = engine.config, engine.core, telemetry or Telemetry()
    if not config.warm_seconds or not core.pool.caching:
        return
    counts, began = PrefixCounts(store, core.limits.fingerprint, core.pool.block_size), clock()
    engine.observers.append(counts)

    def obstacle() -> str:
        if engine.draining:
            return "the engine is draining"
        if clock() >= began + config.warm_seconds:
            return f"warm_seconds, {config.warm_seconds:g}, are over"
        return "requests are already queued" if store.requests_wait() else ""

    prefixes, why = [], obstacle()
    try:
        prefixes = [] if why else store.take_hot_prefixes(core.limits.fingerprint)
    except (BusDown, ValueError) as error:
        why = str(error)
    if why:
        log.info("skipped prefix warm-up: %s", why)
    if not prefixes:
        return
    telemetry.warming = True
    done, why = prefill(engine, prefixes, counts, observers, obstacle)
    telemetry.warming = False
    tokens, seconds = core.pool.idle * core.pool.block_size, clock() - began
    telemetry.warmed(done, tokens, seconds)
    reason = why and f": {why}"
    log.info("computed %d of %d hot prefixes, %d tokens, in %.2f s%s", done, len(prefixes), tokens, seconds, reason)


def prefill(
    engine: Engine,
    prefixes: Sequence[HotPrefix],
    counts: PrefixCounts,
    observers: Iterable[Observer],
    obstacle: Callable[[], str],
) -> tuple[int, str]:
    """Compute prefixes, hottest first, until their share of the pool is full or an obstacle appears.

    Returns how many are in the cache, and the obstacle."""
    core, done, why = engine.core, 0, ""
    deltas: list[Delta] = []
    box = LocalBox(deltas.append)
    ahead = Engine(engine.config, engine.executor, box, box, observers=observers, core=core)
    greedy = Sampling(temperature=0.0, ignore_eos=True)
    for number, prefix in enumerate(prefixes):
        left = int(core.pool.total * engine.config.warm_share) - core.pool.idle
        token_ids, digest = fit(prefix, core, max(0, left))
        if not token_ids:
            continue
        name = f"ahead {number}"
        box.orders.append(Generate(name, "", token_ids, 1, greedy, FOREVER_MS, prefix.cache_salt))
        while box.orders or not core.idle:
            if not why and (why := obstacle()):
                box.orders.append(Abort(name))
            ahead.turn()
        if (finish := deltas[-1].finish) is not None and finish.reason == "error":
            why = finish.message
        if why:
            break
        done += 1
        counts.add(digest, HotPrefix(prefix.tokens[: len(token_ids) * TOKEN_BYTES], prefix.cache_salt))
    for field in msgspec.structs.fields(core.report.totals):  # metrics count what clients asked for
        setattr(core.report.totals, field.name, 0)
    return done, why
