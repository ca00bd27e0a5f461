"""The burst suite: what it runs, what it takes from before, and what it says; servers without a model."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest import burst

ROOT = Path(__file__).resolve().parents[2]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    burst.add_arguments(parser)
    return parser.parse_args(["DIR", *words])


def test_runs_take_turns_and_vllm_comes_last() -> None:
    runs = burst.runs_of(parsed("--modes", "forecast,none", "--seeds", "4,2", "--vllm-python", "python"), 16_000, 0)
    assert [(run.system, run.seed) for run in runs] == [
        ("forecast", 4),
        ("none", 4),
        ("forecast", 2),
        ("none", 2),
        ("vllm", 4),
    ]
    assert len({run.file for run in runs}) == 5
    assert runs[0].server.endswith(
        "--kv-blocks 512 --queue-wait-s 2 --max-seqs 256 --max-model-len 2048 --admission forecast"
    )
    work = {run.words for run in runs if run.seed == 4}
    assert len(work) == 1  # every system gets the same
    estimate = sum(burst.estimate_s(run, parsed()) for run in burst.runs_of(parsed("--vllm-python", "p"), 16_000, 0))
    assert estimate <= 26 * 60


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--modes", "forecast,best"], "--modes: 'best' is none; there are forecast, threshold"),
        (["--seeds", "1,x"], "--seeds: '1,x' must be whole numbers"),
    ],
)
def test_bad_input_is_one_line(words: list[str], says: str) -> None:
    with pytest.raises(SystemExit, match=says):
        burst.runs_of(parsed(*words), 16_000, 0)


def test_what_never_came_is_later_than_everything() -> None:
    assert burst.median([1.0, 3.0, 2.0]) == 2.0
    assert burst.median([1.0, None, 2.0]) == 2.0
    assert burst.median([None, None, 2.0]) is None
    assert burst.median([5.0]) == 5.0


@pytest.mark.system
def test_the_command(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    into = tmp_path / "burst"
    short = ["--seconds", "1", "--peak-seconds", "1", "--after-seconds", "1", "--scale", "0.1", "--drain", "60"]
    scripted = "--executor scripted --scripted-step-ms 1 --queue-wait-s 2"
    words = ["--modes", "forecast,none", "--seeds", "1", "--context", "512", "--server", scripted, "--into", str(into)]
    command = [sys.executable, "-m", "loadtest", "burst", str(checkpoint("llama")), *short, *words]

    def run() -> str:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = run()
    assert "2 of 2 runs to do" in said
    assert "medians over seeds" in said
    results = {mode: json.loads((into / f"burst_{mode}_1.json").read_text()) for mode in ("forecast", "none")}
    for mode, result in results.items():
        assert result["server"].endswith(f"--admission {mode}")
        assert result["figures"]["completed"] == result["figures"]["requests"] > 10
        assert set(result["figures"]["phases"]) == {"base", "burst", "after"}
    assert results["forecast"]["config"]["work"] == results["none"]["config"]["work"]
    summary = json.loads((into / "burst.json").read_text())
    assert summary["runs"] == {"forecast": 1, "none": 1}
    assert summary["figures"]["none"]["failed []"] == 0

    (into / "burst_none_1.json").write_text('{"cut": ')  # as a run that was killed while it wrote
    before = (into / "burst_forecast_1.json").stat().st_mtime_ns
    assert "1 of 2 runs to do" in run()
    assert (into / "burst_forecast_1.json").stat().st_mtime_ns == before
    assert json.loads((into / "burst_none_1.json").read_text())["system"] == "none"


@pytest.mark.system
def test_a_server_that_does_not_start_is_said_so_and_does_not_end_the_others(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    words = ["--modes", "forecast", "--seeds", "1,2", "--server=--no-such-option 1", "--into", str(tmp_path)]
    command = [sys.executable, "-m", "loadtest", "burst", str(checkpoint("llama")), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.count("before it was ready") == 2
    assert "no-such-option" in done.stderr  # its own words
    assert list(tmp_path.iterdir()) == []
