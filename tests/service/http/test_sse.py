"""The stream as bytes on a socket: when headers leave, what a failure looks like before and after them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession, web

from quire.service.api import api
from quire.service.api.format import Format, Prompted
from quire.service.common.metrics import Telemetry
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.http import sse
from quire.service.http.meter import Meter
from quire.service.output.choice_delta import ChoiceDelta

Turns = list[list[ChoiceDelta] | Exception]


def piece(text: str, finish: str | None = None) -> ChoiceDelta:
    return ChoiceDelta(0, text, [1], finish=finish)


@pytest.fixture
async def stream(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[Turns], Awaitable[tuple[int, str]]]]:
    """`await stream(turns)`: the status and body a client gets when these turns are written; without event ids if the
    test passes False."""
    turns: Turns = []
    ids: bool = getattr(request, "param", True)

    async def pieces() -> AsyncIterator[list[ChoiceDelta]]:
        for turn in turns:
            if isinstance(turn, Exception):
                raise turn
            yield turn

    async def handle(request: web.Request) -> web.StreamResponse:
        valid = api.parse_completion(b'{"model": "m", "prompt": "a", "stream": true}', GatewayConfig(), "m", 600.0)
        form = Format(
            valid,
            request_id="r",
            model="m",
            created=1,
            fingerprint=None,
            prompts=[Prompted([1])],
            vocabulary=[],
            ids=ids,
        )
        try:
            return await sse.write(request, pieces(), form, Meter(Telemetry("g"), 0.0), lambda tokens: None)
        except Refusal as refusal:
            return web.Response(status=refusal.status, body=refusal.body())

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()

    async def get(given: Turns) -> tuple[int, str]:
        turns[:] = given
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{site.port}/") as response:
            return response.status, await response.text()

    yield get
    await runner.cleanup()


def data(body: str) -> list[Any]:
    found = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else msgspec.json.decode(line) for line in found]


async def test_frames_ids_comments_and_the_end(stream: Callable[[Turns], Awaitable[tuple[int, str]]]) -> None:
    status, body = await stream([[], [piece("a")], [], [piece("b"), piece("c", "length")]])
    assert status == 200
    assert body.startswith(": keep-alive\nid: r:1\ndata: {")
    assert body.count(": keep-alive\n") == 2
    assert body.endswith("data: [DONE]\n\n")
    assert [event["choices"][0]["text"] for event in data(body)[:-1]] == ["a", "b", "c"]
    assert [line for line in body.splitlines() if line.startswith("id: ")] == [
        "id: r:1",
        "id: r:2",
        "id: r:3:0",
        "id: r:3:done",
    ]
    assert all(frame.startswith((":", "id: ", "data: ")) for frame in body.split("\n\n")[:-1])


@pytest.mark.parametrize("stream", [False], indirect=True)
async def test_without_ids_every_line_is_data_or_blank(stream: Callable[[Turns], Awaitable[tuple[int, str]]]) -> None:
    status, body = await stream([[], [piece("a")], [], [], [piece("b", "length")], RuntimeError("broken")])
    assert status == 200
    assert body.startswith("\n\ndata: {")
    frames = body.split("\n\n")
    assert [bool(frame) for frame in frames] == [False, True, False, False, True, True, True, False]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames if frame)
    assert [event["choices"][0]["text"] for event in data(body)[:-2]] == ["a", "b"]


async def test_a_failure_before_anything_was_sent_has_its_status(
    stream: Callable[[Turns], Awaitable[tuple[int, str]]],
) -> None:
    status, body = await stream([Refusal(503, "no_engine", "nobody")])
    assert status == 503
    assert "nobody" in body


async def test_a_failure_after_that_is_an_event(stream: Callable[[Turns], Awaitable[tuple[int, str]]]) -> None:
    for error, code in ((Refusal(500, "engine_error", "broken"), "engine_error"), (KeyError("x"), "internal_error")):
        status, body = await stream([[piece("a")], error])
        assert status == 200
        _, failed, done = data(body)
        assert (failed["error"]["code"], done) == (code, "[DONE]")
