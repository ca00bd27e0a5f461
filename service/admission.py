"""May one more request join the queue?  Pure: no clock, no randomness, no I/O, no memory.

Engines say how many prompt tokens they would still claim (their own rule decides: forecast, threshold, ...), and what
they cannot take yet waits in the shared queue.  The queue is bounded by how long it would take, not by how many are in
it, and by each request's own deadline:

    wait = (prompt tokens ahead of it in the tenants' fair order + its own - room) / prompt tokens started per second

A tenant that holds less than its share of an engine does not wait at all, as far as others would yield to it there.
The answer is made on this gateway's view, which is a moment old and not the only one.  So `decide` also says how far
the queue may have grown until this request comes to it, and the script that queues checks just that (`bus.submit`).
Who is refused gets the terms of a promise (`bus.promise`): when to come again, and be let in then.
"""

from __future__ import annotations

import math

import msgspec

from engine.wire.bus import Fleet, RetryTerms
from engine.wire.keys import STALE_MS
from engine.wire.messages import EngineLoad
from service.api import EngineLimits, Refusal
from service.config import GatewayConfig

RETRY_CAP_S = 60.0  # clients ignore or refuse to honour longer pauses
JITTER = 0.25  # pauses without a promise are shorter by up to this fraction, lest a crowd returns as one
# Of the pace, for those who return, however many newcomers there are: for the first to return, and for one who is told
# to return in RETRY_CAP_S.  Newcomers can still be served in time, who was refused has missed that; but everybody shall
# get a time.
LEAST_SHARES = (0.15, 0.75)
LATE_STEPS = 3  # a report is late after so many of its engine's steps
RETURN_WAITS = 2.0  # who returns when told may wait so many times `queue_wait_s`: the pace is an estimate


class Cost(msgspec.Struct, frozen=True):
    """What a request needs, and by when."""

    prompt_tokens: int  # over all its prompts; continuations share them
    timeout_s: float  # > 0: seconds from now to its deadline
    least_tokens: int = 1  # output tokens of a continuation before it may end by itself
    tenant: str = ""
    weight: float = 1.0


class Overloaded(Refusal):
    """The refusal of a request that may come again: `retry_after_s` where nothing is promised, `terms` to ask for a
    promise on; None while nothing is known of the pace."""

    retry_terms: RetryTerms | None = None


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
        eos_ids=frozenset(token for load in engines for token in load.eos_ids),
    )


def _starts(load: EngineLoad) -> float:
    """Prompt tokens an engine with a queue starts per second.

    Whatever it generates and gives back it can start anew, and the mix of prompt and output tokens stays what it was:
    of every block given back, the prompts' part goes to prompts, and to every output token belong P / G prompt tokens.
    Either is a lower bound while the batch still fills."""
    prompt, generated = load.prompt_tokens, load.generated_tokens
    if not prompt or not generated:
        return 0.0
    given_back = load.blocks_per_s * load.block_size
    return max(given_back * prompt / (prompt + generated), load.tokens_per_s * prompt / generated)


def _full_starts(load: EngineLoad) -> float:
    """The same once it has been as full as it is now for a while: its averages lag where it was idle before."""
    if not load.step_s or not load.generated_tokens:
        return _starts(load)
    return max(_starts(load), load.running / load.step_s * load.prompt_tokens / load.generated_tokens)


def _trust(load: EngineLoad, now_ms: int) -> float:
    """How much of an engine's rates still counts, 0 to 1.  An engine reports once a step: a report older than STALE_MS
    and LATE_STEPS steps says that this step is longer than those that the rates come from.  Nothing may have finished
    since then, so the rates are spread over the time that has passed; those of a step that hangs go towards 0."""
    usual_ms = max(STALE_MS, LATE_STEPS * 1000 * load.step_s)
    return min(1.0, usual_ms / max(1, now_ms - load.time_ms))


def _token_s(engines: list[EngineLoad]) -> float:
    """Seconds between two output tokens of one sequence, on the fastest engine whose pace is known; else 0."""
    return min((load.step_s for load in engines if load.step_s > 0), default=0.0)


def ahead(cost: Cost, fleet: Fleet) -> int:
    """Prompt tokens in the queue that are claimed before the last of this request's, under VTC (see engine/wire/bus).

    Another tenant goes first until its counter has come to where ours will be by then, or its queue is empty.  A tenant
    with nothing queued starts level with the smallest counter, so what a loud tenant piled up delays it little.  Output
    tokens, which move counters too, are left out: they are charged to both sides."""
    ours = fleet.tenants.get(cost.tenant)
    others = [turn for name, turn in fleet.tenants.items() if name != cost.tenant]
    if not others:
        return ours.queued_tokens if ours else 0
    counter = ours.counter if ours else min(turn.counter for turn in others)
    own = ours.queued_tokens if ours else 0
    reached = counter + (own + cost.prompt_tokens) / cost.weight
    total = float(own)
    for turn in others:
        total += min(turn.queued_tokens, max(0.0, reached - turn.counter) * turn.weight)
    return int(total)


