"""`python -m quire.loadtest.studies redis-full`: steps per second of one Redis that never waits, by number of gateways.

Engines are processes of their own.  Each engine syncs again as soon as it has its reply, with one token per sequence.
A gateway is a connection whose bytes are read and not decoded.  So Redis finds several syncs at once, and writes to a
gateway once for all of them, as it does when many engines run steps.  `redis-load` measures one sync at a time.

`thread_us` and `thread_cores` are CPU time of Redis' main thread, per step and per second; `cores` has the I/O threads
and the append-only file's thread as well.  `idle_cores` of the machine are necessary for --io-threads: these threads
spin.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import selectors
import shlex
import socket
import time
from collections.abc import Sequence
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from typing import Any, cast

import msgspec
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.token_messages import channel_of
from quire.loadtest import machine
from quire.loadtest.studies.fleet import redis_cpu_s
from quire.loadtest.studies.redis_load import Deployment, Engine, Size

GATEWAYS = (1, 4, 16, 64)
READERS = 4  # number of processes that read streams, each with the connections of some gateways
RECEIVE_BYTES = 1 << 18
PREFIX = "{quire}:"  # namespace "quire" is the default
WARM_S = 1.0
POLL_S = 0.05


class _Counts(msgspec.Struct, frozen=True):
    """What the processes share."""

    begun: Barrier  # engines wait here until each one runs all its sequences
    steps: Synchronized[int]
    read: Synchronized[int]  # bytes that the gateways have read


def _add(counter: Synchronized[int], number: int) -> None:
    with counter.get_lock():
        counter.value += number


async def _engine(url: str, name: str, size: Size, counts: _Counts) -> None:
    """Claim, and then sync until this process is killed."""
    engine = Engine(url, name)
    await engine.side.open()
    while len(engine.held) < size.sequences:
        await asyncio.sleep(POLL_S)
        await engine.sync(room=size.sequences - len(engine.held))
    await asyncio.to_thread(counts.begun.wait)
    while True:
        await engine.sync(tokens=True)
        _add(counts.steps, 1)


async def _submit(url: str, size: Size, requests: int) -> None:
    """Queue requests, of each gateway in turn."""
    deployment = Deployment(url, size)
    await deployment.open()
    for _ in range(requests):
        await deployment.submit()
    await deployment.close()


async def _read(url: str, gateways: Sequence[str], counts: _Counts) -> None:
    """Receive all messages of these gateways, and count their bytes."""
    with selectors.DefaultSelector() as selector:
        for gateway in gateways:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(url.removeprefix("unix://"))
            connection.sendall(f"SUBSCRIBE {PREFIX}tokens:{channel_of(gateway)}\r\n".encode())
            selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                _add(counts.read, len(cast(socket.socket, key.fileobj).recv(RECEIVE_BYTES)))


def _start(run: Any, *arguments: Any) -> mp.process.BaseProcess:
    process = mp.get_context("fork").Process(target=lambda: asyncio.run(run(*arguments)), daemon=True)
    process.start()
    return process


def measure(url: str, size: Size, seconds: float) -> dict[str, Any]:
    """Return steps per second, and CPU time of Redis per step."""
    counts = _Counts(mp.Barrier(size.engines), mp.Value("q", 0), mp.Value("q", 0))
    names = [f"gateway-{at}" for at in range(size.gateways)]
    processes = [_start(_read, url, names[at::READERS], counts) for at in range(min(READERS, len(names)))]
    processes += [_start(_engine, url, f"engine-{at}", size, counts) for at in range(size.engines)]
    client: Any = redis.Redis.from_url(url)
    try:
        asyncio.run(_submit(url, msgspec.structs.replace(size, engines=0), size.engines * size.sequences))
        while counts.steps.value < size.engines:
            if not all(process.is_alive() for process in processes):
                raise RuntimeError("an engine or gateway has ended: its error is above")
            time.sleep(POLL_S)
        time.sleep(WARM_S)
        before, began, steps, read = client.info("cpu"), time.monotonic(), counts.steps.value, counts.read.value
        time.sleep(seconds)
        after, wall = client.info("cpu"), time.monotonic() - began
        steps, read = counts.steps.value - steps, counts.read.value - read
    finally:
        for process in processes:
            process.kill()
            process.join()
        client.close()
    thread_s = sum(after[key] - before[key] for key in ("used_cpu_user_main_thread", "used_cpu_sys_main_thread"))
    return {
        "steps_per_s": round(steps / wall),
        "read_mb_per_s": round(read / wall / 1e6, 1),
        "thread_us": round(1e6 * thread_s / steps, 1),
        "thread_cores": round(thread_s / wall, 2),
        "cores": round((redis_cpu_s(after) - redis_cpu_s(before)) / wall, 2),
    }


def main(argv: list[str]) -> int:
    """Print one JSON object, or write it as a result file."""
    parser = argparse.ArgumentParser(
        prog="python -m quire.loadtest.studies redis-full",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gateways", type=int, nargs="+", default=GATEWAYS, help="default: 1 4 16 64")
    parser.add_argument("--io-threads", type=int, nargs="+", default=[1], help="threads of Redis; default: 1")
    parser.add_argument("--engines", type=int, default=8, help="engines, each with a core of its own; default: 8")
    parser.add_argument("--sequences", type=int, default=64, help="sequences per engine; default: 64")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement; default: 5")
    parser.add_argument("--name", type=machine.result_name, help="write loadtest/results/NAME.json")
    args = parser.parse_args(argv)
    runs = []
    for threads in args.io_threads:
        for gateways in args.gateways:
            with EmbeddedRedis(settings={"io-threads": str(threads)}) as server:
                size = Size(gateways, args.engines, args.sequences, prompt_tokens=100)
                found = measure(server.url, size, args.seconds)
            runs.append({"gateways": gateways, "io_threads": threads, **found})
    figures = {
        "engines": args.engines,
        "sequences": args.sequences,
        "idle_cores": len(os.sched_getaffinity(0)),
        "runs": runs,
    }
    print(json.dumps(figures))
    if args.name:
        machine.write(args.name, f"python -m quire.loadtest.studies redis-full {shlex.join(argv)}", figures)
    return 0
