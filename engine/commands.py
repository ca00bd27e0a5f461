"""Inputs and outputs of the step loop: commands (control messages to the engine), tokens and reports.

    Inbox.drain() ==Generate, Resume, Abort, ResetPrefixCache==> Engine.turn ==Outputs, Report==> Outbox.put()
                      '-- Refused, Returned: made by a gate

The bus thread (`bus_thread.py`) is inbox and outbox of a server; `LocalBox` is both for a caller in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol

import msgspec

from quire.engine.core.limits import Outputs
from quire.engine.wire.clock import RedisClock
from quire.engine.wire.messages import Abort, Delta, EngineLoad, Generate
from quire.engine.wire.records import ANY_TOKENS


class Resume(msgspec.Struct, frozen=True):
    """Command to continue a request that an earlier engine began."""

    request: Generate
    outputs: list[list[int] | None]  # output tokens per choice so far; None: the choice has ended


class Refused(msgspec.Struct, frozen=True):
    """Command to end a request with an error, because its grammar or its adapter cannot be used."""

    request: Generate
    outputs: list[list[int] | None] | None  # as in Resume; None: no engine began it
    why: str  # one line for the client


class Returned(msgspec.Struct, frozen=True):
    """Command to return a request to the queue, for another engine: this one cannot use its LoRA adapter."""

    request: Generate
    why: str  # error line for the client, if no other engine has the adapter


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Command to empty the prefix cache.  Running requests keep their blocks."""


Command = Generate | Resume | Refused | Returned | Abort | ResetPrefixCache


class Inbox(Protocol):
    """The source of commands."""

    @property
    def relieved(self) -> bool:
        """Whether another engine can take over all requests of this engine."""

    @property
    def queued(self) -> int:
        """This engine's share of the requests that wait in the shared queue."""

    def drain(self, wait_s: float) -> Sequence[Command]:
        """Return all new commands; wait up to `wait_s` seconds for the first one."""


class StepCosts(msgspec.Struct, frozen=True):
    """Measured times of steps and adapter loads; 0: unknown."""

    token_s: float = 0.0  # seconds per prompt token, in addition to the decode-only step
    step_s: float = 0.0  # seconds of a decode-only step with the sequences that run now
    load_s: float = 0.0  # seconds until one more LoRA adapter is in host memory; negative: it takes no adapters
    loads: int = 0  # adapters that wait for their load


class Report(msgspec.Struct, frozen=True):
    """State of the engine after a turn."""

    load: EngineLoad
    free_tokens: int  # prompt tokens that the scheduler could start
    free_requests: int  # requests that the scheduler could start
    accepted: int  # requests taken from the inbox since start
    dropped: int = 0  # requests dropped since start because they were reassigned to another engine
    costs: StepCosts = StepCosts()
    # Prompt tokens to claim at once, at most free_tokens; the request that exceeds them is the last one claimed.
    claim_tokens: int = ANY_TOKENS
    # Prompt tokens of tenants below their share to claim at once: they start by preemption, even if free_tokens is 0.
    preempt_claim_tokens: int = ANY_TOKENS


class Outbox(Protocol):
    """The receiver of tokens."""

    returns: bool  # whether it can return requests (`Outputs.returned`) to a queue shared with other engines

    @property
    def full(self) -> bool:
        """Whether the outbox is full, so that the engine must not generate tokens for now."""

    def put(self, outputs: Outputs, report: Report) -> None:
        """Take the outputs and the report of one turn.  Never blocks."""


class LocalBox:
    """Inbox and outbox in memory, for a caller in the same process."""

    relieved = full = returns = False
    queued = 0

    def __init__(self, on_delta: Callable[[Delta], None]) -> None:
        self.commands: list[Command] = []  # the caller appends commands, the engine removes them
        self._on_delta = on_delta

    def drain(self, wait_s: float) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands

    def put(self, outputs: Outputs, report: Report) -> None:
        for deltas in outputs.deltas.values():
            for delta in deltas:
                self._on_delta(delta)


def request_of(command: Command) -> Generate | None:
    """Return the request that a command contains; None: the command contains no request."""
    if isinstance(command, Abort | ResetPrefixCache):
        return None
    return command.request if isinstance(command, Resume | Refused | Returned) else command


def on_own_clock(request: Generate, clock: RedisClock) -> Generate:
    """Convert the times of a claimed request from Redis' clock to this process's clock.

    So the remaining time until its deadline does not change if a machine's clock is set afterwards."""
    queued_ms = clock.local_ms(request.queued_ms) if request.queued_ms else 0
    return msgspec.structs.replace(request, deadline_ms=clock.local_ms(request.deadline_ms), queued_ms=queued_ms)


def without(outputs: Outputs, ids: Container[str]) -> Outputs:
    """Return the outputs without those of the requests `ids`."""
    return Outputs(
        {gateway: [delta for delta in deltas if delta.id not in ids] for gateway, deltas in outputs.deltas.items()},
        [request_id for request_id in outputs.finished if request_id not in ids],
        returned={request_id: why for request_id, why in outputs.returned.items() if request_id not in ids},
    )


def merged(deltas: list[Delta]) -> list[Delta]:
    """Merge the deltas of several steps into one delta per choice."""
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
