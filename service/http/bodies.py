"""Read request bodies, within limits on size, time, JSON values, and bytes of all bodies together.

    socket --64 KiB at a time--> unzip --> scan --> parts --> one `Body`, which counts as in flight until released

msgspec holds the GIL while it decodes, so only bodies that decode fast may be decoded.  Long strings decode fast: a few
milliseconds per MiB.  Many small values do not: 4 MiB of them take a second.  `Scan` counts the values while the body
arrives, and the body is refused as soon as it has too many.

The checks after decoding are even slower: 64 KiB of `{}` took 50 ms on the event loop.  So `parse_weight`, not the
length, decides whether a body is parsed on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator

from aiohttp import web

from quire.service.common.limits import STRUCTURES, VALUES, shown
from quire.service.common.refusal import Refusal, limit_refusal
from quire.service.common.work_threads import LONG_BYTES
from quire.service.config import GatewayConfig

FREE_BYTES = 16 * 1024  # bytes of each body that are not counted, so that large bodies never keep out small ones
PIECE_BYTES = 64 * 1024  # bytes that are unzipped and scanned at a time
# Weight of one small JSON value: it takes up to 3 us to parse, as much as this number of bytes of a long string.
VALUE_BYTES = 32


class Scan:
    """Counts the values of a JSON text that arrives in chunks.  The text need not be valid JSON."""

    __slots__ = ("_escaped", "_in_string", "structures", "values")

    def __init__(self) -> None:
        self.structures = 0  # strings, objects and arrays
        self.values = 0  # commas outside strings: the number of values minus one per non-empty object or array
        self._in_string = False
        self._escaped = False  # True if the last chunk ended with a backslash that escapes the next chunk's first byte

    def feed(self, data: bytes) -> None:
        """Count the values of the next chunk."""
        if b"\\" in data or self._escaped:
            if self._escaped:
                data = data[1:]
            # Once pairs of backslashes are removed, any other backslash escapes the character after it.
            data = data.replace(b"\\\\", b"")
            self._escaped = data.endswith(b"\\")
            data = data.replace(b'\\"', b"")
        quotes = data.count(b'"')
        if quotes > 2 * STRUCTURES:  # too many strings: the body will be refused
            self.structures += quotes // 2
            return
        parts = data.split(b'"')
        outside = b"".join(parts[1 if self._in_string else 0 :: 2])
        opened = (quotes + (not self._in_string)) // 2
        self._in_string ^= bool(quotes % 2)
        self.structures += opened + outside.count(b"{") + outside.count(b"[")
        self.values += outside.count(b",")


class Body:
    """A request's body.  Its bytes count as in flight until `release`."""

    __slots__ = ("_bodies", "_held", "data")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._held = bodies, 0
        self.data = b""

    def hold(self, total: int) -> None:
        """Count `total` bytes of this body as in flight.  Raises Refusal(503) beyond the limit for all bodies."""
        more = max(0, total - FREE_BYTES) - self._held
        self._bodies.reserve(more)
        self._held += more

    def release(self) -> None:
        """Free the body, and stop counting its bytes."""
        self._bodies.held -= self._held
        self._held, self.data = 0, b""


def parse_weight(data: bytes) -> int:
    """Return the cost of parsing a JSON body: the length of a plain string that takes equally long to parse.

    Values within strings count, too, since the arguments of a call are JSON in a string. A body of more than LONG_BYTES
    is parsed on a thread anyway, so its weight is its length."""
    if len(data) > LONG_BYTES:
        return len(data)
    values = data.count(b'"') // 2 + sum(map(data.count, (b"{", b"[", b",")))
    return len(data) + VALUE_BYTES * values


