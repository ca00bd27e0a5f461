"""What enters the step loop and what leaves it: orders, tokens and reports.

    Inbox.drain() ==Generate, Resume, Abort, ResetPrefixCache==> Engine.turn ==Outputs, Report==> Outbox.put()
                      '-- Refused, Returned of a gate

The bus thread (`bus_thread.py`) is the inbox and outbox of a server, `LocalBox` that of a caller in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol

import msgspec

from quire.engine.core.limits import Outputs
from quire.engine.core.scheduler import Scheduler
from quire.engine.wire.clock import RedisClock
from quire.engine.wire.messages import Abort, Delta, EngineLoad, Generate
from quire.engine.wire.records import ANY_TOKENS


class Resume(msgspec.Struct, frozen=True):
    """A request that an earlier engine began."""

    request: Generate
    outputs: list[list[int] | None]  # tokens of each choice so far; None: that choice has ended


class Refused(msgspec.Struct, frozen=True):
    """A request that cannot be answered: its grammar cannot be followed."""

    request: Generate
    outputs: list[list[int] | None] | None  # as in Resume; None: no engine began it
    why: str  # one line for the client


class Returned(msgspec.Struct, frozen=True):
    """A request whose LoRA adapter is not on this machine: it goes back to the queue, for another engine."""

    request: Generate
    why: str  # one line for the client, if no other engine has the adapter


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Empty the prefix cache.  Requests that run keep their blocks."""


Order = Generate | Resume | Refused | Returned | Abort | ResetPrefixCache


class Inbox(Protocol):
    """The source of orders."""

    @property
    def relieved(self) -> bool:
        """Whether another engine can take over every request of this one."""

    @property
    def queued(self) -> int:
        """Requests that wait in the shared queue, this engine's share of them."""

    def drain(self, wait_s: float) -> Sequence[Order]:
        """Return everything that has arrived; wait up to `wait_s` seconds for the first order."""


class StepCosts(msgspec.Struct, frozen=True):
    """How long steps take, as measured; 0: not known."""

    token_s: float = 0.0  # seconds of a prompt token, on top of the step that computes it
    step_s: float = 0.0  # seconds of a step without prompts, with the sequences that run now
    load_s: float = 0.0  # seconds until one more LoRA adapter is in host memory
    loads: int = 0  # adapters that wait for their load


class Report(msgspec.Struct, frozen=True):
    """State of the engine after a turn."""

    load: EngineLoad
    room_tokens: int  # prompt tokens that the scheduler could start
    room_requests: int
    accepted: int  # requests taken from the inbox since start
    dropped: int = 0  # requests dropped since start because they were reassigned to another engine
    costs: StepCosts = StepCosts()
    # Of room_tokens, how many to claim at once; the prompt that exceeds them is the last one.
    claim_tokens: int = ANY_TOKENS


class Outbox(Protocol):
    """The receiver of tokens."""

    returns: bool  # whether it passes `Outputs.returned` on to a queue of several engines

    @property
    def full(self) -> bool:
        """Whether no more tokens may be generated for now."""

    def put(self, outputs: Outputs, report: Report) -> None:
        """Hand over the output of one turn.  Never blocks."""


class LocalBox:
    """Inbox and outbox in memory, for a caller in the same process."""

    relieved = full = returns = False
    queued = 0

    def __init__(self, on_delta: Callable[[Delta], None]) -> None:
        self.orders: list[Order] = []  # the caller appends, the engine takes
        self._on_delta = on_delta

    def drain(self, wait_s: float) -> list[Order]:
        orders, self.orders = self.orders, []
        return orders

    def put(self, outputs: Outputs, report: Report) -> None:
        for deltas in outputs.deltas.values():
            for delta in deltas:
                self._on_delta(delta)


def apply_order(core: Scheduler, order: Order) -> None:
    """Pass one order to the scheduler."""
    if isinstance(order, Generate):
        core.accept(order)
    elif isinstance(order, Resume):
        core.accept(order.request, order.outputs)
    elif isinstance(order, Refused):
        core.accept(order.request, order.outputs, fault=order.why)
    elif isinstance(order, ResetPrefixCache):
        core.reset_prefix_cache()
    elif isinstance(order, Returned):
        pass  # the scheduler has not seen it
    elif order.reassigned:
        core.drop(order.id)
    else:
        core.abort(order.id, order.index)


def request_of(order: Order) -> Generate | None:
    """Return the request that an order brings; None for one that brings none."""
    if isinstance(order, Abort | ResetPrefixCache):
        return None
    return order.request if isinstance(order, Resume | Refused | Returned) else order


def on_own_clock(request: Generate, clock: RedisClock) -> Generate:
    """Return a claimed request with its times converted from Redis' clock to this process's clock.

    The request keeps the seconds that it had when it was claimed, even if a machine's clock is set afterwards."""
    queued_ms = clock.local_ms(request.queued_ms) if request.queued_ms else 0
    return msgspec.structs.replace(request, deadline_ms=clock.local_ms(request.deadline_ms), queued_ms=queued_ms)


def without(outputs: Outputs, ids: Container[str]) -> Outputs:
    """Return the outputs of all other requests."""
    return Outputs(
        {gateway: [delta for delta in deltas if delta.id not in ids] for gateway, deltas in outputs.deltas.items()},
        [request_id for request_id in outputs.finished if request_id not in ids],
        returned={request_id: why for request_id, why in outputs.returned.items() if request_id not in ids},
    )


def merged(deltas: list[Delta]) -> list[Delta]:
    """Merge the deltas of several steps into one for each choice."""
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
