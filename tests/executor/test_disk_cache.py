"""Location of the cache: the user's folder, or a private one in the temporary folder for a user without a home."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from quire.engine.executor.disk_cache import CacheRefused, cache_directory


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a container that runs as any UID.  Returns the temporary folder."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_variable_and_the_home_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directory() == Path("/x/quire")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache/quire"


def test_a_user_without_a_home_has_a_private_directory(homeless: Path) -> None:
    found = cache_directory()
    assert found.parent == homeless
    assert found.stat().st_mode & 0o777 == 0o700
    assert cache_directory() == found  # again


def test_a_home_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as HOME=/nonexistent, or / on a read-only root.  A cache that an image brings there is used all the same."""
    home, temporary, access = tmp_path / "home", tmp_path / "temporary", os.access
    temporary.mkdir()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(os, "access", lambda path, mode: path not in (home, tmp_path) and access(path, mode))
    monkeypatch.setenv("HOME", str(home))
    assert cache_directory().parent == temporary  # it does not exist
    home.mkdir()
    assert cache_directory().parent == temporary
    (home / ".cache/quire").mkdir(parents=True)
    assert cache_directory() == home / ".cache/quire"


@pytest.mark.parametrize("trap", ["wide", "link", "file"])
def test_what_another_user_may_have_made_is_refused(homeless: Path, trap: str) -> None:
    found = cache_directory()
    found.rmdir()
    if trap == "wide":
        found.mkdir()
        found.chmod(0o777)
    elif trap == "link":
        (homeless / "target").mkdir(mode=0o700)
        found.symlink_to(homeless / "target")
    else:
        found.touch(mode=0o600)
    with pytest.raises(CacheRefused, match="XDG_CACHE_HOME"):
        cache_directory()
