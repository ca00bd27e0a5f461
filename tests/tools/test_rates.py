"""The command that compares four ways to allocate the same KV memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.loadtest.studies import rates

SHARED = [7] * 64
WORK = [(random.Random(i).choices(range(10, 90), k=8), 4 + i % 5) for i in range(24)]


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps({"token_ids": SHARED + own, "max_new_tokens": n}) + "\n" for own, n in WORK))
    return file


def test_the_same_memory_holds_more_sequences_with_each_way(
    checkpoint: Callable[[str], Path], requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """60 blocks of 8 tokens, and a context of 240 tokens: two runs of static allocation fit, and six sequences of 9 to
    10 blocks each.  The prompts share 8 blocks, so all 24 fit where those are kept once."""
    words = [str(checkpoint("llama")), f"--requests={requests}", "--kv-blocks=60", "--block-size=8", "--threads=1"]
    assert rates.main([*words, "--max-model-len=240", "--rates=400,500", "--seconds=0.04", "--at-once=24"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(rates.WAYS)
    for runs in found.values():
        assert runs[0]["rate"] == 400
        assert runs[-1]["rate"] is None
        assert runs[-1]["requests"] == 24
        for run in runs:
            assert 0 < run["batch"] <= run["most"]
            assert run["normalised_ms"] > 0
    most = {way: runs[-1]["most"] for way, runs in found.items()}
    assert most["static"] == 2
    assert 5 <= most["paged"] <= 7
    assert 2 <= most["admission"] <= 7
    assert most["prefix-cache"] > 7
    assert found["static"][-1]["preemptions"] == 0


def test_rates_beyond_the_limit_are_left_out(
    checkpoint: Callable[[str], Path], requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(checkpoint("llama")), f"--requests={requests}", "--kv-blocks=60", "--block-size=8", "--threads=1"]
    assert rates.main([*words, "--ways=paged", "--rates=1000,2000", "--seconds=0.01", "--limit-ms=0"]) == 0
    assert [run["rate"] for run in json.loads(capsys.readouterr().out)["paged"]] == [1000]


def test_requests_arrive_at_the_rate() -> None:
    at = rates.arrivals(50.0, 4000)
    assert at[0] == 0
    assert at == sorted(at)
    assert abs(at[-1] / 80 - 1) < 0.08
    assert rates.arrivals(None, 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("word", "said"), [("--at-once=25", "has 24 requests"), ("--at-once=0", "ask for 0"), ("--ways=pagd", "no 'pagd'")]
)
def test_what_cannot_be_measured_is_refused(
    checkpoint: Callable[[str], Path], requests: Path, capsys: pytest.CaptureFixture[str], word: str, said: str
) -> None:
    assert rates.main([str(checkpoint("llama")), f"--requests={requests}", word]) == 2
    assert said in capsys.readouterr().err
