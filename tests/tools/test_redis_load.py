"""The commands that measure and simulate what a fleet asks of Redis."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.engine.wire.layout import TOKEN_CHANNELS
from quire.loadtest.studies import redis_load
from quire.loadtest.studies.redis_load import Size, Spent

ROOT = Path(__file__).resolve().parents[2]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert redis_load.main(["--engines=2", "--sequences=3", "--prompt-tokens=500"]) == 0
    [found] = json.loads(capsys.readouterr().out)["configurations"]
    assert (found["engines"], found["sequences"]) == (2, 3)
    for name in ("ring", "submit", "step", "request", "first", "reading", "quiet"):
        assert found[name]["cpu_us"] > 0, name
        assert found[name]["commands"] >= 1, name
    # A prompt's tokens take 2 bytes or more each, and are sent once by the gateway and once to the engine.
    assert found["queued_bytes"] > 1000
    assert found["submit"]["in_bytes"] > found["step"]["in_bytes"] > found["ring"]["in_bytes"]
    assert found["request"]["in_bytes"] > 1000
    assert found["request"]["out_bytes"] > 1000


@pytest.mark.parametrize(
    ("gateways", "engines", "sequences", "tenants", "prompt_tokens"),
    [
        (1, 1, 16, 1, 200),
        (1, 1, 64, 1, 100),
        (12, 2, 24, 3, 1000),
        (32, 1, 64, 1, 100),
        (2, 20, 2, 40, 400),
        (40, 1, 8, 1, 100),
    ],
)
def test_the_formula_of_the_scaling_page_fits_the_running_bus(
    capsys: pytest.CaptureFixture[str], gateways: int, engines: int, sequences: int, tenants: int, prompt_tokens: int
) -> None:
    """Within a factor of 1.6: gateways do not spread evenly over the channels, nor tenants over the engines."""
    size = Size(gateways, engines, sequences, tenants, prompt_tokens)
    sizes = msgspec.structs.asdict(size)
    assert redis_load.main([f"--{name.replace('_', '-')}={number}" for name, number in sizes.items()]) == 0
    [found] = json.loads(capsys.readouterr().out)["configurations"]
    for part, counts in found["expected"].items():
        for name, expected in counts.items():
            assert expected / 1.6 < found[part][name] < expected * 1.6, (part, name)


def test_a_step_runs_no_more_commands_the_more_gateways_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    """But for one message per channel."""
    counts = []
    for gateways in (TOKEN_CHANNELS * 2, TOKEN_CHANNELS * 8):
        sizes = [f"--gateways={gateways}", "--sequences=32", "--engines=1", "--prompt-tokens=100"]
        assert redis_load.main(sizes) == 0
        [found] = json.loads(capsys.readouterr().out)["configurations"]
        counts.append(found["step"]["commands"])
    assert counts[1] <= counts[0] + 2 * TOKEN_CHANNELS


def test_sizes_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"gateways": 3, "engines": 2, "sequences": 6, "tenants": 5, "prompt_tokens": 100}
    assert redis_load.main([f"--{name.replace('_', '-')}={number}" for name, number in sizes.items()]) == 0
    [found] = json.loads(capsys.readouterr().out)["configurations"]
    assert {name: found[name] for name in sizes} == sizes


def test_what_one_part_costs_is_the_rest_after_the_known_parts() -> None:
    spent = Spent({"cpu_us": 900.0, "in_bytes": 90}) - Spent({"cpu_us": 100.0, "in_bytes": 10})
    assert spent.each(4) == {"cpu_us": 200.0, "in_bytes": 20.0}
    assert spent.each(4, {"cpu_us": 150.0}, 4) == {"cpu_us": 50.0, "in_bytes": 20.0}


@pytest.mark.usefixtures("warm_processes")
def test_the_steps_of_a_busy_redis_are_counted() -> None:
    command = [sys.executable, "-m", "quire.loadtest.studies", "redis-full", "--engines=2"]
    sizes = ["--sequences=8", "--seconds=0.5", "--gateways", "1", "6", "--io-threads", "1", "2"]
    done = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True, check=True)
    runs = json.loads(done.stdout)["runs"]
    assert [(run["gateways"], run["io_threads"]) for run in runs] == [(1, 1), (6, 1), (1, 2), (6, 2)]
    assert all(run["steps_per_s"] > 0 and run["read_mb_per_s"] > 0 and run["thread_us"] > 0 for run in runs)


def simulated(*options: str) -> dict[str, Any]:
    """Run it in a process of its own: it changes the scripts' clock."""
    sizes = ["--engines=3", "--rate=300", "--prefixes=10", "--own=20", "--output=8", "--warm=20", "--requests=60"]
    command = [sys.executable, "-m", "quire.loadtest.studies", "fleet", "prefixes", *sizes, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.usefixtures("warm_processes")
def test_a_fleet_counts_what_it_asks_of_redis() -> None:
    """Each ring of an idle engine is a sync, unless rings during a sync count as one."""
    every, merged = simulated(), simulated("--exchange-ms=20")
    for found in (every, merged):
        load = found["redis"]
        assert found["requests"] == 60
        assert load["scripts_per_s"] > load["exchanges_per_s"] > load["steps_per_s"] > 0
        requests_per_s = load["exchanges_per_s"] / load["exchanges_per_request"]
        assert load["cores"] == pytest.approx(load["cpu_us_per_request"] * requests_per_s / 1e6)
        assert load["scripts_per_s"] == pytest.approx(load["exchanges_per_s"] + requests_per_s, rel=0.05)
    assert every["redis"]["exchanges_per_request"] > 1.5 * merged["redis"]["exchanges_per_request"]
