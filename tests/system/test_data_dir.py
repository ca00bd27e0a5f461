"""`quire serve --data-dir`: one server at a time, also right after a kill."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.service.fakes import byte_level
from tests.system.processes import Process, ending

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]


def test_a_second_server_on_one_directory_is_refused(tmp_path: Path) -> None:
    model, data = byte_level(tmp_path / "model"), tmp_path / "data"
    words = ["serve", str(model), "--port=0", "--executor=scripted", "--no-spare", f"--data-dir={data}"]
    with ending([]) as running:
        running.append(first := Process(tmp_path / "first", *words))
        first.wait_for("serving ")
        running.append(second := Process(tmp_path / "second", *words))
        assert second.popen.wait() == 1
        [line] = second.said().splitlines()
        assert line.startswith(f"quire serve: --data-dir {data} is in use by PID {first.popen.pid} on ")
        first.kill()  # its Redis ends a moment later
        running.append(third := Process(tmp_path / "third", *words))
        third.wait_for("serving ")
        assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in [data, *data.rglob("*")])
        assert third.terminate() == 0
