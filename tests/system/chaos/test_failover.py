"""A failover under a running server, on every Redis and Valkey of the machine: streams continue, new requests
are answered, and engine and gateways are the same processes as before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.system.chaos import run as chaos
from tests.system.chaos.faults import Fault
from tests.system.chaos.run import Setting, figures, run, table
from tests.system.chaos.world import GATEWAYS, World, until
from tests.system.processes import wait_until_ready

pytestmark = [pytest.mark.system, pytest.mark.every_redis, pytest.mark.timeout(300)]
STREAMS = 8
BACK_S = 5.0  # from the moment when the name leads to a master again to the next token of the last stream


ROUNDS = [
    ("demote redis", 0.0),
    ("failover", 0.2),  # the old master is killed
    ("failover", 0.6),  # it is demoted, and its connections stay open
    ("hand over redis", 0.5),  # by the command FAILOVER
]


async def test_streams_and_processes_outlive_failovers(
    redis_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[set[psutil.Process]] = []
    one_round = chaos.one_round

    async def watched(stage: World, load: chaos.Load, faults: list[Fault]) -> chaos.Round:
        def children() -> set[psutil.Process]:
            machine = stage.machines[0]
            return {*machine.children("quire.engine"), *machine.children("quire.service.app")}

        # Clients that were refused during the last fault retry after their Retry-After.
        assert await until(lambda: sum(reader.live for reader in load.readers) == STREAMS)
        before = children()
        found = await one_round(stage, load, faults)
        await asyncio.to_thread(wait_until_ready, stage.doors.near[0], BACK_S, gateways=GATEWAYS)
        processes.extend((before, children()))
        return found

    monkeypatch.setattr(chaos, "one_round", watched)
    setting = Setting("scripted", 1, STREAMS, (50, 200), seed=2, step_ms=20, between_s=(0.3, 0.5))
    rounds = [[Fault(kind, 0, dice)] for kind, dice in ROUNDS]
    report = await run(setting, rounds, tmp_path, say=print, binary=redis_binary)
    print(table(figures(report)))
    assert report.clean, report.tally
    # A spare engine joins them once it has been forked.
    assert all(processes[0] <= each for each in processes), "a process did not survive"
    assert report.tally.streams > STREAMS, "no new request was answered"
    for found in report.rounds:
        assert len(found.after_s) > STREAMS / 2
        assert max(found.after_s) < BACK_S, found.kind
    assert report.tally.with_redis < report.tally.streams / 2
