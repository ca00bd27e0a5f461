"""Silence as a watcher counts it, beats, and what makes a process drain."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quire.engine.common import orphans, readiness
from quire.engine.common.silence import Silence

ROOT = Path(__file__).resolve().parents[2]


def test_silence_counts_looks_and_no_pause_of_the_machine() -> None:
    silence = Silence(0.5)
    assert silence.look(7, 100.0) == 0.0
    assert silence.look(7, 100.5) == 0.5
    assert silence.look(7, 700.0) == 1.5  # the watcher slept as well
    assert silence.look(8, 700.5) == 0.0  # progress
    assert silence.look(8, 701.0) == 0.5
    assert silence.look(0, 702.0) == 0.0  # nothing is expected
    assert silence.look(0, 703.0) == 0.0


def test_beats_are_counted_apart_from_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    with readiness.ReadinessListener() as listener:
        monkeypatch.setenv(readiness.VARIABLE, listener.address)
        readiness.notify_alive()
        assert not listener.is_ready()
        assert listener.beats == 1
        readiness.notify_ready()
        readiness.notify_alive()
        assert listener.is_ready()
        assert listener.beats == 2


def test_a_supervisor_that_reads_nothing_stops_no_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stopped:
        stopped.bind(str(tmp_path / "s"))
        monkeypatch.setenv(readiness.VARIABLE, str(tmp_path / "s"))
        for _ in range(10_000):  # more than a queue of the kernel holds: this loop ends all the same
            readiness.notify_alive()


@pytest.mark.parametrize("supervised", [True, False])
def test_a_supervised_process_ends_after_its_supervisor(supervised: bool, tmp_path: Path) -> None:
    """Its handler of SIGTERM runs, and it ends though it never drains.  Without a supervisor nothing happens."""
    code = (
        "import os, signal, sys, time\nfrom quire.engine.common import orphans\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('drains', flush=True))\n"
        "parents = iter([1, 1])\n"
        "orphans.end_with_supervisor(0.1, lambda: next(parents, 2))\n"
        f"print('runs', flush=True)\n{'while True: time.sleep(1)' if supervised else 'time.sleep(0.1)'}"
    )
    env = {name: value for name, value in os.environ.items() if name != readiness.VARIABLE}
    env |= {readiness.VARIABLE: str(tmp_path / "gone")} if supervised else {}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == ((1, "runs\ndrains\n") if supervised else (0, "runs\n")), done.stderr


def test_nohup_keeps_its_meaning() -> None:
    assert signal.SIGHUP in orphans.drain_signals()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert orphans.drain_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)
