"""Chat templates of clients, where the operator allows them (`--client-template-s`).

    Tokenizer --open(template)--> Session: what the template reads, its text --frames--> a child of `template_worker`

The calls here block: they run on threads of their own (`Tokenizer.encode`), so no other request waits for a template.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

from quire.engine.common import child_python
from quire.service.chat_templates.template_probe import Dialect
from quire.service.chat_templates.template_worker import MEMORY_BYTES, Job, Reply, receive, send
from quire.service.common.refusal import Refusal

FIELD = "chat_template"
HANG_S = 60.0  # longest wait for a child that uses no CPU time: it may have to share the machine
# All that the process inherits: no key and no address.
ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "HOME")


class Session:
    """One template, in a process of its own until the session ends."""

    def __init__(self, sock: socket.socket, job: Job) -> None:
        """Raises Refusal when no messages could make the template work."""
        self._sock, self._job = sock, job
        opened = self._ask(job)
        assert opened.dialect is not None
        self.dialect: Dialect = opened.dialect

    def render(self, messages: list[dict[str, Any]], **more: Any) -> str:
        """Return the text of messages, with the arguments of transformers' `apply_chat_template`.

        Raises Refusal when the template fails or exceeds its limits."""
        return self._ask({"messages": messages, **more}).text

    def _ask(self, message: Any) -> Reply:
        try:
            send(self._sock, message)
            reply: Reply | None = receive(self._sock, Reply)
        except OSError:
            reply = None
        if reply is None:
            limits = f"{self._job.cpu_s:g} s of CPU time or {MEMORY_BYTES // 2**20} MiB of memory"
            reply = Reply(error=f"it takes more than {limits}")
        if reply.error:
            raise Refusal(400, "chat_template_error", f"{FIELD}: {reply.error}", param=FIELD)
        return reply


class ClientTemplates:
    """The process that renders, started again if it has ended.  Thread-safe."""

    def __init__(self, cpu_s: float, most_chars: int, variables: dict[str, str]) -> None:
        """`cpu_s`: CPU seconds that one request's template may take.  `most_chars`: of the text that it writes.

        `variables`: the special tokens of the model, by their names in templates."""
        self._cpu_s, self._most, self._variables = cpu_s, most_chars, variables
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the process and wait until it renders; a second or two."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """End the process.  Harmless when called twice."""
        with self._lock:
            self._end()

    @contextlib.contextmanager
    def open(self, template: str) -> Iterator[Session]:
        """A context with a process that renders `template`.  Raises Refusal."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(HANG_S)
            self._hand_over(theirs)
            theirs.close()
            yield Session(ours, Job(template, self._variables, self._cpu_s, self._most))

    def _hand_over(self, theirs: socket.socket) -> None:
        """Have the process fork a child that serves `theirs`.  Raises Refusal(500)."""
        with self._lock:
            for _ in range(2):  # the process may have been killed since
                try:
                    if self._control is None:
                        self._start()
                    assert self._control is not None
                    socket.send_fds(self._control, [b"j"], [theirs.fileno()])
                    return
                except OSError:
                    self._end()
        message = "chat_template: the process that renders templates of clients cannot be started"
        raise Refusal(500, "internal_error", message)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
            environment = child_python.environment(inherited)
            environment["TRANSFORMERS_VERBOSITY"] = "error"
            command = child_python.command("-m", "quire.service.chat_templates.template_worker", str(theirs.fileno()))
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )
        self._control = ours
        ours.settimeout(HANG_S)
        if ours.recv(1) != b"r":
            raise ConnectionResetError("the process that renders templates of clients has ended")

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()  # the process ends
        if self._process is not None:
            try:
                self._process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._control = self._process = None
