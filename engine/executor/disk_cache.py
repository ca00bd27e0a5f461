"""Where Quire keeps what it makes once: compiled kernels, digests of weights, the built-in and the demo model."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return $XDG_CACHE_HOME/quire, or ~/.cache/quire.  It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


def describe_failure(what: str, directory: Path, error: OSError) -> str:
    """Return the line for a user whose disk does not take `what` into `directory`."""
    reason = error.strerror or str(error)
    return f"cannot write {what} to {directory}: {reason}; set XDG_CACHE_HOME to another folder"


def make_readable(directory: Path) -> None:
    """Let every user read a checkpoint: safetensors writes files that only their owner may read.

    The superuser builds an image, and another user runs it."""
    directory.chmod(0o755)
    for file in directory.iterdir():
        file.chmod(0o644)
