"""Server-sent events: headers, frames, keep-alives, and the end of a stream.

    data: {"id":"cmpl-5f0c", ...}    a chunk, in one line
                                     blank line
                                     two more after a silence, since proxies cut idle connections
                                     also while the request waits in the late lane
    data: [DONE]

Many readers take every non-empty line for an event, `vllm bench serve` and llmperf among them.  So ids and
comments are only for clients that ask for ids:

    id: cmpl-5f0c:17                 how much of the answer the reader has after this event: `position.Position`
    data: {"id":"cmpl-5f0c", ...}
                                     blank line
    : keep-alive                     after a silence
    : queued place=12 wait_s=8.3     while the request waits in the late lane

Headers wait for the first token or the first heartbeat, so that an earlier failure has a proper HTTP status.  A late
request does not wait: its headers and its place in the queue are sent at once.  Each handler waits only for its own
socket, once WRITE_BUFFER_BYTES are buffered there.  Meanwhile tokens merge in the request's mailboxes.
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
from quire.service.output.pieces import Piece

log = logging.getLogger("quire.gateway")

# No blank line follows: after an id, OpenAI's client reads a lone blank line as an event without data, and fails.
KEEP_ALIVE = b": keep-alive\n"
# For readers without ids.  Two line ends: a reader that splits at blank lines finds an empty part, and the next part
# still begins with `data: `.
BLANK_LINES = b"\n\n"
RETRY = b"retry: 100\n"  # milliseconds before a reader that was handed over asks again
# How much a socket may buffer for a slow reader, plus one event: in this process, and in the kernel, which doubles the
# value and would buffer megabytes by itself.  The rest waits as tokens, which take a fiftieth of the space.
WRITE_BUFFER_BYTES, SEND_BUFFER_BYTES = 16 * 1024, 32 * 1024
TURN_BYTES = 64 * 1024  # bytes of one request's events that are built before other requests run: 1 to 3 ms
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # or nginx would buffer the events
}


async def write(
    request: web.Request,
    pieces: AsyncIterator[list[Piece]],
    form: AnswerFormat,
    meter: Meter,
    sent: Callable[[list[int]], None],
    waiting: Waiting | None = None,
    *,
    silent: Callable[[], bool] = bool,
    pacer: Pacer | None = None,
) -> web.StreamResponse:
    """Stream an answer to its end.  Calls `sent` with the tokens of each choice that were sent so far.

    `waiting`: where the request stands in the queue.  `silent()`: whether the client was sent nothing for too long.
    Tokens may arrive meanwhile, whose text is held back.

    Raises Refusal while nothing was sent; later it sends the error as an event.  Raises ConnectionError when the client
    has left.  Raises HandedOver, which `pieces` raises, when the client shall resume elsewhere: the stream breaks off,
    so that no reader takes it for complete."""
    response: web.StreamResponse | None = None
    try:
        async for changed in pieces:
            if response is None:
                response = await begin(request, _headers(form, waiting))
            for piece in changed:
                meter.record_piece(piece)
            data = await _chunks(form, changed)
            if data or ((not changed or silent()) and (data := form.idle() or _idle(waiting, comments=form.ids))):
                sent(form.tokens)  # before the write: if it fails, a part may have arrived
                await response.write(data)
                await request.writer.drain()  # aiohttp checks the buffer only every 64 KiB
        if response is None:  # resumed after the last choice had ended
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


async def _chunks(form: AnswerFormat, changed: list[Piece]) -> bytes:
    """Return the events of what is new.  Other requests run after every TURN_BYTES."""
    chunks, waiting = [], 0
    for piece in changed:
        await form.prepare(piece)
        chunks.append(form.chunk(piece))
        waiting += len(chunks[-1])
        if waiting > TURN_BYTES:
            waiting = 0
            await asyncio.sleep(0)
    return b"".join(chunks)


def _idle(waiting: Waiting | None, *, comments: bool) -> bytes:
    """Return what a silent stream sends."""
    if not comments:
        return BLANK_LINES
    return KEEP_ALIVE if waiting is None or waiting.waited_s is not None else waiting.comment()


def _headers(form: AnswerFormat, waiting: Waiting | None) -> dict[str, str]:
    """Return the headers of an answer.

    Its id comes before the first event, so that a client can resume or cancel an answer that still waits."""
    return {"x-answer-id": form.request_id, **(waiting.headers() if waiting is not None else {})}


async def begin(request: web.Request, headers: Mapping[str, str] | None = None) -> web.StreamResponse:
    """Send the headers of a stream.  Its socket buffers no more than a slow reader needs."""
    if (transport := request.transport) is not None:
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    response = web.StreamResponse(headers={**HEADERS, **(headers or {})})
    await response.prepare(request)
    return response