class Bodies:
    """All bodies that a gateway reads, or keeps until their request is queued."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._room = config.max_bodies_mib * 2**20
        self.held = 0  # bytes in flight

    def reserve(self, more: int) -> None:
        """Count `more` bytes as in flight.  Raises Refusal(503) beyond the limit for all bodies."""
        if self.held + more > self._room:
            message = f"the request bodies in flight are limited to {self._config.max_bodies_mib} MiB together"
            raise limit_refusal("bodies", message, self._room, retry_after_s=1.0)
        self.held += more

    @contextlib.asynccontextmanager
    async def read(self, request: web.Request, max_values: int = VALUES) -> AsyncIterator[Body]:
        """A context with the complete body, which is released at the context's end.

        `max_values`: maximum number of numbers, booleans and nulls in the body.  Raises Refusal: 400 for a broken
        transfer or too many values, 408 if the body is too slow, 413 if it is too long (before reading it, if its
        Content-Length is), 415 for an unknown encoding, 503 if all bodies together are too long."""
        body = Body(self)
        try:
            await self._fill(body, request, max_values)
            yield body
        finally:
            body.release()

    async def _fill(self, body: Body, request: web.Request, max_values: int) -> None:
        limit, seconds = self._config.max_body_bytes, self._config.body_timeout_s
        if (length := request.content_length) is not None and length > limit:
            raise _too_large(limit, length)
        require_json(request)
        scan, parts, total = Scan(), [], 0
        try:
            async with asyncio.timeout(seconds):
                async for part in _unzipped(request):
                    total += len(part)
                    if total > limit:
                        raise _too_large(limit, f"more than {limit}")
                    body.hold(total)
                    scan.feed(part)
                    _check(scan, max_values)
                    parts.append(part)
        except TimeoutError:
            message = f"body: must arrive within {seconds:g} s, got {total} bytes of it"
            raise limit_refusal("body time", message, seconds, param="body", given=total) from None
        except (web.RequestPayloadError, zlib.error):
            raise Refusal(
                400, "invalid_body", "body: its transfer or content encoding is broken", param="body"
            ) from None
        body.data = b"".join(parts)


def require_json(request: web.Request) -> None:
    """Raise Refusal(415) unless the Content-Type is application/json; parameters are ignored.

    A web page may send requests with some other types, or with none, to any site without a CORS preflight.  So a page
    could make a server on its visitor's own machine compute.  vLLM refuses such requests, too."""
    given = request.headers.get("Content-Type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        message = f"content-type: must be application/json, got '{shown(given)}'"
        raise Refusal(
            415, "unsupported_media_type", message, param="content-type", limit="application/json", given=shown(given)
        )


def _too_large(limit: int, given: int | str) -> Refusal:
    return limit_refusal("body", f"body: at most {limit} bytes, got {given}", limit, param="body", given=given)


def _check(scan: Scan, max_values: int) -> None:
    """Raise Refusal if the part of the body that has arrived has too many values."""
    for key, given, limit, what in (
        ("body structures", scan.structures, STRUCTURES, "strings, objects and lists"),
        ("body values", scan.values, max_values + STRUCTURES, "values"),
    ):
        if given > limit:
            message = f"body: at most {limit} {what}, got more than {limit}"
            raise limit_refusal(key, message, limit, param="body", given=f"more than {limit}")


async def _unzipped(request: web.Request) -> AsyncIterator[bytes]:
    """Yield the unzipped body as it arrives, in chunks of at most PIECE_BYTES.  The event loop runs between chunks."""
    unzip = _decompressor(request)
    while data := await request.content.readany():
        for at in range(0, len(data), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            if unzip is None:
                yield piece
            while unzip is not None and piece and not unzip.eof:
                yield unzip.decompress(piece, PIECE_BYTES)
                piece = unzip.unconsumed_tail
                await asyncio.sleep(0)
            await asyncio.sleep(0)
    if unzip is not None and not unzip.eof:
        raise zlib.error("the stream is incomplete")


def _decompressor(request: web.Request) -> zlib._Decompress | None:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        return None
    if encoding in ("gzip", "x-gzip"):
        return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    if encoding == "deflate":
        return zlib.decompressobj()
    allowed = "gzip, deflate or none"
    message = f"content-encoding: must be {allowed}, got '{encoding[:32]}'"
    raise Refusal(415, "unsupported_encoding", message, param="content-encoding", limit=allowed, given=encoding[:32])
