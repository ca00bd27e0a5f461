"""A failover under a running server, on every Redis and Valkey of the machine: streams go on, new requests are
answered, and engine and gateways are the same processes as before."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.system.chaos import run as chaos
from tests.system.chaos.faults import Fault
from tests.system.chaos.run import Setting, figures, run, table
from tests.system.chaos.world import World

pytestmark = [pytest.mark.system, pytest.mark.every_redis, pytest.mark.timeout(300)]
BACK_S = 5.0  # from the moment when the name leads to a master again to the next token of the last stream


@pytest.mark.parametrize(
    ("kind", "dice"),
    [
        ("demote redis", 0.0),
        ("failover", 0.2),  # the old master is killed
        ("failover", 0.6),  # it is demoted, and its connections stay open
    ],
    ids=["demoted and back", "killed", "demoted"],
)
async def test_streams_and_processes_outlive_a_failover(
    kind: str, dice: float, redis_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[list[psutil.Process]] = []
    one_round = chaos.one_round

    async def watched(stage: World, load: chaos.Load, faults: list[Fault]) -> chaos.Round:
        def children() -> list[psutil.Process]:
            return [child for module in ("engine", "service.app") for child in stage.machines[0].children(module)]

        before = children()
        found = await one_round(stage, load, faults)
        processes.extend((before, children()))
        return found

    monkeypatch.setattr(chaos, "one_round", watched)
    setting = Setting("scripted", 1, 8, (150, 300), seed=2, step_ms=20, between_s=(0.0, 0.1))
    report = await run(setting, [[Fault(kind, 0, dice)]], tmp_path, say=print, binary=redis_binary)
    print(table(figures(report)))
    assert report.clean, report.tally
    assert processes[0] == processes[1], "a process did not survive"
    [found] = report.rounds
    assert len(found.after_s) > 4
    assert max(found.after_s) < BACK_S
    assert report.tally.with_redis < report.tally.streams / 2
