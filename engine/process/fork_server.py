"""`python -m quire.engine.process.fork_server [MODEL] [options]`: forks spare engines, so that no spare needs to import
torch.

    supervisor ── socket: a pipe, the standard input of the spare ──> fork server ── fork ── fork ──> spare
               <── PID of the spare ────────────────────────────────┘       └ ends: the supervisor becomes the parent

The imports and the kernels take 5 s of CPU time; a fork takes 30 ms.  `quire serve` starts one fork server when its
first engine is ready.  A spare runs `python -m quire.engine --standby` with the options of the fork server.

Threads and a CUDA context do not survive a fork.  So the server has one thread, and only spares call CUDA.  If a fork
has lost a thread or a CUDA context nevertheless, the spare replaces itself by a new interpreter: slow, but correct.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from quire.engine.__main__ import code
from quire.engine.__main__ import main as run_engine
from quire.engine.common import child_python, settings
from quire.engine.common.embedded_redis import die_with_parent
from quire.engine.config import EngineConfig
from quire.engine.process.standby import low_priority, turn_has_come

READY = b"ready"  # the first message to the supervisor
SERVER_NAME, ENGINE_NAME = "quire-forks", "quire-engine"  # names that `ps -o comm` and `top` show
GPU_DEVICES = ("nvidiactl", "dxg")  # files in /dev whose presence means that processes may call CUDA


def main(words: list[str]) -> int:
    """Fork spares until standard input ends.

    Returns an exit status: in the parent the server's, in a forked spare the spare's."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    name_process(SERVER_NAME)
    words = [*words, "--standby"]
    config = settings.load(EngineConfig, words, os.environ, prog="quire engine", positional="model", table="engine")
    supervisor = socket.socket(fileno=os.dup(0))
    end_with_supervisor = die_with_parent(os.getppid())
    with low_priority():
        prepare(config)
    supervisor.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(supervisor, 64, 1)
        if not message:
            return 0
        if not descriptors:  # a wake-up without a pipe: the supervisor needs a spare soon, see `low_priority`
            continue
        one_thread = len(os.listdir("/proc/self/task")) == 1
        pid = fork_grandchild()
        if not pid:
            supervisor.close()
            return be_spare(words, descriptors[0], end_with_supervisor, valid=one_thread and can_call_cuda(config))
        os.close(descriptors[0])
        supervisor.send(str(pid).encode())


def prepare(config: EngineConfig) -> None:
    """Run the imports for all spares and, without a GPU, also the preparation of a spare."""
    _, parts = code(config)
    if config.tensor_parallel > 1 or may_have_gpu(config):  # the spare itself must create ranks and CUDA contexts
        return
    with contextlib.suppress(Exception):  # the spare repeats the preparation, and logs its errors
        for _ in parts(config):
            if turn_has_come():
                break
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a spare would copy the memory pages shared with the server


def may_have_gpu(config: EngineConfig) -> bool:
    """Return whether an engine with this configuration may call CUDA.

    Does not call CUDA itself, because forks of this process could not call it afterwards."""
    if config.executor == "scripted" or config.device == "cpu":
        return False
    import torch

    return torch.backends.cuda.is_built() and any(Path("/dev", name).exists() for name in GPU_DEVICES)


def can_call_cuda(config: EngineConfig) -> bool:
    """Return whether CUDA works in this fork, or the configuration does not need it."""
    if not may_have_gpu(config):
        return True
    import torch

    return not torch.cuda._is_in_bad_fork()


def fork_grandchild() -> int:
    """Fork twice.  Returns the PID of the grandchild; in the grandchild returns 0, after its parent has ended.

    The kernel then makes the nearest subreaper among its ancestors, the supervisor, its parent.  Raises OSError."""
    reader, writer = os.pipe()
    if not (between := os.fork()):
        between = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.close(reader)
        os.close(writer)
        while os.getppid() == between:
            time.sleep(0.001)
        return 0
    os.close(writer)
    with open(reader, encoding="ascii") as answer:
        pid = int(answer.read() or 0)
    os.waitpid(between, 0)
    if not pid:
        raise OSError("cannot fork a spare engine")
    return pid


def be_spare(words: list[str], stdin: int, end_with_supervisor: Callable[[], None] | None, *, valid: bool) -> int:
    """Run an engine in this fork; return its exit status.  `valid`: the fork lost no thread and no CUDA context."""
    os.dup2(stdin, 0)
    os.close(stdin)
    os.setpgid(0, 0)  # Ctrl-C reaches only the supervisor, as for all its children
    if end_with_supervisor is not None:
        end_with_supervisor()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name_process(ENGINE_NAME)
    if not valid:
        os.execve(sys.executable, child_python.command("-m", "quire.engine", *words), child_python.environment())
    return run_engine(words)


def name_process(name: str) -> None:
    """Set the name that `ps -o comm` shows; the command line of a fork stays that of the fork server."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="ascii")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
