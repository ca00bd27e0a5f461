"""Kernels are compiled once for all tests here, into the user's cache."""

from __future__ import annotations

import pytest

from engine.executor import ops


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    ops.load()
