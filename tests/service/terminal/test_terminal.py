"""`quire top`, `chat` and `bench` as processes: in a pseudo-terminal, through a pipe, and with bad input."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from quire.engine.wire.messages import Finish, Generate
from quire.service import cli
from quire.service.terminal import bench
from quire.service.terminal.options import BenchConfig
from quire.service.text.tokenizer import Tokenizer
from tests.pace import Patience, paced, patience
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import ANSWER, says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 60.0  # a bound of a hang
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "OPENAI_"))}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")


class Terminal:
    """A `quire` command in a pseudo-terminal of 100 columns.  inherited: what its parent does with Ctrl-C."""

    def __init__(self, *words: str, inherited: signal.Handlers = signal.SIG_DFL) -> None:
        self._words, self._inherited = words, inherited
        self._shown, self._seen = b"", 0

    @property
    def text(self) -> str:
        """All it has shown since the last keys, without escape sequences."""
        return ESCAPES.sub("", self._shown[self._seen :].decode(errors="replace")).replace("\r", "")

    async def __aenter__(self) -> Terminal:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        command = [sys.executable, "-m", "quire.service.cli", *self._words]
        env = {**CLEAN, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
        self.process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=env, stdin=slave, stdout=slave, stderr=slave, preexec_fn=self._control
        )
        asyncio.get_running_loop().add_reader(self._master, self._read)
        return self

    def _control(self) -> None:
        """Make the terminal the child's own, so that Ctrl-C there is a signal."""
        signal.signal(signal.SIGINT, self._inherited)
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    async def __aexit__(self, *error: object) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _read(self) -> None:
        self._shown += os.read(self._master, 65536)

    def type(self, keys: str) -> None:
        self._seen = len(self._shown)
        os.write(self._master, keys.encode())

    async def shows(self, pattern: str) -> str:
        """Wait until it has shown this since the last keys."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience(WAIT_S)):
                while not re.search(pattern, self.text):
                    assert self.process.returncode is None, self.text
                    await asyncio.sleep(0.02)
                return self.text
        pytest.fail(f"{pattern} was not shown: {self.text!r}")

    async def ends(self, *, keys: str = "") -> int:
        """Wait for its end, and press `keys` until then.  The terminal must be as it was.

        A signal between a prompt and the wait for a key is lost: GNU readline sees it at the next key."""
        bound = Patience(WAIT_S)
        while self.process.returncode is None:
            assert bound.lasts(), self.text
            if keys:
                self.type(keys)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(paced(1.0)):
                    await self.process.wait()
        status = self.process.returncode
        assert termios.tcgetattr(self._slave) == self.before
        return status


async def piped(*words: str, text: str = "") -> tuple[int, str, str]:
    """The status, output and errors of a `quire` command without a terminal."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire.service.cli", *words),
        **{"cwd": ROOT, "env": {**CLEAN, "PYTHONPATH": str(ROOT)}},  # type: ignore[arg-type]
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(patience(WAIT_S)):
        out, errors = await process.communicate(text.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


async def called(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The status and the last line of errors of a command that runs in this process."""

    def run() -> int:
        try:
            return cli.main(words)
        except SystemExit as ended:
            return int(ended.code or 0)

    status = await asyncio.to_thread(run)
    return status, capsys.readouterr().err


@pytest.mark.system
async def test_top_refreshes_sorts_and_leaves(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    script = says(byte_level_tokenizer)
    async with engine(script, engine="aa") as first, engine(script, engine="bb") as second:
        first.load_changes, second.load_changes = {"generated_tokens": 5}, {"running": 7}
        await settled(lambda: len(served.streams.fleet.engines) == 2)
        async with Terminal("top", served.url, "--interval-s", "0.2") as top:
            assert re.search(r"aa .*\n.*bb ", await top.shows(r"sorted by name\b"))
            assert "2 engines, 1 gateway read" in top.text
            async with served.session.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}) as response:
                assert response.status == 200
            await top.shows(r"p50 \d")  # the next reading has its latency
            top.type("r")
            assert re.search(r"bb .*\n.*aa ", await top.shows(r"sorted by running\b"))
            top.type("r")
            await top.shows("sorted by running, reversed")
            top.type("q")
            assert await top.ends() == 0


@pytest.mark.system
async def test_top_is_plain_text_in_a_pipe(serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer) -> None:
    served = await serve()
    async with engine(says(byte_level_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        status, out, errors = await piped("top", served.url, "--interval-s", "0.1")
    assert (status, errors) == (0, "")
    assert re.search(r"^e0 +tiny +0 ", out, re.MULTILINE)
    assert "\x1b" not in out
    for word in ("queue", "on-time 0", "late 0", "tokens/s", "TTFT", "ITL", "prefix hits", "preempted", "refusals"):
        assert word in out


def by_message(tokenizer: Tokenizer) -> Callable[[Generate, int], tuple[list[int], Finish | None]]:
    """An endless answer to a message that ends with "for ever", a short one to any other."""
    endless, short = says(tokenizer), says(tokenizer, eos=True)

    def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        asked = tokenizer.text_of(generate.token_ids, skip_special=False).removesuffix("</s><|assistant|>")
        return (endless if asked.endswith("for ever") else short)(generate, index)

    return script


@pytest.mark.system
@pytest.mark.parametrize("inherited", [signal.SIG_DFL, signal.SIG_IGN], ids=["heeded", "ignored"])
async def test_chat_answers_stops_and_leaves(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, inherited: signal.Handlers
) -> None:
    served = await serve(resume_s=600.0)
    async with engine(by_message(byte_level_tokenizer), step_s=0.02) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        async with Terminal("chat", served.url, "--system", "Be brief.", inherited=inherited) as chat:
            assert "Ctrl-C stops" in await chat.shows("> $")
            chat.type("Talk for ever\n")
            await chat.shows("One request down")
            chat.type("\x03")
            await chat.shows(r"\[stopped\]\n> $")
            await settled(lambda: len(fake.aborted) == 1 and not fake.busy)  # it computes no longer
            chat.type("Hello\n")
            shown = await chat.shows(r"tokens/s\n> $")
            assert ANSWER.split()[-1] in shown
            assert "first after" in shown
            sent = byte_level_tokenizer.text_of(fake.seen[1].token_ids, skip_special=False)
            assert sent.startswith("<|system|>Be brief.</s><|user|>Talk for ever</s><|assistant|>One request")
            assert sent.endswith("<|user|>Hello</s><|assistant|>")  # the conversation so far
            chat.type("\x04")
            assert await chat.ends() == 0


@pytest.mark.system
async def test_chat_leaves_at_a_ctrl_c_at_the_prompt_and_answers_a_pipe(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(root_path="/llm")
    async with engine(says(byte_level_tokenizer, eos=True)):
        await settled(lambda: bool(served.streams.fleet.engines))
        assert await piped("chat", f"{served.url}/llm/v1", text="hi\n") == (0, f"{ANSWER}\n", "")
        async with Terminal("chat", served.url) as chat:
            await chat.shows("> $")
            assert await chat.ends(keys="\x03") == 0


@pytest.mark.system
async def test_bench_shows_a_table_and_fails_if_a_request_does(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    async with engine(says(byte_level_tokenizer), step_s=0.001) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        words = ("bench", served.url, "--requests", "12", "--rate", "100", "--prompt-tokens", "20", "--max-tokens", "5")
        async with Terminal(*words) as run:
            shown = await run.shows(r"seconds +\d.*\n")
            assert re.search(r"TTFT, ms +[\d.]+ +[\d.]+", shown)
            assert re.search(r"complete +12 *\n", shown)
            assert re.search(r"output tokens +60 *\n", shown)
            assert "answered" in shown  # the bar
            assert await run.ends() == 0
        assert {len(generate.token_ids) for generate in fake.seen} == {20}
        assert {generate.max_new_tokens for generate in fake.seen} == {5}
        status, out, _ = await piped("bench", served.url, "--requests", "2", "--rate", "9", "--max-tokens", "100000")
        assert status == 1, out
        assert re.search(r"failed +2 *\n", out), out
        assert "2 times: 400 context_length_exceeded" in out


def test_arrivals_of_bench_are_seeded_and_of_one_length() -> None:
    config = BenchConfig(url="x", requests=50, rate=10.0, prompt_tokens=7, max_tokens=3)
    first, again = bench.arrivals(config), bench.arrivals(config)
    assert first == again
    assert len(first) == 50
    assert {(one.job.prompt_len, one.job.output_len) for one in first} == {(7, 3)}
    assert len({tuple(one.job.prompt(500)) for one in first}) == 50
    assert first != bench.arrivals(BenchConfig(url="x", requests=50, rate=10.0, seed=1))
    timed = bench.arrivals(BenchConfig(url="x", seconds=5.0, rate=100.0))
    assert 350 < len(timed) < 650
    assert max(one.at_s for one in timed) < 5.0


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.fixture
async def keyed(serve: Serve) -> Served:
    """A gateway with a key, and without an engine."""
    return await serve(api_keys=["k"])


@pytest.mark.parametrize("command", ["top", "chat", "bench"])
async def test_a_server_that_cannot_be_reached_is_one_line(
    command: str, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for url, status, why in (
        (f"127.0.0.1:{port}", 1, "Connection refused"),
        ("ftp://x", 2, "no address of a server"),
    ):
        got, errors = await called(capsys, command, url)
        assert (got, errors.count("\n")) == (status, 1)
        assert errors.startswith(f"quire {command}: ")
        assert why in errors


async def test_a_wrong_key_or_model_is_one_line(
    keyed: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QUIRE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for command in ("chat", "bench"):
        for key in ([], ["--api-key", "wrong"]):
            status, errors = await called(capsys, command, keyed.url, *key)
            assert (status, errors.count("\n")) == (1, 1)
            assert "refuses the API key (401" in errors
            assert "QUIRE_API_KEY" in errors
        status, errors = await called(capsys, command, keyed.url, "--api-key", "k", "--model", "gpt")
        assert (status, errors.count("\n")) == (1, 1)
        assert "does not serve 'gpt'; it serves " in errors
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        status, errors = await called(capsys, command, keyed.url, "--model", "gpt")
        assert "does not serve 'gpt'" in errors
        monkeypatch.delenv("OPENAI_API_KEY")


async def test_top_says_where_the_metrics_of_a_gateway_with_keys_are(
    keyed: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    status, errors = await called(capsys, "top", keyed.url)
    assert (status, errors.count("\n")) == (1, 1)
    assert "answered 404" in errors
    assert "--metrics-port" in errors


async def test_a_server_that_is_not_quires_is_one_line(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = await serve()
    for command in ("chat", "bench"):
        status, errors = await called(capsys, command, f"{served.url}/elsewhere")
        assert (status, errors.count("\n")) == (1, 1)
        assert "is no OpenAI-compatible server: GET /v1/models answered 404" in errors
    status, errors = await called(capsys, "top", f"{served.url}/elsewhere")
    assert (status, errors.count("\n")) == (1, 1)


async def test_an_empty_message_is_refused(keyed: Served) -> None:
    status, _, errors = await piped("chat", keyed.url, "--api-key", "k")
    assert (status, errors) == (2, "quire chat: there is no message on the standard input\n")


@pytest.mark.parametrize("command", ["top", "chat", "bench"])
def test_options_are_shown_and_unknown_ones_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    assert f"usage: quire {command} [URL" in capsys.readouterr().out
    for words, why in (([], " is required"), (["x", "--intervall", "y"], "--intervall is not an option")):
        with pytest.raises(SystemExit, match="2"):
            cli.main([command, *words])
        assert why in capsys.readouterr().err


def test_without_a_package_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("rich", "quire.service.terminal."))]:
        if name != "quire.service.terminal.options":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys, "meta_path", [_NoRich(), *sys.meta_path])
    with pytest.raises(SystemExit, match="2"):
        cli.main(["top", "x"])
    assert capsys.readouterr().err == "quire top: needs the package rich: pip install 'quire[cli]'\n"


class _NoRich:
    """An importer that has no rich."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_clients_key_in_the_environment_does_not_stop_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "k")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["serve", "--help"]) or sys.exit(0)
