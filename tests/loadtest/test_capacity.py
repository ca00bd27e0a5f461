"""How the number of users is found, and the command itself against servers without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.loadtest.stats import Attempt, Record
from quire.loadtest.studies.capacity import FINE, SYSTEMS, Sla, Trial, Work, highest
from tests.pace import patience

ROOT = Path(__file__).resolve().parents[2]


@given(st.integers(0, 300), st.integers(1, 64), st.integers(1, 200))
def test_the_highest_number_is_found(limit: int, first: int, most: int) -> None:
    tried: list[int] = []

    def passed(users: int) -> bool:
        tried.append(users)
        return users <= limit

    found = highest(passed, first, most)
    truth = min(limit, most)
    assert found <= truth <= found + max(0, round(found * FINE))
    assert len(tried) == len(set(tried)) <= 20
    assert all(1 <= users <= most for users in tried)
    assert found == 0 or found in tried


@pytest.mark.parametrize(
    ("ttft", "gaps", "outcome", "held"),
    [
        (0.9, [0.04] * 9, "ok", True),
        (1.1, [0.04] * 9, "ok", False),
        (0.9, [0.06] * 9, "ok", False),
        (0.9, [0.01] * 99 + [1.5], "ok", False),  # a mean of 25 ms, and one gap of 1.5 s
        (0.9, [0.04] * 9, "error", False),
    ],
)
def test_the_promise(ttft: float, gaps: list[float], outcome: str, held: bool) -> None:
    times = [1.0 + ttft]
    for gap in gaps:
        times.append(times[-1] + gap)
    record = Record(1.0, "x", 5, len(times), 0.0, [Attempt(1.0, 200)], times, times[-1], len(times), outcome)
    assert Sla(1.0, 0.05, 1.0, 95.0).held(record) is held


@pytest.mark.parametrize(("requests", "held", "failed", "passed"), [(20, 0.95, 0, True), (20, 0.94, 0, False)])
def test_a_trial_passes(requests: int, held: float, failed: int, passed: bool) -> None:
    def trial(requests: int, held: float, failed: int) -> Trial:
        return Trial(3, requests, held, failed, 0, None, None, None, 1.0, 1.0, None, None, None, None)

    sla = Sla(1.0, 0.05, 1.0, 95.0)
    assert trial(requests, held, failed).passed(sla) is passed
    assert not trial(requests, 1.0, 1).passed(sla)
    assert not trial(0, 1.0, 0).passed(sla)


def test_users_ask_differently_behind_the_same_beginning() -> None:
    work = Work(system=32, question=10, answer=30, ask=64, vocab=400, eos=0, seed=3)
    jobs = [job for user in range(3) for job in islice(work.requests_of(user), 5)]
    prompts = [tuple(job.prompt(400)) for job in jobs]
    assert len({prompt[:32] for prompt in prompts}) == 1
    assert len(set(prompts)) == 15
    assert all(2 <= job.output_len < 64 for job in jobs)
    assert jobs == [job for user in range(3) for job in islice(work.requests_of(user), 5)]


@pytest.mark.system
@pytest.mark.usefixtures("warm_processes")
def test_the_command(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The first allocator and the last, a few users, and results that show what the allocators differ in."""
    out, names = tmp_path / "capacity.json", [next(iter(SYSTEMS)), [*SYSTEMS][-1]]
    words = [
        "--quick",
        "--systems",
        ";".join(names),
        "--sla-ttft",
        "30",
        "--sla-itl",
        "5",
        "--sla-stall",
        "30",
        "--out",
        str(out),
    ]
    command = [sys.executable, "-m", "quire.loadtest.studies", "capacity", str(checkpoint("llama")), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(240), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert list(result["figures"]) == names
    for name, figures in result["figures"].items():
        assert name in done.stdout
        assert figures["users"] >= 1
        assert all(trial["failed"] == 0 for trial in figures["trials"])
        assert figures["there"]["held"] == 1.0
    assert result["figures"]["static"]["there"]["hit_rate"] == 0.0
    assert result["figures"]["paged, admission, prefix cache"]["there"]["hit_rate"] > 0.5
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(60), check=False)
    assert (again.returncode, again.stderr) == (0, "")  # all of it was known
