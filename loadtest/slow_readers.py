"""What readers at a byte a second cost a gateway, and those who read beside them.

    python -m loadtest.slow_readers DIRECTORY [--slow 1000] [--slow-tokens 1200] [--fast 64] [--tokens 300]

DIRECTORY holds a model, of which only the tokenizer is read; where there is none the 42M one is made.  `quire serve`
with the scripted executor computes nothing, and everything else is real: step loop, Redis, one gateway, sockets.  The
fast clients read `--tokens` tokens each in three phases, in which the slow ones

    alone     have not come yet
    computed  are being generated: the engine's batch and its log are that much larger, whoever reads how fast
    reading   have long been generated, and still read: the engine knows nothing of them any more

What `computed` costs is mostly the larger batch: compare with `--bytes-per-s 100000`, where the slow are not slow.
Gaps are between reads of a fast client, each of which brings one token, or several where the gateway fell behind.
Memory is the gateway's own, and what the kernel holds for all TCP sockets here, the clients' end included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import resource
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest import machine
from loadtest.checkpoint import prepare
from loadtest.scrape import sample
from loadtest.server import Server, serve

RECEIVE_BYTES = 2048  # a slow client's socket buffer, doubled by the kernel
TURNS = 20  # in a second, each of its share of the slow clients: no turn is long enough to delay the fast ones here
POLL_S = 0.1
LIMIT_S = 300.0  # for whatever is waited for
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


class SlowReaders:
    """Connections on which so many bytes are read each second."""

    def __init__(self, port: int, count: int, tokens: int, bytes_per_s: int) -> None:
        body = json.dumps(
            {"model": "bench", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        )
        self._request = HEAD % len(body) + body.encode()
        self._port, self._count, self._bytes_per_s = port, count, bytes_per_s
        self._sockets: list[socket.socket] = []
        self.read = 0

    async def come(self) -> None:
        for _ in range(self._count):
            one = socket.socket()
            if self._bytes_per_s < RECEIVE_BYTES:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            one.setblocking(False)
            await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", self._port))
            one.send(self._request)
            self._sockets.append(one)

    async def drip(self) -> None:
        """For ever."""
        for turn in itertools.cycle(range(TURNS)):
            due = time.monotonic() + 1 / TURNS
            for one in self._sockets[turn::TURNS]:
                with contextlib.suppress(BlockingIOError):  # nothing has come yet
                    self.read += len(one.recv(self._bytes_per_s))
            await asyncio.sleep(due - time.monotonic())

    def leave(self) -> None:
        for one in self._sockets:
            one.close()


class Watch:
    """The gateway's page and memory."""

    def __init__(self, server: Server) -> None:
        self._url, self._gateway = f"{server.url}/metrics", server.child("service.app")
        self.most_rss = self.most_kernel = 0

    async def page(self) -> str:
        def read() -> str:
            with urllib.request.urlopen(self._url, timeout=30) as response:
                return str(response.read().decode())

        return await asyncio.to_thread(read)

    async def until(self, holds: Callable[[str], bool]) -> str:
        """The first page of which `holds` is true.  Raises RuntimeError when none is in LIMIT_S."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            if holds(page := await self.page()):
                return page
            await asyncio.sleep(POLL_S)
        raise RuntimeError(f"the server is not where it should be after {LIMIT_S:g} s")

    def rss(self) -> int:
        return int(self._gateway.memory_info().rss)

    async def sample(self) -> None:
        """For ever: keep the most of each."""
        while True:
            self.most_rss = max(self.most_rss, self.rss())
            self.most_kernel = max(self.most_kernel, kernel_bytes())
            await asyncio.sleep(POLL_S)


def value(page: str, name: str) -> float:
    """Of the one series of this name; 0 where there is none."""
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def kernel_bytes() -> int:
    """What all TCP sockets of this machine hold in the kernel; 0 where there is no /proc."""
    try:
        said = Path("/proc/net/sockstat").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^TCP:.* mem (\d+)$", said, re.MULTILINE)
    return int(found[1]) * resource.getpagesize() if found else 0


async def read_stream(port: int, body: bytes) -> list[float]:
    """Send one request on a connection of its own and read it to the end; seconds between reads that brought events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % len(body) + body)
    times, tail = [], b""
    while block := await reader.read(1 << 16):
        if b"data: " in block:
            times.append(time.perf_counter())
        tail = (tail + block)[-64:]
    writer.close()
    if b"[DONE]" not in tail:
        raise RuntimeError("a stream was cut short")
    return [after - before for before, after in itertools.pairwise(times)]


