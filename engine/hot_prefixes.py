"""Hot prefixes: noted while an engine serves, computed again before the next one does.

    serving:   "started" events --Noted--> Report --> bus thread --> the manifest in Redis
    starting:  the manifest --choose--> what fits a share of the pool --prefill--> idle cached blocks, first exchange

An engine joins the fleet with its first exchange, so what is done before it delays nobody but those whom the rest of
the fleet has no room for: while one of them waits, nothing is warmed.  Then real requests fill the cache.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from engine.core.blocks import chain_digest, root_digest
from engine.core.limits import Event
from engine.wire.bus import BusDown
from engine.wire.hot_prefix_store import LONGEST, Reuse
from engine.wire.messages import FOREVER_MS, Abort, Delta, Generate, HotPrefix, Sampling
from engine.wire.token_log import TOKEN_BYTES

if TYPE_CHECKING:
    from engine.loop import Engine

log = logging.getLogger("quire.warming")

REPORT_S = 5.0  # how often reuse is reported at most
NOTED = 1024  # prefixes noted between two reports; others wait for the next
NOTED_TOKENS = 2**19  # the same for their tokens: requests are kept for as long, some 20 MB


class Source(Protocol):
    """Where the manifest is."""

    def wanted(self) -> bool:
        """Whether a request waits for whom the rest of the fleet has no room."""

    def hottest(self, fingerprint: str) -> list[tuple[float, bytes]]:
        """See Manifest.hottest().  Raises BusDown."""

    def warmed(self) -> None:
        """What hottest() brought was survived."""


class PrefixUses:
    """What was found in the prefix cache since the last report.  A request costs it one entry of a dict."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._longest = LONGEST // block_size  # blocks
        self._hits: dict[bytes, int] = {}  # digest of the last block found -> requests
        self._where: dict[bytes, tuple[Generate, int]] = {}  # -> one of them, and the tokens found
        self._tokens = 0
        self._reported = 0.0

    def note(self, event: Event) -> None:
        """A request started: "started", with the digests of what it found."""
        blocks = min(len(event.digests), self._longest)
        if not blocks:
            return
        digest = event.digests[blocks - 1]
        if digest in self._hits:
            self._hits[digest] += 1
        elif len(self._hits) < NOTED and self._tokens < NOTED_TOKENS:
            self._hits[digest] = 1
            self._where[digest] = event.request, blocks * self._block_size
            self._tokens += len(event.request.token_ids)

    def take(self, now: float, *, at_once: bool = False) -> tuple[Reuse, ...]:
        """What to report at `now` (seconds, monotonic): nothing within REPORT_S of the last, unless `at_once`."""
        if not self._hits or (now - self._reported < REPORT_S and not at_once):
            return ()
        self._reported = now
        found = tuple(
            Reuse(digest, request.token_ids, length, request.cache_salt, self._hits[digest])
            for digest, (request, length) in self._where.items()
        )
        self._hits, self._where, self._tokens = {}, {}, 0
        return found


class Prefix(NamedTuple):
    """Whole blocks to compute ahead."""

    cache_salt: str
    token_ids: list[int]
    digests: list[bytes]  # of its blocks


def readable(entries: Sequence[tuple[float, bytes]], vocab_size: int) -> list[tuple[float, HotPrefix]]:
    """Those that are what they should be."""
    found = []
    for heat, packed in entries:
        try:
            prefix = msgspec.msgpack.decode(packed, type=HotPrefix)
        except msgspec.DecodeError:  # malformed, or of other types
            continue
        if len(prefix.tokens) % TOKEN_BYTES == 0 and max(unpacked(prefix.tokens), default=0) < vocab_size:
            found.append((heat, prefix))
    return found


def unpacked(tokens: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens)


