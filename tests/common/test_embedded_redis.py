"""The embedded Redis server is private and persistent, and ends with its owner."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import redis

from quire.engine.common import embedded_redis
from quire.engine.common.embedded_redis import EmbeddedRedis, EmbeddedRedisError
from tests.pace import patience


def test_it_is_private_and_leaves_nothing() -> None:
    with EmbeddedRedis() as server:
        socket = Path(server.url.removeprefix("unix://"))
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert server.pid is not None
        assert psutil.Process(server.pid).net_connections("inet") == []
        with redis.Redis.from_url(server.url) as client:
            found = client.config_get("*")
            assert found["appendonly"] == "yes"
            assert found["appendfsync"] == "everysec"
            assert found["maxmemory-policy"] == "noeviction"
    assert not socket.parent.exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_data_survives_a_stop_and_a_crash(tmp_path: Path, how: signal.Signals) -> None:
    folder = tmp_path / ("deep" * 30)  # far too long for a socket of its own
    with EmbeddedRedis(folder) as server, redis.Redis.from_url(server.url) as client:
        client.set("kept", 1)
        pid = server.pid
        assert pid is not None
        os.kill(pid, how)
        while server.pid is not None:
            time.sleep(0.01)
        server.start()
    with EmbeddedRedis(folder) as server, redis.Redis.from_url(server.url) as client:
        assert client.get("kept") == b"1"


def test_a_start_that_fails_says_why_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "appendonly.aof").write_bytes(b"not a log\n")
    with pytest.raises(EmbeddedRedisError, match=r"(?i)bad file format|aof|append") as caught, EmbeddedRedis(tmp_path):
        pass
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EmbeddedRedisError, match="no redis-server"):
        EmbeddedRedis()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's parent-death signal is Linux only")
def test_it_ends_when_its_owner_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tempfile.mkdtemp(dir="/tmp")  # where no other test sweeps; tmp_path is too long for a socket
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    code = """
import time
from quire.engine.common.embedded_redis import EmbeddedRedis
server = EmbeddedRedis()
server.start()
print(server.pid, server.url, flush=True)
time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    number, url = owner.stdout.readline().split()
    pid = int(number)
    owner.kill()
    owner.communicate()
    give_up = time.monotonic() + patience(30)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up
        time.sleep(0.02)
    left = Path(url.removeprefix("unix://")).parent
    assert left.exists()  # its killed owner could not remove it
    with EmbeddedRedis() as one, EmbeddedRedis() as other:
        assert not left.exists()
        assert one.url != other.url
        assert Path(one.url.removeprefix("unix://")).exists()  # no owner sweeps away a living one's
    shutil.rmtree(folder)


@pytest.mark.parametrize("link", ["owner", "folder"])
def test_a_planted_link_leads_the_sweep_to_no_other_file(tmp_path: Path, link: str) -> None:
    """Every user may write to the temporary folder, so a socket there may be a trap."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / embedded_redis.LOCK).write_text("kept")
    base = tmp_path / "tmp"
    base.mkdir()
    trap = base / f"{embedded_redis.FOLDER}x"
    if link == "owner":
        trap.mkdir(mode=0o700)
        (trap / embedded_redis.LOCK).symlink_to(precious / embedded_redis.LOCK)
    else:
        trap.symlink_to(precious)
    embedded_redis._sweep(base)
    assert (precious / embedded_redis.LOCK).read_text() == "kept"
    assert trap.exists()


def test_the_sweep_leaves_folders_that_others_could_have_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def left(name: str, mode: int) -> Path:
        folder = tmp_path / f"{embedded_redis.FOLDER}{name}"
        folder.mkdir()
        (folder / embedded_redis.LOCK).write_text("")
        folder.chmod(mode)
        return folder

    open_to_all, ours = left("open", 0o755), left("ours", 0o700)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    embedded_redis._sweep(tmp_path)
    assert ours.exists()  # another user's
    monkeypatch.undo()
    embedded_redis._sweep(tmp_path)
    assert open_to_all.exists()
    assert not ours.exists()
