"""`quire serve` restarts gateways that hang, drains at SIGHUP, and leaves nothing behind when it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from quire.loadtest.server import engine_processes
from quire.service import supervisor
from tests.pace import paced, patience, wait_until
from tests.service.fakes import byte_level
from tests.system.processes import Process, children, ending, wait_until_ready

pytestmark = [pytest.mark.system, pytest.mark.timeout(900), pytest.mark.usefixtures("warm_processes")]
HANG_S = 600.0  # a bound of a hang


def until(holds: Callable[[], bool], what: str) -> None:
    wait_until(holds, HANG_S, why=lambda: what)


def family(process: Process) -> list[psutil.Process]:
    return children(process.popen.pid, recursive=True)


def gateways(process: Process) -> list[psutil.Process]:
    return [child for child in children(process.popen.pid) if "quire.service.app" in child.cmdline()]


def ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two questions
        return True


class Vanishing:
    """A process that ends after it was found to run."""

    def is_running(self) -> bool:
        return True

    def status(self) -> str:
        raise psutil.NoSuchProcess(1)


def test_a_process_that_vanishes_while_it_is_looked_at_has_ended() -> None:
    assert ended(cast(Any, Vanishing()))


def serve(folder: Path, *words: str) -> Process:
    model = byte_level(folder / "model")
    return Process(folder / "log", "serve", str(model), "--port=0", "--executor=scripted", "--served-name=m", *words)


def test_a_gateway_whose_loop_hangs_is_restarted(tmp_path: Path) -> None:
    with ending([]) as running:
        limit_s = math.ceil(paced(2.0))
        running.append(server := serve(tmp_path, "--no-spare", f"--gateway-timeout-s={limit_s}"))
        url = server.wait_for("serving ").split()[-1].removesuffix("/v1")
        [gateway] = gateways(server)
        gateway.send_signal(signal.SIGSTOP)
        server.wait_for(f"the event loop of gateway 0 has not moved for {limit_s} s", HANG_S)
        server.wait_for("the gateway 0 was killed by SIGKILL; starting it again", HANG_S)
        wait_until_ready(url, HANG_S)
        assert [one.pid for one in gateways(server)] != [gateway.pid]
        assert server.terminate(HANG_S) == 0


class Hanging:
    """A process that ends only when it is killed."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._killed = asyncio.Event()

    def send_signal(self, number: signal.Signals) -> None:
        self.returncode = -number
        self._killed.set()

    async def wait(self) -> int:
        await self._killed.wait()
        assert self.returncode is not None
        return self.returncode


class Readiness:
    """What a supervisor hears from a process that is ready at a number of looks; 0: never."""

    beats = 0

    def __init__(self, ready_at: int) -> None:
        self.looks, self._ready_at = 0, ready_at

    def is_ready(self) -> bool:
        self.looks += 1
        return self.looks == self._ready_at


async def test_a_gateway_that_hangs_before_it_is_ready_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit is 10 looks, each of which counts as two at most, so a slow machine changes nothing."""
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    for start_s, ready_at, status in ((0.01, 0, -signal.SIGKILL), (0.01, 3, None), (0.0, 60, None)):
        child, listener = supervisor.Child("gateway 0", [], 1.0, start_s=start_s), Readiness(ready_at)
        process: Any = Hanging()
        child._process = process
        watching = asyncio.create_task(child._watch(process, cast(Any, listener)))
        if ready_at:
            while listener.looks < ready_at:  # noqa: ASYNC110  (looks of the supervisor, not a time)
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)  # more than the limit: a longer sleep tests the same
            assert process.returncode is None
            process.send_signal(signal.SIGTERM)
        assert await watching == ((status, False) if status else (-signal.SIGTERM, True))
        killed = "the gateway 0 is not ready 0.01 s after its start (--gateway-start-s); killing it"
        assert (killed in capsys.readouterr().err) == (status is not None)


def test_a_supervisor_that_was_stopped_kills_no_gateway(tmp_path: Path) -> None:
    """As after a pause of the machine: it has read no beat for longer than the limit."""
    with ending([]) as running:
        limit_s = paced(3.0)
        running.append(server := serve(tmp_path, "--no-spare", f"--gateway-timeout-s={limit_s}"))
        url = server.wait_for("serving ").split()[-1].removesuffix("/v1")
        [gateway] = gateways(server)
        for process in (server.popen, gateway):
            process.send_signal(signal.SIGSTOP)
        time.sleep(1.7 * limit_s)  # longer than the limit; a longer sleep tests the same
        for process in (server.popen, gateway):
            process.send_signal(signal.SIGCONT)
        wait_until_ready(url, HANG_S)
        time.sleep(4 * supervisor.POLL_S)  # looks of the watchdog; more of them test the same
        assert [one.pid for one in gateways(server)] == [gateway.pid], server.said()
        assert server.terminate(HANG_S) == 0


def test_sighup_drains(tmp_path: Path) -> None:
    with ending([]) as running:
        running.append(server := serve(tmp_path, "--no-spare"))
        base = server.wait_for("serving ").split()[-1]
        body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 300, "stream": True}).encode()
        request = urllib.request.Request(f"{base}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=patience(HANG_S)) as answer:
            answer.readline()
            server.popen.send_signal(signal.SIGHUP)
            rest = answer.read()
        assert b"[DONE]" in rest  # a running answer ends as it would have
        assert server.popen.wait(patience(HANG_S)) == 0
        assert "finishing running requests" in server.said()


@pytest.mark.parametrize("hanging", [False, True])
def test_a_killed_supervisor_leaves_no_process(tmp_path: Path, hanging: bool) -> None:
    """Redis, engine, spare and gateways; one of them may be stopped."""
    with ending([]) as running:
        words = ["--gateways=2", f"--drain-s={paced(1)}", "--grace-s=1"]
        running.append(server := serve(tmp_path, *words))
        server.wait_for("serving ")
        until(lambda: len(engine_processes(psutil.Process(server.popen.pid))) == 2, "no spare")
        left = family(server)
        assert len(left) >= 6  # Redis, engine, spare, fork server, two gateways
        if hanging:
            (stopped := gateways(server)[0]).send_signal(signal.SIGSTOP)
            # The kernel continues it when its parent ends, but only if it has stopped by then.
            until(lambda: stopped.status() == psutil.STATUS_STOPPED, "not stopped")
        server.kill()
        try:
            until(lambda: all(ended(one) for one in left), str([one for one in left if not ended(one)]))
        finally:
            for one in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
