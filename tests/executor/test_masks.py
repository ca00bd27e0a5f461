"""Masks reach the device row by row, and what no slot wants is sent along only between rows that are wanted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.executor.masks import Masks, runs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@given(st.sets(st.integers(0, 300)), st.integers(1, 20))
def test_runs_hold_all_numbers_and_no_gap_that_is_wide(numbers: set[int], gap: int) -> None:
    found = list(runs(sorted(numbers), gap))
    held = {number for first, end in found for number in range(first, end)}
    assert numbers <= held
    assert sum(end - first for first, end in found) == len(held)
    for first, end in found:
        assert {first, end - 1} <= numbers
        inside = sorted(numbers & set(range(first, end)))
        assert all(b - a <= gap for a, b in itertools.pairwise(inside))
    assert all(after[0] - before[1] + 1 > gap for before, after in itertools.pairwise(found))


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_sent_is_what_the_device_reads(device: str) -> None:
    """While other work is queued, and with the host writing again as soon as a step has been collected."""
    masks = Masks(40, 1003, torch.device(device))
    assert masks.host.shape == (40, 32)
    rng = np.random.default_rng(1)
    for _ in range(20):
        slots = rng.choice(40, size=12, replace=False).tolist()
        masks.host[slots] = rng.integers(-(2**31), 2**31, size=(12, 32), dtype=np.int64).astype(np.int32)
        masks.send(slots)
        read = torch.stack([masks._device[slot].clone() for slot in slots])
        assert read.cpu().numpy().tolist() == masks.host[slots].tolist()
    assert masks.address(7) - masks.address(6) == 32 * 4
