"""How a spare waits for its turn."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from quire.engine.process import standby


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The supervisor's end of standard input."""
    ours, theirs = os.pipe()
    with os.fdopen(ours) as file:
        monkeypatch.setattr("sys.stdin", file)
        yield theirs
    os.close(theirs)


def test_preparation_ends_when_the_turn_has_come(turn: int) -> None:
    done = []

    def parts() -> Iterator[int]:
        for part in range(5):
            done.append(part)
            if part == 2:
                os.write(turn, b"now\n")
            yield part

    assert standby.wait_for_turn(parts())
    assert done == [0, 1, 2]


def test_a_part_that_fails_leaves_the_rest_to_the_takeover(turn: int, caplog: pytest.LogCaptureFixture) -> None:
    def parts() -> Iterator[int]:
        yield 1
        raise RuntimeError("CUDA out of memory")

    os.write(turn, b"now\n")
    assert standby.wait_for_turn(iter(()))
    os.write(turn, b"now\n")
    generator = parts()
    next(generator)
    assert standby.wait_for_turn(generator)
    assert "preparation failed" in caplog.text
    assert "CUDA out of memory" in caplog.text


def test_an_end_of_standard_input_means_that_no_spare_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert not standby.wait_for_turn(())


def test_a_spare_whose_turn_has_come_keeps_its_priority(turn: int) -> None:
    """The engine died again while this spare started: what is left of its preparation is part of the pause."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.write(turn, b"now\n")
    with standby.low_priority():
        assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_low_priority_ends_where_it_may(turn: int) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with standby.low_priority():
        lowered = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    assert lowered == (max(before, standby.NICE) if standby.may_raise_priority(before) else before)
