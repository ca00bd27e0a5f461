"""Where Quire keeps what it makes once: compiled kernels, digests of weights, the built-in and the demo model."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return $XDG_CACHE_HOME/quire, or ~/.cache/quire.  It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


def make_readable(directory: Path) -> None:
    """Let every user read a checkpoint: safetensors writes files that only their owner may read.

    The superuser builds an image, and another user runs it."""
    directory.chmod(0o755)
    for file in directory.iterdir():
        file.chmod(0o644)
