"""Hot prefixes: a starting engine computes the most-hit prefixes of earlier engines, so that its cache starts warm.

    serving:   "started" events --PrefixCounts--> every WRITE_S seconds --> one key in Redis (wire/hot_prefix_store.py)
    starting:  the key --warm()--> prefill, within a share of the pool --> cached blocks, then /ready

The warm-up is skipped or ended if requests wait and no other engine has free capacity for them.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterable

from quire.engine.bus_thread import BusThread
from quire.engine.commands import LocalBox
from quire.engine.core.limits import Event, Totals
from quire.engine.loop import Engine
from quire.engine.observers.metrics import Telemetry
from quire.engine.observers.turn_record import Observer, TurnRecord
from quire.engine.wire.hot_prefix_store import MAX_PREFIXES, bounded
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import FOREVER_MS, Abort, Delta, Generate, HotPrefix, Sampling
from quire.engine.wire.prefixes import prefix_digests
from quire.engine.wire.token_log import TOKEN_BYTES

log = logging.getLogger("quire.warming")

WRITE_S = 5.0  # minimum seconds between two writes
FADE = 0.99  # factor of each count per write: a prefix with one hit is dropped after 69 writes (6 minutes)
MAX_TOKENS = 32_768  # maximum tokens of a prefix; longer prefixes are cut
AHEAD = "ahead "  # prefix of the ids of warm-up requests


class PrefixCounts:
    """Observer that counts which prefixes requests find in the cache, and writes the hottest to the store."""

    def __init__(self, store: BusThread, fingerprint: str, block_size: int) -> None:
        self._store, self._fingerprint, self._block_size = store, fingerprint, block_size
        self._hot: dict[bytes, tuple[float, HotPrefix]] = {}  # digest of the last cached block -> (hits, prefix)
        self._changed, self._written = False, time.monotonic()

    def observe(self, record: TurnRecord) -> None:
        for event in record.outputs.events:
            ahead = event.request.id.startswith(AHEAD)
            if event.digests and (event.reason == "length" if ahead else event.kind == "started"):
                self.count(event)
        if self._changed and (record.draining or record.marks[-1] - self._written >= WRITE_S):
            self.write(record.marks[-1])

    def count(self, event: Event) -> None:
        """Count one prefix hit.  New prefixes are ignored until the next write while 4 * MAX_PREFIXES are counted.

        Hits of requests with a LoRA adapter are ignored, because the warm-up uses the base model."""
        if event.request.adapter:
            return
        blocks = min(len(event.digests), MAX_TOKENS // self._block_size)
        digest = event.digests[blocks - 1]
        if digest not in self._hot and len(self._hot) < 4 * MAX_PREFIXES:
            token_ids = event.request.token_ids[: blocks * self._block_size]
            tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
            self._hot[digest] = 0.0, HotPrefix(tokens, event.request.cache_salt)
        if digest in self._hot:
            hits, prefix = self._hot[digest]
            self._hot[digest] = hits + 1.0, prefix
        self._changed = True

    def write(self, now: float) -> None:
        """Write the hottest prefixes to the store, and drop all others."""
        faded = [(hits * FADE, digest, prefix) for digest, (hits, prefix) in self._hot.items() if hits * FADE >= 0.5]
        faded.sort(key=lambda entry: entry[0], reverse=True)
        kept = bounded([prefix for _, _, prefix in faded])
        self._hot = {digest: (hits, prefix) for hits, digest, prefix in faded[: len(kept)]}
        self._store.write_hot_prefixes(self._fingerprint, kept)
        self._changed, self._written = False, now


def warm(
    engine: Engine,
    store: BusThread,
    telemetry: Telemetry | None = None,
    observers: Iterable[Observer] = (),
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Prefill the stored hot prefixes, hottest first, before the engine's first turn, and begin to count hits.

    Takes at most `warm_seconds`, plus the steps in flight at that time.  The prefixes become cached, unreferenced
    blocks.  Errors are logged, and the engine starts with fewer cached prefixes.  `observers` get the turns of the
    warm-up."""
    config, core, telemetry, began = engine.config, engine.core, telemetry or Telemetry(), clock()
    if not config.warm_seconds or not core.pool.caching:
        return
    counts, deltas, done = PrefixCounts(store, core.limits.fingerprint, core.pool.block_size), list[Delta](), 0
    engine.observers.append(counts)
    box = LocalBox(deltas.append)
    ahead = Engine(config, engine.executor, box, box, observers=[*observers, counts], core=core)

    def obstacle() -> str:
        if engine.draining:
            return "the engine is draining"
        if clock() >= began + config.warm_seconds:
            return f"warm_seconds, {config.warm_seconds:g}, are over"
        return "requests are already queued" if store.requests_wait() else ""

    why, prefixes = obstacle(), list[HotPrefix]()
    try:
        prefixes = [] if why else store.take_hot_prefixes(core.limits.fingerprint)
    except (BusDown, ValueError) as error:
        why = str(error)
    telemetry.warming = bool(prefixes)
    for number, prefix in enumerate(prefixes):
        if (token_ids := fit(prefix, engine)) and not why:
            name, sampling = f"{AHEAD}{number}", Sampling(temperature=0.0, ignore_eos=True)
            digests = prefix_digests(token_ids, prefix.cache_salt)
            box.commands.append(
                Generate(name, "", token_ids, 1, sampling, FOREVER_MS, prefix.cache_salt, prefixes=digests)
            )
            while box.commands or not core.idle:
                if not why and (why := obstacle()):
                    box.commands.append(Abort(name))
                ahead.turn()
            why = next((delta.finish.message for delta in deltas if delta.finish and delta.finish.message), why)
            done += not why
    telemetry.warming, core.report.totals = False, Totals()  # metrics must count only requests of clients
    if prefixes:
        telemetry.warmed(done, core.pool.idle * core.pool.block_size, clock() - began)
        figures = done, len(prefixes), telemetry.warm.tokens, telemetry.warm.seconds
        log.info("computed %d of %d hot prefixes, %d tokens, in %.2f s", *figures)
    if why:
        log.info("%s prefix warm-up: %s", "stopped" if prefixes else "skipped", why)


def fit(prefix: HotPrefix, engine: Engine) -> list[int]:
    """Return the tokens of a prefix, cut to full blocks that fit the warm-up's share; empty if it is unusable."""
    pool, limits = engine.core.pool, engine.core.limits
    left = max(0, int(pool.total * engine.config.warm_share) - pool.idle) * pool.block_size
    count = min(len(prefix.tokens) // TOKEN_BYTES, limits.max_model_len - 1, left) // pool.block_size * pool.block_size
    token_ids = list(struct.unpack_from(f"<{count}I", prefix.tokens))
    return token_ids if max(token_ids, default=0) < limits.vocab_size else []
