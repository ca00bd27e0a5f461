"""PID 1 of a container reaps what it did not start, passes signals on, and ends as the command does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import patience, wait_until
from tests.system.processes import ROOT

# As PID 1 would: the kernel hands the orphans of a subreaper's descendants to it, too.
COMMAND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
from quire.service.common.container_init import run_in_child
run_in_child()
"""


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND + code], stdout=subprocess.PIPE, text=True, cwd=ROOT, process_group=0
    )


@pytest.mark.parametrize(("ending", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_it_ends_as_the_command_does(ending: str, status: int) -> None:
    with start(ending) as process:
        assert process.wait(patience(60)) == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_command(number: signal.Signals) -> None:
    code = f"""
signal.signal({int(number)}, lambda *_: sys.exit(7))
print("up", flush=True)
while True:
    signal.pause()
"""
    with start(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.wait(patience(60)) == 7


def test_orphans_are_reaped() -> None:
    """A child of the command leaves a process behind, which ends later."""
    code = """
import subprocess
orphan = subprocess.run(["sh", "-c", "sleep 0.1 >&2 & echo $!"], stdout=subprocess.PIPE, text=True).stdout
print(orphan, flush=True)
signal.pause()
"""
    with start(code) as process:
        try:
            assert process.stdout is not None
            orphan = int(process.stdout.readline())
            wait_until(lambda: not Path(f"/proc/{orphan}").exists(), why=lambda: "a zombie is left")
        finally:
            process.send_signal(signal.SIGTERM)
