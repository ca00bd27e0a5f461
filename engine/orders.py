"""What goes into the step loop and what leaves it: orders, tokens, reports."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol

import msgspec

from engine.core.limits import Outputs
from engine.wire.clock import RedisClock
from engine.wire.hot_prefix_store import Reuse
from engine.wire.messages import Abort, Delta, EngineLoad, Generate


class Resume(msgspec.Struct, frozen=True):
    """A request that an earlier engine began."""

    request: Generate
    outputs: list[list[int] | None]  # of each continuation so far; None: it is over


class Audit(msgspec.Struct, frozen=True):
    """Audit the books, all of them, and report what was found under this name."""

    name: str


Order = Generate | Resume | Abort


class Inbox(Protocol):
    """Where orders come from."""

    relieved: bool  # another engine would go on with all that is here

    def drain(self, wait_s: float) -> Sequence[Order | Audit]:
        """Everything that has arrived; waits up to `wait_s` seconds for the first."""


class Outbox(Protocol):
    """Where tokens go."""

    @property
    def full(self) -> bool:
        """No more of them for now."""

    def put(self, outputs: Outputs, report: Report) -> None:
        """Hand over what a turn said.  Never blocks."""


class Report(msgspec.Struct, frozen=True):
    """How the engine stands after a turn."""

    load: EngineLoad
    room_tokens: int  # prompt tokens it could start
    room_requests: int
    accepted: int  # requests taken from the inbox since start
    dropped: int = 0  # requests dropped since start because they are somebody else's now
    audited: tuple[tuple[str, str], ...] = ()  # audits that were ordered, by name: what was found, or ''
    reused: tuple[Reuse, ...] = ()  # prefixes found in the cache, every few seconds


class LocalBox:
    """Inbox and Outbox in memory, for a caller in the same process."""

    relieved = full = False

    def __init__(self, on_delta: Callable[[Delta], None]) -> None:
        self.orders: list[Order | Audit] = []  # what the caller wants done
        self._on_delta = on_delta

    def drain(self, wait_s: float) -> list[Order | Audit]:
        orders, self.orders = self.orders, []
        return orders

    def put(self, outputs: Outputs, report: Report) -> None:
        for said in outputs.deltas.values():
            for delta in said:
                self._on_delta(delta)


def on_own_clock(request: Generate, clock: RedisClock) -> Generate:
    """A claimed request with its times on this process's clock: whatever is done to any clock while it runs here, it
    has the seconds that it had at its claim."""
    queued_ms = clock.local_ms(request.queued_ms) if request.queued_ms else 0
    return msgspec.structs.replace(request, deadline_ms=clock.local_ms(request.deadline_ms), queued_ms=queued_ms)


def without(outputs: Outputs, ids: Container[str]) -> Outputs:
    return Outputs(
        {gateway: [delta for delta in said if delta.id not in ids] for gateway, said in outputs.deltas.items()},
        [request_id for request_id in outputs.finished if request_id not in ids],
    )


def merged(deltas: list[Delta]) -> list[Delta]:
    """One Delta for each continuation: what several steps said, when they go out together."""
    found: dict[tuple[str, int], Delta] = {}
    for delta in deltas:
        key = delta.id, delta.index
        before = found.get(key)
        if before is None:
            found[key] = delta
        else:
            probs = None if before.logprobs is None else before.logprobs + (delta.logprobs or [])
            found[key] = msgspec.structs.replace(
                before,
                token_ids=before.token_ids + delta.token_ids,
                finish=delta.finish,
                logprobs=delta.logprobs if before.logprobs is None else probs,
            )
    return list(found.values())
