"""Child processes import Quire and the standard library, whatever the user's directory and PYTHONPATH hold."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from quire.engine.common import child_python

SHADOWS = (
    "import json, types, redis; from quire import engine, service; "
    "print(*(m.__file__ for m in (json, types, redis, engine, service)))"
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    for name in ("quire", "redis"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the user\\'s package was imported')")
    for name in ("json", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user\\'s module was imported')")
    return tmp_path


@pytest.mark.parametrize("path", ["", ":", ":/nonexistent", "/nonexistent::/elsewhere"])
def test_a_child_imports_nothing_from_the_current_directory(hostile: Path, path: str) -> None:
    env = child_python.environment({**os.environ, "PYTHONPATH": path})
    done = subprocess.run(
        child_python.command("-c", SHADOWS), cwd=hostile, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(hostile) not in done.stdout
    ours = f"{child_python.ROOT}/quire"
    assert f"{ours}/engine/__init__.py {ours}/service/__init__.py" in done.stdout


def test_the_parents_code_goes_first_and_the_users_entries_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"PYTHONPATH": f"/a::/b:{child_python.ROOT}", "X": "1"}
    assert child_python.environment(given) == {"PYTHONPATH": f"{child_python.ROOT}:/a:/b", "X": "1"}
    assert given["PYTHONPATH"].startswith("/a")  # the parent's own stays
    # An installed package is found without: first on the path, its neighbours could hide modules of Python itself.
    monkeypatch.setattr("site.getsitepackages", lambda: [child_python.ROOT])
    assert child_python.environment({"PYTHONPATH": ":"}) == {}
    assert child_python.environment({"PYTHONPATH": "/a"}) == {"PYTHONPATH": "/a"}
