"""Stored responses of /v1/responses, which clients may retrieve and continue: the client of response_*.lua.

    put()    ---> stores a new response or its next state, and evicts the holder's oldest responses
    get()    <--- one response; chain(): also the earlier responses that it continues
    drop()   ---> deletes a response
    renew()  <--> renews leases of background responses, and takes over the responses of dead gateways

A holder is a tenant, or an API key without a tenant.  For the keys see "Responses" in `redis/KEYS.md`.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.wire.quotas import RunScript
from quire.engine.wire.scripts import RESPONSE_DROP, RESPONSE_GET, RESPONSE_LEASE, RESPONSE_PUT

TAKEN = 16  # maximum responses that one renewal takes over


class StoredResponse(NamedTuple):
    """One stored response."""

    id: str
    input: bytes  # JSON: its own input items, without the items of earlier responses that it continues
    body: bytes  # JSON: the response
    ended: bool


class Chain(NamedTuple):
    """A response and the earlier responses that it continues, newest first."""

    found: list[StoredResponse]
    missing: str  # id of the response at which the chain was cut; "": the chain is complete


class Leases(NamedTuple):
    """The result of a renewal."""

    stopped: list[str]  # ids that do not run any more: deleted, cancelled or ended
    taken: list[tuple[str, str]]  # (id, holder) of responses that the caller runs from now on


class ResponseStore:
    """Stored responses of all holders.  Every method runs one script and raises BusDown after PATIENCE_S."""

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
        max_bytes: int,
        given: bytes | None = None,
        previous: str = "",
        lease_ms: int = 0,
    ) -> int:
        """Store a new response, or the next state of a response that has not ended.

        `given`: input of a new response; None: next state.  `max_bytes`: maximum of all responses of the holder.
        Returns the number of older responses evicted; -1: too large; -2: no unfinished response has this id."""
        new = int(given is not None)
        state = (holder, response_id, new, previous, given or b"", body, int(ended), ttl_ms, max_bytes, lease_ms)
        return int(await self._run(RESPONSE_PUT, *state))

    async def get(self, holder: str, response_id: str) -> StoredResponse | None:
        """Return a stored response; None: the API key `holder` has none with this id."""
        found, _ = await self._run(RESPONSE_GET, holder, response_id, 0, 0, 0)
        return _read(found[0]) if found else None

    async def chain(self, holder: str, response_id: str, *, max_bytes: int, ttl_ms: int) -> Chain:
        """Return a response and the earlier responses that it continues, and extend their lifetime to `ttl_ms`.

        The chain is cut at a missing response, or when more than `max_bytes` were read."""
        found, missing = await self._run(RESPONSE_GET, holder, response_id, 1, max_bytes, ttl_ms)
        return Chain([_read(one) for one in found], missing.decode())

    async def drop(self, holder: str, response_id: str) -> bool:
        """Delete a response.  Returns whether it existed."""
        return bool(await self._run(RESPONSE_DROP, holder, response_id))

    async def renew(self, lease_ms: int, running: list[str], most: int = TAKEN) -> Leases:
        """Renew the leases of the responses `running`, and take over at most `most` responses with a lapsed lease.

        With `lease_ms` 0 and `most` 0 another gateway may take over the responses in `running` at once."""
        stopped, taken = await self._run(RESPONSE_LEASE, lease_ms, most, *running)
        return Leases([one.decode() for one in stopped], [(one.decode(), holder.decode()) for one, holder in taken])


def _read(entry: list[bytes]) -> StoredResponse:
    return StoredResponse(entry[0].decode(), entry[1], entry[2], entry[3] == b"1")
