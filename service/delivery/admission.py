"""Admission: which lane may one more request join?  Pure: no clock, no randomness, no I/O, no memory.

    can start in time ---------------> on-time lane    engines claim from it first
    cannot, and may wait so long ----> late lane       engines fill the free capacity that is left
    would wait longer than it may ---> 429             with the time until the late lane is short enough

Engines report how many prompt tokens they would still claim; their own admission mode decides that.  What they cannot
take yet waits in the shared queue.  The wait in a lane is estimated as

    wait = (prompt tokens claimed before it, its own included, - room) / prompt tokens started per second

The on-time lane precedes the late one, so the late wait counts the tokens of both.  A tenant that holds less than its
share of an engine does not wait, as far as the engine would preempt others for it.

The decision uses this gateway's view, which is a moment old, and other gateways submit meanwhile.  So `decide` returns
how far each lane may have grown until this request reaches it.  The submit script checks just that, and picks the lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from quire.engine.wire.layout import STALE_MS
from quire.engine.wire.messages import ADAPTERS, LATER_FIELDS, PREDICTIONS, Beams, EngineLoad, Sampling
from quire.engine.wire.records import ANY_TOKENS, SIZE_CLASSES, Fleet, Place, QueueBounds
from quire.service.api.beams import require_beams
from quire.service.api.fitting import EngineLimits
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig

RETRY_CAP_S = 60.0  # clients ignore or refuse to honour longer pauses
JITTER = 0.25  # pauses are longer by up to this fraction, so that clients spread out
PROMISE_JITTER = 0.05  # the same for pauses that follow one another already
# Factor of a lane's longest wait for a promised retry: it is admitted although the pace was not quite as reported.
KEPT = 2.0
# Without a late lane promises take at most this fraction of the engines' pace, so that new requests find the rest and
# promised retries start on time.
PROMISED_PACE = 0.8
LATE_STEPS = 3  # a report is late after this many steps of its engine
# Longest wait in the on-time lane, estimated or real, as a fraction of the target: the prompt takes the rest.
ON_TIME_WAIT = 0.8
NEVER = -ANY_TOKENS  # a bound that no queue keeps


class Cost(msgspec.Struct, frozen=True):
    """What a request needs, and by when."""

    prompt_tokens: int  # over all its prompts, as the queue counts them; choices share them
    timeout_s: float  # > 0: seconds from now to its deadline
    least_tokens: int = 1  # output tokens of a choice before it may end by itself
    tenant: str = ""
    weight: float = 1.0
    longest_wait_s: float = math.inf  # >= 0: how long its client lets it wait; 0: not longer than the on-time lane
    continuations: int = 1  # over all its prompts; beams count, returned or not
    extra_tokens: int = 0  # tokens added to each prompt, included in `prompt_tokens`: see QueueBounds

    @property
    def size_class(self) -> int:
        """The power of two of its tokens that are certain, in quarters: prompts, and outputs up to their minimum
        length.

        Smaller classes start first within the on-time lane, so more requests start in time with the same blocks."""
        tokens = max(1, self.prompt_tokens + self.continuations * self.least_tokens)
        power = tokens.bit_length() - 1
        return min(SIZE_CLASSES - 1, 4 * power + (4 * tokens >> power) - 4)


class Promised(NamedTuple):
    """Retries that refused clients were promised, which count as queued before a request (`retry_book.py`)."""

    tokens: int = 0  # their prompt tokens
    due: bool = False  # the request itself is such a retry, and its time has come
    due_tokens: int = 0  # the part of `tokens` whose clients may come at any moment


NO_PROMISES = Promised()


class Decision(msgspec.Struct, frozen=True):
    """What a request needs to join the queue, and how long it would wait there."""

    bounds: QueueBounds
    on_time_wait_s: float | None  # estimated wait in that lane; None while the engines' pace is not known
    late_wait_s: float | None


def limits(fleet: Fleet, beams: Beams | None = None) -> EngineLimits:
    """Return the smallest of each limit over the live engines.

    Raises Refusal(503) without an engine, and as `require_beams` where they cannot search with `beams`."""
    engines = fleet.engines
    if not engines:
        raise Refusal(503, "no_engine", "no engine is running", retry_after_s=5.0)
    require_beams(beams, engines)
    return EngineLimits(
        max_model_len=min(load.max_model_len for load in engines),
        vocab_size=min(load.vocab_size for load in engines),
        block_size=min(load.block_size for load in engines),
        total_blocks=min(load.total_blocks for load in engines),
        eos_ids=frozenset(token for load in engines for token in load.eos_ids),
    )


def grammars(fleet: Fleet) -> bool:
    """Return whether every engine that may claim a request follows grammars."""
    return all(load.grammars for load in fleet.engines if not load.draining)


def require_grammars(fleet: Fleet, param: str) -> None:
    """Raise Refusal unless every engine that may claim the request can hold its answer to a grammar."""
    _require(fleet, lambda load: load.grammars, param, "structured output")


def require_fields(fleet: Fleet, sampling: Sampling) -> None:
    """Raise Refusal unless every engine that may claim the request honours its fields of LATER_FIELDS."""
    for name in LATER_FIELDS:
        if getattr(sampling, name):
            feature = "words of several tokens" if name == "bad_words" else "this field"
            _require(fleet, partial(_honours, name), name, feature)


def drafts(fleet: Fleet) -> bool:
    """Return whether every engine that may claim a request takes drafts from its prediction."""
    return all(_honours(PREDICTIONS, load) for load in fleet.engines if not load.draining)


def require_adapters(fleet: Fleet, param: str) -> None:
    """Raise Refusal unless every engine that may claim the request takes LoRA adapters."""
    _require(fleet, partial(_honours, ADAPTERS), param, "LoRA adapters")


def _honours(name: str, load: EngineLoad) -> bool:
    return name in load.honours


def _require(fleet: Fleet, able: Callable[[EngineLoad], bool], param: str, feature: str) -> None:
    """Raise Refusal unless every engine that may claim a request is able to serve a feature.

    It is a 400 if no engine is able, and a 503, which clients retry, if some are, as during an upgrade."""
    claiming = [load for load in fleet.engines if not load.draining] or fleet.engines
    unable = sum(not able(load) for load in claiming)
    if unable == len(claiming):
        message = f"{param}: {feature} is not served by the engines of this deployment"
        raise Refusal(400, "unsupported", message, param=param)
    if unable:
        message = f"{param}: {unable} of {len(claiming)} engines cannot serve {feature}, and any may take this"
        raise Refusal(503, "no_engine", message, param=param, retry_after_s=5.0)


def _starts(load: EngineLoad) -> float:
    """Return the prompt tokens per second that an engine with a queue starts.

    An engine can start anew what it generates and frees, and the mix of prompt and output tokens stays the same.  So
    the prompts' share of each freed block goes to prompts, and P / G prompt tokens belong to each output token.
    Either figure is a lower bound while the batch still fills.  0 until a sequence has ended while others waited: at
    the first answers' beginning P / G is far too large."""
    prompt, generated = load.prompt_tokens, load.generated_tokens
    if not prompt or not generated or not load.blocks_per_s:
        return 0.0
    freed = load.blocks_per_s * load.block_size
    return max(freed * prompt / (prompt + generated), load.tokens_per_s * prompt / generated)


