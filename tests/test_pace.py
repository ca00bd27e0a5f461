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


@pytest.mark.parametrize(("cores", "workers"), [(0.5, 2), (1, 2), (2, 4), (4, 8), (64, 16)])
def test_workers_follow_the_cores(monkeypatch: pytest.MonkeyPatch, cores: float, workers: int) -> None:
    monkeypatch.setattr(pace, "cores", lambda: cores)
    assert pace.workers() == workers


def test_a_bound_grows_with_the_machine_and_its_pauses(monkeypatch: pytest.MonkeyPatch, even: None) -> None:
    bound, lease = pace.patience(20), pace.paced_ms(500)
    assert (bound, lease) == (60, 500)
    monkeypatch.setattr(pace, "slowness", lambda: 4.0)
    monkeypatch.setattr(pace, "_longest_pause", lambda: 7.0)
    assert pace.LONGEST_S > pace.patience(20) > 4 * bound
    assert pace.paced_ms(500) == 9000  # no lease lapses because of such a pause
    assert pace.patience(60) == pace.patience(900) == pace.LONGEST_S  # on any machine a hang ends


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


@pytest.mark.timeout(0.1)
def test_hangs():
    time.sleep(1000)
"""


def run_pytest(folder: Path, tests: str, *options: str, **env: str) -> str:
    """Run these tests with the hooks of verdicts.py; return what pytest prints."""
    (folder / "test_it.py").write_text(tests)
    plugins = ["tests.verdicts", "pytest_timeout", "xdist.plugin", "no:cacheprovider", "no:warnings"]
    words = [sys.executable, "-m", "pytest", *(f"-p{name}" for name in plugins), "-c", os.devnull]
    env |= {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*words, *options, "--rootdir", str(folder), str(folder)],
        cwd=folder,
        env={**os.environ, **env},
        timeout=pace.patience(100),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_a_failure_in_a_pause_runs_again_and_others_do_not(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, STOOD_STILL)
    assert "3 failed, 2 passed" in said, said
    assert "wrong at once: 4" in said  # run once
    assert "Failed: Timeout" in said
    repeated = [line.split("::")[1].split()[0] for line in said.splitlines() if line.startswith("repeated: ")]
    assert (
        sorted(repeated) == ["test_paused"] * 2 + ["test_set_up_again"] + ["test_wrong_whatever_the_machine_does"] * 2
    )


HANG = """
import collections, itertools, time
import pytest
from tests import pace, verdicts

verdicts.TEARDOWN_S = pace.paced(0.5)  # begins in pytest's own hooks, which must not be interrupted


@pytest.fixture
def that_never_ends():
    yield
    verdicts.STUCK_S = pace.paced(0.5)  # STUCK_S while the next test runs
    time.sleep(1000)


@pytest.mark.timeout(0.1)
def test_hangs_and_then_its_fixture(that_never_ends):
    time.sleep(1000)


@pytest.mark.timeout(0.1)
def test_holds_the_interpreter():
    collections.deque(itertools.repeat(0), maxlen=0)


def test_passes():
    pass
"""


def test_no_hang_lasts_longer_than_its_limit(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, HANG, "-n", "1")
    assert "2 failed, 1 passed, 1 error" in said, said
    assert "crashed while running 'test_it.py::test_holds_the_interpreter'" in said
    assert "in test_holds_the_interpreter" in said  # where it was


def test_a_run_that_is_out_of_time_ends_with_a_report(tmp_path: Path) -> None:
    tests = "def test_first(): pass\ndef test_second(): pass\n"
    said = run_pytest(tmp_path, tests, "-n", "1", TESTS_UNTIL=str(time.time()))
    assert "the tests have used up their time (TESTS_UNTIL): no other starts" in said, said
    assert "out of time: 1 of 2 tests did not run" in said
    assert "1 passed" in said
