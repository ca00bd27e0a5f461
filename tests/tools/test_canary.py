"""The command that measures the canary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.observers.canary import MOST_SHARE
from quire.engine.tools import canary


def test_the_command(checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--runs=4", "--kv-blocks=80", "--threads=1", "--max-model-len=256"]
    assert canary.main([str(checkpoint("llama")), *options]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["runs"], figures["equal"], figures["difference"]) == (4, 4, 0.0)
    assert figures["run_ms"] > 0
    assert figures["period_s"] >= 60.0
    assert figures["share"] == pytest.approx(figures["cpu_ms"] / 1e3 / figures["period_s"])
    assert figures["run_ms"] / 1e3 <= MOST_SHARE * figures["period_s"] * 1.001


def test_a_model_that_cannot_be_loaded_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert canary.main(["/no/such/model"]) == 2
    assert capsys.readouterr().err.startswith("python -m quire.engine.tools canary: ")
