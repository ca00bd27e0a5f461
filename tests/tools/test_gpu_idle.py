from __future__ import annotations

from quire.loadtest.studies.gpu_idle import Did, evaluate

US = 1000


def test_gaps_between_steps_and_within() -> None:
    """Steps of 100 us: two kernels that overlap, a gap of 10 us, a copy home, and 20 us of nothing before the next."""
    did = []
    for step in range(5):
        at = step * 100 * US
        did += [Did(at, at + 40 * US, "a"), Did(at + 30 * US, at + 60 * US, "b")]
        did += [Did(at + 70 * US, at + 80 * US, "Memcpy DtoH")]
    found = evaluate(1, did)
    assert (found.step_ms, found.between_steps_ms) == (0.1, 0.02)
    assert (found.between_steps, found.idle, found.launches) == (0.2, 0.3, 3)
    assert found.kernels == {"a": 0.04, "b": 0.02, "Memcpy DtoH": 0.01}  # b ended 20 us after a
