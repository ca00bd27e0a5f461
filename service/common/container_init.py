"""What PID 1 of a container owes the others: it reaps orphans and passes signals on.

    PID 1 (this) ── forwards signals, reaps every process ──> its child: the command itself

The kernel gives PID 1 every process whose parent has ended, and ignores signals that PID 1 does not handle.  The
command knows its own children only.
"""

from __future__ import annotations

import os
import signal
import sys

from quire.engine.common.embedded_redis import die_with_parent

FORWARDED = {
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH),
}


def leave_pid_1() -> None:
    """Return at once, unless this is PID 1.  Then return in a child; PID 1 ends with the child's exit status."""
    if os.getpid() == 1:
        run_in_child()


def run_in_child() -> None:
    """Return in a child.  The caller's process never returns: it reaps and forwards until the child has ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})  # none is lost before the loop
    prepare = die_with_parent()
    child = os.fork()
    if child == 0:
        if prepare is not None:
            prepare()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    _keep(child)


def _keep(child: int) -> None:
    while True:
        told = signal.sigwaitinfo({*FORWARDED, signal.SIGCHLD})
        if told.si_signo != signal.SIGCHLD:
            if told.si_code <= 0:  # sent by a process; signals of a terminal reach the child by themselves
                os.kill(child, told.si_signo)
            continue
        for process, status in _ended():
            if process == child:
                sys.stdout.flush()
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)


def _ended() -> list[tuple[int, int]]:
    """Reap all that have ended.  Returns process ids and wait statuses."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if process == 0:
            return found
        found.append((process, status))
