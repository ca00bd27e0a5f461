"""Fixtures of the gateway's tests: tokenizers, gateways and scripted engines on one namespace."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.messages import Sampling
from quire.service.text.tokenizer import Tokenizer
from tests import warm
from tests.ports import free_port
from tests.service.chat_templates.published import TEMPLATES, tokenizer_in
from tests.service.fakes import (
    TOOLS_TEMPLATE,
    FakeEngine,
    Script,
    Served,
    byte_level,
    sentencepiece_like,
    with_template,
)
from tests.service.gateways import served, settings


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("tokenizers") / "tiny")


@pytest.fixture(scope="session")
def byte_level_tokenizer(byte_level_dir: Path) -> Tokenizer:
    return Tokenizer(str(byte_level_dir))


@pytest.fixture(scope="session")
def tools_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of a model that thinks and calls tools: ChatML, with the markers of Hermes and Qwen3."""
    folder = byte_level(tmp_path_factory.mktemp("tokenizers") / "tools")
    return Tokenizer(str(with_template(folder, TOOLS_TEMPLATE)))


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(sentencepiece_like(tmp_path_factory.mktemp("tokenizers") / "spm")))


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """Tokenizers with stand-ins of published chat templates, by name."""
    folder = tmp_path_factory.mktemp("published")
    made: dict[str, Tokenizer] = {}

    def make(name: str) -> Tokenizer:
        if name not in made:
            made[name] = tokenizer_in(folder, name)
        return made[name]

    return make


@pytest.fixture(scope="session", params=TEMPLATES)
def published(request: pytest.FixtureRequest, tokenizer_of: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_of(request.param)


ROOT = Path(__file__).resolve().parents[2]
Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve(
    redis_server: EmbeddedRedis, namespace: str, byte_level_dir: Path, byte_level_tokenizer: Tokenizer
) -> AsyncIterator[Serve]:
    """Start gateways on the test's namespace: `await serve(**config)`.  A request still open at the end is an error."""
    async with contextlib.AsyncExitStack() as stack:
        started = itertools.count()

        async def start(
            tokenizer: Tokenizer = byte_level_tokenizer, *, defaults: Sampling | None = None, **changes: object
        ) -> Served:
            config = settings(
                **{"model": str(byte_level_dir), "namespace": namespace, "redis_url": redis_server.url, **changes}
            )
            return await stack.enter_async_context(served(config, tokenizer, f"g{next(started)}", defaults))

        yield start


@pytest.fixture
def engine(redis_server: EmbeddedRedis, namespace: str) -> Callable[..., FakeEngine]:
    """`async with engine(script, **options) as fake:` on the test's namespace."""

    def make(script: Script, **options: object) -> FakeEngine:
        return FakeEngine(redis_server.url, namespace, script, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def port() -> int:
    return free_port()


class Logged(warm.Popen[str]):
    """Its stderr goes to a file: an unread pipe would fill with the log and block it."""

    def __init__(self, command: list[str], log: Path, *, cold: bool) -> None:
        self._log, self._cold = log, cold
        with log.open("w") as file:
            super().__init__(command, cwd=ROOT, stderr=file, text=True)

    def _is_warm(self, *start: Any) -> bool:
        return not self._cold and super()._is_warm(*start)

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        super().communicate(input, timeout)
        return "", self._log.read_text()


@pytest.fixture
def launch(
    redis_server: EmbeddedRedis,
    namespace: str,
    byte_level_dir: Path,
    port: int,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start gateways as processes that share `port`: `launch(*options)`.  With `cold` each is a new interpreter."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "quire.service.app", str(byte_level_dir), "--redis-url", redis_server.url]
        command += ["--namespace", namespace, "--port", str(port), "--served-name", "tiny", *options]
        log = tmp_path / f"gateway-{len(started)}.log"
        process = Logged(command, log, cold="cold" in request.fixturenames)
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()
