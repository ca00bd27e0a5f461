"""Responses that clients may retrieve and continue, in Redis: the client of the scripts response_*.lua.

    put()    ---> a new response, or its next state; the oldest of its holder are removed
    get()    <--- one response; chain(): with those that it continues
    drop()   ---> deleted
    renew()  <--> leases of those that run in the background, and those whose gateway has died

The keys: "Responses" in `redis/KEYS.md`.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.wire.quotas import RunScript
from quire.engine.wire.scripts import RESPONSE_DROP, RESPONSE_GET, RESPONSE_LEASE, RESPONSE_PUT

TAKEN = 16  # most responses that one renewal takes over


class StoredResponse(NamedTuple):
    """One response as it stands in Redis."""

    id: str
    input: bytes  # JSON: its own items, without those of responses that it continues
    body: bytes  # JSON: the response
    ended: bool


class Chain(NamedTuple):
    """A response and those that it continues, newest first."""

    found: list[StoredResponse]
    missing: str  # the one at which it ended early; "": it is complete


class Leases(NamedTuple):
    """The outcome of a renewal."""

    stopped: list[str]  # ids that do not run any more: deleted, cancelled or ended
    taken: list[tuple[str, str]]  # (id, holder) of those that the caller answers for from now on


class ResponseStore:
    """Stored responses of all holders.  Every method is one script and raises BusDown after PATIENCE_S."""

    def __init__(self, run_script: RunScript) -> None:
        self._run = run_script

    async def put(
        self,
        holder: str,
        response_id: str,
        body: bytes,
        *,
        ended: bool,
        ttl_ms: int,
        most_bytes: int,
        given: bytes | None = None,
        previous: str = "",
        lease_ms: int = 0,
    ) -> int:
        """Store a response (`given`: its input), or without `given` the next state of one that has not ended.

        `most_bytes`: of all responses of the holder.  Returns how many older ones were evicted; -1: too large; -2:
        there is none that has not ended."""
        new = int(given is not None)
        state = (holder, response_id, new, previous, given or b"", body, int(ended), ttl_ms, most_bytes, lease_ms)
        return int(await self._run(RESPONSE_PUT, *state))

    async def get(self, holder: str, response_id: str) -> StoredResponse | None:
        """Return a response; None if the holder has none of this id."""
        found, _ = await self._run(RESPONSE_GET, holder, response_id, 0, 0, 0)
        return _read(found[0]) if found else None

    async def chain(self, holder: str, response_id: str, *, most_bytes: int, ttl_ms: int) -> Chain:
        """Return a response and those that it continues, and keep them for `ttl_ms` more.

        It ends early where one is missing, or once more than `most_bytes` were read."""
        found, missing = await self._run(RESPONSE_GET, holder, response_id, 1, most_bytes, ttl_ms)
        return Chain([_read(one) for one in found], missing.decode())

    async def drop(self, holder: str, response_id: str) -> bool:
        """Delete a response.  Returns whether there was one."""
        return bool(await self._run(RESPONSE_DROP, holder, response_id))

    async def renew(self, lease_ms: int, running: list[str], most: int = TAKEN) -> Leases:
        """Renew the leases of `running`, and take over at most `most` responses whose lease has lapsed.

        With `lease_ms` 0 and `most` 0 another gateway may take over those in `running` at once."""
        stopped, taken = await self._run(RESPONSE_LEASE, lease_ms, most, *running)
        return Leases([one.decode() for one in stopped], [(one.decode(), holder.decode()) for one, holder in taken])


def _read(entry: list[bytes]) -> StoredResponse:
    return StoredResponse(entry[0].decode(), entry[1], entry[2], entry[3] == b"1")
