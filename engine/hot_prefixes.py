"""Hot prefixes: a restarted engine keeps the hit rate of its prefix cache.

    serving:   "started" events --PrefixCounts--> every WRITE_S seconds --> one key in Redis (wire/hot_prefix_store.py)
    starting:  the key --warm()--> prefill, within a share of the pool --> idle cached blocks, then /ready

Warming delays only requests that no other engine has room for.  It is skipped, or ended, while such a request waits.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterable

import msgspec

from engine.bus_thread import BusThread
from engine.core.limits import Event
from engine.core.scheduler import Scheduler
from engine.loop import Engine
from engine.metrics import Telemetry
from engine.orders import LocalBox
from engine.turn_record import Observer, TurnRecord
from engine.wire.hot_prefix_store import MOST, bounded
from engine.wire.link import BusDown
from engine.wire.messages import FOREVER_MS, Abort, Generate, HotPrefix, Sampling
from engine.wire.token_log import TOKEN_BYTES

log = logging.getLogger("quire.warming")

WRITE_S = 5.0  # shortest time between two writes
FADE = 0.99  # of a count, at each write: a prefix that one request found is forgotten after 69 writes, or 6 minutes
LONGEST = 32_768  # tokens of one prefix; of a longer one its beginning is kept
AHEAD = "ahead "  # begins the id of a request that computes a prefix


class PrefixCounts:
    """Observer that counts which prefixes requests find in the cache, and writes the hottest to the store."""

    def __init__(self, store: BusThread, fingerprint: str, block_size: int) -> None:
        self._store, self._fingerprint, self._block_size = store, fingerprint, block_size
        self._hot: dict[bytes, tuple[float, HotPrefix]] = {}  # digest of the last block found -> requests, prefix
        self._changed, self._written = False, time.monotonic()

    def observe(self, record: TurnRecord) -> None:
        for event in record.outputs.events:
            ahead = event.request.id.startswith(AHEAD)
            if event.digests and (event.reason == "length" if ahead else event.kind == "started"):
                self.count(event)
        if self._changed and (record.draining or record.marks[-1] - self._written >= WRITE_S):
            self.write(record.marks[-1])

    def count(self, event: Event) -> None:
        """Count one hit.  A new prefix beyond four times what the store holds waits for the next write."""
        blocks = min(len(event.digests), LONGEST // self._block_size)
        length, digest = blocks * self._block_size, event.digests[blocks - 1]
        if digest in self._hot:
            hits, prefix = self._hot[digest]
            self._hot[digest] = hits + 1.0, prefix
        elif len(self._hot) < 4 * MOST:
            tokens = struct.pack(f"<{length}I", *event.request.token_ids[:length])
            self._hot[digest] = 1.0, HotPrefix(tokens, event.request.cache_salt)
        self._changed = True

    def write(self, now: float) -> None:
        """Store the hottest prefixes and forget the others."""
        hottest = sorted(self._hot.items(), key=lambda entry: entry[1][0], reverse=True)
        faded = [(digest, hits * FADE, prefix) for digest, (hits, prefix) in hottest if hits * FADE >= 0.5]
        kept = bounded([prefix for _, _, prefix in faded])
        self._hot = {digest: (hits, prefix) for digest, hits, prefix in faded[: len(kept)]}
        self._store.write_hot_prefixes(self._fingerprint, kept)
        self._changed, self._written = False, now


def fit(prefix: HotPrefix, core: Scheduler, blocks: int) -> list[int]:
    """Return the tokens of a prefix that fill whole blocks, `blocks` at most; none where it is unusable."""
    size = core.pool.block_size
    count = min(len(prefix.tokens) // TOKEN_BYTES, core.limits.max_model_len - 1, blocks * size) // size * size
    token_ids = list(struct.unpack_from(f"<{count}I", prefix.tokens))
    return token_ids if max(token_ids, default=0) < core.limits.vocab_size else []


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

    prefixes, why = list[HotPrefix](), obstacle()
    try:
        prefixes = [] if why else store.take_hot_prefixes(core.limits.fingerprint)
    except (BusDown, ValueError) as error:
        why = str(error)
    if why:
        log.info("skipped prefix warm-up: %s", why)
    if not prefixes:
        return
    telemetry.warming = True
    done, why = prefill(engine, prefixes, [*observers, counts], obstacle)
    telemetry.warming = False
    tokens, seconds = core.pool.idle * core.pool.block_size, clock() - began
    telemetry.warmed(done, tokens, seconds)
    reason = why and f": {why}"
    log.info("computed %d of %d hot prefixes, %d tokens, in %.2f s%s", done, len(prefixes), tokens, seconds, reason)


def prefill(
    engine: Engine, prefixes: list[HotPrefix], observers: list[Observer], obstacle: Callable[[], str]
) -> tuple[int, str]:
    """Compute prefixes, hottest first, until their share of the pool is full or an obstacle appears.

    Returns how many are in the cache, and the obstacle."""
    core, done, errors = engine.core, 0, list[str]()
    box = LocalBox(lambda delta: errors.append(delta.finish.message) if delta.finish and delta.finish.message else None)
    ahead = Engine(engine.config, engine.executor, box, box, observers=observers, core=core)
    greedy, why = Sampling(temperature=0.0, ignore_eos=True), ""
    for number, prefix in enumerate(prefixes):
        left = int(core.pool.total * engine.config.warm_share) - core.pool.idle
        if not (token_ids := fit(prefix, core, max(0, left))):
            continue
        name = f"{AHEAD}{number}"
        box.orders.append(Generate(name, "", token_ids, 1, greedy, FOREVER_MS, prefix.cache_salt))
        while box.orders or not core.idle:
            if not why and (why := obstacle()):
                box.orders.append(Abort(name))
            ahead.turn()
        why = errors[0] if errors else why
        if why:
            break
        done += 1
    for field in msgspec.structs.fields(core.report.totals):  # metrics count what clients asked for
        setattr(core.report.totals, field.name, 0)
    return done, why
