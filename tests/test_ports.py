"""Ports for servers of tests: no two callers get one, also before a server has bound it."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests import ports


class Repeats(random.Random):
    """Draws each number twice."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._at = 2 * number - 1

    def randint(self, low: int, high: int) -> int:
        self._at += 1
        return self._at // 2


def test_a_port_that_was_drawn_twice_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers drew one port within the seconds that a server takes to bind it: "Address already in use"."""
    port = ports.free_port()
    monkeypatch.setattr(ports, "RANDOM", Repeats(port))
    assert port < ports.free_port()
    code = f"from tests import ports, test_ports; ports.RANDOM = test_ports.Repeats({port}); print(ports.free_port())"
    assert int(subprocess.check_output([sys.executable, "-c", code])) > port


def test_the_ports_beside_are_free_too() -> None:
    port = ports.free_port(7)
    assert ports.FIRST <= port <= ports.LAST - 7
    with pytest.raises(BlockingIOError):
        ports.lock(port + 7)
