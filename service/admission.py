"""Admission: may one more request join the queue?  Pure: no clock, no randomness, no I/O, no memory.

Engines report how many prompt tokens they would still claim; their own admission mode decides that.  What they cannot
take yet waits in the shared queue.  The queue is bounded by how long it takes, and by each request's own deadline, not
by its length:

    wait = (prompt tokens ahead of it in the tenants' fair order + its own - room) / prompt tokens started per second

A tenant that holds less than its share of an engine does not wait, as far as the engine would preempt others for it.

The decision uses this gateway's view, which is a moment old, and other gateways submit meanwhile.  So `decide` also
returns how far the queue may have grown until this request reaches it, and the submit script checks just that.
A refused request carries its retry terms: with them Redis computes when to return, and admits the request then.
"""

from __future__ import annotations

import math

import msgspec

from engine.wire.layout import STALE_MS
from engine.wire.messages import EngineLoad
from engine.wire.records import Fleet, RetryTerms
from service.api import EngineLimits, Refusal
from service.config import GatewayConfig

RETRY_CAP_S = 60.0  # clients ignore or refuse to honour longer pauses
JITTER = 0.25  # pauses that Redis did not compute are shorter by up to this fraction, so that clients spread out
# Shares of the pace that stay reserved for returning requests, however many new ones arrive: for the first to return,
# and for one that returns in RETRY_CAP_S.  New requests can still be served in time, and a refused one has missed that.
# But every refused request must get a time to return.
LEAST_SHARES = (0.15, 0.75)
LATE_STEPS = 3  # a report is late after this many steps of its engine
RETURN_WAITS = 2.0  # a request that returns when told may wait this many times `queue_wait_s`: the pace is an estimate


class Cost(msgspec.Struct, frozen=True):
    """What a request needs, and by when."""

    prompt_tokens: int  # over all its prompts; continuations share them
    timeout_s: float  # > 0: seconds from now to its deadline
    least_tokens: int = 1  # output tokens of a continuation before it may end by itself
    tenant: str = ""
    weight: float = 1.0


class Overloaded(Refusal):
    """The refusal of a request that may be sent again.

    `retry_terms` are the terms on which Redis computes when to return; None while the pace is unknown.  Then
    `retry_after_s` holds."""

    retry_terms: RetryTerms | None = None


def limits(fleet: Fleet) -> EngineLimits:
    """Return the smallest of each limit over the live engines.  Raises Refusal(503) without an engine."""
    engines = fleet.engines
    if not engines:
        raise Refusal(503, "no_engine", "no engine is running", retry_after_s=5.0)
    return EngineLimits(
        max_model_len=min(load.max_model_len for load in engines),
        vocab_size=min(load.vocab_size for load in engines),
        block_size=min(load.block_size for load in engines),
        total_blocks=min(load.total_blocks for load in engines),
        eos_ids=frozenset(token for load in engines for token in load.eos_ids),
    )


def _starts(load: EngineLoad) -> float:
    """Return the prompt tokens per second that an engine with a queue starts.

    An engine can start anew what it generates and frees, and the mix of prompt and output tokens stays the same.  So
    the prompts' share of each freed block goes to prompts, and P / G prompt tokens belong to each output token.
    Either figure is a lower bound while the batch still fills."""
    prompt, generated = load.prompt_tokens, load.generated_tokens
    if not prompt or not generated:
        return 0.0
    freed = load.blocks_per_s * load.block_size
    return max(freed * prompt / (prompt + generated), load.tokens_per_s * prompt / generated)


def _full_starts(load: EngineLoad) -> float:
    """Return the same for an engine that stays as full as it is now: after idleness its averages lag."""
    if not load.step_s or not load.generated_tokens:
        return _starts(load)
    return max(_starts(load), load.running / load.step_s * load.prompt_tokens / load.generated_tokens)


def _trust(load: EngineLoad, now_ms: int) -> float:
    """Return how much of an engine's rates still counts, 0 to 1.

    An engine reports once a step.  A report older than STALE_MS and LATE_STEPS steps means that the current step is
    longer than those that the rates come from.  Nothing may have finished since, so the rates are spread over the
    elapsed time; those of a step that hangs approach 0."""
    usual_ms = max(STALE_MS, LATE_STEPS * 1000 * load.step_s)
    return min(1.0, usual_ms / max(1, now_ms - load.time_ms))


def _token_s(engines: list[EngineLoad]) -> float:
    """Return the seconds between two output tokens of a sequence, on the fastest engine with a known pace; else 0."""
    return min((load.step_s for load in engines if load.step_s > 0), default=0.0)


def ahead(cost: Cost, fleet: Fleet) -> int:
    """Return the queued prompt tokens that are claimed before the last of this request's, under VTC (`engine/wire`).

    Another tenant is served first until its counter reaches the value that ours will have by then, or its queue is
    empty.  A tenant with nothing queued starts level with the smallest counter, so the queue of a busy tenant delays it
    little.  Output tokens, which move counters too, are left out: they are charged to both sides."""
    ours = fleet.tenants.get(cost.tenant)
    others = [queue for name, queue in fleet.tenants.items() if name != cost.tenant]
    if not others:
        return ours.queued_tokens if ours else 0
    counter = ours.counter if ours else min(queue.counter for queue in others)
    own = ours.queued_tokens if ours else 0
    reached = counter + (own + cost.prompt_tokens) / cost.weight
    total = float(own)
    for queue in others:
        total += min(queue.queued_tokens, max(0.0, reached - queue.counter) * queue.weight)
    return int(total)


