"""May one more request join the queue?  No clock, no randomness, no I/O of its own; what it remembers is `Promises`.

Engines say how many prompt tokens they would still claim (their own rule decides: forecast, threshold, ...), and what
they cannot take yet waits in the shared queue.  The queue is bounded by how long it would take, not by how many are in
it, and by each request's own deadline:

    wait = (prompt tokens ahead of it in the tenants' fair order + its own - room) / prompt tokens started per second

The answer is made on this gateway's view, which is a moment old and not the only one.  So `decide` also says how far
the queue may have grown until this request comes to it, and the script that queues checks just that (`bus.submit`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from operator import sub

import msgspec

from engine.wire.bus import Fleet
from engine.wire.messages import EngineLoad
from engine.wire.scripts import STALE_MS
from service.api import EngineLimits, Refusal
from service.config import GatewayConfig

RETRY_CAP_S = 60.0  # clients ignore or refuse to honour longer pauses
MOST_PROMISES = 256  # of one tenant: each costs every decision 0.1 us
JITTER = 0.25  # pauses are longer by up to this fraction: clients refused together don't return together


class Cost(msgspec.Struct, frozen=True):
    """What a request needs, and by when."""

    prompt_tokens: int  # over all its prompts; continuations share them
    timeout_s: float  # > 0: seconds from now to its deadline
    least_tokens: int = 1  # output tokens of a continuation before it may end by itself
    tenant: str = ""
    weight: float = 1.0


class Promises:
    """What one tenant was refused, told when to return, and has not had the time to.

    A crowd is told different times, each behind those before, and whoever comes without a promise must leave what was
    promised possible.  A promise ends the moment it is due, so the one who comes just then finds its place free; one
    who does not come has cost nobody anything, for the queue in front of the engines is as long as the bound."""

    def __init__(self) -> None:
        self._due: list[int] = []  # unix ms, soonest first
        self._sizes: list[int] = []  # their prompt tokens

    def add(self, due_ms: int, prompt_tokens: int) -> None:
        """Beyond MOST_PROMISES the request is told when to return, but nothing is kept for it."""
        if len(self._due) < MOST_PROMISES:
            at = bisect_right(self._due, due_ms)
            self._due.insert(at, due_ms)
            self._sizes.insert(at, prompt_tokens)

    def tokens(self, now_ms: int) -> int:
        """Prompt tokens still to return."""
        passed = bisect_right(self._due, now_ms)
        del self._due[:passed], self._sizes[:passed]
        return sum(self._sizes)

    def budget(self, budget: float, pace: float, now_ms: int) -> float:
        """How much of `budget`, the prompt tokens that may be ahead, is left when every promise is kept.

        At each one's time the queue, shorter by `pace` tokens a second, must still take it and those due before it."""
        per_ms = pace / 1000
        spare = map(sub, map(per_ms.__mul__, self._due), accumulate(self._sizes))
        return budget + min(0.0, min(spare, default=math.inf) - per_ms * now_ms)


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


def decide(cost: Cost, fleet: Fleet, now_ms: int, config: GatewayConfig, jitter: float, promises: Promises) -> int:
    """Say whether one request may join the queue.  `jitter` is uniform in [0, 1); `promises` are the tenant's, and a
    refusal's pause is added to them.

    Returns the excess for `GatewaySide.submit`: by how many prompt tokens the queue, this request included, may pass
    the engines' room for the answer to be still the same.
    Raises Refusal(429, retry_after_s), `rate_limit_exceeded` when the wait would pass `queue_wait_s` and
    `deadline_unreachable` when wait and least service would pass its deadline, which is the nearer bound.  The pause is
    how long until the wait is within the bound: at least 1 s, at most 60, spread by a quarter, in whole seconds, so
    that clients of either header come when they are expected.
    Raises Refusal(503) when no engine lives or all are draining.
    Never waits; costs O(engines + tenants with something queued).  An engine not heard of for STALE_MS counts as full
    and standing still, and all of them when this reading is as old, so a stale view errs on the safe side.  While
    nothing is known of the pace (idle or just started engines), the queue may hold as much as the pools do."""
    open_engines = [load for load in fleet.engines if not load.draining]
    if not open_engines:
        why = "every engine is shutting down" if fleet.engines else "no engine is running"
        raise Refusal(503, "no_engine", why, retry_after_s=5.0 * (1 + jitter * JITTER))
    fresh = [load for load in open_engines if now_ms - load.time_ms <= STALE_MS]
    room = fleet.room_tokens if fresh and now_ms - fleet.time_ms <= STALE_MS else 0
    missing = ahead(cost, fleet) + cost.prompt_tokens - room
    inside = sum(load.waiting_tokens for load in open_engines)  # claimed and not started: ahead of the queue
    pace = sum(map(_starts, fresh))
    # The pace of an engine that has just come out of idleness is not known yet, but such a one has room.
    service = cost.least_tokens * _token_s(fresh) if missing > 0 else 0.0
    bound, code = config.queue_wait_s, "rate_limit_exceeded"
    if cost.timeout_s - service < bound:
        bound, code = cost.timeout_s - service, "deadline_unreachable"
    if pace > 0:
        budget = bound * pace
    elif any(map(_starts, open_engines)):
        budget = 0.0
    else:
        budget = float(sum(load.total_blocks * load.block_size for load in fresh))
    promised = promises.tokens(now_ms)
    slack = max(-missing, promises.budget(budget, pace, now_ms) - missing - inside) if bound >= 0 else -1
    if slack >= 0:
        return int(fleet.queued_tokens + cost.prompt_tokens - room + slack)
    wait = (missing + inside) / pace if pace > 0 else 2 * config.queue_wait_s + 1.0
    needed = max(0.0, wait - bound) + (promised / pace if pace > 0 else 0.0)
    pause = math.ceil(max(1.0, min(RETRY_CAP_S / (1 + JITTER), needed) * (1 + jitter * JITTER)))
    if needed <= pause:  # beyond the cap nothing can be promised
        promises.add(now_ms + 1000 * pause, cost.prompt_tokens)
    least = f" and at least {service:.1f} s of work" if service else ""
    limit = f"its deadline is in {cost.timeout_s:g} s" if code == "deadline_unreachable" else f"the limit {bound:g} s"
    raise Refusal(
        429,
        code,
        f"overloaded: the estimated wait is {wait:.1f} s{least}, {limit}",
        param="timeout" if code == "deadline_unreachable" else None,
        limit=cost.timeout_s if code == "deadline_unreachable" else bound,
        given=round(wait + (service if code == "deadline_unreachable" else 0.0), 1),
        retry_after_s=pause,
    )
