"""A spare engine: its resources while it waits, and takeovers in quick succession."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import psutil
import pytest
from safetensors.torch import load_file, save_file

from quire.engine.process.fork_server import SERVER_NAME
from quire.loadtest.server import engine_processes
from tests.pace import paced, patience
from tests.system.processes import ENVIRONMENT, ROOT, ending, wait_until_ready
from tests.system.test_survival import LIMIT_S, Answer, Served, begin, bodies, until

pytestmark = pytest.mark.system
OPTIONS = ("--dtype=float32", "--threads=1", "--kv-blocks=600", "--max-seqs=16", "--check-accounting")


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=patience(LIMIT_S)), connector=connector
    ) as session:
        yield session


def engines(served: Served) -> list[psutil.Process]:
    """Return the engine and its spare."""
    return engine_processes(psutil.Process(served.process.popen.pid))


def fork_servers(served: Served) -> list[psutil.Process]:
    """Return the processes that fork spares: one, unless one has died."""
    return [one for one in psutil.Process(served.process.popen.pid).children() if one.name() == SERVER_NAME]


async def spare_of(served: Served) -> psutil.Process:
    """Return the spare when it is ready."""
    deadline = time.monotonic() + patience(LIMIT_S)
    while True:
        assert time.monotonic() < deadline, served.process.said()
        found = engines(served)
        if len(found) == 2 and f"spare {found[1].pid} is ready" in served.process.said():
            return found[1]
        await asyncio.sleep(0.05)


async def asking_on(client: aiohttp.ClientSession, served: Served) -> Answer:
    """Ask for answers until a spare has taken over: none may be refused meanwhile.  Returns the last answer."""
    starts = served.process.said().count("started: ")
    while True:
        answer = await Answer(bodies()[0]).read(client, served.url)
        if served.process.said().count("started: ") > starts:
            return answer


async def test_deaths_in_quick_succession_cost_no_token(
    checkpoint: Callable[[str], Path], tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    """The engine that took over is killed as soon as it has sent one token, and the next one before it has a model.

    Each of the three successors is a fork of one fork server: none imports anything.  Then the model's weights are
    replaced.  The spare had prepared for the old weights and must serve the new ones."""
    model = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    served = Served(tmp_path, model, *OPTIONS, "--late-wait-s=1000", "--takeover-wait-s=200")
    with ending([served.process]):
        await asyncio.to_thread(wait_until_ready, served.url, LIMIT_S)
        undisturbed = await asyncio.gather(*(Answer(body).read(client, served.url) for body in bodies()))
        spare = await spare_of(served)
        forkers = fork_servers(served)
        answers = [Answer(body) for body in bodies()]
        reading = begin(answers, client, served.url)

        def said() -> int:
            return sum(len(tokens) for answer in answers for tokens in answer.tokens)

        await until(lambda: all(answer.tokens[0] for answer in answers), reading)
        engines(served)[0].kill()
        await until(lambda: "takeover: this spare serves" in served.process.said(), reading)
        had = said()
        await until(lambda: served.process.said().count("started: ") == 2 and said() > had, reading)
        assert engines(served)[0] == spare
        spare.kill()
        takeover = "takeover: this spare serves"
        await until(lambda: served.process.said().count(takeover) == 2, reading)
        engines(served)[0].kill()
        await asyncio.gather(*reading)
        assert served.process.said().count(takeover) == 3
        [server] = forkers
        assert fork_servers(served) == [server]
        for answer, wanted in zip(answers, undisturbed, strict=True):
            answer.same_as(wanted)

        await spare_of(served)
        weights = load_file(model / "model.safetensors")
        weights["lm_head.weight"] = -weights["lm_head.weight"]
        save_file(weights, model / "draft.safetensors", {"format": "pt"})
        (model / "draft.safetensors").rename(model / "model.safetensors")
        gone = engines(served)[0]
        gone.kill()
        gone.wait()
        changed = await asyncio.gather(*(asking_on(client, served) for _ in range(4)))
        assert all(answer.tokens != undisturbed[0].tokens for answer in changed)
        fingerprints = re.findall(r"ready: .* fingerprint (\w+)", served.process.said())
        assert len(set(fingerprints[:-1])) == 1
        assert fingerprints[-1] != fingerprints[0]


def test_a_spare_that_is_not_wanted_leaves_nothing_behind(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    log = tmp_path / "spare.log"
    kept = str(tmp_path / "compiled")  # torch makes this folder when its compiler is imported
    with log.open("w") as file:
        spare = subprocess.Popen(
            [sys.executable, "-m", "quire.engine", str(checkpoint("llama")), "--standby", *OPTIONS],
            cwd=ROOT,
            env={**ENVIRONMENT, "TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": kept},
            stdin=subprocess.PIPE,
            stderr=file,
        )
    try:
        deadline = time.monotonic() + patience(LIMIT_S)
        while f"spare {spare.pid} is ready" not in log.read_text():
            assert spare.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before = sum(psutil.Process(spare.pid).cpu_times()[:2])
        time.sleep(paced(1.0))
        assert sum(psutil.Process(spare.pid).cpu_times()[:2]) - before < 0.1, "a spare that waits computes nothing"
        assert spare.stdin is not None
        spare.stdin.close()
        assert spare.wait(patience(LIMIT_S)) == 0
    finally:
        spare.kill()
        spare.wait()
    assert not list(scratch.iterdir())
    assert "Traceback" not in log.read_text()


def test_a_supervisor_that_dies_takes_its_spare_along(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    served = Served(tmp_path, checkpoint("llama"), "--executor=scripted")
    with ending([served.process]):
        wait_until_ready(served.url, LIMIT_S)
        deadline = time.monotonic() + patience(LIMIT_S)
        while len(found := engines(served)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(served.process.popen.pid, 9)
        _, alive = psutil.wait_procs(found, patience(LIMIT_S))
        assert not alive
