"""The burst suite: what it runs, which results it keeps, and what its summary says; servers without a model."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.loadtest import burst, burst_summary
from quire.loadtest.checkpoint import COUNTDOWN
from quire.loadtest.server import serve
from quire.loadtest.studies import burst_modes
from tests.pace import patience

ROOT = Path(__file__).resolve().parents[2]


def parsed(*words: str, model: str = "DIR") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    burst.add_arguments(parser)
    return parser.parse_args([model, *words])


def test_loads_and_systems_take_turns_and_vllm_comes_last() -> None:
    args = parsed(
        "--systems", "lanes,fifo,threshold", "--seeds", "4,2", "--loads", "known,warm", "--vllm-python", "python"
    )
    runs = burst.runs_of(args, 16_000, 0, 5.0)
    assert [(run.load, run.system, run.seed) for run in runs] == [
        *((load, system, 4) for load in ("known", "warm") for system in ("lanes", "fifo", "threshold")),
        *((load, system, 2) for load in ("known", "warm") for system in ("lanes", "fifo", "threshold")),
        ("known", "vllm", 4),
        ("cold", "vllm", 4),  # it learns no lengths
    ]
    assert len({run.file for run in runs}) == len(runs)
    sizes = "quire serve DIR --kv-blocks 512 --max-seqs 256 --max-model-len 4096"
    assert [run.server for run in runs[:3]] == [
        sizes,
        f"{sizes} --ttft-target-s 0.001 --late-wait-s 3600",
        f"{sizes} --admission threshold",
    ]


def test_the_study_of_the_burst_adds_modes_that_quire_has_not() -> None:
    parser = argparse.ArgumentParser()
    burst_modes.add_arguments(parser)
    args = parser.parse_args(["DIR", "--systems", "lanes,none,reserve", "--seeds", "1", "--loads", "cold"])
    lanes, none, reserve = burst.runs_of(args, 16_000, 0, 5.0)
    assert isinstance(lanes.start, partial)
    assert isinstance(none.start, partial)
    assert (lanes.start.func, none.start.func) == (serve, serve)
    assert none.start.keywords == burst_modes.serve_baseline.keywords
    assert none.server.endswith("--admission none")
    assert reserve.server.endswith("--admission reserve")


def test_every_system_gets_the_same_work_and_loads_differ_in_what_the_server_knows() -> None:
    runs = burst.runs_of(parsed("--systems", "lanes,fifo", "--seeds", "4"), 16_000, 0, 5.0)
    for load in burst.LOADS:
        assert len({run.words for run in runs if run.load == load}) == 1
    words = {run.load: dict(zip(run.words[::2], run.words[1::2], strict=True)) for run in runs}
    assert words["known"] | {"--ask-tokens": "2048"} == words["cold"] == words["warm"]
    assert (words["known"]["--rate"], words["known"]["--peak"], words["known"]["--ask-tokens"]) == ("5.0", "15.0", "0")
    warm = next(run.warm_words for run in runs if run.load == "warm")
    given = dict(zip(warm[::2], warm[1::2], strict=True))
    assert (given["--seconds"], given["--seed"]) == ("40.0", "1004")  # 200 requests, and other prompts
    assert "--peak" not in given
    assert [run.warm_words for run in runs if run.load != "warm"] == [()] * 4


def test_a_model_with_a_countdown_is_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / COUNTDOWN).write_text('{"ids": [0, 5, 6]}')
    [run] = burst.runs_of(
        parsed("--systems", "lanes", "--seeds", "1", "--loads", "cold", model=str(tmp_path)), 640, 0, 5.0
    )
    assert run.words[run.words.index("--countdown") + 1] == str(tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--systems", "lanes,best"], "--systems: 'best' is unknown; valid: lanes, fifo, threshold"),
        (["--loads", "hot"], "--loads: 'hot' is unknown; valid: known, cold, warm"),
        (["--seeds", "1,x"], "--seeds: '1,x' must be whole numbers"),
        (["--shape", "llama-8b", "--vllm-python", "p"], "--vllm-python: vLLM cannot make random"),
    ],
)
def test_bad_input_is_one_line(words: list[str], says: str) -> None:
    with pytest.raises(SystemExit, match=says):
        burst.runs_of(parsed(*words), 16_000, 0, 5.0)


# -------------------------------------------------------------------------------------------------------- the summary


def result(system: str, seed: int, on_time: float, last: float | None, **more: Any) -> dict[str, Any]:
    overload = {"on_time": {"burst": on_time, "all": 0.5}, "last_first_token_s": last, "unanswered": 0} | more
    return {"load": "known", "system": system, "seed": seed, "figures": {"requests": 10, "overload": overload}}


def test_medians_over_seeds_compare_each_run_with_fifo_and_oracle_of_its_seed() -> None:
    results = [result("lanes", seed, 0.1 * seed, 10.0 * seed) for seed in (1, 2, 3)]
    results += [result("fifo", seed, 0.05, 10.0) for seed in (1, 2, 3)]
    oracles: dict[int, dict[str, Any] | None] = {
        seed: {"burst": {"simulated": 0.4, "bound": 0.8}, "all": {"simulated": 0.5, "bound": 1.0}} for seed in (1, 2)
    }
    page = burst_summary.page(results, oracles | {3: None})
    lanes, fifo = page["figures"]["known"]["lanes"], page["figures"]["known"]["fifo"]
    assert page["seeds"] == {"known": {"lanes": 3, "fifo": 3}}
    assert lanes["on time, due in the burst"] == pytest.approx(0.2)
    assert lanes["burst, of the oracle's"] == pytest.approx(
        0.5
    )  # 0.25, 0.5 and none: of what is missing nothing is known
    assert lanes["all, of the upper bound"] == pytest.approx(0.5)
    assert lanes["the same over fifo's"] == pytest.approx(2.0)
    assert fifo["the same over fifo's"] == 1.0
    assert lanes["recomputed tokens"] is None


def test_goals_say_what_is_missed() -> None:
    oracle: dict[str, Any] = {"burst": {"simulated": 0.5, "bound": 0.6}, "all": {"simulated": 0.5, "bound": 0.6}}
    figures = {"refusals_429": 2, "longest_gap_s": 0.05, "kv_while_waiting": 0.95, "preemptions": 0.0}
    results = [result("lanes", 1, 0.46, 31.0, **figures), result("fifo", 1, 0.2, 30.0)]
    page = burst_summary.page(results, {1: oracle})
    goals = {line[7:41].strip(): line.split()[-1] for line in burst_summary.goals(page)}
    assert goals == {
        "burst, of the oracle's": "reached",
        "unanswered": "reached",
        "answers 429": "MISSED",
        "the same over fifo's": "reached",
        "pool in use while any wait": "reached",
        "preemptions": "reached",
        "longest gap": "reached",
    }
    assert "known: medians over seeds" in burst_summary.table(page)
    assert "perfect knowledge, seed 1: burst: simulated 50.0%, bound 60.0%, without_lengths –" in burst_summary.table(
        page
    )


def test_what_has_no_value_is_larger_than_everything() -> None:
    assert burst_summary.median([1.0, 3.0, 2.0]) == 2.0
    assert burst_summary.median([1.0, None, 2.0]) == 2.0
    assert burst_summary.median([None, None, 2.0]) is None
    assert burst_summary.median([5.0]) == 5.0


# -------------------------------------------------------------------------------------------------------- the command


def test_perfect_knowledge_is_asked_with_the_arrivals_and_the_measured_steps(tmp_path: Path) -> None:
    words = ("--rate", "2", "--seconds", "1", "--peak", "8", "--peak-seconds", "2", "--after-seconds", "1")
    args = parsed("--into", str(tmp_path), "--kv-tokens", "4096")
    runs = [burst.Run("fifo", "known", 3, "", lambda: pytest.fail("started"), (*words, "--seed", "3"))]
    step = {"fixed": 0.01, "row": 0.0, "prompt_token": 0.0}
    fifo = result("fifo", 3, 0.5, 9.0, step_time=step)
    fifo["figures"]["itl_s"] = {"p99": 0.05}
    found = burst.oracle_of(3, [result("lanes", 3, 0.5, 9.0, step_time=None), fifo], runs, args)
    given = json.loads((tmp_path / "arrivals_3.json").read_text())
    assert (given["blocks"], given["block_size"], given["pace_s"], given["step"]) == (256, 16, 0.05, step)
    assert {request["phase"] for request in given["requests"]} >= {"burst"}
    assert found["all"]["requests"] == len(given["requests"])
    assert 0 < found["all"]["simulated"] <= found["all"]["bound"] <= 1
    assert burst.oracle_of(3, [result("lanes", 3, 0.5, 9.0, step_time=None)], runs, args) is None


def burst_run(model: Path, into: Path, *extra: str, status: int = 0) -> str:
    """Run the command with a second a phase and a scripted engine; return its stdout."""
    short = "--rate 5 --seconds 1 --peak-seconds 1 --after-seconds 1 --scale 0.1 --context 256 --ask-tokens 256"
    words = "--systems fifo --loads known,warm --seeds 1 --fifo-server= --warm-requests 5 --drain 60"
    server = ["--server", "--executor scripted --scripted-step-ms 5 --no-spare", "--into", str(into)]
    command = [
        sys.executable,
        "-m",
        "quire.loadtest",
        "burst",
        str(model),
        *short.split(),
        *words.split(),
        *server,
        *extra,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(250), check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("warm_processes")
def test_no_run_starts_that_would_end_too_late(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    said = burst_run(checkpoint("llama"), tmp_path, "--minutes", "0.5", status=1)
    assert "left to do: known fifo, seed 1\nleft to do: warm fifo, seed 1" in said


@pytest.mark.system
@pytest.mark.usefixtures("warm_processes")
def test_the_command(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    said = burst_run(checkpoint("llama"), tmp_path)
    assert "2 of 2 runs to do" in said
    assert "known: medians over seeds" in said
    results = {load: json.loads((tmp_path / f"burst_{load}_fifo_1.json").read_text()) for load in ("known", "warm")}
    for each in results.values():
        assert each["figures"]["overload"]["answered"] == each["figures"]["requests"] > 10
        assert set(each["figures"]["overload"]["on_time"]) == {"base", "burst", "after", "all"}
    assert results["known"]["config"]["work"]["ends"] == "max_tokens"
    assert results["warm"]["config"]["work"]["ends"] == "logit_bias"  # this checkpoint has no countdown
    summary = json.loads((tmp_path / "burst.json").read_text())
    assert summary["seeds"] == {"known": {"fifo": 1}, "warm": {"fifo": 1}}
    assert summary["figures"]["known"]["fifo"]["unanswered"] == 0
    assert summary["figures"]["known"]["fifo"]["the same over fifo's"] == 1.0
    assert summary["command"].startswith("python -m quire.loadtest burst DIR ")

    (tmp_path / "burst_warm_fifo_1.json").write_text('{"cut": ')  # as a run that was killed while it wrote
    before = (tmp_path / "burst_known_fifo_1.json").stat().st_mtime_ns
    assert "1 of 2 runs to do" in burst_run(checkpoint("llama"), tmp_path)
    assert (tmp_path / "burst_known_fifo_1.json").stat().st_mtime_ns == before
    assert json.loads((tmp_path / "burst_warm_fifo_1.json").read_text())["system"] == "fifo"


@pytest.mark.system
@pytest.mark.usefixtures("warm_processes")
def test_a_server_that_does_not_start_is_reported_and_does_not_end_the_others(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    words = ["--systems", "lanes", "--loads", "known", "--seeds", "1,2", "--server=--no-such-option 1", "--rate", "5"]
    command = [
        sys.executable,
        "-m",
        "quire.loadtest",
        "burst",
        str(checkpoint("llama")),
        *words,
        "--into",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(120), check=False)
    assert done.returncode == 1
    assert done.stderr.count("before it was ready") == 2
    assert "no-such-option" in done.stderr  # its own words
    assert list(tmp_path.iterdir()) == []
