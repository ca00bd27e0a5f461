"""Helpers of request handlers: work on threads, answers written in parts, a timeout for clients that stop reading."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import ParamSpec, TypeVar

from aiohttp import web

from quire.service.api.trace_context import TraceContext, traceparent, tracestate
from quire.service.common.work_threads import WorkThreads
from quire.service.config import GatewayConfig
from quire.service.delivery.streams import Streams
from quire.service.http.middleware import Capacity

P = ParamSpec("P")
T = TypeVar("T")

LAST_READ_S = 30.0  # seconds after the deadline for a client to read its answer; then its connection is closed
# A body of a larger weight (bodies.py) is parsed on a thread, which releases the GIL every GIL_SWITCH_S (app.py).  If
# 32 bodies of this weight arrive in one turn of the event loop (pacing.TURN_EVENTS), parsing takes up to 45 ms.
INLINE_BYTES = 16 * 1024
WRITE_BYTES = 256 * 1024  # bytes of a long answer that are written before other requests run


class RequestWork:
    """Long work for handlers: on threads, or in parts between which the event loop runs."""

    def __init__(self, config: GatewayConfig, streams: Streams, capacity: Capacity) -> None:
        self._config, self._streams, self._capacity = config, streams, capacity
        self._threads = WorkThreads(INLINE_BYTES, "parse")

    async def write(
        self, request: web.Request, parts: list[bytes], headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        """Send a JSON answer part by part, so that a long answer does not stall the event loop."""
        response = web.StreamResponse(headers=headers)
        response.content_type, response.content_length = "application/json", sum(map(len, parts))
        if self._capacity.draining:
            response.force_close()
        await response.prepare(request)
        for part in parts:
            for at in range(0, len(part), WRITE_BYTES):
                await response.write(part[at : at + WRITE_BYTES])
                await asyncio.sleep(0)
        await response.write_eof()
        return response

    async def offload(self, weight: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` for a request whose body has this `parse_weight`: inline up to INLINE_BYTES, else on a thread."""
        return await self._threads.run(weight, work, *args, **kwargs)

    def max_tokens(self) -> int:
        """Return the maximum prompt tokens of a request: `max_prompt_tokens` or the context length, the larger one."""
        return max(self._config.max_prompt_tokens, self._streams.fleet_watch.max_model_len or 0)


@contextlib.asynccontextmanager
async def cut_after(timeout_s: float) -> AsyncIterator[None]:
    """A context around writing an answer.

    Raises ConnectionResetError LAST_READ_S after `timeout_s`, because the client does not read."""
    try:
        async with asyncio.timeout(timeout_s + LAST_READ_S):
            yield
    except TimeoutError:
        raise ConnectionResetError("client does not read") from None


def trace_context(request: web.Request) -> TraceContext:
    """Return a request's `traceparent` and `tracestate`; both are empty if `traceparent` is not valid."""
    parent = traceparent(request.headers.get("traceparent", ""))
    state = tracestate(",".join(request.headers.getall("tracestate", ()))) if parent else ""
    return TraceContext(parent, state)
