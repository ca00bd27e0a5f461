from __future__ import annotations

import pytest

from quire.engine.executor.progress import Progress


def test_lines_are_rare_and_none_says_what_the_end_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("quire.engine.executor.progress.time.monotonic", lambda: clock[0])
    lines: list[str] = []
    work = Progress(lines.append, "reading weights", 10_000_000_000, in_bytes=True)
    for clock[0] in (0.5, 1.9, 2.1, 3.0, 4.2, 9.0, 20.0):
        work.advance(1_500_000_000)
    assert lines == [
        "reading weights: 4.5 GB of 10.0 GB",
        "reading weights: 7.5 GB of 10.0 GB",
        "reading weights: 9.0 GB of 10.0 GB",
    ]


def test_quick_work_prints_nothing() -> None:
    lines: list[str] = []
    work = Progress(lines.append, "capturing CUDA graphs", 3)
    for _ in range(3):
        work.advance()
    assert lines == []
