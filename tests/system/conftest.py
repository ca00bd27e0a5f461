"""How the processes of tests start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import warm


@pytest.fixture(scope="module")
def warm_processes() -> Iterator[None]:
    """Engines, gateways and supervisors start as forks of a process that has imported torch (tests/warm.py)."""
    with warm.everywhere():
        yield