def choose(
    entries: Sequence[tuple[float, HotPrefix]], *, blocks: int, longest: int, block_size: int, fingerprint: str
) -> list[Prefix]:
    """The prefixes to compute, hottest first, that take at most `blocks` together, each at most `longest` tokens.

        heat, own                      worth: all hits that needed it
        S            4  |------|       6   an ancestor is worth no less than what follows it, so going by worth
        S D1         1  |------|--|    1   computes it first, and it counts its blocks once
        S D2         1  |------|-----| 1

    The last one that fits in part is cut.  O(n log n) for n entries, and a digest for each block looked at."""
    top = max((heat for heat, _ in entries), default=0.0)
    most = longest // block_size * block_size * TOKEN_BYTES
    order = sorted(
        (prefix.cache_salt, prefix.tokens[: min(most, whole(prefix.tokens, block_size))], 2.0 ** (heat - top))
        for heat, prefix in entries
    )
    worth = [0.0] * len(order)
    path: list[int] = []  # of the entries that the present one begins with, itself included
    for at, (salt, tokens, hits) in enumerate(order):
        while path and not (order[path[-1]][0] == salt and tokens.startswith(order[path[-1]][1])):
            path.pop()
        path.append(at)
        for ancestor in path:
            worth[ancestor] += hits
    chosen: list[Prefix] = []
    taken: set[bytes] = set()
    for at in sorted(range(len(order)), key=lambda at: (-worth[at], len(order[at][1]))):
        salt, tokens, _ = order[at]
        digests, digest, fresh = [], root_digest(fingerprint, salt), 0
        token_ids = list(unpacked(tokens))
        for start in range(0, len(token_ids), block_size):
            digest = chain_digest(digest, token_ids[start : start + block_size])
            if digest not in taken:
                if fresh == blocks:
                    break
                fresh += 1
            digests.append(digest)
        if fresh:
            blocks -= fresh
            taken.update(digests)
            chosen.append(Prefix(salt, token_ids[: len(digests) * block_size], digests))
        if not blocks:
            break
    return chosen


def whole(tokens: bytes, block_size: int) -> int:
    """Bytes of whole blocks in it."""
    size = block_size * TOKEN_BYTES
    return len(tokens) // size * size


def warm(engine: Engine, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
    """Prefill the hottest prefixes of the manifest, before the engine's first turn.  Takes `warm_seconds` at most, and
    the steps then in flight; less where all is computed, somebody waits for this engine, or it shall stop.

    Their blocks are then cached and idle like any others, the hottest to be evicted last.  What goes wrong is logged,
    and the engine starts colder."""
    config, core, info, telemetry = engine.config, engine.core, engine.executor.info, engine.telemetry
    if not config.warm_seconds or not core.pool.caching:
        return
    began = clock()

    def why_not() -> str:
        if engine.draining:
            return "it shall stop"
        if clock() >= began + config.warm_seconds:
            return "the time is over"
        return "requests wait" if source.wanted() else ""

    try:
        if why := why_not():
            log.info("no hot prefix is computed ahead: %s", why)
            return
        entries = source.hottest(info.fingerprint)
    except BusDown as error:
        log.warning("hot prefixes are not to be had: %s", error)
        return
    found = readable(entries, info.vocab_size)
    if len(found) < len(entries):
        log.warning("%d of %d hot prefixes in Redis make no sense, skipped", len(entries) - len(found), len(entries))
    prefixes = choose(
        found,
        blocks=int(core.pool.total * config.warm_share),
        longest=min(info.max_model_len, core.pool.total * core.pool.block_size) - 1,
        block_size=core.pool.block_size,
        fingerprint=info.fingerprint,
    )
    if not prefixes:
        return
    telemetry.warming = True
    done, why = prefill(engine, prefixes, why_not)
    telemetry.warming = False
    seconds, tokens = clock() - began, core.pool.idle * core.pool.block_size
    telemetry.warmed(done, tokens, seconds)
    source.warmed()
    log.info(
        "%d of %d hot prefixes computed ahead, %d tokens, in %.2f s%s",
        done,
        len(prefixes),
        tokens,
        seconds,
        why and f": {why}",
    )


def prefill(engine: Engine, prefixes: Sequence[Prefix], why_not: Callable[[], str]) -> tuple[int, str]:
    """Compute them, in this order, until `why_not` says something or a step fails.  Returns how many are whole, and why
    the others are not."""
    said: list[Delta] = []
    why = ""
    greedy = Sampling(temperature=0.0, ignore_eos=True)
    with engine.aside(said.append) as box:
        box.orders += [
            Generate(f"ahead {at}", "", prefix.token_ids, 1, greedy, FOREVER_MS, prefix.cache_salt)
            for at, prefix in enumerate(prefixes)
        ]
        while box.orders or not engine.core.idle:
            if not why and (why := failure(said) or why_not()):
                box.orders += [Abort(f"ahead {at}") for at in range(len(prefixes))]
            engine.turn()
    pool = engine.core.pool
    for prefix in reversed(prefixes):  # what is used last is evicted last
        blocks = pool.lookup(prefix.digests)
        pool.acquire(blocks)
        pool.release(blocks)
    return sum(delta.finish is not None and delta.finish.reason == "length" for delta in said), why or failure(said)


def failure(said: Sequence[Delta]) -> str:
    """What the first of these that failed says; "": none did."""
    return next((one.finish.message for one in said if one.finish is not None and one.finish.reason == "error"), "")
