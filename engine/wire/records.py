"""Arguments and results of the two sides of the bus.  None of them is sent; messages are in `messages.py`."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.engine.wire.layout import PLACES, SIZES
from quire.engine.wire.messages import Abort, EngineLoad, Generate
from quire.engine.wire.token_log import LoggedOutput

Lane = Literal["on_time", "late"]
LANES: tuple[Lane, ...] = ("on_time", "late")  # lanes in the order in which engines claim

ANY_TOKENS = 2**53  # a bound in tokens that nothing exceeds
SIZE_CLASSES = PLACES // SIZES


class TenantQueue(msgspec.Struct, frozen=True):
    """The queue state of a tenant with waiting requests."""

    queued_tokens: int  # prompt tokens of its waiting requests, both lanes
    counter: float  # virtual tokens served to the tenant; the tenant with the smallest counter goes first
    weight: float
    late_tokens: int = 0  # the part of `queued_tokens` in the late lane


class LaneQueue(msgspec.Struct, frozen=True):
    """The state of one lane of the queue."""

    requests: int = 0  # waiting requests
    tokens: int = 0  # prompt tokens of these requests, counted once for all choices of a prompt
    oldest_ms: int = 0  # ms since the oldest waiting request was submitted
    tenants: int = 0  # number of tenants with requests queued in it


class QueueBounds(msgspec.Struct, frozen=True):
    """Limits of the queue for a new request, which itself counts in each of them.

    The on-time lane has the requests whose predicted wait meets the TTFT target; the late lane has the others.  A
    request joins the on-time lane if the tokens in this lane exceed the engines' free capacity by at most
    `on_time_excess`; larger requests of its tenant, which it would precede, do not count.  Otherwise it joins the late
    lane if the tokens of both lanes exceed the free capacity by at most `late_excess`.  Otherwise it is not queued."""

    on_time_excess: int = ANY_TOKENS  # prompt tokens
    late_excess: int = ANY_TOKENS  # prompt tokens
    target_ms: int = 3_600_000  # ms in the on-time lane after which a request moves to the late lane
    max_requests: int = 2**53  # maximum waiting requests, one per prompt
    max_bytes: int = 2**53  # maximum payload bytes of waiting requests
    size_class: int = 0  # 0 to SIZE_CLASSES - 1: smaller requests go first in a tenant's on-time lane
    # Tokens that each prompt counts for in addition to its own: the blocks that its further beams take at once.
    extra_tokens: int = 0


class DuplicateRequest(msgspec.Struct, frozen=True):
    """The first request with an idempotency key."""

    request_id: str  # request id of its first prompt
    same_body: bool  # whether its body equals that of the new request


class IdempotencyKey(msgspec.Struct, frozen=True):
    """A client's idempotency key: the first request with a key is computed, later requests share its answer."""

    key: str  # digest of the client's key and of the user it belongs to
    body: str  # digest of all fields that must be equal for two requests to be the same


class Fleet(msgspec.Struct, frozen=True):
    """The engines with a live lease and the shared queue, as one call of GatewaySide.fleet() reads them."""

    engines: list[EngineLoad]
    queued: int  # requests that no engine has claimed yet, both lanes
    queued_tokens: int  # prompt tokens of these requests, counted once for all choices of a prompt
    time_ms: int  # unix time of this reading, on Redis' clock
    free_tokens: int = 0  # prompt tokens that the engines would still claim; engines silent for STALE_MS do not count
    tenants: dict[str, TenantQueue] = {}  # the TENANTS_SHOWN tenants of each lane that engines claim from next
    # True: the gateway must attach to every open request again, for one of three reasons.  This gateway has subscribed
    # to its tokens again and may have missed some.  Or Redis has had no heartbeat of it for long, so that its requests
    # may have other listeners.  Or Redis may have lost data, because it was restarted or a replica was promoted.
    forgotten: bool = False
    quarantined: int = 0  # number of requests in quarantine, because they killed their engines
    # Engine -> unix time of its last sync, on the clock of `time_ms`.  The bus thread syncs even while a step runs;
    # EngineLoad.time_ms is the end of the last step.
    exchanged_ms: dict[str, int] = {}
    on_time: LaneQueue = LaneQueue()
    late: LaneQueue = LaneQueue()

    def unnamed_tokens(self) -> tuple[int, int]:
        """Return the prompt tokens of tenants that `tenants` does not name, in the on-time and in the late lane."""
        late = sum(queue.late_tokens for queue in self.tenants.values())
        on_time = sum(queue.queued_tokens for queue in self.tenants.values()) - late
        return max(0, self.on_time.tokens - on_time), max(0, self.late.tokens - late)


