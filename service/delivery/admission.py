"""Admission: decide which lane of the queue a new request may join.  Pure: no clock, randomness, I/O or state.

    estimated TTFT within the target ------> on-time lane    engines claim requests from it first
    longer, but within the maximum wait ---> late lane       engines claim from it with the free capacity that is left
    beyond the maximum wait ---------------> 429             Retry-After: until the late lane is short enough

Each engine reports its free capacity: the prompt tokens that it could still claim.  Requests beyond it wait in the
queue, which all engines share.  The wait of a request in a lane is estimated as

    wait = (prompt tokens ahead of it + its own - free capacity) / prompt tokens that engines start per second

Engines empty the on-time lane first, so the wait in the late lane counts the tokens of both lanes.  A request of a
tenant below its fair share does not wait if an engine would preempt sequences of other tenants for it.

This gateway's snapshot of the queue is a moment old, and other gateways submit meanwhile.  So `decide` returns the
maximum length of each lane at which this request may join it.  The submit script compares the lanes with these bounds
and picks the lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from quire.engine.wire.layout import STALE_MS
from quire.engine.wire.messages import ADAPTERS, LATER_FIELDS, LEAVES_ADAPTERS, PREDICTIONS, Beams, EngineLoad, Sampling
from quire.engine.wire.records import ANY_TOKENS, SIZE_CLASSES, Fleet, Place, QueueBounds
from quire.service.api.beams import require_beams
from quire.service.api.fitting import EngineLimits
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig

RETRY_CAP_S = 60.0  # maximum Retry-After: clients ignore or refuse to honour longer pauses
JITTER = 0.25  # maximum random lengthening of Retry-After, as a fraction, so that clients spread out
PROMISE_JITTER = 0.05  # JITTER of promised retries (retry_book.py), which are already spread out
# A promised retry may wait this many times the wait that was estimated at its refusal: the lane's maximum wait, and in
# the late lane the stated pause too.  So it is admitted even if engines were slower, or more requests went first.
KEPT = 2.0
# Without a late lane, promised retries get at most this fraction of the engines' throughput, new requests the rest.
PROMISED_PACE = 0.8
LATE_STEPS = 3  # an engine's report is late after this many steps of usual length
# Maximum wait in the on-time lane as a fraction of the TTFT target: prefill takes the rest.
ON_TIME_WAIT = 0.8
NEVER = -ANY_TOKENS  # bound of a lane that the request may not join


class Cost(msgspec.Struct, frozen=True):
    """Tokens that a client's request needs, and its time limits."""

    prompt_tokens: int  # sum over all prompts of the request; `n` choices share a prompt
    timeout_s: float  # > 0: seconds from now to its deadline
    min_output_tokens: int = 1  # minimum output tokens of a choice (`min_tokens`)
    tenant: str = ""
    weight: float = 1.0  # the tenant's weight
    longest_wait_s: float = math.inf  # >= 0: maximum wait that the client allows; 0: only the on-time lane
    choices: int = 1  # number of choices over all prompts; every beam counts, returned or not
    extra_tokens: int = 0  # tokens added to each prompt, included in `prompt_tokens`: see QueueBounds

    @property
    def size_class(self) -> int:
        """Logarithmic size class, four per power of two, of the prompt tokens plus the minimum output tokens.

        Smaller classes start first within the on-time lane, so more requests start in time with the same blocks."""
        tokens = max(1, self.prompt_tokens + self.choices * self.min_output_tokens)
        power = tokens.bit_length() - 1
        return min(SIZE_CLASSES - 1, 4 * power + (4 * tokens >> power) - 4)


class Promised(NamedTuple):
    """Promised retries of refused clients, which count as if queued before a request (`retry_book.py`)."""

    tokens: int = 0  # prompt tokens of all promised retries
    due: bool = False  # True if the request itself is a promised retry whose time has come
    due_tokens: int = 0  # prompt tokens of the retries whose time has come
    paused_s: float = 0.0  # pause that was stated to the request itself, in seconds


NO_PROMISES = Promised()


class Decision(msgspec.Struct, frozen=True):
    """The bounds within which a request may join each lane, and its estimated wait there."""

    bounds: QueueBounds
    on_time_wait_s: float | None  # estimated wait in the on-time lane; None while the engines' throughput is not known
    late_wait_s: float | None  # estimated wait in the late lane


