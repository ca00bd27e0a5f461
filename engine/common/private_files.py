"""Files and directories of this user alone: modes 0600 and 0700, whatever the umask; and a directory's only user.

They hold prompts, answers, or what was asked when.
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
LOCK = "quire.lock"  # file in a locked directory that names the holder
ENDING_S = 15.0  # longest wait for the children of a holder that was killed
POLL_S = 0.05


class DirectoryRefused(OperatorError):
    """A directory cannot be private or is in use; one line an operator can act on."""


def open_private(path: Path) -> BinaryIO:
    """Open a new, empty file that only this user can read.  An existing one is emptied.

    Raises OSError, also for a symbolic link and for anything else that is no regular file."""
    # Non-blocking: to open a pipe that has no reader would wait for one.  Files ignore it.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, FILE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileExistsError(errno.EEXIST, "not a regular file", str(path))
    os.truncate(descriptor, 0)
    with contextlib.suppress(PermissionError):  # another user's file, which that user lets us write
        os.fchmod(descriptor, FILE)
    return os.fdopen(descriptor, "wb")


def restrict_file(path: Path) -> None:
    """Take all rights of other users from a file of this user.  Raises OSError."""
    with contextlib.suppress(PermissionError):
        path.chmod(FILE)


class LockedDirectory:
    """A private directory with one user at a time, until close().

    The kernel holds the lock for as long as this process or a child that inherited `descriptor` lives.  So neither a
    kill nor a file that is left blocks the next user."""

    def __init__(self, path: Path, flag: str, ours: Collection[str]) -> None:
        """Make and lock the directory.  Modes that are too wide become 0700 and 0600.

        `flag`: the option that names it, for errors.  `ours`: names of files that may be in it; "*" ends a prefix.
        Raises DirectoryRefused, or OSError if it cannot be made."""
        self._flag, self.path = f"{flag} {path}", path
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=DIRECTORY, parents=True)
            path.chmod(DIRECTORY)  # a umask may have taken rights of this user
        self._restrict([LOCK, *ours])
        self.descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE)
        try:
            self._lock()
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        """Give up the lock.  The file stays: removing it would let two processes lock two files."""
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
            # A container's volume, say: other members of its group may see names, and the files are private.
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
                time.sleep(POLL_S)  # its children still write, and end by themselves
        os.fchmod(self.descriptor, FILE)
        os.truncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"PID {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(name.startswith(one[:-1]) if one.endswith("*") else name == one for one in patterns)


def _restrict_tree(path: Path) -> None:
    """Set the modes of a file or of a directory with all it holds, of this user's.  No symbolic link is followed."""
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
    """Whether the process that the lock's file names ran on this machine and has ended."""
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
