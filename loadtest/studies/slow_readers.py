"""The cost of clients that read one byte per second, for a gateway and its fast clients.

    python -m quire.loadtest.studies slow-readers DIRECTORY [--slow 1000] [--slow-tokens 1200]
                                                  [--fast 64] [--tokens 300]

DIRECTORY holds a model, of which only the tokenizer is read; the 42M model is made there if it holds none.  `quire
serve` runs with the scripted executor, which computes nothing.  Everything else is real: step loop, Redis, one
gateway, sockets.  The fast clients read `--tokens` tokens each in four phases:

    alone     no slow client is connected
    computed  the engine generates the slow clients' answers as well, so its batch and the token log are larger
    reading   the slow clients' answers are complete in the engine, and the clients still read
    after     the slow clients have left

The cost of `computed` is mostly the larger batch: compare with `--bytes-per-s 100000`, where no client is slow.
Gaps are times between reads of a fast client.  A read returns one token, or several if the gateway is late.
Memory is that of the gateway, and of the kernel for all TCP sockets of this machine, including the clients' ends.
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
import statistics
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.loadtest import machine
from quire.loadtest.checkpoint import prepare
from quire.loadtest.raw_stream import encode_request, read_stream
from quire.loadtest.scrape import sample
from quire.loadtest.server import MODEL_NAME, Server, serve
from quire.loadtest.stats import percentile

RECEIVE_BYTES = 2048  # a slow client's socket buffer, doubled by the kernel
SHARES = 20  # number of groups per second in which slow clients are read, so that no group delays the fast clients
POLL_S = 0.1
LIMIT_S = 300.0  # maximum seconds to wait for a condition


def body_of(tokens: int) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}


class SlowReaders:
    """`count` connections, each read at `bytes_per_s`."""

    def __init__(self, port: int, count: int, tokens: int, bytes_per_s: int) -> None:
        self._request = encode_request(body_of(tokens))
        self._port, self._count, self._bytes_per_s = port, count, bytes_per_s
        self._sockets: list[socket.socket] = []
        self.read = 0  # bytes read on all connections

    async def connect(self) -> None:
        for _ in range(self._count):
            one = socket.socket()
            if self._bytes_per_s < RECEIVE_BYTES:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            one.setblocking(False)
            await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", self._port))
            one.send(self._request)
            self._sockets.append(one)

    async def read_slowly(self) -> None:
        """Read until cancelled."""
        for share in itertools.cycle(range(SHARES)):
            due = time.monotonic() + 1 / SHARES
            for one in self._sockets[share::SHARES]:
                with contextlib.suppress(BlockingIOError):  # no byte has arrived yet
                    self.read += len(one.recv(self._bytes_per_s))
            await asyncio.sleep(due - time.monotonic())

    def close(self) -> None:
        for one in self._sockets:
            one.close()


class Watch:
    """Reads the gateway's metrics page and memory."""

    def __init__(self, server: Server) -> None:
        self._url, self._gateway = f"{server.url}/metrics", server.child("quire.service.app")
        self.max_rss = self.max_kernel = 0

    async def page(self) -> str:
        def read() -> str:
            with urllib.request.urlopen(self._url, timeout=30) as response:
                return str(response.read().decode())

        return await asyncio.to_thread(read)

    async def until(self, holds: Callable[[str], bool]) -> str:
        """Return the first page for which `holds` is true.  Raises RuntimeError after LIMIT_S."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            if holds(page := await self.page()):
                return page
            await asyncio.sleep(POLL_S)
        raise RuntimeError(f"the server's metrics did not reach the expected state in {LIMIT_S:g} s")

    def cpu_s(self) -> float:
        """Return the gateway's CPU time so far."""
        times = self._gateway.cpu_times()
        return float(times.user + times.system)

    def rss(self) -> int:
        return int(self._gateway.memory_info().rss)

    async def record_peaks(self) -> None:
        """Record the highest memory use of gateway and kernel until cancelled."""
        while True:
            self.max_rss = max(self.max_rss, self.rss())
            self.max_kernel = max(self.max_kernel, kernel_bytes())
            await asyncio.sleep(POLL_S)


def value(page: str, name: str) -> float:
    """Return the value of the only series of this name; 0 if the page has none."""
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def kernel_bytes() -> int:
    """Return the kernel's memory of all TCP sockets of this machine; 0 if there is no /proc."""
    try:
        text = Path("/proc/net/sockstat").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^TCP:.* mem (\d+)$", text, re.MULTILINE)
    return int(found[1]) * resource.getpagesize() if found else 0


