"""Standby: preparation of a spare engine, and its wait until the supervisor needs it.

    imports -> prepare (executor/preload.py) -> wait on standard input -> takeover: load model, open queue, serve

The spare prepares at a lower priority, because the serving engine needs the cores, if the system allows raising the
priority again.  Its activation (takeover) ends the preparation at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from quire.engine.executor.priority import set_priority

log = logging.getLogger("quire.engine")

NICE = 10  # nice value of a spare during imports and preparation
CAP_SYS_NICE = 23  # bit of the capability to raise a priority, see capabilities(7)
# transformers imports these packages if they are installed, but no model that Quire serves needs them.  Some take
# seconds to import: scikit-learn and torchvision together 3 s on one host.
OPTIONAL = (
    *("accelerate", "apex", "av", "bitsandbytes", "cv2", "datasets", "deepspeed", "flash_attn", "flax", "gguf"),
    *("jax", "kernels", "librosa", "matplotlib", "nltk", "numba", "onnxruntime", "openai", "optimum", "pandas", "peft"),
    *("PIL", "scipy", "sklearn", "soundfile", "tensorflow", "timm", "torchao", "torchaudio", "torchcodec"),
    *("torchvision", "wandb"),
)


@contextlib.contextmanager
def without_optional_packages() -> Iterator[None]:
    """Hide the OPTIONAL packages from all imports within this context, as if they were not installed."""
    hidden = [name for name in OPTIONAL if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: import and find_spec find nothing
    try:
        yield
    finally:
        for name in hidden:
            if sys.modules.get(name, sys) is None:
                del sys.modules[name]


def wait_for_turn(parts: Iterable[object]) -> bool:
    """Prepare step by step, then wait for a line on standard input.  False: it ended, so no spare is needed.

    `parts`: an iterator that runs the next part of the preparation at each item.  A failing part is logged and ends the
    preparation; the activation then does the work, and reports its errors."""
    try:
        for _ in parts:
            if turn_has_come():
                break
        else:
            log.info("spare %d is ready to take over if the engine dies", os.getpid())
    except Exception as error:
        log.warning("spare: preparation failed, its activation will take longer: %s: %s", type(error).__name__, error)
    return bool(sys.stdin.readline())


def turn_has_come() -> bool:
    """Return whether standard input has a line or has ended."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


@contextlib.contextmanager
def low_priority() -> Iterator[None]:
    """Run at a lower priority, if the process may raise it again afterwards.

    If the supervisor has already activated this spare, its priority is restored at once.  The supervisor writes the
    line first and raises the priority afterwards, so at least one of the two processes raises it."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    polite = may_raise_priority(before)
    if polite:
        os.setpriority(os.PRIO_PROCESS, 0, max(before, NICE))
        if turn_has_come():
            set_priority(os.getpid(), before)
    try:
        yield
    finally:
        if polite:
            set_priority(os.getpid(), before)


def may_raise_priority(nice: int) -> bool:
    """Return whether this process may return to the nice value `nice` after a higher one.  False outside Linux."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    except (OSError, AttributeError):
        return False
    capabilities = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    return bool(capabilities >> CAP_SYS_NICE & 1) or limit == resource.RLIM_INFINITY or limit >= 20 - nice
