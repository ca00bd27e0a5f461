from __future__ import annotations

from engine.idle import Did, evaluate


def test_gaps_between_steps_and_within() -> None:
    """Steps of 100 ns: two kernels that overlap, a gap of 10 ns, a copy home, and 20 ns of nothing before the next."""
    did = []
    for step in range(5):
        at = step * 100
        did += [Did(at, at + 40, "a"), Did(at + 30, at + 60, "b"), Did(at + 70, at + 80, "Memcpy DtoH")]
    found = evaluate(1, did)
    assert (found.step_ms, found.between_steps_ms) == (100e-6, 20e-6)
    assert (found.between_steps, found.idle, found.launches) == (0.2, 0.3, 3)
    assert list(found.kernels) == ["a", "b", "Memcpy DtoH"]
