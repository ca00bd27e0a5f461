"""The study of mixtures: its figures are those that `bench` prints, and the memory that the start log names."""

from __future__ import annotations

from quire.loadtest import shapes
from quire.loadtest.studies.mixtures import CASES, figures_of


def test_figures_of_a_case() -> None:
    found = {
        "start_s": 4.06,
        "batch1_ms_per_token": 2.3871,
        "batch32_ms_per_token": 10.5,
        "batch32_first_token_ms": 57.06,
    }
    log = "INFO experts of 48 layers stay in fp8: they take 30.2 GB\n"
    assert figures_of(found, log) == {
        "ms_per_token": {"1": 2.387, "32": 10.5},
        "first_tokens_ms": {"32": 57.1},
        "start_s": 4.1,
        "packed_experts_gb": 30.2,
    }
    assert "packed_experts_gb" not in figures_of(found, "")


def test_cases_name_shapes() -> None:
    assert {shape for shape, _ in CASES.values()} <= shapes.CONFIGS.keys()
