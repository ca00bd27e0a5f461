"""Directories and files that only this user can read, and directories with one user at a time."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from quire.engine.common import private_files
from quire.engine.common.embedded_redis import EmbeddedRedis, EmbeddedRedisError
from quire.engine.common.private_files import DirectoryRefused, LockedDirectory, open_private
from quire.engine.observers.log_file import LogFile

ROOT = Path(__file__).resolve().parents[2]
HOLD = "from pathlib import Path\nfrom quire.engine.common.private_files import LockedDirectory\nimport sys, time\n"


@pytest.fixture(autouse=True, params=[0o000, 0o022, 0o777], ids=lambda mask: f"umask-{mask:03o}")
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): f"{stat.S_IMODE(path.stat().st_mode):04o}"
        for path in [folder, *folder.rglob("*")]
        if path.is_file() or path.is_dir()
    }


def private(folder: Path) -> bool:
    return all(
        mode == ("0700" if (folder / name).is_dir() else "0600") for name, mode in modes(folder).items()
    ) and bool(modes(folder))


def test_files_of_the_private_redis_are_readable_by_its_user_only(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with EmbeddedRedis(folder) as server, redis.Redis.from_url(server.url) as client:
        client.set("prompt", "secret")
        client.bgrewriteaof()
        client.save()
        while client.info("persistence")["aof_rewrite_in_progress"]:
            pass
        assert private(folder), modes(folder)
        assert "redis.log" in modes(folder)
        for path in folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        folder.chmod(0o755)
    with EmbeddedRedis(folder) as server, redis.Redis.from_url(server.url) as client:  # a directory of an older version
        assert private(folder), modes(folder)
        assert client.get("prompt") == b"secret"


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "letter").touch()
    (folder / "letter").chmod(0o644)
    with pytest.raises(EmbeddedRedisError, match=r"/home has mode 0755 and .* such as letter"), EmbeddedRedis(folder):
        pass
    assert modes(folder) == {".": "0755", "letter": "0644"}
    folder.chmod(0o700)
    with EmbeddedRedis(folder):
        assert modes(folder)["letter"] == "0644"


def test_no_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").touch()
    (tmp_path / "outside").chmod(0o644)
    folder = tmp_path / "data"
    folder.mkdir(0o700)
    folder.chmod(0o700)
    (folder / "dump.rdb").symlink_to(tmp_path / "outside")
    with LockedDirectory(folder, "--x", ["dump.rdb"]):
        assert modes(tmp_path)["outside"] == "0644"
    (folder / private_files.LOCK).unlink()
    (folder / private_files.LOCK).symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic link"):
        LockedDirectory(folder, "--x", [])


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "directory"])
def test_a_file_is_opened_only_as_a_regular_file_of_the_directory(tmp_path: Path, kind: str) -> None:
    """Another member of the group may have put something else there: a link to a file of ours would be emptied."""
    outside, path = tmp_path / "outside", tmp_path / "redis.log"
    if kind == "link":
        outside.write_text("kept")
    if kind.endswith("link"):
        path.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without one, to open it would block
    else:
        path.mkdir()
    with pytest.raises(OSError, match=r"symbolic link|not a regular file|[Ii]s a directory"):
        open_private(path).close()
    if kind == "pipe":
        os.close(reader)
        with pytest.raises(OSError, match="No such device"):  # at once, though nothing reads
            open_private(path).close()
    assert (outside.read_text() if outside.exists() else "") == ("kept" if kind == "link" else "")


def test_a_second_user_is_refused_with_the_first_ones_name(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "data") as first:
        with pytest.raises(EmbeddedRedisError) as caught, EmbeddedRedis(tmp_path / "data"):
            pass
        assert re.fullmatch(rf"--data-dir \S+/data is in use by PID {os.getpid()} on \S+: .*", str(caught.value))
        first.stop()  # a start follows
        with pytest.raises(EmbeddedRedisError, match="is in use"), EmbeddedRedis(tmp_path / "data"):
            pass
    with EmbeddedRedis(tmp_path / "data"):
        pass


def test_a_killed_user_blocks_no_other(tmp_path: Path) -> None:
    code = f"{HOLD}locked = LockedDirectory(Path(sys.argv[1]), '--x', [])\nprint('held', flush=True)\ntime.sleep(600)"
    words = [sys.executable, "-c", code, str(tmp_path / "data")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DirectoryRefused, match=f"PID {holder.pid} "):
            LockedDirectory(tmp_path / "data", "--x", [])
        holder.kill()
        holder.wait()
        with LockedDirectory(tmp_path / "data", "--x", []):
            assert f"PID {os.getpid()} on " in (tmp_path / "data" / private_files.LOCK).read_text()


def test_a_child_that_outlives_its_killed_owner_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis still writes its file when its owner is gone."""
    code = (
        f"{HOLD}import subprocess\nlocked = LockedDirectory(Path(sys.argv[1]), '--x', [])\n"
        "child = subprocess.Popen(['sleep', '600'], pass_fds=[locked.descriptor])\nprint(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "data")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.kill()
        owner.wait()
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            os.kill(child, signal.SIGKILL)

    monkeypatch.setattr("quire.engine.common.private_files.time.sleep", sleep)
    with LockedDirectory(tmp_path / "data", "--x", []):
        assert len(looks) >= 3


def test_logs_that_say_what_was_asked_are_private(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    path.touch()
    path.chmod(0o644)
    LogFile(path, 1 << 20).close()
    assert {modes(tmp_path)[name] for name in ("requests", "requests.1")} == {"0600"}
    with open_private(tmp_path / "new") as file:  # as EmbeddedRedis does for the log of its server
        file.write(b"x")
    assert modes(tmp_path)["new"] == "0600"


@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_a_log_is_a_regular_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(OSError, match="not a regular file"):
        LogFile(path, 1 << 20)
    assert path.exists()
