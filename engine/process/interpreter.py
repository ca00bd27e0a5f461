"""Settings of Python itself, in every process that computes tokens."""

from __future__ import annotations

import gc
import sys

# How long a thread may keep the interpreter from another thread, seconds.  With Python's own 5 ms the bus thread waits
# longer for the interpreter while the executor computes: median time to first token 47.6 ms, 43.2 ms with this value
# (36 to 42 streams).
SWITCH_S = 0.0002
# Of the garbage collector.  With Python's own 700, the objects of a step of 1,000 sequences counted as old before they
# were freed.  The collector then walked through all sequences every two seconds: 30 to 130 ms at 1,000 of them.
GC_THRESHOLDS = (10_000, 10, 5)


def tune_interpreter() -> None:
    """Set how often threads change and when garbage is collected.  Call it once per process."""
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*GC_THRESHOLDS)


def keep_what_is_loaded() -> None:
    """Have the collector leave alone what exists now: it would walk through it again and again while tokens wait.

    For a process that loads one model and keeps it.  Objects that refer to each other are never freed afterwards, until
    gc.unfreeze()."""
    gc.collect()
    gc.freeze()
