"""May one more request join the queue?  Pure: no clock, no randomness, no I/O of its own.

The threshold mode.  Engines start new sequences only while their KV utilisation stays at or below a threshold; what
does not fit waits in the shared queue.  The queue is bounded by how long it would take, not by how many are in it:

    wait = (blocks of everybody ahead + ours - blocks free below the threshold) / blocks given back per second
"""

from __future__ import annotations

import msgspec

from engine.wire.bus import Fleet
from engine.wire.messages import EngineLoad
from service.api import EngineLimits, Refusal
from service.config import GatewayConfig

RETRY_CAP_S = 60.0  # clients ignore or refuse to honour longer pauses


class Cost(msgspec.Struct, frozen=True):
    """What a request needs before its first token."""

    prompt_tokens: int  # over all its prompts; continuations share them
    sequences: int  # prompts times n: each soon takes a block of its own


def limits(fleet: Fleet) -> EngineLimits:
    """The smallest of each limit over the live engines.  Raises Refusal(503) when there is none."""
    engines = fleet.engines
    if not engines:
        raise Refusal(503, "no_engine", "no engine is running", retry_after_s=5.0)
    return EngineLimits(
        max_model_len=min(load.max_model_len for load in engines),
        vocab_size=min(load.vocab_size for load in engines),
        block_size=min(load.block_size for load in engines),
        total_blocks=min(load.total_blocks for load in engines),
    )


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _room(load: EngineLoad, threshold: float) -> int:
    """Blocks a new request could take now without crossing the threshold."""
    return max(0, int(load.total_blocks * threshold) - (load.total_blocks - load.free_blocks))


def _drain(load: EngineLoad) -> float:
    """Blocks given back per second.  Before the first sequence has finished only the pace of generation is known; in
    the long run whatever is generated is given back, its prompt too, so that pace is a lower bound."""
    return max(load.blocks_per_s, load.tokens_per_s / load.block_size)


def decide(cost: Cost, fleet: Fleet, now_ms: int, config: GatewayConfig, jitter: float) -> float:
    """Say whether one request may join the queue.  `jitter` is uniform in [0, 1): pauses differ between clients.

    Returns the estimated wait in seconds, 0 when some engine has room and nobody is ahead.
    Raises Refusal(429, retry_after_s) when the wait would pass `queue_wait_s`: that much longer, spread by a quarter,
    at least 1 s and at most 60.  Raises Refusal(503) when no engine lives or all are draining.
    Never waits.  An engine not heard of for `stale_s` counts as full and standing still, so a stale view errs on the
    safe side.  While nothing is known of the pace (idle or just started engines), the queue may hold as much as the
    pools do."""
    open_engines = [load for load in fleet.engines if not load.draining]
    if not open_engines:
        why = "every engine is shutting down" if fleet.engines else "no engine is running"
        raise Refusal(503, "no_engine", why, retry_after_s=5.0 * (1 + jitter / 4))
    fresh = [load for load in open_engines if now_ms - load.time_ms <= config.stale_s * 1000]
    block_size = min(load.block_size for load in open_engines)
    ahead = _blocks(fleet.queued_tokens, block_size) + fleet.queued  # each sequence takes a block of its own, too
    ahead += sum(_blocks(load.waiting_tokens, load.block_size) + load.waiting for load in open_engines)
    need = _blocks(cost.prompt_tokens, block_size) + cost.sequences
    room = sum(_room(load, config.admit_threshold) for load in fresh)
    idle = any(load.running == 0 and load.waiting == 0 for load in fresh)
    if ahead + need <= room or (idle and ahead == 0):  # an idle engine takes anything that fits it at all
        return 0.0
    drain = sum(_drain(load) for load in fresh)
    missing = ahead + need - room
    if drain > 0:
        wait = missing / drain
    elif not any(map(_drain, open_engines)) and ahead + need <= sum(load.total_blocks for load in fresh):
        return config.queue_wait_s
    else:
        wait = 2 * config.queue_wait_s + 1.0
    if wait <= config.queue_wait_s:
        return wait
    pause = min(RETRY_CAP_S, max(1.0, wait - config.queue_wait_s) * (1 + jitter / 4))
    raise Refusal(
        429,
        "rate_limit_exceeded",
        f"overloaded: the estimated wait is {wait:.1f} s, the limit {config.queue_wait_s:g} s",
        limit=config.queue_wait_s,
        given=round(wait, 1),
        retry_after_s=pause,
    )
