"""Quotas of a tenant: each request takes tokens from buckets, or gets 429; the `x-ratelimit-*` headers show the rest.

    Answers.begin --hold--> quota_take.lua ----> admission and submit ----> answer
                                  |                     |                      '--> settle.lua returns unused tokens
                                  '-> OverQuota (429)   '-- refused: quota_return.lua returns all tokens

Redis keeps the buckets (`engine/wire/quotas.py`), which all gateways share.  A tenant without quotas costs no call.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from aiohttp import web

from quire.engine.wire.layout import QUOTA_MS
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import Generate
from quire.engine.wire.quotas import Buckets, Kind, Quota, Taken
from quire.service.api.tenants import OverQuota, Tenant
from quire.service.common.metrics import QUOTA_REFUSALS, Telemetry
from quire.service.common.refusal import Refusal
from quire.service.delivery.streams import AlreadySubmitted, Streams, unavailable

BUCKETS = web.RequestKey("buckets", Buckets)  # state of the buckets that this request's last script returned
CONCURRENT_RETRY_S = 1.0  # Retry-After at the concurrency limit; a guess, since running requests end at unknown times
NAMES: dict[Kind, str] = {
    "requests": "requests_per_minute",
    "tokens": "tokens_per_minute",
    "concurrent": "max_requests",
}


class Hold:
    """What one request took from its tenant's buckets."""

    def __init__(self) -> None:
        self.queued = False  # True once submitted: settle.lua then returns unused tokens at the request's end


class Quotas:
    """Takes requests and tokens from the buckets of tenants, and makes the headers that show what is left."""

    def __init__(self, streams: Streams, telemetry: Telemetry) -> None:
        self._streams, self._telemetry = streams, telemetry

    @contextlib.asynccontextmanager
    async def hold(
        self, request: web.Request, tenant: Tenant, submissions: Sequence[Generate], *, bounded: bool
    ) -> AsyncIterator[Hold]:
        """A context around submit and answer, in which the request counts as running.

        It takes the prompt's tokens plus the maximum output tokens from the buckets.  `bounded`: the client set
        `max_tokens`. If not, at most the complete quota is taken, and tokens generated beyond that are taken at the
        end.  Raises OverQuota, or Refusal(503) when Redis is away."""
        hold = Hold()
        if tenant.quota is None:
            yield hold
            return
        request_id = submissions[0].id.rpartition(".")[0]
        prompts = _prompts(tenant.quota, submissions, bounded=bounded)
        take = self._streams.quotas.take(tenant.name, tenant.quota, request_id, submissions[0].deadline_ms, prompts)
        taking = asyncio.ensure_future(self._taken(request, take))
        try:
            taken = await asyncio.shield(taking)
        except asyncio.CancelledError:  # the client left; Redis may still run the script, so wait for it, then undo it
            with contextlib.suppress(Refusal):
                await taking
            await self._restore(request, tenant.name, tenant.quota, request_id)
            raise
        self._check(tenant, tenant.quota, taken, prompts)
        try:
            yield hold
        except (Refusal, AlreadySubmitted):
            if not hold.queued:
                await self._restore(request, tenant.name, tenant.quota, request_id)
            raise

    async def take_repeat(self, request: web.Request, tenant: Tenant, request_id: str, tokens: int) -> None:
        """Charge the tenant for a stored answer that is sent again: one request and `tokens`.

        At most the complete token quota is taken.  Raises OverQuota, or Refusal(503) when Redis is away."""
        if tenant.quota is None:
            return
        limit = tenant.quota.tokens_per_minute
        tokens = tokens if limit is None else min(tokens, limit)
        repeat_id = f"{request_id} {secrets.token_hex(8)}"
        take = self._streams.quotas.take_repeat(tenant.name, tenant.quota, repeat_id, tokens)
        taken = await self._taken(request, take)
        self._check(tenant, tenant.quota, taken, [(tokens, 0)])

    async def count(self, request: web.Request, tenant: Tenant) -> None:
        """Count a request that needs no engine against `requests_per_minute`.  Raises OverQuota, or Refusal(503)."""
        await self.take_repeat(request, tenant, "", 0)

    async def _taken(self, request: web.Request, take: Coroutine[Any, Any, Taken]) -> Taken:
        if self._streams.trouble is not None:
            take.close()
            raise unavailable()
        try:
            taken = await take
        except BusDown:
            raise unavailable() from None
        request[BUCKETS] = taken.buckets
        return taken

    def _check(self, tenant: Tenant, quota: Quota, taken: Taken, prompts: list[tuple[int, int]]) -> None:
        if taken.used_up is not None:
            self._telemetry.count(QUOTA_REFUSALS, 1, self._telemetry.tenant_label(tenant.name), NAMES[taken.used_up])
            raise _refusal(quota, taken.used_up, taken, prompts)

    async def _restore(self, request: web.Request, tenant: str, quota: Quota, request_id: str) -> None:
        if self._streams.trouble is None:  # without Redis nothing is returned: the bucket refills within a minute
            with contextlib.suppress(BusDown):
                request[BUCKETS] = await self._streams.quotas.restore(tenant, quota, request_id)

    async def headers(self, request: web.Request, tenant: Tenant | None) -> dict[str, str]:
        """Return the `x-ratelimit-*` headers of an answer to this tenant; {} without quotas or while Redis is away."""
        if tenant is None or tenant.quota is None:
            return {}
        if BUCKETS not in request:
            if self._streams.trouble is not None:
                return {}
            try:
                request[BUCKETS] = await self._streams.quotas.look(tenant.name, tenant.quota)
            except BusDown:
                return {}
        return describe(request[BUCKETS])


