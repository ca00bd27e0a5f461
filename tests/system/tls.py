"""Redis behind TLS and a password, as a managed one is."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.pace import patience

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

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(patience(10))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for localhost in `folder`; return it and its key."""
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key.pem -out cert.pem -subj /CN=localhost"
    subprocess.run(
        [*words.split(), "-addext", "subjectAltName=DNS:localhost"], cwd=folder, check=True, capture_output=True
    )
    return folder / "cert.pem", folder / "key.pem"


@contextmanager
def behind_tls(certificate: tuple[Path, Path]) -> Iterator[TlsProxy]:
    """Run a Redis with PASSWORD behind TLS."""
    with EmbeddedRedis() as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("requirepass", PASSWORD)
        proxy = TlsProxy(server, *certificate)
        try:
            yield proxy
        finally:
            proxy.close()


def url_of(proxy: TlsProxy, certificate: Path, password: str = PASSWORD, host: str = "localhost") -> str:
    """Return the Redis URL that checks the certificate."""
    return f"rediss://:{password.replace(' ', '%20')}@{host}:{proxy.port}/0?ssl_ca_certs={certificate}"
