"""Processes of tests that start warm: a template imports torch, transformers and Quire once, and forks.

    pytest ── words, environment, descriptors ──> template ── fork ──> fork ──> engine, rank, gateway, supervisor
                                                                     (ends: pytest becomes the parent)

An interpreter that imports these takes four seconds of CPU time, a fork 50 ms.  `Popen` takes the place of
subprocess.Popen: same arguments, and the process is a child of its caller.  It starts MODULES warm, and code (`-c`) if
the caller names this class; all else starts normally, and so does a process that differs in a variable that an import
reads. `quire engine` and `quire gateway` replace themselves by another program (os.execve): in a fork that stays warm,
too. A forked process has a template of its own for what it starts itself.  Tests of the start use subprocess.Popen.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

ROOT = str(Path(__file__).resolve().parents[1])
MODULES = {
    "quire.engine",
    "quire.engine.process.fork_server",
    "quire.engine.process.rank",
    "quire.engine.executor.models.sources.builtin",
    "quire.engine.executor.models.sources.demo",
    "quire.loadtest",
    "quire.loadtest.studies",
    "quire.service.app",
    "quire.service.cli",
    "tests.system.deadly",
    "tests.system.skewed",
}
IMPORTS = (
    "quire.engine.executor.ranks.parallel",
    "quire.engine.executor.preload",
    "quire.engine.executor.ranks.rank_process",
    "quire.service.app",
    "quire.service.cli",
)
# Variables that only what a process does after its imports reads.  Any other that differs has a process start cold.
READ_LATE = (
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "OMP_NUM_THREADS",
    "NOTIFY_SOCKET",
    "OTEL_BSP_",
    "QUIRE_",
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it in the tests' own process, when a model is made
    "XDG_CACHE_HOME",  # the hub's client reads it when it is imported; no test of warm processes loads from a hub
    "PIP_",
    "NO_PROXY",
    "PYTEST_",
    "COLUMNS",
    "TERM",
)
TEMPLATE = [sys.executable, "-m", "tests.warm"]  # command line of a template that a forked process starts
PADDING = 4096  # bytes for the command line of a fork
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER, PR_SET_PDEATHSIG = 36, 37, 1
MESSAGE = 1 << 18  # bytes, the largest request
COLD = subprocess.Popen  # whatever subprocess.Popen is replaced by
COLD_EXECVE = os.execve
CLI = "quire.service.cli"  # replaces itself by an engine or a gateway

Text = TypeVar("Text", str, bytes)


class Template:
    """The process that forks, as its only user sees it."""

    def __init__(self, line: socket.socket, environment: Mapping[str, str]) -> None:
        """`line` leads to a process that runs `fork_on_request`, and was started with `environment`."""
        self._line, self._environment = line, dict(environment)
        self._lock = threading.Lock()

    @classmethod
    def start(cls) -> Template:
        """Start a template, and import what it needs."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        code = f"import sys; sys.path.insert(0, {ROOT!r}); from tests import warm; warm.main(int(sys.argv[1]))"
        with theirs:
            words = [sys.executable, "-P", "-c", code, str(theirs.fileno()), "-" * PADDING]
            process = COLD(words, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        atexit.register(process.wait)
        atexit.register(ours.close)  # runs first, and ends it
        assert ours.recv(MESSAGE) == b"ready"
        return cls(ours, os.environ)

    def takes(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork with this environment is as a new process with it."""
        names = self._environment.keys() | environment.keys()
        differ = (name for name in names if self._environment.get(name) != environment.get(name))
        return all(name.startswith(READ_LATE) for name in differ)

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Return the PID of a new child of this process, which does as `request` says."""
        with self._lock, adopting():
            socket.send_fds(self._line, [json.dumps(request).encode()], descriptors)
            return int(self._line.recv(64))


_templates: list[Template] = []  # this process's: none or one


def template() -> Template:
    """Return this process's template, which starts at the first call."""
    if not _templates:
        _templates.append(Template.start())
    return _templates[0]


def libc() -> Any:
    return ctypes.CDLL(None)


@contextmanager
def adopting() -> Iterator[None]:
    """A context in which descendants become children of this process when their parent ends.

    A supervisor may be in such a context of its own (service/common/spares.py), and stays in it."""
    before = ctypes.c_int()
    libc().prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc().prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc().prctl(PR_SET_CHILD_SUBREAPER, before.value)


class Popen(COLD[Text]):
    """subprocess.Popen, whose process is a fork of the template if possible."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        """Take the place of fork and exec; the arguments are those of Python 3.11 and 3.12."""
        pass_fds: tuple[int, ...] = rest[1]
        cwd, env, shell, new_session, group = rest[2], rest[3], rest[6], rest[-2], rest[-1]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[7:13]
        environment = dict(os.environ if env is None else env)
        words = [] if isinstance(args, (str, bytes)) or shell or executable else [os.fspath(word) for word in args]
        if not self._is_warm(words, preexec_fn) or not template().takes(environment):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        standard: list[int] = [
            number if number != -1 else place for place, number in enumerate((p2cread, c2pwrite, errwrite))
        ]
        request = {
            "words": words,
            "environment": environment,
            "folder": str(cwd or Path.cwd()),
            "places": [0, 1, 2, *pass_fds],
            "new_session": bool(new_session),
            "group": group,
            "dies_with_parent": preexec_fn is not None,
        }
        self.pid = template().fork(request, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _is_warm(self, words: list[str], preexec_fn: Callable[[], None] | None) -> bool:
        if preexec_fn is not None and not preexec_fn.__qualname__.startswith("die_with_parent"):
            return False
        match words:
            case [sys.executable, "-P", "-m", module, *_] | [sys.executable, "-m", module, *_]:
                return module in MODULES
            case [sys.executable, "-c", *_]:
                return True
        return False


class ModulesOnly(Popen[Text]):
    """Popen for all callers: code (`-c`) of tests that do not name `Popen` starts cold."""

    def _is_warm(self, words: list[str], preexec_fn: Callable[[], None] | None) -> bool:
        return "-c" not in words[:3] and super()._is_warm(words, preexec_fn)


def run(words: Sequence[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a program warm, and return what it prints."""
    with Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            printed, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(words, process.returncode, printed, errors)


@contextmanager
def everywhere() -> Iterator[None]:
    """Let every subprocess.Popen of this process start MODULES warm."""
    before, subprocess.Popen = subprocess.Popen, ModulesOnly  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------------- the template


def main(line: int) -> None:
    """Be a template until the process that asks ends.  Forks return from here, and end as an interpreter does."""
    import_all()
    asker = socket.socket(fileno=line)
    asker.send(b"ready")
    serve(asker)


def import_all() -> None:
    """Import what engines, ranks and gateways import, as they do."""
    from quire.engine.process.standby import without_optional_packages

    with without_optional_packages():
        for name in IMPORTS:
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with several threads cannot be forked"
    gc.collect()
    gc.freeze()


def serve(asker: socket.socket) -> None:
    """Fork for each request of the process at the other end, until it ends.  Returns in forks as well, at their end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all of its group
    while True:
        message, descriptors, _, _ = socket.recv_fds(asker, MESSAGE, 64)
        if not message:
            return
        pid = fork_to_grandparent()
        if not pid:
            become(json.loads(message), descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        asker.send(str(pid).encode())


def fork_to_grandparent() -> int:
    """Fork, and give the new process to the parent of this one.  Returns its PID here and 0 there."""
    pids, go = os.pipe(), os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid:
            os.write(pids[1], str(pid).encode())
            os._exit(0)  # the kernel gives its child to the nearest ancestor that is a subreaper
        os.read(go[0], 1)
        return 0
    os.waitpid(between, 0)
    pid = int(os.read(pids[0], 64))
    os.write(go[1], b".")
    for descriptor in (*pids, *go):
        os.close(descriptor)
    return pid


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Do in this fork what a new interpreter does with the request's words."""
    words: list[str] = request["words"]
    set_command_line(words)
    if request["new_session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    if request["dies_with_parent"]:
        libc().prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    place(descriptors, request["places"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    tempfile.tempdir = None
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
    words = [word for word in words[1:] if word != "-P"]
    own = {"serve", "--tensor-parallel", "quire.loadtest"} & set(re.split("[= ]", " ".join(words)))
    if words[0] == "-c" or (
        own and "quire.engine.process.fork_server" not in words
    ):  # their forks could not share a template
        start_template_of_its_own()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_main(words)


def place(descriptors: list[int], places: list[int]) -> None:
    """Give received descriptors the numbers that they had at the sender, and close all others."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(places) + 1) for descriptor in descriptors]
    for source, number in zip(high, places, strict=True):
        os.dup2(source, number)
    last = 2
    for number in sorted(set(places) - {0, 1, 2}):
        os.closerange(last + 1, number)
        last = number
    os.closerange(last + 1, 1 << 16)


def start_template_of_its_own() -> None:
    """Fork a template for what this process starts.  It has the process's environment and none of its descriptors."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        null = os.open(os.devnull, os.O_RDWR)
        set_command_line(TEMPLATE)
        place([null, null, null, theirs.fileno()], [0, 1, 2, 3])
        serve(socket.socket(fileno=3))
        os._exit(0)
    theirs.close()
    _templates[:] = [Template(ours, os.environ)]
    subprocess.Popen = ModulesOnly  # type: ignore[misc]


def set_command_line(words: list[str]) -> None:
    """Let /proc show these words."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end = int(fields[45]), int(fields[46])  # arg_start and arg_end
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - first - 1]
    ctypes.memmove(first, text.ljust(end - first, b"\0"), end - first)


class Replaced(BaseException):
    """The program of this fork has asked for another one in its place."""

    def __init__(self, words: list[str]) -> None:
        super().__init__(words)
        self.words = words


def execve(program: Any, words: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Take the place of os.execve in `quire engine` and `quire gateway`: a warm program goes on in this process."""
    names = os.environ.keys() | environment.keys()
    differ = [name for name in names if os.environ.get(name) != environment.get(name)]
    rest = [word for word in words[1:] if word != "-P"]
    if rest[0] != "-m" or rest[1] not in MODULES or not all(name.startswith(READ_LATE) for name in differ):
        COLD_EXECVE(program, words, environment)
    set_command_line(words)
    os.environ.clear()
    os.environ.update(environment)
    raise Replaced(rest)


def run_main(words: list[str]) -> None:
    """Run a module or code as the main program, and then what it puts in its place."""
    try:
        os.execve = execve if words[1] == CLI else COLD_EXECVE  # type: ignore[assignment]  # narrower arguments
        run_program(words)
    except Replaced as replaced:
        words = replaced.words
    else:
        return
    run_main(words)


def run_program(words: list[str]) -> None:
    """Run a module or code."""
    how, what, *arguments = words
    if how == "-m":
        sys.argv = [what, *arguments]
        for name in (what, f"{what}.__main__"):
            sys.modules.pop(name, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    sys.argv = ["-c", *arguments]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(what, "<string>", "exec"), module.__dict__)
