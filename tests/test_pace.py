"""Waits of tests follow the machine: what pace.py measures, and which failures run again (verdicts.py)."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import pace

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine as fast as the one that tests name their seconds for, and without pauses."""
    monkeypatch.setattr(pace, "slowness", lambda: 1.0)
    monkeypatch.setattr(pace, "_longest_pause", lambda: 0.0)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({}, math.inf),
    ],
)
def test_cores_are_those_of_affinity_and_quota(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert pace.cores(tmp_path) == min(quota, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("cores", "workers"), [(0.5, 2), (1, 2), (2, 3), (4, 6), (64, 16)])
def test_workers_follow_the_cores(monkeypatch: pytest.MonkeyPatch, cores: float, workers: int) -> None:
    monkeypatch.setattr(pace, "cores", lambda: cores)
    assert pace.workers() == workers


def test_a_bound_grows_with_the_machine_and_its_pauses(monkeypatch: pytest.MonkeyPatch, even: None) -> None:
    bound, lease = pace.patience(60), pace.paced_ms(500)
    assert (bound, lease) == (180, 500)
    monkeypatch.setattr(pace, "slowness", lambda: 4.0)
    monkeypatch.setattr(pace, "_longest_pause", lambda: 7.0)
    assert pace.patience(60) > 4 * bound
    assert pace.paced_ms(500) == 9000  # no lease lapses because of such a pause


@pytest.mark.usefixtures("even")
def test_time_that_stands_still_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    bound = pace.Patience(10)
    for _ in range(29):
        now += 100.0  # between two polls
        assert bound.lasts()
    now += 100.0
    assert not bound.lasts()


@pytest.mark.usefixtures("even")
async def test_waits_end_with_the_reason() -> None:
    turns = iter(range(100))
    pace.wait_until(lambda: next(turns) == 3, poll_s=0)
    await pace.until(lambda: next(turns) == 6, poll_s=0)
    with pytest.raises(AssertionError, match="not true after 0 s: seven"):
        pace.wait_until(lambda: False, 0.0, why=lambda: "seven")
    with pytest.raises(AssertionError, match="not true after 0 s: eight"):
        await asyncio.create_task(pace.until(lambda: False, 0.0, why=lambda: "eight"))


STOOD_STILL = """
import os, signal, time
import pytest
from tests import pace

tries, setups = 0, 0


def stand_still():
    witness, before = pace._witness()._process.pid, pace.stood_still(0.0)
    os.kill(witness, signal.SIGSTOP)
    time.sleep(1.2)
    os.kill(witness, signal.SIGCONT)
    pace.wait_until(lambda: pace.stood_still(0.0) > before)


@pytest.fixture(scope="module")
def shared():
    global setups
    setups += 1
    if setups == 1:
        stand_still()
        raise RuntimeError("the server did not start")
    return setups


def test_set_up_again(shared):
    assert shared > 1


def test_paused():
    global tries
    tries += 1
    if tries < 3:
        stand_still()
    assert tries == 3


def test_wrong_whatever_the_machine_does():
    stand_still()
    assert False, "wrong"


def test_wrong():
    global tries
    tries += 1
    assert tries == 100, f"wrong at once: {tries}"


@pytest.mark.timeout(0.01)
def test_hangs():
    time.sleep(1000)
"""


def test_a_failure_in_a_pause_runs_again_and_others_do_not(tmp_path: Path) -> None:
    (tmp_path / "test_stood_still.py").write_text(STOOD_STILL)
    words = [sys.executable, "-m", "pytest", "-p", "tests.verdicts", "-p", "no:cacheprovider", "-c", os.devnull]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [*words, "--rootdir", str(tmp_path), str(tmp_path)],
        **{"cwd": tmp_path, "env": env, "timeout": pace.patience(100)},  # type: ignore[call-overload]
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout
    assert "3 failed, 2 passed" in said, said + done.stderr
    assert "wrong at once: 4" in said  # run once
    assert "Failed: Timeout" in said
    repeated = [line.split("::")[1].split()[0] for line in said.splitlines() if line.startswith("repeated: ")]
    assert (
        sorted(repeated) == ["test_paused"] * 2 + ["test_set_up_again"] + ["test_wrong_whatever_the_machine_does"] * 2
    )
