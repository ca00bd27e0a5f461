"""Kernels are compiled once for all tests here, into the user's cache, or taken from QUIRE_KERNELS."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.engine.executor import ops


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    library = os.environ.get("QUIRE_KERNELS")
    ops.load(library=Path(library) if library else None)
