"""The process that renders chat templates of clients: `python -m quire.service.chat_templates.template_worker FD`.

    ClientTemplates ==one socket a request, over the socket FD==> this process --fork--> a child for this request alone
                    <==frames: msgpack behind 4 bytes of length==

A template is a program that its client wrote.  The child runs it in the sandbox of transformers and jinja2, under
limits that a template cannot catch: CPU time (a timer that kills the process), memory, no file, no process.  It ends
with its request, so templates share nothing.  The environment holds no key (see `client_templates.py`).

Frames to the child: the first is a Job, further ones are calls of `render`.  Each gets one frame back.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from quire.service.chat_templates.template_probe import Dialect, probe

MEMORY_BYTES = 128 * 2**20  # that a child may take beyond what it starts with
HEAD = 4  # bytes of length before each frame


class Job(msgspec.Struct, frozen=True):
    """What a child needs once."""

    template: str
    variables: dict[str, Any]  # the special tokens of the model
    cpu_s: float
    most_chars: int  # of a rendered text


class Hopeless(BaseException):
    """A template failed in a way that no other messages would change: its syntax, memory, depth.

    It is no Exception, so that a probe of what the template reads (`template_probe.probe`) ends too: a template that
    doubles a text until memory is full does so once, not at each probe."""


class Reply(msgspec.Struct, frozen=True):
    """The outcome of one frame."""

    text: str = ""
    error: str = ""  # why there is no text; it quotes neither messages nor template
    dialect: Dialect | None = None  # of the first frame, where there is no error


def send(sock: socket.socket, message: Any) -> None:
    """Send one frame.  Raises OSError."""
    data = msgspec.msgpack.encode(message)
    sock.sendall(len(data).to_bytes(HEAD, "little") + data)


def receive(sock: socket.socket, kind: Any) -> Any:
    """Return one frame as `kind`; None at the end of the connection.  Raises OSError."""
    head = _read(sock, HEAD)
    data = _read(sock, int.from_bytes(head, "little")) if len(head) == HEAD else b""
    return msgspec.msgpack.decode(data, type=kind) if data else None


def _read(sock: socket.socket, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = sock.recv(min(count, 2**20))
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _renderer(template: str, variables: dict[str, Any]) -> Callable[..., str]:
    """Return a function that renders messages as transformers' `apply_chat_template` does.  It may raise Hopeless."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: list[dict[str, Any]], tools: Any = None, documents: Any = None, **more: Any) -> str:
        given = {**variables, **more}
        try:
            [text], _ = render_jinja_template(
                conversations=[messages], tools=tools, documents=documents, chat_template=template, **given
            )
        except MemoryError as error:
            raise Hopeless(f"it takes more than {MEMORY_BYTES // 2**20} MiB of memory") from error
        except (RecursionError, TemplateSyntaxError) as error:
            raise Hopeless(_failure(error)) from error
        return str(text)

    return render


def _limit(cpu_s: float) -> None:
    """Put this process under limits that kill it, or fail what it asks for."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # of this process's own CPU time: a busy machine does not matter


def _serve(sock: socket.socket) -> None:
    """Answer the frames of one request."""
    job: Job | None = receive(sock, Job)
    if job is None:
        return
    _limit(job.cpu_s)
    render = _renderer(job.template, job.variables)
    send(sock, _opened(render, job.template))
    while (asked := receive(sock, dict[str, Any])) is not None:
        send(sock, _outcome(render, asked, job.most_chars))


def _opened(render: Callable[..., str], template: str) -> Reply:
    """Return what the template reads, or why it is of no use."""
    try:
        return Reply(dialect=probe(render, template))
    except Hopeless as error:
        return Reply(error=str(error))


def _failure(error: Exception) -> str:
    return f"it fails with {type(error).__name__}"  # its text might quote the messages


def _outcome(render: Callable[..., str], asked: dict[str, Any], most_chars: int) -> Reply:
    try:
        text = render(**asked)
    except Hopeless as error:
        return Reply(error=str(error))
    except Exception as error:  # a template may raise anything
        return Reply(error=_failure(error))
    if len(text) > most_chars:
        return Reply(error=f"it writes more than {most_chars} characters")
    return Reply(text)


def _warm_up() -> None:
    """Load what rendering needs, an error's path included: children may open no file."""
    import jinja2.debug  # noqa: F401

    for template in (
        "{% for m in messages %}{{ m.content | tojson }}{{ strftime_now('%Y') }}{% endfor %}",
        "{{ 1 / 0 }}",
    ):
        _outcome(_renderer(template, {}), {"messages": [{"role": "user", "content": "x"}]}, 100)


def main(argv: list[str]) -> None:
    """Serve until the gateway has closed its end."""
    control = socket.socket(fileno=int(argv[0]))
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    for number in (signal.SIGINT, signal.SIGHUP):  # from a terminal: the gateway drains, and ends this process
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end leave nothing behind
    os.nice(10)  # streams go first
    _warm_up()
    control.send(b"r")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        for descriptor in descriptors:
            if os.fork() == 0:
                control.close()
                try:
                    with socket.socket(fileno=descriptor) as sock:
                        _serve(sock)
                finally:
                    os._exit(0)
            os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1:])
