"""The thread pool of the CPU kernels: each ticket is computed exactly once, by any caller and any number of threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.engine.executor import ops
from tests.pace import patience

CORES = 2
FORK = """
import os, torch
from quire.engine.executor import ops
torch.set_num_threads(1)
ops.load()
ops.set_threads(3)
x, weight = torch.randn(200, 512), torch.randn(512)
expected = ops.rms_norm(x, weight, 1e-6)
if (child := os.fork()) == 0:
    os._exit(0 if torch.equal(ops.rms_norm(x, weight, 1e-6), expected) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    ops.set_threads(0)


def pool_threads() -> int:
    names = (task / "comm" for task in Path("/proc/self/task").iterdir())
    return sum(name.read_text(encoding="ascii").strip() == "quire-cpu" for name in names)


@pytest.mark.parametrize("count", [2, 3, 8, 40])
@torch.inference_mode()
def test_more_threads_than_cores_compute_the_same_bits(count: int) -> None:
    x, weight = torch.randn(300, 512), torch.randn(512)
    ops.set_threads(1)
    expected = ops.rms_norm(x, weight, 1e-6)
    ops.set_threads(count)
    assert all(torch.equal(ops.rms_norm(x, weight, 1e-6), expected) for _ in range(300))
    assert pool_threads() >= min(count - 1, 39 if count == 40 else count - 1)


@torch.inference_mode()
def test_callers_at_the_same_time_do_not_mix_up_their_work() -> None:
    """The second caller finds the pool busy and computes alone."""
    inputs = [torch.randn(200, 512, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    weight = torch.ones(512)
    ops.set_threads(1)
    expected = [ops.rms_norm(x, weight, 1e-6) for x in inputs]
    ops.set_threads(CORES + 1)

    def agree(at: int) -> bool:
        return all(torch.equal(ops.rms_norm(inputs[at], weight, 1e-6), expected[at]) for _ in range(200))

    with ThreadPoolExecutor(len(inputs)) as callers:
        assert all(callers.map(agree, range(len(inputs))))


def test_a_forked_process_has_a_pool_of_its_own() -> None:
    """The threads of a pool do not survive a fork: the child would wait for them, or leave their tickets undone."""
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=patience(60))
