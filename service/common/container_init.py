"""The duties of PID 1 in a container: reap orphans and forward signals.

    PID 1 (this) ── forwards signals, reaps every process ──> its child: the command itself

The kernel makes PID 1 the parent of every process whose own parent has ended, and drops signals that PID 1 does not
handle.  The command itself reaps only its own children.
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
    """If this process is PID 1, fork and return only in the child; PID 1 then exits with the child's status."""
    if os.getpid() == 1:
        run_in_child()


def run_in_child() -> None:
    """Fork, and return in the child.  The parent never returns: it reaps and forwards until the child has ended."""
    # Blocked signals wait for the loop in `_keep`, so none is lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
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
            if told.si_code <= 0:  # sent by a process; signals from a terminal reach the child without this
                os.kill(child, told.si_signo)
            continue
        for process, status in _ended():
            if process == child:
                sys.stdout.flush()
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)


def _ended() -> list[tuple[int, int]]:
    """Reap all ended processes.  Returns (process id, wait status) pairs."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if process == 0:
            return found
        found.append((process, status))
