"""What a steady decode step costs the scheduler."""

from __future__ import annotations

import pytest

from quire.loadtest.studies.scheduler_cost import steady_step_seconds
from tests.pace import python_s


@pytest.mark.perf
def test_a_steady_step_is_planned_in_time_of_what_changes() -> None:
    """256 decoding sequences: plan and commit take the CPU time of 12,000 turns of a plain loop, some 0.5 ms."""
    assert steady_step_seconds(256) < 1.2 * python_s()
