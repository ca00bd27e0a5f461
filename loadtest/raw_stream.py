"""The cheapest reader of an answer: one socket, no HTTP client, no JSON.

Measurements of the gateway read 50,000 events per second on the same cores, where parsing would cost more than the
gateway itself.  All other measurements read streams by loadtest/replay.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from quire.loadtest.stats import gaps

HEAD = (
    b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
MARK = b"data: "


@dataclass
class RawStream:
    """One answer."""

    events: int = 0  # without [DONE]
    times: list[float] = field(default_factory=list)  # time.perf_counter() of reads that contained an event

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between reads.  A read returns one event, or several if the server was slow."""
        return gaps(self.times)


def encode_request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """Return the bytes of a complete HTTP request."""
    data = json.dumps(body).encode()
    return HEAD % (path.encode(), len(data)) + data


async def read_stream(port: int, request: bytes) -> RawStream:
    """Send `request` on a new connection and read the answer to its end.  Raises RuntimeError without a [DONE]."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    stream, tail = RawStream(), b""
    while block := await reader.read(1 << 16):
        joined = tail + block
        if events := joined.count(MARK) - tail.count(MARK):
            stream.events += events
            stream.times.append(time.perf_counter())
        tail = joined[-64:]
    writer.close()
    if b"[DONE]" not in tail:
        raise RuntimeError(f"a stream ended before its [DONE], with {tail.decode(errors='replace')!r}")
    stream.events -= 1
    return stream