async def fast(port: int, count: int, tokens: int) -> dict[str, float]:
    """Inter-token latency of so many clients that read at once."""
    asked = {"model": "bench", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body = json.dumps({**asked, "return_token_ids": True}).encode()  # an event for each token, also one without text
    gaps = sorted(itertools.chain(*await asyncio.gather(*(read_stream(port, body) for _ in range(count)))))
    return {f"itl_p{p:g}_ms": round(gaps[int(len(gaps) * p / 100)] * 1e3, 2) for p in (50, 99, 99.9)}


async def measure(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    watch, slow = Watch(server), SlowReaders(server.port, options.slow, options.slow_tokens, options.bytes_per_s)
    await fast(server.port, options.fast, 20)  # what is made once, at the first requests, counts for nobody
    figures: dict[str, Any] = {"alone": await fast(server.port, options.fast, options.tokens)}
    rss, kernel = watch.rss(), kernel_bytes()
    background = [asyncio.create_task(watch.sample())]
    try:
        await slow.come()
        background.append(asyncio.create_task(slow.drip()))
        await watch.until(lambda page: (sample(page, 0.0).running or 0) >= options.slow)
        figures["computed"] = await fast(server.port, options.fast, options.tokens)
        page = await watch.until(lambda page: not sample(page, 0.0).running)
        figures["once_they_were_generated"] = {
            "slow_streams_open": value(page, "quire_open_requests"),
            "kv_share_held": sample(page, 0.0).kv,
            "backlog_mib": round(value(page, "quire_backlog_bytes") / 2**20, 2),
        }
        figures["reading"] = await fast(server.port, options.fast, options.tokens)
        page = await watch.page()
        figures["in_the_end"] = {
            "slow_streams_open": value(page, "quire_open_requests"),
            "bytes_read_by_each": round(slow.read / options.slow, 1),
        }
        slow.leave()
        await watch.until(lambda page: not value(page, "quire_open_requests"))
    finally:
        for task in background:
            task.cancel()
        slow.leave()
    figures["gateway_rss_mib"] = {"before": round(rss / 2**20, 1), "most": round(watch.most_rss / 2**20, 1)}
    figures["gateway_kib_per_slow_stream"] = round((watch.most_rss - rss) / 2**10 / options.slow, 1)
    figures["kernel_tcp_kib_per_slow_stream"] = round((watch.most_kernel - kernel) / 2**10 / options.slow, 1)
    for phase in ("computed", "reading"):
        figures[f"itl_p99_{phase}_over_alone"] = round(figures[phase]["itl_p99_ms"] / figures["alone"]["itl_p99_ms"], 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--slow", type=int, default=1000)
    parser.add_argument("--slow-tokens", type=int, default=1200, help="of each slow client")
    parser.add_argument("--bytes-per-s", type=int, default=1, help="that each slow client reads")
    parser.add_argument("--fast", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300, help="of each fast client, in each phase")
    parser.add_argument("--step-ms", type=float, default=50.0)
    options = parser.parse_args()
    prepare(options.directory)
    flags = ["--executor", "scripted", "--scripted-step-ms", str(options.step_ms), "--queue-wait-s", "1000"]
    flags += ["--max-seqs", str(options.slow + options.fast), "--step-tokens", "4096", "--kv-blocks", "200000"]
    with serve(str(options.directory), *flags) as server:
        figures = asyncio.run(measure(server, options))
    settings = f"--slow {options.slow} --slow-tokens {options.slow_tokens} --fast {options.fast}"
    settings += f" --tokens {options.tokens} --step-ms {options.step_ms:g}"
    print(json.dumps(figures, indent=1))
    if options.bytes_per_s == 1:
        path = machine.write("slow_readers", f"python -m loadtest.slow_readers DIRECTORY {settings}", figures)
        print(f"written to {path.relative_to(machine.ROOT)}")


if __name__ == "__main__":
    main()
