"""Server-sent events: headers, frames, keep-alives, and the end of a stream.

    data: {"id":"cmpl-5f0c", ...}    an event: one JSON document in one line
                                     blank line
                                     two more blank lines as a keep-alive, since proxies close idle connections
                                     (also while the request waits in the late lane)
    data: [DONE]

Many clients parse every non-empty line as an event, among them `vllm bench serve` and llmperf.  So `id:` lines and
comments are sent only to clients that ask for event ids:

    id: cmpl-5f0c:17                 position in the answer after this event: `position.Position`
    data: {"id":"cmpl-5f0c", ...}
                                     blank line
    : keep-alive                     if nothing was sent for a while
    : queued place=12 wait_s=8.3     while the request waits in the late lane

The HTTP headers are sent with the first token or the first keep-alive, so that an earlier failure gets a proper HTTP
status.  Only a request in the late lane (estimated wait over the TTFT target) gets headers and queue position at once.
Each handler waits only for its own socket, once WRITE_BUFFER_BYTES are buffered there.  Meanwhile new tokens merge in
the request's mailboxes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping

from aiohttp import web

from quire.service.api.format import AnswerFormat
from quire.service.common.pacing import Pacer
from quire.service.common.refusal import Refusal
from quire.service.delivery.open_request import HandedOver
from quire.service.delivery.queue_updates import Waiting
from quire.service.http.meter import Meter
from quire.service.output.choice_delta import ChoiceDelta

log = logging.getLogger("quire.gateway")

# No blank line follows it: after an id, OpenAI's client takes a single blank line for an event without data, and fails.
KEEP_ALIVE = b": keep-alive\n"
# Keep-alive for clients without event ids. It has two line ends, so a client that splits the stream at blank lines gets
# an empty part, and its next part still begins with `data: `.
BLANK_LINES = b"\n\n"
RETRY = b"retry: 100\n"  # milliseconds until a client reconnects after this gateway broke off the stream at shutdown
# Maximum bytes buffered for a slow client, besides one event: in asyncio's write buffer, and in the kernel.  The kernel
# doubles its value; by default it would buffer megabytes.  Further output waits as tokens, in a fiftieth of the memory.
WRITE_BUFFER_BYTES, SEND_BUFFER_BYTES = 16 * 1024, 32 * 1024
TURN_BYTES = 64 * 1024  # bytes of events built for one request before other requests run; 1 to 3 ms of work
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # without it nginx would buffer the events
}


async def write(
    request: web.Request,
    deltas: AsyncIterator[list[ChoiceDelta]],
    form: AnswerFormat,
    meter: Meter,
    sent: Callable[[list[int]], None],
    waiting: Waiting | None = None,
    *,
    silent: Callable[[], bool] = bool,
    pacer: Pacer | None = None,
) -> web.StreamResponse:
    """Stream an answer to its end.  Before each write, calls `sent` with the number of tokens sent, per choice.

    `waiting`: the request's queue position. `silent()`: whether a keep-alive is due because nothing was written for too
    long, even if tokens have arrived whose text is held back.

    Raises Refusal while nothing was sent; later errors are sent as an event.  Raises ConnectionError when the client
    has left.  Raises HandedOver, from `deltas`, when the client shall resume at another gateway.  The stream then
    breaks off without `[DONE]`, so that no client considers it complete."""
    response: web.StreamResponse | None = None
    try:
        async for changed in deltas:
            if response is None:
                response = await begin(request, _headers(form, waiting))
            for delta in changed:
                meter.record_delta(delta)
            data = await _chunks(form, changed)
            if data or ((not changed or silent()) and (data := form.idle() or _idle(waiting, comments=form.ids))):
                sent(form.tokens)  # before the write, since even a failed write may deliver a part of the data
                await response.write(data)
                await request.writer.drain()  # aiohttp by itself waits only after every 64 KiB
        if response is None:  # the client already has all deltas: it resumed after the last choice had ended
            response = await begin(request, _headers(form, waiting))
        await form.prepare_end(pacer or Pacer())
        last = form.usage_chunk() + form.done()
    except HandedOver:
        if response is None:
            raise Refusal(503, "shutting_down", "this gateway is shutting down", retry_after_s=1.0) from None
        await response.write(RETRY)
        raise
    except ConnectionError:
        raise
    except Exception as error:
        if response is None:
            raise
        if not isinstance(error, Refusal):
            log.exception("a stream failed; its client gets an error event")
            error = Refusal(500, "internal_error", "the gateway failed on this request")
        meter.fail(error)
        last = form.failure(error)
    await response.write(last)
    await response.write_eof()
    return response


async def _chunks(form: AnswerFormat, changed: list[ChoiceDelta]) -> bytes:
    """Return the events for new deltas.  Other requests run after every TURN_BYTES."""
    chunks, waiting = [], 0
    for delta in changed:
        await form.prepare(delta)
        chunks.append(form.chunk(delta))
        waiting += len(chunks[-1])
        if waiting > TURN_BYTES:
            waiting = 0
            await asyncio.sleep(0)
    return b"".join(chunks)


def _idle(waiting: Waiting | None, *, comments: bool) -> bytes:
    """Return the keep-alive of a stream: a comment (`comments`), or blank lines."""
    if not comments:
        return BLANK_LINES
    return KEEP_ALIVE if waiting is None or waiting.waited_s is not None else waiting.comment()


def _headers(form: AnswerFormat, waiting: Waiting | None) -> dict[str, str]:
    """Return the headers of an answer.

    They contain its id, so that a client can resume or cancel an answer before its first event."""
    return {"x-answer-id": form.request_id, **(waiting.headers() if waiting is not None else {})}


async def begin(request: web.Request, headers: Mapping[str, str] | None = None) -> web.StreamResponse:
    """Send the headers of a stream, and limit the send buffers of its socket."""
    if (transport := request.transport) is not None:
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    response = web.StreamResponse(headers={**HEADERS, **(headers or {})})
    await response.prepare(request)
    return response