async def fast(port: int, count: int, tokens: int) -> dict[str, float]:
    """Return the inter-token latency of `count` clients that read at once."""
    request = encode_request(
        body_of(tokens) | {"return_token_ids": True}
    )  # so that a token without text is an event, too
    streams = await asyncio.gather(*(read_stream(port, request) for _ in range(count)))
    ordered = sorted(gap for stream in streams for gap in stream.gaps_s)
    return {f"itl_p{p:g}_ms": round(percentile(ordered, p) * 1e3, 2) for p in (50, 99, 99.9)}


async def run_phase(server: Server, watch: Watch, options: argparse.Namespace) -> dict[str, Any]:
    """Return the fast clients' inter-token latency, and the gateway's CPU time per token of theirs, in each round."""
    rounds, tokens = [], options.fast * options.tokens
    for _ in range(options.rounds):
        before = watch.cpu_s()
        found = await fast(server.port, options.fast, options.tokens)
        rounds.append(found | {"gateway_cpu_us_per_token": round(1e6 * (watch.cpu_s() - before) / tokens, 1)})
    return {name: round(statistics.median(each[name] for each in rounds), 2) for name in rounds[0]} | {
        "rounds": [each["gateway_cpu_us_per_token"] for each in rounds]
    }


async def measure(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    watch, slow = Watch(server), SlowReaders(server.port, options.slow, options.slow_tokens, options.bytes_per_s)
    await fast(server.port, options.fast, 20)  # warm-up: the first requests include one-time work of the server
    figures: dict[str, Any] = {"alone": await run_phase(server, watch, options)}
    rss, kernel = watch.rss(), kernel_bytes()
    background = [asyncio.create_task(watch.record_peaks())]
    try:
        await slow.connect()
        background.append(asyncio.create_task(slow.read_slowly()))
        await watch.until(lambda page: (sample(page, 0.0).running or 0) >= options.slow)
        figures["computed"] = await fast(server.port, options.fast, options.tokens)
        page = await watch.until(lambda page: not sample(page, 0.0).running)
        figures["once_they_were_generated"] = {
            "slow_streams_open": value(page, "quire_open_requests"),
            "kv_share_held": sample(page, 0.0).kv,
            "backlog_mib": round(value(page, "quire_backlog_bytes") / 2**20, 2),
        }
        figures["reading"] = await run_phase(server, watch, options)
        page = await watch.page()
        figures["in_the_end"] = {
            "slow_streams_open": value(page, "quire_open_requests"),
            "bytes_read_by_each": round(slow.read / options.slow, 1),
        }
        slow.close()
        await watch.until(lambda page: not value(page, "quire_open_requests"))
        figures["after"] = await run_phase(server, watch, options)
    finally:
        for task in background:
            task.cancel()
        slow.close()
    figures["gateway_rss_mib"] = {"before": round(rss / 2**20, 1), "most": round(watch.max_rss / 2**20, 1)}
    figures["gateway_kib_per_slow_stream"] = round((watch.max_rss - rss) / 2**10 / options.slow, 1)
    figures["kernel_tcp_kib_per_slow_stream"] = round((watch.max_kernel - kernel) / 2**10 / options.slow, 1)
    for phase in ("computed", "reading"):
        figures[f"itl_p99_{phase}_over_alone"] = round(figures[phase]["itl_p99_ms"] / figures["alone"]["itl_p99_ms"], 3)
    # The machine's other load changes latencies more than CPU times, so this is the cost of clients that read slowly.
    without = statistics.median(figures["alone"]["rounds"] + figures["after"]["rounds"])
    figures["cpu_reading_over_without"] = round(figures["reading"]["gateway_cpu_us_per_token"] / without, 3)
    return figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="directory of the model; made there if empty")
    parser.add_argument("--slow", type=int, default=1000, help="slow clients; default 1000")
    parser.add_argument(
        "--slow-tokens", type=int, default=1200, help="tokens of each slow client's answer; default 1200"
    )
    parser.add_argument(
        "--bytes-per-s", type=int, default=1, help="bytes per second that each slow client reads; default 1"
    )
    parser.add_argument("--fast", type=int, default=64, help="fast clients; default 64")
    parser.add_argument(
        "--tokens", type=int, default=300, help="tokens of each fast client, in each phase; default 300"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each phase but `computed`; default 3")
    parser.add_argument("--step-ms", type=float, default=50.0, help="milliseconds of an engine step; default 50")


def main(options: argparse.Namespace, command: str) -> int:
    prepare(options.directory)
    flags = ["--executor", "scripted", "--scripted-step-ms", str(options.step_ms), "--late-wait-s", "1000"]
    flags += ["--max-seqs", str(options.slow + options.fast), "--step-tokens", "4096", "--kv-blocks", "200000"]
    with serve(str(options.directory), *flags) as server:
        figures = asyncio.run(measure(server, options))
    print(json.dumps(figures, indent=1))
    if options.bytes_per_s == 1:
        path = machine.write("slow_readers", command.replace(str(options.directory), "DIRECTORY"), figures)
        print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
