"""Redis behind TLS and a password, as a managed one is: all use `rediss://:password@host/?ssl_ca_certs=...`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.ports import free_port
from tests.system.processes import Process, at_rest, ending, fleet_until, wait_until_ready
from tests.system.tls import PASSWORD, TlsProxy, behind_tls, self_signed, url_of

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def proxy(certificate: tuple[Path, Path]) -> Iterator[TlsProxy]:
    with behind_tls(certificate) as found:
        yield found


async def test_gateway_and_engine_through_tls_with_a_password(
    proxy: TlsProxy, certificate: tuple[Path, Path], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    redis_url, port = url_of(proxy, certificate[0]), free_port()
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
        "wrong password": (url_of(proxy, certificate[0], "swordfish"), "password"),
        "another host than the certificate's": (url_of(proxy, certificate[0], "swordfish", "127.0.0.1"), "127.0.0.1"),
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
            *before, line = process.said().splitlines()
            assert all(" INFO " in other for other in before), before  # what of the machine it will use
            assert line.startswith(f"quire {kind}: "), line
            assert cases[name][1] in line
            assert "swordfish" not in process.said()