def describe(buckets: Buckets) -> dict[str, str]:
    """Return OpenAI's `x-ratelimit-*` headers for the tenant's quotas per minute.

    The header `reset` is the time until the bucket is full again."""
    found = {}
    for name, limit, left, full_ms in (
        ("requests", buckets.quota.requests_per_minute, buckets.requests, buckets.requests_ms),
        ("tokens", buckets.quota.tokens_per_minute, buckets.tokens, buckets.tokens_ms),
    ):
        if limit is not None:
            found[f"x-ratelimit-limit-{name}"] = str(limit)
            found[f"x-ratelimit-remaining-{name}"] = str(left)
            found[f"x-ratelimit-reset-{name}"] = duration(full_ms)
    return found


def duration(ms: float) -> str:
    """Return a time in OpenAI's format, rounded up to ms: "0s", "17ms", "1.2s", "6m0s", "1h2m3s"."""
    whole = max(0, math.ceil(ms))
    if 0 < whole < 1000:
        return f"{whole}ms"
    minutes, rest = divmod(whole, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}s" if hours else f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def _prompts(quota: Quota, submissions: Sequence[Generate], *, bounded: bool) -> list[tuple[int, int]]:
    """Return (prompt tokens, maximum output tokens) of each prompt.

    Raises Refusal(400) if the request needs more tokens than a full bucket holds."""
    prompts = [(len(submission.token_ids), submission.width * submission.max_new_tokens) for submission in submissions]
    limit = quota.tokens_per_minute
    if limit is None:
        return prompts
    size, output = (sum(column) for column in zip(*prompts, strict=True))
    asked = size + output if bounded else size + sum(submission.width for submission in submissions)
    if asked > limit:
        message = f"prompt and max_tokens: this key may use {limit} tokens a minute, but {asked} were asked for at once"
        raise Refusal(400, "quota_exceeded_by_request", message, param="max_tokens", limit=limit, given=asked)
    if size + output <= limit:
        return prompts
    left = limit - size
    shares = [left * room // output for _, room in prompts]
    shares[0] += left - sum(shares)
    return [(tokens, share) for (tokens, _), share in zip(prompts, shares, strict=True)]


def _refusal(quota: Quota, kind: Kind, taken: Taken, prompts: list[tuple[int, int]]) -> OverQuota:
    name = NAMES[kind]
    limit = getattr(quota, name)
    if kind == "concurrent":
        message = f"{name}: this key may have {limit} requests at once, and has them"
        retry_s = CONCURRENT_RETRY_S
        given = limit + 1
    else:
        asked = 1 if kind == "requests" else sum(map(sum, prompts))
        left = taken.buckets.requests if kind == "requests" else taken.buckets.tokens
        retry_s = math.ceil(taken.wait_ms) / 1000
        unit = QUOTA_MS // 1000
        message = f"{name}: {limit} {kind} every {unit} s, {left} are left and {asked} asked for; retry in {retry_s} s"
        given = asked
    return OverQuota(429, "rate_limit_exceeded", message, limit=limit, given=given, retry_after_s=retry_s)
