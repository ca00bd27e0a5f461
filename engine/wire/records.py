"""What the two sides of the bus take and return.  None of these is sent: what crosses the wire is in `messages.py`."""

from __future__ import annotations

import msgspec

from engine.wire.messages import Abort, EngineLoad, Generate
from engine.wire.token_log import LoggedOutput


class TenantQueue(msgspec.Struct, frozen=True):
    """The state of a tenant that has something in the queue."""

    queued_tokens: int  # its prompt tokens that no engine has claimed yet
    counter: float  # virtual tokens served to it: the smallest counter goes first
    weight: float


class DuplicateRequest(msgspec.Struct, frozen=True):
    """The request that came first under an idempotency key."""

    request_id: str  # of the first of its prompts
    same_body: bool


class IdempotencyKey(msgspec.Struct, frozen=True):
    """The first request with this key is computed; every later one shares its answer."""

    key: str  # digest of the client's key and of the user it belongs to
    body: str  # digest of everything that must be equal for two requests to be the same


class Fleet(msgspec.Struct, frozen=True):
    """What a gateway knows about the engines with a live lease, and about the shared queue."""

    engines: list[EngineLoad]
    queued: int  # requests that no engine has claimed yet
    queued_tokens: int  # their prompt tokens, counted once for all continuations of a prompt
    time_ms: int  # unix time of this reading, on Redis' clock
    room_tokens: int = 0  # prompt tokens the engines would still claim; one silent for STALE_MS has none
    tenants: dict[str, TenantQueue] = {}  # those with something queued
    # Either Redis has not received a heartbeat of this gateway for long, so its requests may have other listeners.  Or
    # Redis may have lost data: it was restarted, or a replica was promoted, so its data has a new history.
    forgotten: bool = False
    oldest_ms: int = 0  # since the oldest waiting request was first queued
    quarantined: int = 0  # requests in the quarantine, because they killed their engines
    # Unix time of each engine's last exchange, on the clock of `time_ms`.  The engine's bus thread keeps it fresh while
    # a step runs.  EngineLoad.time_ms is the end of the last step.
    exchanged_ms: dict[str, int] = {}


class Queue(msgspec.Struct, frozen=True):
    """The queue right after a submit."""

    accepted: bool  # False: nothing was queued, it would have been too much
    queued: int
    queued_tokens: int
    room_tokens: int
    tenants: dict[str, TenantQueue]
    duplicate: DuplicateRequest | None = None  # nothing was queued: this request came first under the idempotency key


class Usage(msgspec.Struct, frozen=True):
    """What one prompt's request has used, all continuations together."""

    request_id: str
    tenant: str
    generated: int  # output tokens that engines produced for it, as far as its log is kept
    delivered: int  # of those, the tokens that were sent to a client
    new: int  # of those, the tokens that no earlier call had counted


class Attached(msgspec.Struct, frozen=True):
    """A request as its log has it."""

    record: bytes  # what submit() stored with it; empty except for the first of a client's prompts
    continuations: list[LoggedOutput]


class Quarantined(msgspec.Struct, frozen=True):
    """A request that killed its engine too often."""

    request: Generate
    attempts: int  # engines that died while they held it, at the same token
    logged_tokens: int  # its tokens in the log at the verdict, all continuations together
    engine: str  # the last engine that died
    time_ms: int  # unix time of the verdict


class RetryTerms(msgspec.Struct, frozen=True):
    """The terms on which a refused request gets a time to return."""

    pace: float  # prompt tokens that the engines start per second, > 0
    full_pace: float  # that they will start once they are as full as now, >= pace
    least_ms: int  # no promise is sooner
    most_ms: int  # no promise is later
    # Least share of the pace for requests that return, however many arrive for the first time: for the next promise,
    # and for one at most_ms.
    least_shares: tuple[float, float]


class ExchangeReply(msgspec.Struct, frozen=True):
    """What an engine receives in one exchange."""

    generates: list[Generate]
    aborts: list[Abort]  # carry these out after `generates` are accepted: both may concern the same request
    # Another engine took them over, or a client withdrew them, after this engine's lease had
    # lapsed.  Drop them without a Delta and without `finished`.  Redis ignored what this exchange reported of them.
    reassigned: list[str] = []
    # Every continuation so far of those `generates` that an earlier engine has begun, by id.  The next Delta of one
    # without a Finish has first == len(token_ids); one with a Finish sends nothing more.
    resumed: dict[str, list[LoggedOutput]] = {}
    audits: list[str] = []  # ids of audits: check the whole block accounting and call audited()