def _yielded(cost: Cost, fleet: Fleet, fresh: list[EngineLoad]) -> int:
    """Prompt tokens left of what engines would start at once for a tenant that holds less than its share, this request
    and those queued that may take the same started; < 0: that is not enough for it, or there is none."""
    offers = [load for load in fresh if load.yield_tokens and cost.tenant not in load.crowd]
    if not offers:
        return -1
    crowd = set(offers[0].crowd).intersection(*(load.crowd for load in offers))
    queued = sum(turn.queued_tokens for name, turn in fleet.tenants.items() if name not in crowd)
    return sum(load.yield_tokens for load in offers) - queued - cost.prompt_tokens


def decide(
    cost: Cost, fleet: Fleet, now_ms: int, config: GatewayConfig, jitter: float, *, returning: bool = False
) -> int:
    """Say whether one request may join the queue.  `jitter` is uniform in [0, 1).

    Returns the excess for `GatewaySide.submit`: by how many prompt tokens the queue, this request included, may pass
    the engines' room for the answer to be still the same.
    Raises Overloaded(429), `rate_limit_exceeded` when the wait would pass `queue_wait_s` and `deadline_unreachable`
    when wait and least service would pass its deadline.  `returning`: it was told to come now, so it waits up to
    RETURN_WAITS times as long, its own size left out: a prompt too large for the wait gets in when it returns.
    Raises Refusal(503) when no engine lives or all are draining.
    Never waits; costs O(engines + tenants with something queued).  An engine whose last exchange is STALE_MS old counts
    as full and standing still, and all of them when this reading is as old, so a stale view errs on the safe side.  An
    engine in a long step exchanges all the while, so its room counts; its rates count less and less (`_trust`).  While
    nothing is known of the pace (idle or just started engines), the queue may hold as much as the pools do."""
    open_engines = [load for load in fleet.engines if not load.draining]
    if not open_engines:
        why = "every engine is shutting down" if fleet.engines else "no engine is running"
        raise Refusal(503, "no_engine", why, retry_after_s=5.0 * (1 + jitter * JITTER))
    heard_ms = {load.engine: fleet.heard_ms.get(load.engine, load.time_ms) for load in open_engines}
    fresh = [load for load in open_engines if now_ms - heard_ms[load.engine] <= STALE_MS]
    room = fleet.room_tokens if fresh and now_ms - fleet.time_ms <= STALE_MS else 0
    if now_ms - fleet.time_ms <= STALE_MS and (left := _yielded(cost, fleet, fresh)) >= 0:
        return fleet.queued_tokens + cost.prompt_tokens - room + left
    missing = ahead(cost, fleet) + cost.prompt_tokens - room
    inside = sum(load.waiting_tokens for load in open_engines)  # claimed and not started: ahead of the queue
    pace = sum(_starts(load) * _trust(load, now_ms) for load in fresh)
    # The pace of an engine that has just come out of idleness is not known yet, but such a one has room.
    service = cost.least_tokens * _token_s(fresh) if missing > 0 else 0.0

    def budget(wait_s: float) -> float:  # prompt tokens that may be missing
        if pace > 0:
            return wait_s * pace
        if wait_s < 0 or any(map(_starts, open_engines)):
            return min(wait_s, 0.0)
        return float(sum(load.total_blocks * load.block_size for load in fresh))

    usual = budget(config.queue_wait_s)
    patience = RETURN_WAITS * usual + cost.prompt_tokens if returning else usual
    deadline = budget(cost.timeout_s - service)
    if deadline >= 0:
        slack = max(-missing, min(patience, deadline) - missing - inside)
        if slack >= 0:
            return int(fleet.queued_tokens + cost.prompt_tokens - room + slack)
    wait = (missing + inside) / pace if pace > 0 else 2 * config.queue_wait_s + 1.0
    bound, code, param = config.queue_wait_s, "rate_limit_exceeded", None
    if deadline < patience:
        bound, code, param = cost.timeout_s, "deadline_unreachable", "timeout"
    least = f" and at least {service:.1f} s of work" if service else ""
    limit = f"its deadline is in {bound:g} s" if param else f"the limit {bound:g} s"
    refusal = Overloaded(
        429,
        code,
        f"overloaded: the estimated wait is {wait:.1f} s{least}, {limit}",
        param=param,
        limit=bound,
        given=round(wait + (service if param else 0.0), 1),
        retry_after_s=math.ceil(RETRY_CAP_S * (1 - jitter * JITTER)) if pace > 0 else 1.0 + jitter,
    )
    if pace > 0:
        full_pace = sum(_full_starts(load) * _trust(load, now_ms) for load in fresh)
        needed = min(2 * RETRY_CAP_S, max(1.0, wait - min(usual, deadline) / pace))
        refusal.retry_terms = RetryTerms(pace, full_pace, int(1000 * needed), int(1000 * RETRY_CAP_S), LEAST_SHARES)
    raise refusal
