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

LAST_READ_S = 30.0  # seconds after a request's deadline until the connection of a client that does not read is closed
# Maximum weight (bodies.parse_weight) of a body that is parsed on the event loop. If 32 such bodies arrive in one turn
# (pacing.TURN_EVENTS), parsing takes up to 45 ms. A thread parses others, and releases the GIL every GIL_SWITCH_S
# (app.py).
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
        """Call `work` for a body of this `parse_weight`: up to INLINE_BYTES on the event loop, else on a thread."""
        return await self._threads.run(weight, work, *args, **kwargs)

    def max_tokens(self) -> int:
        """Return the maximum prompt tokens of a request: the larger of `max_prompt_tokens` and the context length."""
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