def limits(fleet: Fleet, beams: Beams | None = None) -> EngineLimits:
    """Return, for each limit, the minimum over the live engines.

    Raises Refusal(503) without an engine, and the Refusal of `require_beams` if engines cannot search with `beams`."""
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
    """Raise Refusal unless every engine that may claim the request can constrain its answer with a grammar."""
    _require(fleet, lambda load: load.grammars, param, "structured output")


def require_fields(fleet: Fleet, sampling: Sampling) -> None:
    """Raise Refusal unless every engine that may claim the request supports the fields of LATER_FIELDS that it sets."""
    for name in LATER_FIELDS:
        if getattr(sampling, name):
            feature = "words of several tokens" if name == "bad_words" else "this field"
            _require(fleet, partial(_honours, name), name, feature)


def drafts(fleet: Fleet) -> bool:
    """Return whether every engine that may claim a request uses its `prediction` for speculative decoding."""
    return all(_honours(PREDICTIONS, load) for load in fleet.engines if not load.draining)


def require_adapters(fleet: Fleet, param: str) -> None:
    """Raise Refusal unless an engine supports LoRA adapters, and the other engines leave such requests to it."""
    taken = any(_honours(ADAPTERS, load) for load in _claiming(fleet))
    names = (ADAPTERS, LEAVES_ADAPTERS) if taken else (ADAPTERS,)
    _require(fleet, lambda load: any(_honours(name, load) for name in names), param, "LoRA adapters")


def _honours(name: str, load: EngineLoad) -> bool:
    return name in load.honours


def _claiming(fleet: Fleet) -> Sequence[EngineLoad]:
    """Return the engines that may claim requests: those that do not drain, or all engines if every one drains."""
    return [load for load in fleet.engines if not load.draining] or fleet.engines


def _require(fleet: Fleet, able: Callable[[EngineLoad], bool], param: str, feature: str) -> None:
    """Raise Refusal unless every engine that may claim a request supports a feature.

    400 if no engine supports it; 503, which clients retry, if some do (during an upgrade)."""
    claiming = _claiming(fleet)
    unable = sum(not able(load) for load in claiming)
    if unable == len(claiming):
        message = f"{param}: {feature} is not served by the engines of this deployment"
        raise Refusal(400, "unsupported", message, param=param)
    if unable:
        message = f"{param}: {unable} of {len(claiming)} engines cannot serve {feature}, and any may take this"
        raise Refusal(503, "no_engine", message, param=param, retry_after_s=5.0)


def _starts(load: EngineLoad) -> float:
    """Return the prompt tokens per second that an engine with a queue starts.

    Let P and G be the prompt and generated tokens of the engine so far.  In a steady state new sequences have the same
    ratio of P to G.  So there are two estimates: the fraction P / (P + G) of freed blocks goes to prompts, and P / G
    prompt tokens start per generated token.  While the batch still fills, both are lower bounds, so the larger one is
    returned.  Returns 0 until a sequence has ended while others waited: before that P / G would be far too large."""
    prompt, generated = load.prompt_tokens, load.generated_tokens
    if not prompt or not generated or not load.blocks_per_s:
        return 0.0
    freed = load.blocks_per_s * load.block_size
    return max(freed * prompt / (prompt + generated), load.tokens_per_s * prompt / generated)


def _trust(load: EngineLoad, now_ms: int) -> float:
    """Return the factor, 0 to 1, by which an engine's reported rates are multiplied because the report is old.

    An engine reports once per step.  If its report is older than STALE_MS and than LATE_STEPS steps, the current step
    is longer than the steps that the rates come from.  Perhaps no sequence has ended since, so the rates are spread
    over the time since the report.  They approach 0 while a step hangs."""
    usual_ms = max(STALE_MS, LATE_STEPS * 1000 * load.step_s)
    return min(1.0, usual_ms / max(1, now_ms - load.time_ms))


def _token_s(engines: list[EngineLoad]) -> float:
    """Return the seconds per output token of a sequence on the fastest engine; 0 if no engine's throughput is known."""
    return min((load.step_s for load in engines if load.step_s > 0), default=0.0)


