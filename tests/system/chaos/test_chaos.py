"""The short run of chaos: every kind of fault in twenty seconds; and that its oracle can say no."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.system.chaos.faults import KINDS, Fault, schedule
from tests.system.chaos.readers import Doors, Reader, Request
from tests.system.chaos.run import Setting, figures, run, table

# Kinds with their dice: how long, or which of two.  The slow ones share a round.
ROUNDS = [
    [("kill engine", 0.0), ("freeze gateway", 0.0)],
    [("restart redis", 0.1)],
    [("flush scripts", 0.0), ("kill connections", 0.2)],
    [("kill connections", 0.8)],
    [("freeze engine", 0.1)],
    [("fill redis", 0.3), ("cut clients", 0.3)],
    [("cut redis", 0.1)],
    [("delay redis", 0.5), ("delay clients", 0.5)],
    [("freeze redis", 0.1)],
    [("demote redis", 0.0)],
    [("failover", 0.2)],
    [("failover", 0.8)],
    [("hand over redis", 0.2)],
    [("kill gateway", 0.6)],
]


@pytest.mark.system
@pytest.mark.timeout(300)  # each wait inside has a limit of its own
async def test_no_fault_loses_or_repeats_a_token(tmp_path: Path) -> None:
    rounds = [[Fault(kind, 0, dice) for kind, dice in each] for each in ROUNDS]
    assert {fault.kind for each in rounds for fault in each} == KINDS.keys()
    setting = Setting("scripted", 1, 12, (50, 300), seed=1, step_ms=10, between_s=(0.0, 0.1))
    report = await run(setting, rounds, tmp_path, say=print)
    print(table(figures(report)))
    assert report.clean, report.tally
    assert not any("missed" in one.kind for one in report.rounds)
    assert sum(len(one.pauses_s) for one in report.rounds) > 3 * len(ROUNDS), "the faults met hardly any stream"
    assert report.tally.resumed > 0
    assert report.tally.tokens > 5_000


def test_a_schedule_is_its_seed_and_brings_every_kind_before_any_again() -> None:
    def kinds(seed: int) -> list[Fault]:
        return [fault for each in itertools.islice(schedule(list(KINDS), seed, 2), 4 * len(KINDS)) for fault in each]

    assert kinds(3) == kinds(3) != kinds(4)
    for at in range(0, 3 * len(KINDS), len(KINDS)):
        assert {fault.kind for fault in kinds(3)[at : at + len(KINDS)]} == KINDS.keys()


Event = tuple[int, list[int]]  # position behind it, token ids


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([[(2, [0, 1]), (4, [2, 3])]], {}),
        ([[(2, [0, 1]), (4, [3])]], {"lost": 1}),
        ([[(2, [0, 1])]], {"lost": 2}),
        ([[(2, [0, 1]), (3, [1, 2]), (4, [3])]], {"repeated": 1}),
        ([[(2, [0, 1]), (4, [2, 2])]], {"wrong": 1}),
        ([[(2, [0, 1]), (5, [2, 3, 4])]], {"wrong": 1}),
        ([[(2, [0, 1])], [(4, [2, 3])]], {"resumed": 1}),
        ([[(2, [0, 1])], [(4, [1, 2, 3])]], {"resumed": 1, "repeated": 1}),
        ([[(2, [0, 1])], [(4, [3])]], {"resumed": 1, "lost": 1}),
    ],
)
async def test_a_reader_counts_what_is_lost_repeated_or_wrong(said: list[list[Event]], found: dict[str, int]) -> None:
    """`said`: the events of one connection after the other; all but the last break off."""
    name, connections = f"cmpl-{0:032x}", iter(said)

    async def answer(request: web.Request) -> web.StreamResponse:
        events = next(connections)
        response = web.StreamResponse()
        await response.prepare(request)

        async def send(stage: str, position: int, data: dict[str, object] | str) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            await response.write(f"id: {name}:{position}{stage}\ndata: {text}\n\n".encode())

        for position, ids in events:
            await send("", position, {"choices": [{"index": 0, "token_ids": ids, "finish_reason": None}]})
        if events is not said[-1]:
            assert request.transport is not None
            request.transport.close()
            return response
        await send(":0", events[-1][0], {"choices": [{"index": 0, "token_ids": [], "finish_reason": "length"}]})
        await send(":usage", events[-1][0], {"choices": [], "usage": {"completion_tokens": 4}})
        await send(":done", events[-1][0], "[DONE]")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        doors = Doors(near=[], far=[str(server.make_url("")).rstrip("/")])
        reader = Reader(Request({}, [[0, 1, 2, 3]]), doors, "client", 0, resumable=True)
        tally = await reader.read(session)
    assert not tally.failures
    counts = {name: getattr(tally, name) for name in ("lost", "repeated", "wrong", "resumed")}
    assert {name: count for name, count in counts.items() if count} == found


@pytest.mark.parametrize("when", ["before", "goes on", "during"])
async def test_only_a_failover_that_the_stream_has_seen_excuses_an_unknown_answer(when: str) -> None:
    """A request that Redis has lost is unknown to the gateway at which its client resumes."""
    name, doors = f"cmpl-{0:032x}", Doors(near=[], far=[])
    failover = doors.failing_over()
    if when != "during":
        failover.__enter__()
    if when == "before":
        failover.__exit__(None, None, None)

    async def answer(request: web.Request) -> web.StreamResponse:
        if "Last-Event-ID" in request.headers:
            return web.json_response({"error": {"code": "stream_not_found"}}, status=404)
        if when == "goes on":
            failover.__exit__(None, None, None)
        elif when == "during":
            failover.__enter__()
        response = web.StreamResponse()
        await response.prepare(request)
        event = {"choices": [{"index": 0, "token_ids": [0], "finish_reason": None}]}
        await response.write(f"id: {name}:1\ndata: {json.dumps(event)}\n\n".encode())
        assert request.transport is not None
        request.transport.close()
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        doors.far.append(str(server.make_url("")).rstrip("/"))
        tally = await Reader(Request({}, [[0, 1]]), doors, "client", 0, resumable=True).read(session)
    assert (tally.with_redis, len(tally.failures)) == ((0, 1) if when == "before" else (1, 0))
