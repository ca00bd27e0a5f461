"""Quotas of a tenant, shared by all gateways: the client of quota_take.lua and quota_return.lua.

    take()  ---> takes requests, tokens and a concurrent request from the buckets; all or nothing, one script
    restore() -> gives everything back, if the request was not queued
    GatewaySide.settle() gives back the tokens that an ended request did not generate

For the algorithm and the keys see "Quotas" in `redis/KEYS.md`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from quire.engine.wire.layout import QUOTA_MS
from quire.engine.wire.scripts import QUOTA_RETURN, QUOTA_TAKE, Script

Kind = Literal["requests", "tokens", "concurrent"]


class Quota(msgspec.Struct, frozen=True):
    """Limits of one tenant; None: unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and output tokens
    max_requests: int | None = None  # concurrent requests


class Buckets(msgspec.Struct, frozen=True):
    """A tenant's per-minute quotas and how full their buckets are, at one moment."""

    quota: Quota
    requests_ms: float  # ms until the bucket of requests is full
    tokens_ms: float  # ms until the bucket of tokens is full

    @property
    def requests(self) -> int:
        """Number of requests that could be taken now; 0 without such a quota."""
        return _left(self.quota.requests_per_minute, self.requests_ms)

    @property
    def tokens(self) -> int:
        """Number of tokens that could be taken now; 0 without such a quota."""
        return _left(self.quota.tokens_per_minute, self.tokens_ms)


class Taken(msgspec.Struct, frozen=True):
    """The outcome of a take."""

    used_up: Kind | None  # the exhausted quota, in which case nothing was taken; None: everything was taken
    wait_ms: float  # ms until the exhausted bucket has enough; 0 for "concurrent"
    buckets: Buckets


class RunScript(Protocol):
    """A function that runs a script, and raises BusDown if the script does not succeed in time."""

    def __call__(self, script: Script, *args: bytes | str | int) -> Awaitable[Any]: ...


class QuotaStore:
    """Takes and gives back quotas in Redis.  Every method runs one script and raises BusDown after PATIENCE_S."""

    def __init__(self, run_script: RunScript) -> None:
        self._run = run_script

    async def take(
        self, tenant: str, quota: Quota, request_id: str, deadline_ms: int, prompts: Sequence[tuple[int, int]]
    ) -> Taken:
        """Take the maximum usage of a request from the quotas, all or nothing.  Repeated calls with the same id take it
        once.

        `request_id`: id of the client's request; the id of its prompt i ends with ".i".  `prompts`: (prompt tokens,
        maximum output tokens of all choices) per prompt."""
        return await self._take(tenant, quota, request_id, deadline_ms, *(count for pair in prompts for count in pair))

    async def take_repeat(self, tenant: str, quota: Quota, repeat_id: str, tokens: int) -> Taken:
        """Take one request and `tokens` for an answer that no engine computes, such as a stored answer sent again.

        Nothing is given back later."""
        return await self._take(tenant, quota, repeat_id, 0, tokens, 0, running=False)

    async def look(self, tenant: str, quota: Quota) -> Buckets:
        """Return the state of the buckets; takes nothing."""
        return (await self._take(tenant, quota, "", 0)).buckets

    async def restore(self, tenant: str, quota: Quota, request_id: str) -> Buckets:
        """Give back everything that a request took, because it was not queued.  Harmless when called twice."""
        requests_ms, tokens_ms = await self._run(QUOTA_RETURN, tenant, request_id)
        return Buckets(quota, float(requests_ms), float(tokens_ms))

    async def _take(
        self, tenant: str, quota: Quota, request_id: str, deadline_ms: int, *counts: int, running: bool = True
    ) -> Taken:
        given = (quota.requests_per_minute, quota.tokens_per_minute, quota.max_requests if running else "-")
        limits = ("" if limit is None else limit for limit in given)
        reply = await self._run(QUOTA_TAKE, tenant, *limits, request_id, deadline_ms, *counts)
        used_up, wait_ms, requests_ms, tokens_ms = reply
        return Taken(used_up.decode() or None, float(wait_ms), Buckets(quota, float(requests_ms), float(tokens_ms)))


def _left(limit: int | None, debt_ms: float) -> int:
    # Add a thousandth against rounding: the times are sums of doubles, and 2.9999 requests must count as 3.
    return max(0, int((QUOTA_MS - debt_ms) * limit / QUOTA_MS + 1e-3)) if limit else 0
