"""Many streams that end at once: how long the gateway's event loop stands still, and what it costs.

    python -m tests.system.ending [--streams 1000 4000] [--how leave deadline drain]

One gateway process, an engine that says one token of each answer, and clients that wait for the second.  They all
leave, or their deadlines pass, or the gateway drains.  Also prints the memory and descriptors of an open stream.  Each
side needs a descriptor per stream: `ulimit -n` must be above the number of streams.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.messages import Delta, Finish, Generate, TokenBatch
from tests.checkpoints import make_checkpoint
from tests.pace import paced, patience
from tests.ports import free_port
from tests.service.fakes import a_load
from tests.system.processes import Process, ending, wait_until_ready

OPENED_AT_ONCE = 100
SLOTS = 1024  # a real engine has no more sequences than this at once, so no more deltas in one batch
LIMIT_S = 300.0
STREAMS_PER_ADDRESS = 20_000  # one pair of addresses has some 28,000 ports for clients


class Hushed:
    """An engine that emits one token of each answer and then none, until it is stopped."""

    def __init__(self, url: str) -> None:
        self._side = EngineSide(url, "e0")
        self.held: dict[str, Generate] = {}

    async def run(self) -> None:
        await self._side.open()
        batches: list[tuple[str, TokenBatch]] = []
        finished: list[str] = []
        while True:
            claimed = await self._side.sync(batches, finished, a_load(vocab_size=500), 10**9, 2000)
            deltas, finished = list[Delta](), []
            for request in claimed.generates:
                self.held[request.id] = request
                deltas.append(Delta(request.id, 0, [5]))
            for order in claimed.aborts:
                if (known := self.held.pop(order.id, None)) is not None:
                    deltas.append(Delta(known.id, 1, [], Finish("cancelled")))
                    finished.append(known.id)
            batches = [("g0", part) for part in TokenBatch("e0", deltas).split(SLOTS)] if deltas else []
            await asyncio.sleep(0.05)


async def open_stream(port: int, number: int, timeout_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream that has had its first event."""
    reader, writer = await asyncio.open_connection(f"127.0.0.{1 + number // STREAMS_PER_ADDRESS}", port)
    body = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 100, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}"
    writer.write(f"{head}\r\nX-Request-Timeout: {timeout_s:.1f}\r\n\r\n".encode() + body)
    found = await reader.readuntil(b"data: ")
    assert found.startswith(b"HTTP/1.1 200"), found
    return reader, writer


def stalls(port: int) -> dict[str, dict[float, float]]:
    """Late and busy: observations by the border of their bucket, seconds.  And how many requests are open."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=patience(60)) as page:
        text = page.read().decode()
    found = {"open": {0.0: float(re.findall(r"quire_open_requests{.*} (\S+)", text)[0])}}
    for kind in ("stall", "busy"):
        rows = re.findall(rf'quire_gateway_loop_{kind}_seconds_bucket{{.*le="(.*?)"}} (\S+)', text)
        below = [(float(border), float(count)) for border, count in rows]
        found[kind] = {
            border: count - before
            for (border, count), before in zip(below, [0.0, *(c for _, c in below)], strict=False)
        }
    return found


def peak_bytes(pid: int, *, reset: bool = False) -> int:
    """The most memory that a process has held since it began, or since the last reset.  Linux only."""
    folder = Path(f"/proc/{pid}")
    if reset:
        (folder / "clear_refs").write_text("5")
    return int(re.findall(r"VmHWM:\s+(\d+)", (folder / "status").read_text())[0]) * 1024


def longest(before: dict[float, float], after: dict[float, float]) -> float:
    """The border of the highest bucket that has grown."""
    return max((border for border, count in after.items() if count > before[border]), default=0.0)


def say_cost(streams: int, seconds: float, size: int, descriptors: int) -> None:
    """Print what open streams cost the gateway."""
    each = f"{size / streams / 1024:.1f} KiB, {descriptors / streams:.3f} descriptors"
    print(f"{streams:>7} opened in {seconds:.0f} s: each {each}", flush=True)


async def measure(server: EmbeddedRedis, checkpoint: Path, folder: Path, streams: int, how: str) -> str:
    """One line of the table."""
    port, page = free_port(), free_port()
    options = [f"--redis-url={server.url}", f"--port={port}", f"--metrics-port={page}", "--gateway-id=g0"]
    options += [
        "--served-name=tiny",
        f"--max-open={max(20_000, streams + 100)}",
        "--host=0.0.0.0",
        "--late-wait-s=10000",
        "--drain-s=0.1",
    ]
    timeout_s = 20 + streams / 100 if how == "deadline" else 3000.0
    with ending([Process(folder / f"{how}-{streams}.log", "gateway", str(checkpoint), *options)]) as [gateway]:
        engine = Hushed(server.url)
        running = asyncio.create_task(engine.run())
        await asyncio.to_thread(wait_until_ready, f"http://127.0.0.1:{port}")
        client, process = redis.Redis.from_url(server.url), psutil.Process(gateway.popen.pid)
        ends = time.monotonic() + timeout_s
        opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        empty, opening, descriptors = process.memory_info().rss, time.monotonic(), process.num_fds()
        while len(opened) < streams:
            some = min(OPENED_AT_ONCE, streams - len(opened))
            numbers = range(len(opened), len(opened) + some)
            opened += await asyncio.gather(*(open_stream(port, at, ends - time.monotonic()) for at in numbers))
        await asyncio.sleep(paced(1.0))
        before, held = await asyncio.to_thread(stalls, page), process.memory_info().rss
        say_cost(streams, time.monotonic() - opening, held - empty, process.num_fds() - descriptors)
        client.config_resetstat()
        peak_bytes(process.pid, reset=True)
        began, cpu = time.monotonic(), sum(process.cpu_times()[:2])
        if how == "leave":
            for _, writer in opened:
                writer.transport.abort()
        elif how == "drain":
            process.send_signal(signal.SIGTERM)
        after, peak, spent = before, held, 0.0
        until = began + LIMIT_S
        while time.monotonic() < until and (engine.held or (after["open"][0.0] and process.is_running())):
            if process.status() == psutil.STATUS_ZOMBIE:  # what its engine holds now waits for another gateway
                break
            with contextlib.suppress(OSError, ValueError):  # the page closes before the process ends
                after = await asyncio.to_thread(stalls, page)
                peak = peak_bytes(process.pid)
                spent = sum(process.cpu_times()[:2]) - cpu
            await asyncio.sleep(0.05)
        took = time.monotonic() - began
        commands: dict[str, dict[str, float]] = client.info("commandstats")
        busy = sum(one["usec"] for name, one in commands.items() if name.startswith("cmdstat_eval")) / 1e6
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for _, writer in opened:
            writer.transport.abort()
        client.flushall()
        client.close()
    return (
        f"{streams:>7} {how:<9} {took:6.1f} s, gateway CPU {spent:5.1f} s, stall <= "
        f"{longest(before['stall'], after['stall']):g} s, busy in it <= {longest(before['busy'], after['busy']):g} s, "
        f"peak {(peak - held) / 2**20:+.0f} MiB, Redis busy {busy:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument(
        "--how", nargs="+", choices=("leave", "deadline", "drain"), default=["leave", "deadline", "drain"]
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, EmbeddedRedis() as server:
        folder = Path(name)
        checkpoint = make_checkpoint(folder / "llama", "llama")
        for how in options.how:
            for streams in options.streams:
                print(asyncio.run(measure(server, checkpoint, folder, streams, how)), flush=True)


if __name__ == "__main__":
    main()
