"""A server whose stderr is a pipe that is not read: requests are answered, and it drains."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import aiohttp
import pytest

from tests.pace import patience, wait_until
from tests.service.fakes import byte_level
from tests.system.processes import ENVIRONMENT, QUIRE, ROOT

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]
REQUESTS, CLIENTS = 2_000, 8


async def ask(url: str, count: int) -> None:
    """Send `count` requests.  Each must be answered, and /ping between them."""
    body = {"model": "m", "prompt": "x", "max_tokens": 1}
    async with aiohttp.ClientSession() as client:
        for number in range(count):
            async with client.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            if number % 50 == 0:
                async with client.get(f"{url}/ping") as answer:
                    assert answer.status == 200


def requests_in(log: bytearray) -> int:
    """Return the complete log lines about a completion."""
    lines = bytes(log).splitlines(keepends=True)
    return sum(b"quire.request" in line and b"/v1/completions" in line and line.endswith(b"\n") for line in lines)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [["--log-format=text"], ["--log-format=json", "--no-spare"]])
def test_no_request_waits_for_the_reader_of_the_log(tmp_path: Path, words: list[str]) -> None:
    model = byte_level(tmp_path / "model")
    read_end, write_end = os.pipe()
    options = ["--served-name=m", "--port=0", "--executor=scripted", *words]
    serve = subprocess.Popen(
        [*QUIRE, "serve", str(model), *options], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=write_end
    )
    os.close(write_end)
    try:
        assert serve.stdout is not None
        url = serve.stdout.readline().decode().split()[-1].removesuffix("/v1")

        async def all_clients() -> None:
            await asyncio.gather(*(ask(url, REQUESTS // CLIENTS) for _ in range(CLIENTS)))

        asyncio.run(all_clients())
        read = bytearray()

        def reader() -> None:
            while data := os.read(read_end, 1 << 16):
                read.extend(data)

        thread = threading.Thread(target=reader)
        thread.start()  # the rest comes now, nothing of it is lost
        wait_until(lambda: requests_in(read) == REQUESTS, why=lambda: requests_in(read))
        serve.send_signal(signal.SIGTERM)
        assert serve.wait(patience(250)) == 0
        thread.join()
        lines = [line for line in read.decode().splitlines() if "quire.request" in line and "/v1/completions" in line]
        assert len(lines) == REQUESTS
        assert not words[0].endswith("json") or all(json.loads(line)["status"] == 200 for line in lines)
    finally:
        serve.kill()
        serve.wait()
        assert serve.stdout is not None
        serve.stdout.close()
        os.close(read_end)


def test_a_server_drains_though_its_log_is_not_read(tmp_path: Path) -> None:
    """Its stderr is full from the start."""
    model = byte_level(tmp_path / "model")
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    try:
        while True:
            os.write(write_end, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write_end, True)
    command = [*QUIRE, "serve", str(model), "--served-name=m", "--port=0", "--executor=scripted", "--no-spare"]
    serve = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=write_end)
    os.close(write_end)
    try:
        assert serve.stdout is not None
        url = serve.stdout.readline().decode().split()[-1].removesuffix("/v1")
        asyncio.run(ask(url, 10))
        serve.send_signal(signal.SIGTERM)
        assert serve.wait(patience(250)) == 0
    finally:
        serve.kill()
        serve.wait()
        assert serve.stdout is not None
        serve.stdout.close()
        os.close(read_end)
