"""Settings of the C allocator that return freed memory of large request bodies to the system."""

from __future__ import annotations

import ctypes
import logging

# Parameters of glibc's mallopt(3).
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MMAP_BYTES = 128 * 1024  # minimum size of a block that gets its own mapping, which is unmapped when it is freed
ARENAS = 2  # maximum number of malloc's arenas for threads; each retains free memory

log = logging.getLogger(__name__)


def return_large_blocks() -> bool:
    """Make glibc map each large block separately.  Returns False with another C library.

    By default glibc raises the minimum size to the largest block freed so far (up to 32 MiB).  Bodies then share the
    heap with small objects, and a gateway that has read many large bodies retains free memory: 15 MiB after 30,000
    hostile requests, 7 MiB with these settings."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        log.debug("the C library has no mallopt: its settings stay unchanged")
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(M_ARENA_MAX, ARENAS))
