"""What one gateway process can stream, and what a token costs it.

    python -m loadtest.gateway MODEL_DIRECTORY [--streams 256] [--tokens 400] [--step-ms 5] [--beside CHECKOUT]

Starts `quire serve` with the scripted executor, so nothing is computed and everything else is real: the engine's step
loop, Redis, one gateway, and this client reading every stream.  At `--step-ms 5` the engine offers 200 tokens a second
to each stream, 51,200 to all 256; a gateway that falls behind merges tokens into larger events, which is why events are
counted, too.  CPU time is read from the gateway process, so other work on the machine hardly disturbs it.

`--beside`: another checkout of this project (`git worktree add CHECKOUT COMMIT`), measured in turn with this one,
`--rounds` times each; medians.  So what a change costs can be told.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from loadtest import machine
from loadtest.server import serve


async def read_stream(port: int, body: bytes) -> tuple[int, list[float]]:
    """Send one request on a connection of its own; events received, and the seconds between reads that brought some.
    Parsing is left out: it would cost more than the gateway spends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    events, tail, times = 0, b"", []
    while block := await reader.read(1 << 16):
        times.append(time.perf_counter())
        events += (tail + block).count(b"data: ") - tail.count(b"data: ")
        tail = block[-5:]
    if not tail.endswith((b"0\r\n\r\n", b"\r\n\r\n")):
        raise RuntimeError("a stream was cut short")
    writer.close()
    return events, [after - before for before, after in itertools.pairwise(times)]


async def measure(port: int, streams: int, tokens: int, gateway: psutil.Process) -> dict[str, Any]:
    request = {"model": "bench", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(request).encode()
    before, began = gateway.cpu_times(), time.monotonic()
    read = await asyncio.gather(*(read_stream(port, body) for _ in range(streams)))
    after, wall = gateway.cpu_times(), time.monotonic() - began
    cpu = after.user + after.system - before.user - before.system
    return {
        "streams": streams,
        "tokens": streams * tokens,
        "events": sum(events for events, _ in read) - streams,  # without the [DONE]s
        "itl_p50_ms": round(statistics.median(gap for _, gaps in read for gap in gaps) * 1e3, 2),
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
    parser.add_argument("--beside", type=Path, help="another checkout to measure in turn with this one")
    parser.add_argument("--rounds", type=int, default=1, help="of each")
    options = parser.parse_args()
    flags = ["--executor", "scripted", "--scripted-step-ms", str(options.step_ms)]
    flags += ["--max-seqs", str(options.streams), "--kv-blocks", "100000"]

    def run(checkout: Path | None) -> dict[str, Any]:
        with serve(options.model, *flags, checkout=checkout) as server:
            measured = measure(server.port, options.streams, options.tokens, server.child("service.app"))
            return asyncio.run(measured)

    def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: statistics.median(one[name] for one in runs) for name in runs[0]}

    beside, here = [], []
    for _ in range(options.rounds):
        beside += [run(options.beside.resolve())] if options.beside else []
        here.append(run(None))
    result = median(here)
    if beside:
        result["beside"] = median(beside)
    settings = f"--streams {options.streams} --tokens {options.tokens} --step-ms {options.step_ms:g}"
    path = machine.write("gateway", f"python -m loadtest.gateway MODEL {settings}", result)
    print(json.dumps(result, indent=1))
    print(f"written to {path.relative_to(machine.ROOT)}")


if __name__ == "__main__":
    main()
