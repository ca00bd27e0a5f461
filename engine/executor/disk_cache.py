"""The cache directory of files that are made once per machine: compiled kernels, weight digests, built-in and demo
model."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from quire.engine.common.errors import OperatorError


class CacheRefused(OperatorError):
    """The cache in the temporary folder cannot be trusted.  The message is one line."""


def cache_directory() -> Path:
    """Return $XDG_CACHE_HOME/quire, or ~/.cache/quire.  It may not exist yet.

    A user without a home directory, such as any UID of a container, gets a directory in the temporary folder.  So does
    a user whose home is missing or cannot be written, unless the cache exists there already.  Raises CacheRefused."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "quire"
    with contextlib.suppress(RuntimeError):  # the user has no home
        directory = Path.home() / ".cache" / "quire"
        if os.path.exists(directory) or _can_make(directory):
            return directory
    return _temporary(Path(tempfile.gettempdir()) / f"quire-cache-{os.geteuid()}")


def _can_make(directory: Path) -> bool:
    """Return whether this user may create a directory: its nearest existing parent can be written."""
    parent = next(one for one in directory.parents if os.path.exists(one))
    return os.access(parent, os.W_OK | os.X_OK)


def _temporary(directory: Path) -> Path:
    """Make a directory that only this user can access, or check the existing one: its kernels are loaded and run.

    Every user may write to the parent folder, so another user may have made the directory first."""
    with contextlib.suppress(FileExistsError, PermissionError):
        directory.mkdir(mode=0o700)
    try:
        found = directory.lstat()
    except OSError as error:
        raise CacheRefused(describe_failure("the cache", directory, error)) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise CacheRefused(
            f"{directory} is not a directory that only this user can enter: set XDG_CACHE_HOME to another folder"
        )
    return directory


def describe_failure(what: str, directory: Path, error: OSError) -> str:
    """Return an error line for a user whose disk refuses to store `what` in `directory`."""
    reason = error.strerror or str(error)
    return f"cannot write {what} to {directory}: {reason}; set XDG_CACHE_HOME to another folder"


def make_readable(directory: Path) -> None:
    """Let every user read a checkpoint: safetensors writes files that only their owner may read.

    An image, for example, is built by root and run by another user."""
    directory.chmod(0o755)
    for file in directory.iterdir():
        file.chmod(0o644)
