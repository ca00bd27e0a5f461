"""Returns freed host memory to the system while a model is loaded.

Loading allocates and frees a temporary copy of each weight: in float32 for rounding, or joined for packing.  glibc
raises its threshold for mmap to the largest block freed so far, up to 32 MiB.  From then on it takes such copies from
its heap, where freed copies leave holes between the weights that stay.  Such holes took as much memory as the weights
themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

# Parameters of glibc's mallopt, from malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
WHILE_LOADING = 160 << 10  # bytes: larger blocks are mapped, and unmapped when freed; chunks of weights are smaller
HEAP_KEEPS = 1 << 20  # bytes that the heap keeps at its end while loading, for the next chunk
AFTERWARDS = 32 << 20  # bytes: glibc's own threshold after such blocks were freed


@contextlib.contextmanager
def returned_when_freed() -> Iterator[None]:
    """While loading, map each block of 160 KiB or more separately.  With a C library other than glibc, change
    nothing."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    library.mallopt(MMAP_THRESHOLD, WHILE_LOADING)
    library.mallopt(TRIM_THRESHOLD, HEAP_KEEPS)
    try:
        yield
    finally:
        library.mallopt(MMAP_THRESHOLD, AFTERWARDS)
        library.mallopt(TRIM_THRESHOLD, 2 * AFTERWARDS)  # glibc's own value by then: steps reuse freed memory
        library.malloc_trim(ctypes.c_size_t(0))
