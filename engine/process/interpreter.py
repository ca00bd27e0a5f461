"""Settings of the Python interpreter, for every process that computes tokens."""

from __future__ import annotations

import gc
import sys

# Seconds that a thread may hold the GIL while another thread waits for it.  With Python's default of 5 ms the bus
# thread waits longer while the executor computes: at 36 to 42 streams the median TTFT is 47.6 ms with 5 ms and 43.2 ms
# with this value.
SWITCH_S = 0.0002
# Thresholds of the garbage collector.  With Python's default of 700, objects of a step of 1,000 sequences reached the
# old generation before they were freed.  Every two seconds the collector then visited all sequences, which took 30 to
# 130 ms.
GC_THRESHOLDS = (10_000, 10, 5)


def tune_interpreter() -> None:
    """Set the interpreter's thread switch interval and garbage-collector thresholds.  Call it once per process."""
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*GC_THRESHOLDS)


def keep_what_is_loaded() -> None:
    """Exclude all existing objects from garbage collection, which would visit them repeatedly while tokens wait.

    For a process that keeps one model.  Existing reference cycles are never freed afterwards, until gc.unfreeze()."""
    gc.collect()
    gc.freeze()
