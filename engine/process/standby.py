"""How a spare engine gets ready, and how it waits until the supervisor needs it.

    imports -> prepare (executor/preload.py) -> wait on standard input -> takeover: load model, open queue, serve

The waiting spare runs at a lower priority, because the serving engine needs the cores; only where the system lets it
raise the priority again.  The takeover ends the preparation at once.
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

NICE = 10  # priority of a spare that still imports and prepares
CAP_SYS_NICE = 23  # bit of the capability to raise a priority, see capabilities(7)
# transformers imports these wherever they are installed, and no model that Quire serves needs one of them.  Some take
# seconds each: scikit-learn and torchvision alone 3 s on one host.
OPTIONAL = (
    *("accelerate", "apex", "av", "bitsandbytes", "cv2", "datasets", "deepspeed", "flash_attn", "flax", "gguf"),
    *("jax", "kernels", "librosa", "matplotlib", "nltk", "numba", "onnxruntime", "openai", "optimum", "pandas", "peft"),
    *("PIL", "scipy", "sklearn", "soundfile", "tensorflow", "timm", "torchao", "torchaudio", "torchcodec"),
    *("torchvision", "wandb"),
)


@contextlib.contextmanager
def without_optional_packages() -> Iterator[None]:
    """Make the OPTIONAL packages look as if they were not installed, to every import meanwhile."""
    hidden = [name for name in OPTIONAL if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: import and find_spec find nothing
    try:
        yield
    finally:
        for name in hidden:
            if sys.modules.get(name, sys) is None:
                del sys.modules[name]


def wait_for_turn(parts: Iterable[object]) -> bool:
    """Prepare part by part, then wait for a line on standard input.  False: standard input ended, no spare is needed.

    `parts` does the next part each time it is advanced.  A part that fails is logged and ends the preparation: the
    takeover then does that work, and reports its own errors."""
    try:
        for _ in parts:
            if turn_has_come():
                break
        else:
            log.info("spare %d is ready to take over if the engine dies", os.getpid())
    except Exception as error:
        log.warning("spare: preparation failed, a takeover will take longer: %s: %s", type(error).__name__, error)
    return bool(sys.stdin.readline())


def turn_has_come() -> bool:
    """Whether standard input has a line, or has ended."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


@contextlib.contextmanager
def low_priority() -> Iterator[None]:
    """Run at a lower priority, if the process may raise it again afterwards.

    A spare whose turn has come keeps its priority: the engine may die again before its next spare gets here.  The
    supervisor writes the line first and raises the priority after it, so one of the two sees the other."""
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
    """Whether this process may set the priority `nice` again after it has lowered its own.  False outside Linux."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    except (OSError, AttributeError):
        return False
    capabilities = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    return bool(capabilities >> CAP_SYS_NICE & 1) or limit == resource.RLIM_INFINITY or limit >= 20 - nice
