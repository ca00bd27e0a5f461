"""Where Quire keeps what it makes once: compiled kernels, digests of weights, the built-in and the demo model."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return $XDG_CACHE_HOME/quire, or ~/.cache/quire.  It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"