class Queue(msgspec.Struct, frozen=True):
    """The queue right after a submit."""

    queued: int
    queued_tokens: int
    free_tokens: int
    tenants: dict[str, TenantQueue]  # only the request's own, if it has requests queued
    on_time: LaneQueue = LaneQueue()
    late: LaneQueue = LaneQueue()
    lane: Lane | None = None  # lane that the request joined; None: it was not queued, because it exceeded the limits
    ahead: int = 0  # number of requests ahead of it
    full: bool = False  # not queued: the maximum of waiting requests or bytes is reached
    duplicate: DuplicateRequest | None = None  # not queued: this earlier request has the same idempotency key

    @property
    def accepted(self) -> bool:
        """Whether the request was queued."""
        return self.lane is not None


class Place(msgspec.Struct, frozen=True):
    """Queue position of a waiting request."""

    lane: Lane
    ahead: int  # number of older requests in its lane; for a late request, plus all on-time requests


class Usage(msgspec.Struct, frozen=True):
    """Token usage of one prompt's request, summed over its choices."""

    request_id: str
    tenant: str
    # Output tokens that engines computed for the request, all its beams included; 0 if its log has expired.
    generated: int
    delivered: int  # output tokens that were sent to a client
    new: int  # the part of `delivered` that no earlier call has counted


class Attached(msgspec.Struct, frozen=True):
    """The content of a request's log."""

    record: bytes  # the `record` of submit(); empty except for the first of a client's prompts
    choices: list[LoggedOutput]


class Quarantined(msgspec.Struct, frozen=True):
    """A request in quarantine, because engines that computed it died."""

    request: Generate
    attempts: int  # number of engines that died while they held it, at the same token
    logged_tokens: int  # its tokens in the log when it was quarantined, all choices together
    engine: str  # the last engine that died
    time_ms: int  # unix time when it was quarantined


class Claim(msgspec.Struct, frozen=True):
    """How prefix locality affected the claim of a request."""

    held_tokens: int = 0  # prompt tokens that the engine's prefix cache should hold
    passed_over: bool = False  # an engine with free capacity has claimed a later request first, or has left this one

    @property
    def reason(self) -> Literal["held", "waited", "none"]:
        """Label for metrics: "held", a prefix is cached here; "waited", none is and it was passed over; or "none"."""
        return "held" if self.held_tokens else "waited" if self.passed_over else "none"


class SyncReply(msgspec.Struct, frozen=True):
    """The reply to an engine's sync."""

    generates: list[Generate]  # claimed requests
    aborts: list[Abort]  # apply them after accepting `generates`: both may concern the same request
    # Ids of requests that another engine took over, or a client withdrew, after this engine's lease had lapsed.  Drop
    # them without a Delta and without `finished`.  Redis has ignored this sync's tokens of them.
    reassigned: list[str] = []
    # Request id -> output so far per choice, for claimed requests that an earlier engine has begun.  If an output
    # has no Finish, the choice's next Delta has `first` == len(token_ids) of it; else no further Delta may be sent.
    resumed: dict[str, list[LoggedOutput]] = {}
    claims: dict[str, Claim] = {}  # request id -> claim, without default ones: see claim()
    # Milliseconds after which the engine should sync again, because it left a request to another engine; 0: it left
    # none.
    retry_ms: int = 0
    reset_prefix_cache: bool = False  # the engine must empty its prefix cache before it starts further requests

    def claim(self, request_id: str) -> Claim:
        """Return how prefix locality affected the claim of a request."""
        return self.claims.get(request_id, Claim())
