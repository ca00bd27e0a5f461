"""Processes of tests start warm (tests/warm.py): one that silently starts cold instead costs 1 to 4 s of CPU time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests import warm
from tests.pace import patience
from tests.ports import free_port
from tests.system.processes import ENVIRONMENT, Process, ending

pytestmark = pytest.mark.system


def is_warm(process: Process) -> bool:
    """Return whether a gateway has torch mapped: none imports it, the template that forks does."""
    return "libtorch" in Path(f"/proc/{process.popen.pid}/maps").read_text()


@pytest.mark.usefixtures("warm_processes")
def test_a_gateway_stays_warm_when_the_command_line_replaces_itself(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(checkpoint("llama"))  # torch sets a variable of its own here
    words = ("gateway", model, f"--redis-url={redis_server.url}", f"--namespace={namespace}")
    with ending([]) as processes:
        processes.append(gateway := Process(tmp_path / "log", *words, f"--port={free_port()}"))
        gateway.wait_for("listens on")
        assert is_warm(gateway)
        command = Path(f"/proc/{gateway.popen.pid}/cmdline").read_text()
        assert command.split("\0")[1:5] == ["-P", "-m", "quire.service.app", model]
        assert gateway.terminate() == 0


@pytest.mark.usefixtures("warm_processes", "cold")
def test_a_test_of_a_start_gets_a_new_interpreter(tmp_path: Path) -> None:
    assert subprocess.Popen is warm.COLD
    process = Process(tmp_path / "log", "gateway", "--help")
    assert process.popen.wait(patience(60)) == 0
    assert "--port" in process.said()


def test_a_variable_that_an_import_reads_needs_a_new_interpreter() -> None:
    template = warm.template()
    assert template.takes(ENVIRONMENT)
    assert template.takes({**os.environ, "QUIRE_PORT": "1", "TORCHINDUCTOR_CACHE_DIR": "elsewhere"})
    assert not template.takes({**os.environ, "HF_HUB_OFFLINE": "another"})
