"""What one gateway process can stream, and what a token costs it.

    python -m loadtest.gateway MODEL_DIRECTORY [--streams 256] [--tokens 400] [--step-ms 5]

Starts `quire serve` with the scripted executor, so nothing is computed and everything else is real: the engine's step
loop, Redis, one gateway, and this client reading every stream.  At `--step-ms 5` the engine offers 200 tokens a second
to each stream, 51,200 to all 256; a gateway that falls behind merges tokens into larger events, which is why events are
counted, too.  CPU time is read from the gateway process, so other work on the machine hardly disturbs it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import psutil

from loadtest import machine


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def wait_ready(url: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise SystemExit(f"{url} did not become ready in {seconds:.0f} s")


def gateway_of(supervisor: int) -> psutil.Process:
    children = psutil.Process(supervisor).children(recursive=True)
    return next(child for child in children if "service.app" in child.cmdline())


async def read_stream(port: int, body: bytes) -> int:
    """Send one request on a connection of its own; events received.  Parsing is left out: it would cost more than the
    gateway spends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    events, tail = 0, b""
    while block := await reader.read(1 << 16):
        events += (tail + block).count(b"data: ") - tail.count(b"data: ")
        tail = block[-5:]
    if not tail.endswith((b"0\r\n\r\n", b"\r\n\r\n")):
        raise RuntimeError("a stream was cut short")
    writer.close()
    return events


async def measure(port: int, model: str, streams: int, tokens: int, gateway: psutil.Process) -> dict[str, Any]:
    request = {"model": model, "prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(request).encode()
    before, began = gateway.cpu_times(), time.monotonic()
    events = await asyncio.gather(*(read_stream(port, body) for _ in range(streams)))
    after, wall = gateway.cpu_times(), time.monotonic() - began
    cpu = after.user + after.system - before.user - before.system
    return {
        "streams": streams,
        "tokens": streams * tokens,
        "events": sum(events) - streams,  # without the [DONE]s
        "tokens_per_s": round(streams * tokens / wall),
        "gateway_cpu_us_per_token": round(cpu / (streams * tokens) * 1e6, 1),
        "gateway_rss_mib": round(gateway.memory_info().rss / 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory with a tokenizer; its weights are not read")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=5.0)
    options = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "service.cli", "serve", options.model, "--served-name", "bench"]
    command += ["--port", str(port), "--executor", "scripted", "--scripted-step-ms", str(options.step_ms)]
    command += ["--max-seqs", str(options.streams), "--kv-blocks", "100000"]
    server = subprocess.Popen(command, stdout=sys.stderr, env=os.environ)
    try:
        wait_ready(f"http://127.0.0.1:{port}")
        gateway = gateway_of(server.pid)
        result = asyncio.run(measure(port, "bench", options.streams, options.tokens, gateway))
        settings = f"--streams {options.streams} --tokens {options.tokens} --step-ms {options.step_ms:g}"
        path = machine.write("gateway", f"python -m loadtest.gateway MODEL {settings}", result)
        print(json.dumps(result, indent=1))
        print(f"written to {path.relative_to(machine.ROOT)}")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


if __name__ == "__main__":
    main()
