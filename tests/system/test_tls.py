"""Redis behind TLS and a password, as a managed one is: `rediss://:password@host/?ssl_ca_certs=...` for everybody."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
import redis

from engine.common.embedded_redis import EmbeddedRedis
from tests.system.processes import Process, at_rest, ending, fleet_until, wait_until_ready
from tests.system.stack import free_port

pytestmark = pytest.mark.system
PASSWORD = "correct horse"


class TlsProxy:
    """Ends TLS in front of a Redis on a unix socket, on a thread of its own."""

    def __init__(self, server: EmbeddedRedis, certificate: Path, key: Path) -> None:
        self._path = server.url.removeprefix("unix://")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self.connections = 0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        listening = asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self._server = self._loop.run_until_complete(listening)
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        up_reader, up_writer = await asyncio.open_unix_connection(self._path)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    target.write(data)
                    await target.drain()
            except OSError:
                pass
            target.close()

        try:
            await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))
        finally:
            up_writer.close()
            writer.close()
            self._tasks.discard(task)

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0.1)  # for transports to close

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed one for localhost, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key.pem -out cert.pem -subj /CN=localhost"
    subprocess.run(
        [*words.split(), "-addext", "subjectAltName=DNS:localhost"], cwd=folder, check=True, capture_output=True
    )
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def proxy(certificate: tuple[Path, Path]) -> Iterator[TlsProxy]:
    with EmbeddedRedis() as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("requirepass", PASSWORD)
        proxy = TlsProxy(server, *certificate)
        yield proxy
        proxy.close()


def url(proxy: TlsProxy, certificate: Path, password: str = PASSWORD, host: str = "localhost") -> str:
    return f"rediss://:{password.replace(' ', '%20')}@{host}:{proxy.port}/0?ssl_ca_certs={certificate}"


async def test_gateway_and_engine_through_tls_with_a_password(
    proxy: TlsProxy, certificate: tuple[Path, Path], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    redis_url, port = url(proxy, certificate[0]), free_port()
    shared = [str(checkpoint("llama")), f"--redis-url={redis_url}"]
    processes = [
        Process(tmp_path / "engine", "engine", *shared, "--threads=1", "--kv-blocks=128"),
        Process(tmp_path / "gateway", "gateway", *shared, f"--port={port}", "--served-name=tiny"),
    ]
    with ending(processes):
        await asyncio.to_thread(wait_until_ready, f"http://127.0.0.1:{port}")
        async with aiohttp.ClientSession() as client:
            body = {"model": "tiny", "prompt": "over TLS", "max_tokens": 50, "ignore_eos": True}
            async with client.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
                assert (await response.json())["usage"]["completion_tokens"] == 50
        await fleet_until(redis_url, "quire", at_rest)
        assert [await asyncio.to_thread(process.terminate) for process in processes] == [0, 0]
    for process in processes:
        assert PASSWORD not in process.said()
        assert "Traceback" not in process.said()
    assert proxy.connections >= 4


async def test_what_does_not_fit_is_one_line_without_the_password(
    proxy: TlsProxy, certificate: tuple[Path, Path], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = f"redis://:swordfish@localhost:{proxy.port}/0"
    cases = {
        "wrong password": (url(proxy, certificate[0], "swordfish"), "password"),
        "another host than the certificate's": (url(proxy, certificate[0], "swordfish", "127.0.0.1"), "127.0.0.1"),
        "no TLS where TLS is": (plain, f"redis://localhost:{proxy.port}"),
    }
    started = {
        (kind, name): Process(tmp_path / f"{kind} {name}", kind, *words, f"--redis-url={redis_url}")
        for name, (redis_url, _) in cases.items()
        for kind, words in (("gateway", [str(checkpoint("llama"))]), ("engine", ["--executor=scripted"]))
    }
    with ending(list(started.values())):
        for (kind, name), process in started.items():
            assert await asyncio.to_thread(process.popen.wait, 100) == 2, process.said()
            [line] = process.said().splitlines()
            assert line.startswith(f"quire {kind}: "), line
            assert cases[name][1] in line
            assert "swordfish" not in line
