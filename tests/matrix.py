"""Samples of matrices: `make test` runs combinations that meet every value, the nightly lane runs the rest."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest

SEARCH = "TESTS_SEARCH"  # environment variable; "full": searches try all examples, as the nightly lane does
SAMPLE = 4  # `make test` tries one in so many examples of a search,
SMALLEST = 20  # and at least so many


def examples(count: int) -> int:
    """Return how many examples hypothesis tries of a search of `count`: all in the nightly lane, else a sample."""
    return count if os.environ.get(SEARCH) == "full" else min(count, max(SMALLEST, count // SAMPLE))


def each_value(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations as parameters: `make test` runs some in which each value of each axis occurs.

    They step through all axes at once; shorter axes repeat until the longest ends."""
    longest = max(len(axis) for axis in axes)
    sample = {tuple(turn % len(axis) for axis in axes) for turn in range(longest)}
    return _marked(axes, sample)


def each_pair(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations as parameters: `make test` runs some in which each two values of two axes meet."""
    combinations = list(itertools.product(*(range(len(axis)) for axis in axes)))
    left = {pair for one in combinations for pair in _pairs(one)}
    sample = set()
    while left:
        best = max(combinations, key=lambda one: len(left & _pairs(one)))
        left -= _pairs(best)
        sample.add(best)
    return _marked(axes, sample)


def sampled(values: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
    """Return all values as parameters: `make test` runs those in `kept`, a few that differ in what they reach."""
    assert all(value in values for value in kept)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[] if value in kept else pytest.mark.nightly
        )
        for value in values
    ]


def _pairs(combination: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(combination), 2))


def _marked(axes: Sequence[Sequence[Any]], sample: set[tuple[int, ...]]) -> list[Any]:
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, places, strict=True)),
            marks=[] if places in sample else pytest.mark.nightly,
        )
        for places in itertools.product(*(range(len(axis)) for axis in axes))
    ]