def _preemption_room(cost: Cost, fleet: Fleet, fresh: list[EngineLoad]) -> int:
    """Return the prompt tokens left of what engines would start at once, by preempting others for this tenant.

    The tenant must hold less than its share.  This request, and queued ones with the same right, are subtracted.
    < 0: the rest is too little for it, or there is none."""
    offers = [load for load in fresh if load.yield_tokens and cost.tenant not in load.crowd]
    if not offers:
        return -1
    crowd = set(offers[0].crowd).intersection(*(load.crowd for load in offers))
    queued = sum(queue.queued_tokens for name, queue in fleet.tenants.items() if name not in crowd)
    return sum(load.yield_tokens for load in offers) - queued - cost.prompt_tokens


def decide(
    cost: Cost, fleet: Fleet, now_ms: int, config: GatewayConfig, jitter: float, *, returning: bool = False
) -> int:
    """Decide whether one request may join the queue.  `jitter` is uniform in [0, 1).

    Returns the excess for `GatewaySide.submit`: by how many prompt tokens the queue, this request included, may pass
    the engines' room without changing the decision.
    Raises Overloaded(429): `rate_limit_exceeded` when the wait would pass `queue_wait_s`, `deadline_unreachable` when
    wait and least service would pass its deadline.  `returning`: it was told to return now.  Then it may wait
    RETURN_WAITS times as long, and its own size does not count: a prompt too large for the wait is admitted when it
    returns.  Raises Refusal(503) when no engine lives or all are draining.
    Never waits.  Costs O(engines + tenants with something queued).

    An engine whose last exchange is older than STALE_MS counts as full and standing still; so do all engines when this
    reading is as old.  A stale view errs on the safe side.  An engine in a long step still exchanges, so its room
    counts, while its rates count less and less (`_trust`).  While the pace is unknown (idle or just started engines),
    the queue may hold as much as the pools do."""
    open_engines = [load for load in fleet.engines if not load.draining]
    if not open_engines:
        why = "every engine is shutting down" if fleet.engines else "no engine is running"
        raise Refusal(503, "no_engine", why, retry_after_s=5.0 * (1 + jitter * JITTER))
    exchanged_ms = {load.engine: fleet.exchanged_ms.get(load.engine, load.time_ms) for load in open_engines}
    fresh = [load for load in open_engines if now_ms - exchanged_ms[load.engine] <= STALE_MS]
    room = fleet.room_tokens if fresh and now_ms - fleet.time_ms <= STALE_MS else 0
    if now_ms - fleet.time_ms <= STALE_MS and (left := _preemption_room(cost, fleet, fresh)) >= 0:
        return fleet.queued_tokens + cost.prompt_tokens - room + left
    missing = ahead(cost, fleet) + cost.prompt_tokens - room
    inside = sum(load.waiting_tokens for load in open_engines)  # claimed and not started: ahead of the queue
    pace = sum(_starts(load) * _trust(load, now_ms) for load in fresh)
    # The pace of an engine that was idle until now is unknown, but such an engine has room.
    service = cost.least_tokens * _token_s(fresh) if missing > 0 else 0.0
    usual = _budget(config.queue_wait_s, pace, open_engines, fresh)
    patience = RETURN_WAITS * usual + cost.prompt_tokens if returning else usual
    deadline = _budget(cost.timeout_s - service, pace, open_engines, fresh)
    if deadline >= 0:
        slack = max(-missing, min(patience, deadline) - missing - inside)
        if slack >= 0:
            return int(fleet.queued_tokens + cost.prompt_tokens - room + slack)
    wait = (missing + inside) / pace if pace > 0 else 2 * config.queue_wait_s + 1.0
    refusal = _overloaded(cost, config, wait, service, late=deadline < patience)
    refusal.retry_after_s = 1.0 + jitter
    if pace > 0:
        refusal.retry_after_s = math.ceil(RETRY_CAP_S * (1 - jitter * JITTER))
        full_pace = sum(_full_starts(load) * _trust(load, now_ms) for load in fresh)
        needed = min(2 * RETRY_CAP_S, max(1.0, wait - min(usual, deadline) / pace))
        refusal.retry_terms = RetryTerms(pace, full_pace, int(1000 * needed), int(1000 * RETRY_CAP_S), LEAST_SHARES)
    raise refusal


def _budget(wait_s: float, pace: float, engines: list[EngineLoad], fresh: list[EngineLoad]) -> float:
    """Return how many prompt tokens may be ahead of a request that waits at most `wait_s`."""
    if pace > 0:
        return wait_s * pace
    if wait_s < 0 or any(map(_starts, engines)):
        return min(wait_s, 0.0)
    return float(sum(load.total_blocks * load.block_size for load in fresh))


def _overloaded(cost: Cost, config: GatewayConfig, wait: float, service: float, *, late: bool) -> Overloaded:
    """Return the refusal of a request with this estimated wait and least service, in seconds.

    `late`: it would miss its deadline; else it would wait longer than `queue_wait_s`."""
    bound, code, param = config.queue_wait_s, "rate_limit_exceeded", None
    if late:
        bound, code, param = cost.timeout_s, "deadline_unreachable", "timeout"
    least = f" and at least {service:.1f} s of work" if service else ""
    limit = f"its deadline is in {bound:g} s" if late else f"the limit {bound:g} s"
    return Overloaded(
        429,
        code,
        f"overloaded: the estimated wait is {wait:.1f} s{least}, {limit}",
        param=param,
        limit=bound,
        given=round(wait + (service if late else 0.0), 1),
    )