def _trust(load: EngineLoad, now_ms: int) -> float:
    """Return how much of an engine's rates still counts, 0 to 1.

    An engine reports once per step.  A report older than STALE_MS and LATE_STEPS steps means that the current step is
    longer than those that the rates come from.  Nothing may have finished since, so the rates are spread over the
    elapsed time; those of a step that hangs approach 0."""
    usual_ms = max(STALE_MS, LATE_STEPS * 1000 * load.step_s)
    return min(1.0, usual_ms / max(1, now_ms - load.time_ms))


def _token_s(engines: list[EngineLoad]) -> float:
    """Return the seconds between two output tokens of a sequence, on the fastest engine with a known pace; else 0."""
    return min((load.step_s for load in engines if load.step_s > 0), default=0.0)


def ahead(cost: Cost, fleet: Fleet) -> tuple[int, int]:
    """Return the queued prompt tokens that are claimed before the last of this request's: if on time, and if late.

    The order is VTC (`engine/wire`).  In a lane another tenant is served first until its counter reaches the value that
    ours will have by then, or its part of the lane is empty.  A tenant with nothing queued starts level with the
    smallest counter, so the queue of a busy tenant delays it little.  Output tokens, which move counters too, are left
    out: they are charged to both sides.  The whole on-time lane is ahead of a late request.

    A reading names the tenants that are next.  The others have larger counters, so together they are ahead with at most
    what each of them would be with the largest counter and weight of those."""
    tenants = fleet.tenants
    ours = tenants.get(cost.tenant)
    own_late = ours.late_tokens if ours else 0
    own = ours.queued_tokens - own_late if ours else 0
    on_time, late = float(own), float(own_late + fleet.on_time.tokens)
    if ours is None:
        if not tenants:
            return 0, int(late)
        counter = min([queue.counter for queue in tenants.values()])
    else:
        counter = ours.counter
    reached = counter + (own + cost.prompt_tokens) / cost.weight
    late_reached = counter + (own_late + cost.prompt_tokens) / cost.weight
    for queue in tenants.values():
        if queue is ours:
            continue
        waits_late = queue.late_tokens
        if waits_late and late_reached > queue.counter:
            late += min(waits_late, (late_reached - queue.counter) * queue.weight)
        if reached > queue.counter:
            on_time += min(queue.queued_tokens - waits_late, (reached - queue.counter) * queue.weight)
    unnamed_on_time, unnamed_late = fleet.unnamed_tokens()
    if unnamed_on_time or unnamed_late:
        last = max((queue.counter for queue in tenants.values() if queue is not ours), default=counter)
        most = max(queue.weight for queue in tenants.values()) * max(fleet.on_time.tenants, fleet.late.tenants)
        on_time += min(unnamed_on_time, max(0.0, reached - last) * most)
        late += min(unnamed_late, max(0.0, late_reached - last) * most)
    return int(on_time), int(late)


