"""The command that measures how many blocks samples and beams share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.loadtest.studies import sharing

OPTIONS = ["--kv-blocks=400", "--threads=1", "--requests=6", "--ways=2,4", "--max-model-len=400"]


def test_the_command(checkpoint: Callable[[str], Path], text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples share the full blocks of their prompt and no more, which bounds what they save."""
    assert sharing.main([str(checkpoint("llama")), f"--text={text}", *OPTIONS]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == {"sampling_2", "beams_2", "sampling_4", "beams_4"}
    for ways in (2, 4):
        assert 0 < figures[f"sampling_{ways}"] < figures[f"beams_{ways}"] < 1 - 1 / ways
    assert figures["sampling_2"] < figures["sampling_4"]


@pytest.mark.parametrize("name", sharing.MEANS)
def test_lengths_have_the_means_of_the_paper(name: str) -> None:
    jobs = sharing.draw_jobs(list(range(4000)), sharing.MEANS[name], 4000, 10**6)
    for found, mean in zip(
        ([len(job.prompt) for job in jobs], [job.output for job in jobs]), sharing.MEANS[name], strict=True
    ):
        assert min(found) >= 1
        assert abs(sum(found) / len(found) / mean - 1) < 0.08


def test_a_short_text_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "short").write_text("a few words")
    assert sharing.main([str(checkpoint("llama")), f"--text={file}", "--lengths=sharegpt"]) == 2
    assert "prompts of 161 need more" in capsys.readouterr().err