def ahead(cost: Cost, fleet: Fleet) -> tuple[int, int]:
    """Return the queued prompt tokens that engines claim before this request: in the on-time lane, in the late lane.

    Lanes are served in the order of VTC, the virtual token counter (`engine/wire`): next comes the tenant with the
    smallest counter.  So another tenant is ahead until its counter reaches the value that this tenant's counter has
    when the request is claimed, or until that tenant has nothing left in the lane.  A tenant with nothing queued starts
    at the smallest counter, so the queue of a busy tenant delays it little.  Output tokens also raise counters; they
    are left out here, since both tenants are charged for them.  The complete on-time lane is ahead of a late request.

    A snapshot names only the tenants with the smallest counters.  Each unnamed tenant is estimated with the largest
    counter and the largest weight of the named ones, which is an upper bound of its tokens ahead."""
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
    """Return how many more prompt tokens engines would start at once, by preempting sequences of other tenants.

    Engines offer this only to tenants below their share.  The tokens of this request, and of queued requests of such
    tenants, are subtracted.  < 0: the request does not fit, or no engine would preempt for it."""
    offers = [load for load in fresh if load.preemptible_tokens and cost.tenant not in load.over_share]
    if not offers:
        return -1
    over_share = set(offers[0].over_share).intersection(*(load.over_share for load in offers))
    queued = sum(q.queued_tokens - q.late_tokens for name, q in fleet.tenants.items() if name not in over_share)
    queued += fleet.unnamed_tokens()[0]  # an upper bound: some unnamed tenants may be over their share
    room = sum(load.preemptible_tokens_of.get(cost.tenant, load.preemptible_tokens) for load in offers)
    return room - queued - cost.prompt_tokens


class _Supply(NamedTuple):
    """Free capacity (tokens) and prompt throughput (tokens/s) of the engines that take new requests."""

    fresh: list[EngineLoad]  # engines whose last sync with Redis is at most STALE_MS old
    room: int  # free capacity: prompt tokens that engines would claim at once
    inside: int  # prompt tokens that engines have claimed and not started; they are ahead of the queue
    tokens_per_s: float  # prompt tokens started per second; 0: not known, or the engines have stopped
    stand_still: bool  # engines with known throughput have stopped syncing
    pools: float  # capacity of the KV block pools of `fresh`, in tokens
    token_s: float  # seconds between two output tokens of a sequence; 0: not known

    def wait_s(self, missing: float) -> float | None:
        """Return the seconds until engines have started `missing` prompt tokens beyond their free capacity.

        None while the throughput is not known."""
        return max(0.0, missing + self.inside) / self.tokens_per_s if self.tokens_per_s > 0 else None

    def budget(self, wait_s: float, unknown: float) -> float:
        """Return how many prompt tokens may be ahead of a request that waits at most `wait_s` seconds.

        `unknown`: the value to return while the throughput is unknown because the engines were idle."""
        if self.tokens_per_s > 0:
            return wait_s * self.tokens_per_s
        if wait_s < 0 or self.stand_still:
            return min(wait_s, 0.0)
        return unknown


def _supply(fleet: Fleet, now_ms: int) -> _Supply:
    """Compute free capacity and prompt throughput of the engines that take new requests."""
    engines = [load for load in fleet.engines if not load.draining]
    exchanged_ms = fleet.exchanged_ms
    fresh = [load for load in engines if now_ms - exchanged_ms.get(load.engine, load.time_ms) <= STALE_MS]
    tokens_per_s = sum(_starts(load) * _trust(load, now_ms) for load in fresh)
    return _Supply(
        fresh,
        fleet.free_tokens if fresh and now_ms - fleet.time_ms <= STALE_MS else 0,
        sum(load.waiting_tokens for load in engines),
        tokens_per_s,
        tokens_per_s == 0 and any(map(_starts, engines)),
        float(sum(load.total_blocks * load.block_size for load in fresh)),
        _token_s(fresh),
    )


