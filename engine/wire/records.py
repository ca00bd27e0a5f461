"""What the two sides of the bus take and return.  None of these is sent: what crosses the wire is in `messages.py`."""

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
    """The state of a tenant that has something in the queue."""

    queued_tokens: int  # its prompt tokens that no engine has claimed yet, of both lanes
    counter: float  # virtual tokens served to it: the smallest counter goes first
    weight: float
    late_tokens: int = 0  # those of `queued_tokens` in the late lane


class LaneQueue(msgspec.Struct, frozen=True):
    """What waits in one lane of the queue."""

    requests: int = 0
    tokens: int = 0  # their prompt tokens, counted once for all choices of a prompt
    oldest_ms: int = 0  # ms since the oldest was submitted
    tenants: int = 0  # number of tenants with requests queued in it


class QueueBounds(msgspec.Struct, frozen=True):
    """How full the queue may be for a request to join it.  The request itself counts in each bound.

    It joins the on-time lane if the tokens there, without larger requests of its tenant that it precedes, exceed the
    engines' free capacity by at most `on_time_excess`; else the late lane, if the tokens of both lanes exceed it by at
    most `late_excess`; else none."""

    on_time_excess: int = ANY_TOKENS  # prompt tokens
    late_excess: int = ANY_TOKENS  # prompt tokens
    target_ms: int = 3_600_000  # ms in the on-time lane after which a request moves to the late lane
    most_requests: int = 2**53  # limit of waiting requests, one per prompt
    most_bytes: int = 2**53  # limit of their payload bytes
    size_class: int = 0  # 0 to SIZE_CLASSES - 1: smaller ones are first in a tenant's on-time lane
    # What each prompt counts for in the queue besides its own tokens: the blocks that its beams take as they begin.
    extra_tokens: int = 0


class DuplicateRequest(msgspec.Struct, frozen=True):
    """The request that came first under an idempotency key."""

    request_id: str  # request id of its first prompt
    same_body: bool


class IdempotencyKey(msgspec.Struct, frozen=True):
    """The first request with this key is computed; every later one shares its answer."""

    key: str  # digest of the client's key and of the user it belongs to
    body: str  # digest of everything that must be equal for two requests to be the same


class Fleet(msgspec.Struct, frozen=True):
    """What a gateway knows about the engines with a live lease, and about the shared queue."""

    engines: list[EngineLoad]
    queued: int  # requests that no engine has claimed yet, of both lanes
    queued_tokens: int  # their prompt tokens, counted once for all choices of a prompt
    time_ms: int  # unix time of this reading, on Redis' clock
    room_tokens: int = 0  # prompt tokens the engines would still claim; one silent for STALE_MS has none
    tenants: dict[str, TenantQueue] = {}  # the next TENANTS_SHOWN of each lane
    # Attach to every open request again.  Either this gateway had to subscribe to its tokens again, so it may have
    # missed some.  Or Redis has not received a heartbeat of it for long, so its requests may have other listeners.  Or
    # Redis may have lost data: it was restarted, or a replica was promoted, so its data has a new history.
    forgotten: bool = False
    quarantined: int = 0  # requests in the quarantine, because they killed their engines
    # Unix time of each engine's last sync, on the clock of `time_ms`.  The engine's bus thread keeps it fresh while
    # a step runs.  EngineLoad.time_ms is the end of the last step.
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
    room_tokens: int
    tenants: dict[str, TenantQueue]  # only the request's own, if it has requests queued
    on_time: LaneQueue = LaneQueue()
    late: LaneQueue = LaneQueue()
    lane: Lane | None = None  # lane the request joined; None: nothing was queued, because it exceeded the limits
    ahead: int = 0  # requests that waited ahead of it
    full: bool = False  # nothing was queued: as many requests or bytes wait as may wait
    duplicate: DuplicateRequest | None = None  # nothing was queued: this request came first under the idempotency key

    @property
    def accepted(self) -> bool:
        """Whether the request was queued."""
        return self.lane is not None


class Place(msgspec.Struct, frozen=True):
    """The queue position of a waiting request."""

    lane: Lane
    ahead: int  # requests that were submitted before it and are claimed before it, if it is the only tenant


class Usage(msgspec.Struct, frozen=True):
    """Token usage of one prompt's request, summed over its choices."""

    request_id: str
    tenant: str
    # Output tokens that engines produced for it, those of all its beams included, as far as its log is kept.
    generated: int
    delivered: int  # tokens of `generated` that were sent to a client
    new: int  # tokens of `delivered` that no earlier call had counted


class Attached(msgspec.Struct, frozen=True):
    """A request as its log has it."""

    record: bytes  # what submit() stored with it; empty except for the first of a client's prompts
    continuations: list[LoggedOutput]


class Quarantined(msgspec.Struct, frozen=True):
    """A request that killed its engine too often."""

    request: Generate
    attempts: int  # engines that died while they held it, at the same token
    logged_tokens: int  # its tokens in the log at the verdict, summed over its choices
    engine: str  # the last engine that died
    time_ms: int  # unix time of the verdict


class Claim(msgspec.Struct, frozen=True):
    """Why an engine got a request."""

    held_tokens: int = 0  # prompt tokens that its prefix cache should hold
    passed_over: bool = (
        False  # an engine with free capacity has claimed another request first, or has left this one to another engine
    )

    @property
    def reason(self) -> Literal["held", "waited", "none"]:
        """What the metrics count: its prefix is held here; nothing is held, and it was passed over; or neither."""
        return "held" if self.held_tokens else "waited" if self.passed_over else "none"


class ExchangeReply(msgspec.Struct, frozen=True):
    """What an engine receives in one sync."""

    generates: list[Generate]
    aborts: list[Abort]  # carry these out after `generates` are accepted: both may concern the same request
    # Another engine took them over, or a client withdrew them, after this engine's lease had lapsed.  Drop them without
    # a Delta and without `finished`.  Redis ignored what this sync reported of them.
    reassigned: list[str] = []
    # Every choice so far of those `generates` that an earlier engine has begun, by id.  The next Delta of one
    # without a Finish has first == len(token_ids); one with a Finish sends nothing more.
    resumed: dict[str, list[LoggedOutput]] = {}
    claims: dict[str, Claim] = {}  # reasons by request id, for `generates` that have one: see claim()
    # Milliseconds after which the engine should ask again, because it has left a request to another one; 0: none.
    retry_ms: int = 0
    reset_prefix_cache: bool = False  # no request accepted from now on may find a block that is cached already

    def claim(self, request_id: str) -> Claim:
        """Return why this engine got a request."""
        return self.claims.get(request_id, Claim())
