"""The watchdog over steps that return, steps that hang, and a process that was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from quire.engine.bus_thread import BusThread
from quire.engine.commands import LocalBox, Report
from quire.engine.config import EngineConfig
from quire.engine.core.limits import Outputs
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.loop import Engine
from quire.engine.process.watchdog import Watchdog
from quire.engine.wire.clock import RedisClock
from quire.engine.wire.messages import EngineLoad, Generate, Sampling
from quire.engine.wire.records import SyncReply
from tests.pace import paced, patience, wait_until

INFO = ModelInfo("scripted", "f00d", 100, 256, [0], 64)


def test_steps_that_return_and_idleness_do_not_count() -> None:
    hangs: list[float] = []
    step = [0.0]
    limit_s = paced(2.0)
    watchdog = Watchdog(limit_s, lambda: step[0], hangs.append)
    watchdog.start()
    end = time.monotonic() + 2 * limit_s
    while time.monotonic() < end:  # busy for twice the time, with one step after the other
        step[0] = time.monotonic()
        time.sleep(0.02)
    step[0] = 0.0
    time.sleep(1.25 * limit_s)
    assert hangs == []
    step[0] = time.monotonic()
    wait_until(lambda: hangs)
    assert hangs[0] >= limit_s
    watchdog.stop()


def test_the_loop_says_since_when_a_step_computes() -> None:
    seen: list[bool] = []

    class Watched(ScriptedExecutor):
        def submit(self, plan: object) -> None:
            seen.append(turned <= engine.busy_since <= time.monotonic())
            super().submit(plan)  # type: ignore[arg-type]

    box = LocalBox(lambda delta: None)
    engine = Engine(EngineConfig(max_seqs=8, step_tokens=64), Watched(INFO, 64), box, box)
    box.commands.append(Generate("r", "g", [5], 3, Sampling(ignore_eos=True), 2**60))
    while box.commands or not engine.core.idle:
        turned = time.monotonic()
        engine.turn()
        assert engine.busy_since == 0.0
    assert seen
    assert all(seen)


STOPPED = """
import os, signal, sys, time
from quire.engine.process.watchdog import Watchdog
since = time.monotonic()
watchdog = Watchdog(float(sys.argv[2]), lambda: since, lambda seconds: os._exit(3))
watchdog.start()
print("up", flush=True)
time.sleep(float(sys.argv[1]))
"""


def test_a_process_that_was_stopped_has_not_hung() -> None:
    """SIGSTOP for longer than the limit: the step continues afterwards as if nothing had been."""
    limit_s = paced(4.0)
    process = subprocess.Popen([sys.executable, "-c", STOPPED, "1", str(limit_s)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.5 * limit_s)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(patience(60)) == 0
    process.stdout.close()
    words = [sys.executable, "-c", STOPPED, "100000", str(limit_s)]
    hung = subprocess.run(words, stdout=subprocess.PIPE, check=False, timeout=patience(120))
    assert hung.returncode == 3


async def test_an_engine_that_failed_claims_nothing_more() -> None:
    """Its emitted tokens are still sent; its last report had free capacity."""
    thread = BusThread(EngineConfig())
    sent = []

    class Side:
        queue_share, watched, clock = 0.0, False, RedisClock()

        async def sync(
            self, batches: object, finished: list[str], load: EngineLoad, *room: int, **more: int
        ) -> SyncReply:
            sent.append((finished, load.preemptible_tokens, room[:2]))
            return SyncReply([], [])

    report = Report(EngineLoad("e", "m", "f", 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, preemptible_tokens=50), 100, 10, 0)
    for died in (False, True):
        thread._died = died
        thread.put(Outputs({}, ["a"]), report)
        await thread._sync(Side(), report)  # type: ignore[arg-type]
    assert sent == [(["a"], 50, (100, 10)), (["a"], 0, (0, 0))]
    thread._loop.close()
