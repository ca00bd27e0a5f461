"""The small case of `rolling`: every process of a site is replaced under load, and no client notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pace import paced, patience
from tests.system.chaos.rolling import DRAIN_S, EXIT_S, Rollout, Update, rolling


@pytest.mark.system
@pytest.mark.usefixtures("warm_processes")
@pytest.mark.timeout(400)
async def test_every_process_is_replaced_in_time_and_no_other_stream_fails(tmp_path: Path) -> None:
    # Without a grace period every open resumable stream must be resumed.  Answers take 6 s.  A plain stream that is
    # longer than the drain is cut off when its gateway exits.
    drain_s = paced(2.0)
    found = await rolling(tmp_path, streams=12, tokens=600, step_ms=10.0, seed=2, grace_s=0.0, drain_s=drain_s)
    assert found.clean, found
    assert [update.what for update in found.updates] == ["nothing", "engine", "engine", "resuming", "plain"]
    assert all(len(update.gaps_s) == update.live > 0 for update in found.updates)
    assert found.tally.resumed > 0
    assert 0 <= 600 * found.tally.streams - found.tally.tokens <= 600 * found.updates[-1].cut


def test_an_error_of_any_kind_is_not_clean() -> None:
    def made(update: Update, **tally: int | list[str]) -> Rollout:
        rollout = Rollout([update])
        for name, value in tally.items():
            setattr(rollout.tally, name, value)
        return rollout

    sound = Update("engine", live=3)
    assert made(sound, tokens=10).clean
    for tally in ({"lost": 1}, {"repeated": 1}, {"wrong": 1}, {"with_gateway": 1}, {"failures": ["one"]}):
        assert not made(sound, **tally).clean
    assert not made(Update("engine", live=0)).clean
    assert made(Update("plain", live=3, exit_s=30.0, cut=2), with_gateway=2).clean
    assert not made(Update("plain", live=3, exit_s=30.0, cut=1), with_gateway=2).clean
    assert not made(Update("engine", live=3, cut=2), with_gateway=2).clean
    assert not made(Update("plain", live=3, exit_s=DRAIN_S + patience(EXIT_S) + 1)).clean
    assert not made(Update("engine", live=3, status=1)).clean
