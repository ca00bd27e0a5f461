"""Private files and directories, with modes 0600 and 0700 for any umask, and directories locked by one process.

They hold prompts, answers, or times of requests.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, Self

from quire.engine.common.errors import OperatorError

DIRECTORY, FILE = 0o700, 0o600
LOCK = "quire.lock"  # lock file in a locked directory; contains the PID and host of the holder
ENDING_S = 15.0  # maximum seconds to wait until the children of a killed holder end
POLL_S = 0.05


class DirectoryRefused(OperatorError):
    """A directory cannot be made private or is in use; the text is one line for the operator."""


def open_private(path: Path, *, empty: bool = True) -> BinaryIO:
    """Open a file for appending that only this user can read.  `empty`: truncate an existing file.

    Raises OSError, also for symbolic links and other files that are not regular."""
    # O_NONBLOCK, because opening a pipe without a reader would block.  Regular files ignore the flag.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, FILE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileExistsError(errno.EEXIST, "not a regular file", str(path))
    if empty:
        os.truncate(descriptor, 0)
    with contextlib.suppress(PermissionError):  # a file of another user that this user may write
        os.fchmod(descriptor, FILE)
    return os.fdopen(descriptor, "wb")


def restrict_file(path: Path) -> None:
    """Set mode 0600 on a file of this user.  Raises OSError."""
    with contextlib.suppress(PermissionError):
        path.chmod(FILE)


class LockedDirectory:
    """A private directory, locked by this process until close().

    The kernel holds the lock while this process or a child that inherited `descriptor` lives.  So after a kill neither
    the lock nor a remaining lock file blocks the next process."""

    def __init__(self, path: Path, flag: str, ours: Collection[str]) -> None:
        """Create and lock the directory.  Modes that are too wide become 0700 and 0600.

        `flag`: the option that names the directory, for errors.  `ours`: names of files that it may contain; a trailing
        "*" matches any suffix.  Raises DirectoryRefused, or OSError if the directory cannot be created."""
        self._flag, self.path = f"{flag} {path}", path
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=DIRECTORY, parents=True)
            path.chmod(DIRECTORY)  # the umask may have removed rights of this user
        self._restrict([LOCK, *ours])
        self.descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE)
        try:
            self._lock()
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        """Release the lock.  The lock file stays: after a removal two processes could lock two different files."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _restrict(self, ours: Collection[str]) -> None:
        found = self.path.stat()
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISDIR(found.st_mode):
            raise DirectoryRefused(f"{self._flag} is not a directory")
        if found.st_uid != os.geteuid():
            # For example a container's volume: members of its group may see file names, but the files are private.
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise DirectoryRefused(f"{self._flag} belongs to user {found.st_uid}, and every user may write to it")
        elif mode & 0o077:
            strange = [name for name in sorted(os.listdir(self.path)) if not _matches(name, ours)]
            if strange:
                raise DirectoryRefused(
                    f"{self._flag} has mode {mode:04o} and files of others, such as {strange[0]}: "
                    "give a directory of its own, or chmod 700 it"
                )
            self.path.chmod(DIRECTORY)
        for name in os.listdir(self.path):
            if _matches(name, ours):
                _restrict_tree(self.path / name)

    def _lock(self) -> None:
        give_up = time.monotonic() + ENDING_S
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(self.descriptor, 1000, 0).decode(errors="replace").strip()
                if not _has_ended(holder) or time.monotonic() > give_up:
                    raise DirectoryRefused(
                        f"{self._flag} is in use by {holder or 'another process'}: two servers would overwrite each "
                        "other's queue; stop that one, or give another directory"
                    ) from None
                time.sleep(POLL_S)  # children of the ended holder still write, and end by themselves
        os.fchmod(self.descriptor, FILE)
        os.truncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"PID {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(name.startswith(one[:-1]) if one.endswith("*") else name == one for one in patterns)


def _restrict_tree(path: Path) -> None:
    """Set private modes on a file, or on a directory and its contents, if this user owns them.  Follows no links."""
    found = path.lstat()
    if found.st_uid != os.geteuid():
        return
    if stat.S_ISDIR(found.st_mode):
        path.chmod(DIRECTORY)
        for inner in path.iterdir():
            _restrict_tree(inner)
    elif stat.S_ISREG(found.st_mode):
        path.chmod(FILE)


def _has_ended(holder: str) -> bool:
    """Return whether the process named in the lock file ran on this machine and has ended."""
    words = holder.split()
    if len(words) != 4 or words[0] != "PID" or not words[1].isdigit() or words[3] != socket.gethostname():
        return False
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
