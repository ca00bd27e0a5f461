"""Samples of matrices (matrix.py), and the CPU time of a tree of processes (cpu.py)."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from tests.cpu import Meter
from tests.matrix import SEARCH, each_pair, each_value, examples

AXES = ("abcde", [1, 2, 3], (True, False))


def test_every_combination_is_there_and_the_rest_of_a_sample_nightly() -> None:
    for sampled in (each_value, each_pair):
        parameters = sampled(*AXES)
        assert [one.values for one in parameters] == list(itertools.product(*AXES))
        assert {mark.name for one in parameters for mark in one.marks} == {"nightly"}


def test_a_sample_meets_each_value() -> None:
    sample = [one.values for one in each_value(*AXES) if not one.marks]
    assert len(sample) == 5
    for place, axis in enumerate(AXES):
        assert {one[place] for one in sample} == set(axis)


def test_a_sample_meets_each_pair() -> None:
    sample = [one.values for one in each_pair(*AXES) if not one.marks]
    assert len(sample) < 30
    for one, other in itertools.combinations(range(3), 2):
        assert {(values[one], values[other]) for values in sample} == set(itertools.product(AXES[one], AXES[other]))


def test_a_search_tries_a_sample_and_the_nightly_lane_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SEARCH, raising=False)
    assert [examples(count) for count in (8, 20, 60, 100, 400)] == [8, 20, 20, 25, 100]
    monkeypatch.setenv(SEARCH, "full")
    assert [examples(count) for count in (8, 20, 60, 100, 400)] == [8, 20, 60, 100, 400]


def test_the_time_of_a_child_counts() -> None:
    """Also if it has ended."""
    meter = Meter()
    code = "import os, time\nwhile sum(os.times()[:2]) < 0.3: pass\nprint(flush=True)\n"
    child = subprocess.Popen([sys.executable, "-S", "-c", code + "input()"], stdin=-1, stdout=-1)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        spent = meter.spent_s()
        assert spent >= 0.2
        child.communicate(b"\n")
    assert meter.spent_s() < spent