def _preemption_room(cost: Cost, fleet: Fleet, fresh: list[EngineLoad]) -> int:
    """Return the prompt tokens left of what engines would start at once, by preempting others for this tenant.

    The tenant must hold less than its share.  This request, and queued ones with the same right, are subtracted.
    < 0: the rest is too little for it, or there is none."""
    offers = [load for load in fresh if load.yield_tokens and cost.tenant not in load.crowd]
    if not offers:
        return -1
    crowd = set(offers[0].crowd).intersection(*(load.crowd for load in offers))
    queued = sum(q.queued_tokens - q.late_tokens for name, q in fleet.tenants.items() if name not in crowd)
    queued += fleet.unnamed_tokens()[0]  # some of them may be of tenants over their share
    return sum(load.yield_tokens for load in offers) - queued - cost.prompt_tokens


class _Supply(NamedTuple):
    """What the engines offer to requests that wait."""

    fresh: list[EngineLoad]  # the engines that take requests and have exchanged within STALE_MS
    room: int  # prompt tokens that they would claim at once
    inside: int  # prompt tokens claimed and not started: ahead of the queue
    tokens_per_s: float  # prompt tokens that they start; 0: not known, or they stand still
    stand_still: bool  # engines with a known pace have stopped syncing
    pools: float  # tokens that the engines' pools hold
    token_s: float  # seconds between two output tokens of a sequence; 0: not known

    def wait_s(self, missing: float) -> float | None:
        """Return the seconds until prompt tokens beyond the free capacity are started; None while the pace is not
        known."""
        return max(0.0, missing + self.inside) / self.tokens_per_s if self.tokens_per_s > 0 else None

    def budget(self, wait_s: float, unknown: float) -> float:
        """Return how many prompt tokens may be ahead of a request that waits at most `wait_s` seconds.

        `unknown`: the same for engines that were idle until now, whose pace is unknown."""
        if self.tokens_per_s > 0:
            return wait_s * self.tokens_per_s
        if wait_s < 0 or self.stand_still:
            return min(wait_s, 0.0)
        return unknown


