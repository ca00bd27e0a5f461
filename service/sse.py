"""Server-sent events: headers, frames, keep-alives, and the end of a stream.

    id: cmpl-5f0c:17                 request id, output position (one for each choice, comma-separated)
    data: {"id":"cmpl-5f0c", ...}    a chunk
                                     blank line
    : keep-alive                     a comment, after a silence: proxies cut idle connections
    data: [DONE]

Headers wait for the first token or the first heartbeat, so that what fails before has a proper HTTP status.  Each
handler waits for its own socket only; meanwhile tokens merge in the request's mailbox.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

from aiohttp import web

from service.api import Format, Piece, Refusal
from service.telemetry import Meter

log = logging.getLogger("quire.gateway")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events
}


async def write(
    request: web.Request, pieces: AsyncIterator[list[Piece]], form: Format, meter: Meter
) -> web.StreamResponse:
    """Stream an answer to its end.  Raises Refusal while nothing has been sent, afterwards sends it as an event.
    Raises ConnectionError when the client has gone."""
    response: web.StreamResponse | None = None
    try:
        async for changed in pieces:
            if response is None:
                response = web.StreamResponse(headers=HEADERS)
                await response.prepare(request)
            for piece in changed:
                meter.note(piece)
            data = b"".join([form.chunk(piece) for piece in changed]) if changed else KEEP_ALIVE
            if data:
                await response.write(data)
        assert response is not None  # every choice ends with a piece
        last = form.usage_chunk()
    except ConnectionError:
        raise
    except Exception as error:
        if response is None:
            raise
        if not isinstance(error, Refusal):
            log.exception("a stream failed")
            error = Refusal(500, "internal_error", "the gateway failed on this request")
        meter.fail(error)
        last = b"data: %s\n\n" % error.body()
    await response.write(last + DONE)
    await response.write_eof()
    return response
