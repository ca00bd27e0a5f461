"""All-reduce between two GPUs, one process per rank: rank_sum_process.py has the scenes.

Run these alone: other processes on the same GPUs would be time-sliced with the ranks, which wait for each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.rank_sum_process import SCENES, SIZE
from tests.pace import patience

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu, pytest.mark.timeout(100)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("scene", SCENES)
def test_two_gpus(scene: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.kernels.rank_sum_process", scene]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "meeting")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        output = [rank.communicate(timeout=patience(60))[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.kill()
        output = [rank.communicate()[0] for rank in ranks]
        pytest.fail("\n".join(["a rank did not end", *output]))
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(output)