def _supply(fleet: Fleet, now_ms: int) -> _Supply:
    """Return what the engines offer that take new requests."""
    engines = [load for load in fleet.engines if not load.draining]
    exchanged_ms = fleet.exchanged_ms
    fresh = [load for load in engines if now_ms - exchanged_ms.get(load.engine, load.time_ms) <= STALE_MS]
    tokens_per_s = sum(_starts(load) * _trust(load, now_ms) for load in fresh)
    return _Supply(
        fresh,
        fleet.room_tokens if fresh and now_ms - fleet.time_ms <= STALE_MS else 0,
        sum(load.waiting_tokens for load in engines),
        tokens_per_s,
        tokens_per_s == 0 and any(map(_starts, engines)),
        float(sum(load.total_blocks * load.block_size for load in fresh)),
        _token_s(fresh),
    )


def wait_estimator(fleet: Fleet, now_ms: int) -> Callable[[Place], float | None]:
    """Return a function of a request's place: the seconds until the request is claimed.

    It returns None while the engines' pace is not known.  The requests of a lane count as equally long.  O(engines) to
    make, O(1) to call: thousands of requests may wait."""
    supply = _supply(fleet, now_ms)

    def wait_s(place: Place) -> float | None:
        lane = fleet.late if place.lane == "late" else fleet.on_time
        before, ahead_here = (fleet.on_time.tokens, fleet.on_time.requests) if place.lane == "late" else (0, 0)
        part = min(1.0, (place.ahead - ahead_here + 1) / max(1, lane.requests))
        return supply.wait_s(before + lane.tokens * part - supply.room)

    return wait_s


def decide(
    cost: Cost, fleet: Fleet, now_ms: int, config: GatewayConfig, jitter: float, promised: Promised = NO_PROMISES
) -> Decision:
    """Decide how full each lane may be for one request to join it.  `jitter` is uniform in [0, 1).

    Raises Refusal(429) when the request may join neither lane now: `rate_limit_exceeded` when it would wait longer than
    `late_wait_s` or its client allows, `deadline_unreachable` when wait and minimum service would pass its deadline.
    Raises Refusal(503) when no engine lives or all are draining.
    Never waits.  Costs O(engines + tenants that the reading names).

    An engine whose last sync is older than STALE_MS counts as full and standing still; so do all engines when this
    reading is as old.  A stale view errs on the safe side.  An engine in a long step still syncs, so its free
    capacity counts, while its rates count less and less (`_trust`).  While the pace is unknown (idle or just started
    engines),
    the on-time lane may hold as much as the pools do, and the late lane any number.

    Promises count as queued in the late lane, before this request.  Without that lane those that are due count in the
    on-time lane, except for other promised retries, and all of them lengthen the pause.  The bound of a promised retry,
    once its time has come, is larger (KEPT)."""
    if all(load.draining for load in fleet.engines):
        why = "every engine is shutting down" if fleet.engines else "no engine is running"
        raise Refusal(503, "no_engine", why, retry_after_s=5.0 * (1 + jitter * JITTER))
    supply = _supply(fleet, now_ms)
    longest_s = min(config.longest_wait_s, cost.longest_wait_s)
    missing, late_missing = (tokens + cost.prompt_tokens - supply.room for tokens in ahead(cost, fleet))
    on_time_s, late_s = config.ttft_target_s * ON_TIME_WAIT, longest_s
    if longest_s > 0:
        late_missing += promised.tokens
        late_s *= KEPT if promised.due else 1.0
    elif promised.due:
        on_time_s *= KEPT
    else:
        missing += promised.due_tokens
    slack = _slack(cost, supply, missing, on_time_s, supply.pools)
    if now_ms - fleet.time_ms <= STALE_MS:
        slack = max(slack, _preemption_room(cost, fleet, supply.fresh))
    late_slack = _slack(cost, supply, late_missing, late_s, float(ANY_TOKENS)) if longest_s > 0 else -math.inf
    if slack < 0 and late_slack < 0:
        raise _overloaded(cost, config, supply, late_missing if longest_s > 0 else missing, promised, jitter)
    beyond_room = cost.prompt_tokens - supply.room
    bounds = QueueBounds(
        # Smaller requests precede larger ones, so the lane may have free capacity for this one where it seems full.
        NEVER if math.isinf(slack) else int(fleet.on_time.tokens + beyond_room + slack),
        int(fleet.queued_tokens + beyond_room + late_slack) if late_slack >= 0 else NEVER,
        math.ceil(1000 * on_time_s),
        config.max_queued,
        config.max_queued_mib * 2**20,
        cost.size_class,
        cost.extra_tokens,
    )
    return Decision(bounds, supply.wait_s(missing), supply.wait_s(late_missing))


