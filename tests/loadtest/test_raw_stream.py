"""The reader without a parser counts what the reader with one counts, however the bytes are cut."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.loadtest.raw_stream import encode_request, read_stream
from quire.loadtest.stats import Record
from quire.loadtest.studies.overhead import peak_concurrency
from tests.pace import patience

REQUEST = encode_request({"stream": True})


async def answered(blocks: list[bytes]) -> tuple[int, list[float]]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(len(REQUEST)) == REQUEST
        for block in blocks:
            writer.write(block)
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    async with server:
        stream = await asyncio.wait_for(read_stream(server.sockets[0].getsockname()[1], REQUEST), patience(10))
        assert len(stream.gaps_s) == len(stream.times) - 1
        return stream.events, stream.times


@settings(max_examples=15)
@given(st.integers(1, 6), st.data())
def test_events_are_counted_however_they_are_cut(count: int, data: st.DataObject) -> None:
    whole = b"HTTP/1.1 200 OK\r\n\r\n" + b'data: {"text": "x"}\n\n' * count + b"data: [DONE]\n\n0\r\n\r\n"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=6)))
    blocks = [whole[low:high] for low, high in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    events, times = asyncio.run(answered(blocks))
    assert events == count
    assert 1 <= len(times) <= len(blocks)


async def test_a_stream_without_its_end_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="before its"):
        await answered([b'data: {"text": "x"}\n\n'])


def test_peak_concurrency() -> None:
    spans = [(0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (3.5, 5.0)]
    assert peak_concurrency([Record(due, "x", 1, 1, end_s=end) for due, end in spans]) == 2
