"""A short run of hostile answers inside faults; and that a client notices another text than undisturbed."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.system.chaos import hostile
from tests.system.chaos.faults import KINDS, Fault, Missed
from tests.system.chaos.mixed import Mixed, mixed, setting_of, table
from tests.system.chaos.readers import Doors
from tests.system.chaos.world import Server

ROUNDS = [[("kill connections", 0.2)], [("flush scripts", 0.0), ("cut clients", 0.3)]]


@pytest.mark.system
@pytest.mark.timeout(300)  # each wait inside has a limit of its own
async def test_no_fault_changes_a_hostile_answer(tmp_path: Path) -> None:
    found = Mixed(hostile.asks(1, 4, 60), 4, 1, print)
    rounds = ([Fault(kind, 0, dice) for kind, dice in each] for each in ROUNDS)
    # The limit on turns is generous: this machine may be slow.
    figures = await mixed(
        tmp_path, setting_of(4, 1, retain_s=20), rounds, found, notation="hermes", stall_s=0.5, say=print
    )
    print(table(figures))
    assert figures["clean"]
    assert figures["hostile_known"] == 4
    assert figures["hostile"]["answers"] > 4
    assert figures["looks_at_event_loops"] > 0


async def tally_of(answer: Callable[[web.Request], Awaitable[web.StreamResponse]], way: str) -> hostile.Tally:
    """Return what a client finds that expects "<tool>" from a server."""
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        doors = Doors(near=[], far=[str(server.make_url("")).rstrip("/")])
        known = hostile.Known(hostile.Ask("/v1/completions", {}), {(0, "content"): "<tool>"})
        tally = hostile.Tally()
        await hostile.Client(known, doors, "client", way, tally).run(session)
    return tally


@pytest.mark.parametrize(("parts", "failures"), [(["<t", "ool>"], 0), (["<t", "<t", "ool>"], 1), (["ool>"], 1)])
async def test_a_client_notices_what_is_lost_or_repeated(parts: list[str], failures: int) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for text in parts:
            event = {"choices": [{"index": 0, "text": text}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    tally = await tally_of(answer, "slow")
    assert len(tally.failures) == failures
    assert sum(tally.answers.values()) == 1 - failures


@pytest.mark.parametrize("kind", ["flush scripts", "kill connections"])
async def test_a_fault_beside_one_that_stops_redis_is_missed(kind: str, tmp_path: Path) -> None:
    """Faults of a round may meet."""
    server = Server(tmp_path)
    try:
        with pytest.raises(Missed):
            await KINDS[kind](SimpleNamespace(redis=server), Fault(kind, 0, 0.3))  # type: ignore[arg-type]
    finally:
        await server.close()


async def test_a_connection_that_breaks_after_the_last_event_loses_nothing() -> None:
    """The client resumes with the id of `[DONE]`, and gets 204."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if "Last-Event-ID" in request.headers:
            return web.Response(status=204)
        response = web.StreamResponse()
        await response.prepare(request)
        event = {"choices": [{"index": 0, "text": "<tool>"}]}
        await response.write(f"id: a:1\ndata: {json.dumps(event)}\n\nid: a:done\ndata: [DONE]\n\n".encode())
        assert request.transport is not None
        request.transport.close()
        return response

    tally = await tally_of(answer, "stream")
    assert not tally.failures
    assert sum(tally.answers.values()) == 1
    assert tally.resumed == 1
