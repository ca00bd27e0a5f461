"""Every Redis key, command, script, TTL and retry of Quire: the two ends of the bus, next to each other."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from engine.wire.messages import EngineLoad, Generate, TokenBatch


class BusDown(Exception):
    """Redis cannot be reached or refuses writes; says which and for how long, in one line."""


class Fleet(msgspec.Struct, frozen=True):
    """What a gateway knows about the engines: those with a live lease, and the shared queue."""

    engines: list[EngineLoad]
    queued: int  # requests nobody has claimed yet
    queued_tokens: int  # their prompt tokens, times nothing: siblings share the prompt
    time_ms: int  # unix time of this reading


class Claimed(msgspec.Struct, frozen=True):
    """What one exchange brought an engine."""

    generates: list[Generate]
    aborts: list[str]


class GatewaySide:
    """One gateway's end.  All methods belong to one asyncio loop."""

    def __init__(self, url: str, gateway: str, *, namespace: str = "quire") -> None:
        raise NotImplementedError

    async def open(self) -> None:
        """Connect, register.  Raises BusDown."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def submit(self, request: Generate) -> None:
        """Put a request at the end of the shared queue, durably, and ring the engines.  Raises BusDown: not queued."""
        raise NotImplementedError

    async def cancel(self, request_id: str) -> None:
        """Withdraw: an unclaimed request leaves the queue, a claimed one gets an Abort at its engine.  Idempotent."""
        raise NotImplementedError

    def batches(self) -> AsyncIterator[TokenBatch]:
        """Every TokenBatch for this gateway, in order, for ever; reconnects by itself and loses none."""
        raise NotImplementedError

    async def fleet(self) -> Fleet:
        """Read the fleet in one round trip, and put what engines with lapsed leases held back at the queue's head."""
        raise NotImplementedError


class EngineSide:
    """One engine's end.  All methods belong to one asyncio loop (the loop's I/O thread)."""

    def __init__(self, url: str, engine: str, *, namespace: str = "quire", lease_ms: int = 5000) -> None:
        raise NotImplementedError

    async def open(self) -> None:
        """Connect, register.  Raises BusDown."""
        raise NotImplementedError

    async def close(self) -> None:
        """Give the lease up; whatever is still held goes back to the queue's head."""
        raise NotImplementedError

    async def exchange(
        self,
        batches: list[tuple[str, TokenBatch]],
        finished: list[str],
        load: EngineLoad,
        room_tokens: int,
        room_requests: int,
    ) -> Claimed:
        """One round trip: append each (gateway, batch) to its stream, forget `finished` requests, renew the lease
        with `load`, claim from the queue's head while prompts fit `room_tokens` and `room_requests` (0 claims none),
        and take the aborts waiting here.  Retries with backoff while Redis is away, never loses or repeats a batch."""
        raise NotImplementedError

    async def bell(self) -> None:
        """Return when there may be something to claim or an abort to take; spurious returns are fine."""
        raise NotImplementedError
