"""A process ends in time while a call holds the interpreter.  Each case has a process of its own."""

from __future__ import annotations

import subprocess
import sys

from tests.pace import patience

BEGIN = """
import ctypes, time
from quire.engine.common.deadline import ends_process

def hold(seconds):  # and with it every other thread of Python
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", BEGIN + code]
    return subprocess.run(words, capture_output=True, text=True, timeout=patience(60), check=False)


def test_a_process_that_holds_the_interpreter_ends() -> None:
    found = run("with ends_process(0.2): hold(900)")
    assert found.returncode == 1
    assert "in hold" in found.stderr  # where it was


def test_a_block_that_ends_in_time_leaves_no_timer() -> None:
    found = run("with ends_process(0.3): pass\nhold(0.6)\nprint('alive')")
    assert (found.returncode, found.stdout) == (0, "alive\n")


def test_the_end_of_one_block_leaves_the_timer_of_another() -> None:
    nested = run("with ends_process(0.3):\n    with ends_process(60): pass\n    hold(900)")
    assert nested.returncode == 1
    sooner = run("with ends_process(60):\n    with ends_process(0.2): hold(900)")
    assert sooner.returncode == 1


def test_an_engine_whose_executor_never_lets_go_of_its_device_ends() -> None:
    """One that failed: its requests have moved on, and a supervisor starts another when the process ends."""
    found = run(
        "from types import SimpleNamespace\n"
        "import quire.engine.__main__ as main\n"
        "main.CLOSE_S = 0.2\n"
        "bus = SimpleNamespace(stop=lambda died: print('stopped', died, flush=True))\n"
        "stuck = SimpleNamespace(close=lambda: hold(900))\n"
        "main.Server._close(SimpleNamespace(_bus=bus, _executor=stuck), True)\n"
    )
    assert (found.returncode, found.stdout) == (1, "stopped True\n")
