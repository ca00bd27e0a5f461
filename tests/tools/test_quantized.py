"""The comparison of quantised weights with the plain model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.loadtest.studies import quantized

OPTIONS = ["--rounds=2", "--kv-blocks=256", "--threads=1", "--text-tokens=600", "--cpu-time"]


@pytest.mark.parametrize(
    ("option", "change", "least"),
    [("--quantize=int8", 0.01, 0.5), ("--quantize=int4", 0.1, 0.2), ("--kv-dtype=e4m3", 0.1, 0.2)],
)
def test_the_command(
    checkpoint: Callable[[str], Path],
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    change: float,
    least: float,
) -> None:
    monkeypatch.setattr(quantized, "WINDOW", 200)
    monkeypatch.setattr(quantized, "DECODED", 9)
    asked = [str(checkpoint("llama")), f"--text={text}", option, *OPTIONS]
    assert quantized.main(asked) == 0
    figures = json.loads(capsys.readouterr().out)
    # Weights of a tiny model at random: its guesses are those of chance, rounded or not.
    assert abs(figures["perplexity"] / figures["perplexity_plain"] - 1) < change
    assert figures["perplexity"] != figures["perplexity_plain"]
    assert least < figures["agreement"] <= 1
    assert 0 < figures["greedy_agreement"] <= 1
    for name in ("decode_ratio", "prompt_ratio"):
        assert 0 < figures[f"{name}_low"] <= figures[name] <= figures[f"{name}_high"]


def test_nothing_to_compare(checkpoint: Callable[[str], Path], text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantized.main([str(checkpoint("llama")), f"--text={text}"]) == 2
    assert "--quantize none, --kv-dtype auto: nothing to compare" in capsys.readouterr().err


def test_the_length_of_what_is_equal() -> None:
    assert [quantized.common([1, 2, 3], right) for right in ([1, 2, 3], [1, 5, 3], [4, 2, 3])] == [3, 1, 0]