def wait_estimator(fleet: Fleet, now_ms: int) -> Callable[[Place], float | None]:
    """Return a function that estimates, from a request's place in the queue, the seconds until it is claimed.

    The function returns None while the engines' throughput is not known.  It assumes that all requests of a lane are
    equally long.  Making the function takes O(engines); each call takes O(1), since it is called for thousands of
    waiting requests."""
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
    """Decide up to which length each lane may accept this request.  `jitter` is uniform in [0, 1).

    Raises Refusal(429) when the request may join neither lane now.  Its code is `rate_limit_exceeded` if the request
    would wait longer than `late_wait_s` or than its client allows, and `deadline_unreachable` if wait plus minimum
    service time would exceed the request's deadline.  Raises Refusal(503) when no engine is alive or all are draining.
    Takes O(engines + tenants in the snapshot).

    An engine whose last sync is older than STALE_MS counts as full and standing still.  If the snapshot of the queue is
    that old, no free capacity counts.  So with an outdated snapshot, requests are refused rather than engines
    overloaded. An engine in a long step still syncs, so its free capacity counts, but its rates are reduced (`_trust`).
    While the throughput is unknown (engines idle or just started), the on-time lane may hold as many tokens as the KV
    pools, and the late lane is unbounded.

    Promised retries (retry_book.py) count as queued in the late lane, before this request.  If there is no late lane,
    those whose time has come count as queued in the on-time lane, and all of them lengthen the pause of a refusal.  A
    promised retry whose time has come gets a larger bound (KEPT)."""
    if all(load.draining for load in fleet.engines):
        why = "every engine is shutting down" if fleet.engines else "no engine is running"
        raise Refusal(503, "no_engine", why, retry_after_s=5.0 * (1 + jitter * JITTER))
    supply = _supply(fleet, now_ms)
    longest_s = min(config.late_wait_s, cost.longest_wait_s)
    missing, late_missing = (tokens + cost.prompt_tokens - supply.room for tokens in ahead(cost, fleet))
    on_time_s, late_s = config.ttft_target_s * ON_TIME_WAIT, longest_s
    if longest_s > 0:
        late_missing += promised.tokens
        if promised.due:
            late_s = KEPT * min(config.late_wait_s + promised.paused_s, cost.longest_wait_s)
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
        # A negative slack still gives a bound: engines claim small requests first, so a small request may still be on
        # time.
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
    """Return how many further prompt tokens may join a lane before this request would wait too long in it.

    < 0: the wait is too long already.  -infinity: the request would miss its deadline in any lane.
    `missing`: prompt tokens ahead of the request plus its own, minus the engines' free capacity.
    `longest_s`: maximum wait in seconds.  `unknown`: prompt tokens that may be ahead at unknown throughput."""
    # An engine that was idle until now has an unknown throughput, but free capacity, so the request starts at once.
    service = cost.min_output_tokens * supply.token_s if missing > 0 else 0.0
    deadline = supply.budget(cost.timeout_s - service, unknown)
    if deadline < 0:
        return -math.inf
    return max(-missing, min(supply.budget(longest_s, unknown), deadline) - missing - supply.inside)


def _overloaded(
    cost: Cost, config: GatewayConfig, supply: _Supply, missing: int, promised: Promised, jitter: float
) -> Refusal:
    """Return the 429 for a request that may join no lane.

    `missing`: see `_slack`; for the late lane, or for the on-time lane if there is no late lane."""
    param: str | None
    wait_s, service = supply.wait_s(missing), cost.min_output_tokens * supply.token_s
    longest_s = max(config.ttft_target_s * ON_TIME_WAIT, min(config.late_wait_s, cost.longest_wait_s))
    estimate = f"the estimated wait is {wait_s:.1f} s" if wait_s is not None else "no engine answers"
    given = wait_s
    if cost.timeout_s - service < longest_s:
        code, param, bound, longest_s = "deadline_unreachable", "timeout", cost.timeout_s, cost.timeout_s - service
        least = f" and at least {service:.1f} s of work" if service else ""
        message = f"overloaded: {estimate}{least}, its deadline is in {bound:g} s"
        given = wait_s + service if wait_s is not None else None
    else:
        code, bound, message = "rate_limit_exceeded", longest_s, f"overloaded: {estimate}, the limit {longest_s:g} s"
        param = "x-max-queue-wait" if cost.longest_wait_s < config.late_wait_s else None
    pause_s, spread = 1.0, JITTER
    later = 0.0 if min(config.late_wait_s, cost.longest_wait_s) > 0 else promised.tokens - promised.due_tokens
    # The pause lasts until the lane is short enough, if all earlier promised retries count as queued.
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