def _slack(cost: Cost, supply: _Supply, missing: int, longest_s: float, unknown: float) -> float:
    """Return by how many prompt tokens a lane may grow before a request would wait too long in it; < 0: it would now.

    -infinity: in any lane it would miss its deadline.
    `missing`: prompt tokens claimed before the request, its own included, beyond the engines' free capacity.
    `longest_s`: the longest wait, in seconds.  `unknown`: what may be ahead of it while the pace is not known."""
    # The pace of an engine that was idle until now is unknown, but such an engine has free capacity.
    service = cost.least_tokens * supply.token_s if missing > 0 else 0.0
    deadline = supply.budget(cost.timeout_s - service, unknown)
    if deadline < 0:
        return -math.inf
    return max(-missing, min(supply.budget(longest_s, unknown), deadline) - missing - supply.inside)


def _overloaded(
    cost: Cost, config: GatewayConfig, supply: _Supply, missing: int, promised: Promised, jitter: float
) -> Refusal:
    """Return the refusal of a request that may join no lane.  `missing`: as for _slack, in the last lane there is."""
    param: str | None
    wait_s, service = supply.wait_s(missing), cost.least_tokens * supply.token_s
    longest_s = max(config.ttft_target_s * ON_TIME_WAIT, min(config.longest_wait_s, cost.longest_wait_s))
    estimate = f"the estimated wait is {wait_s:.1f} s" if wait_s is not None else "no engine answers"
    given = wait_s
    if cost.timeout_s - service < longest_s:
        code, param, bound, longest_s = "deadline_unreachable", "timeout", cost.timeout_s, cost.timeout_s - service
        least = f" and at least {service:.1f} s of work" if service else ""
        message = f"overloaded: {estimate}{least}, its deadline is in {bound:g} s"
        given = wait_s + service if wait_s is not None else None
    else:
        code, bound, message = "rate_limit_exceeded", longest_s, f"overloaded: {estimate}, the limit {longest_s:g} s"
        param = "x-max-queue-wait" if cost.longest_wait_s < config.longest_wait_s else None
    pause_s, spread = 1.0, JITTER
    later = 0.0 if min(config.longest_wait_s, cost.longest_wait_s) > 0 else promised.tokens - promised.due_tokens
    # Until the last lane is short enough, behind the promises before this one.
    if (ready_s := supply.wait_s(missing + later / PROMISED_PACE)) is not None:
        spread = PROMISE_JITTER
        pause_s = min(RETRY_CAP_S / (1 + spread), max(1.0, ready_s - longest_s))
    return Refusal(
        429,
        code,
        message,
        param=param,
        limit=bound,
        given=None if given is None else round(given, 1),
        retry_after_s=pause_s * (1 + spread * jitter),
    )
