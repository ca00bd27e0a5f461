"""What Redis, gateway and HTTP cost beside the same engine offline: time to first token, and tokens a second.

    python -m loadtest.overhead [--rate 10] [--requests 200] [--rounds 3] [--threads 1]

The 42M-parameter model of loadtest.throughput, prompts of 78 tokens, outputs of about 172, greedy.  Requests arrive at
`--rate` a second, at seeded random moments that are the same for both: a request that comes while a step runs waits for
its end in either, and time to first token counts from the moment of arrival.  Offline and served runs alternate;
medians are reported.  The engine computes on `--threads` cores in both, so that on a machine of two the other one is
there for gateway, Redis and this client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtest import machine, trace
from loadtest.checkpoint import VOCAB, make_llama_42m
from loadtest.server import serve


async def read_stream(port: int, body: bytes) -> float:
    """Send one request on a connection of its own and read it to the end; the moment of its first event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    first = 0.0
    tail = b""
    while block := await reader.read(1 << 16):
        if not first and b"data: " in tail + block:
            first = time.perf_counter()
        tail = (tail + block)[-64:]
    writer.close()
    if b"[DONE]" not in tail or not first:
        raise RuntimeError("a stream was cut short")
    return first


async def run_served(port: int, jobs: list[dict[str, Any]]) -> dict[str, float]:
    bodies = [
        json.dumps(
            {
                "model": "bench",
                "prompt": job["token_ids"],
                "max_tokens": job["max_new_tokens"],
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        for job in jobs
    ]
    began = time.perf_counter()
    in_flight = most = 0

    async def client(at_s: float, body: bytes) -> float:
        nonlocal in_flight, most
        await asyncio.sleep(began + at_s - time.perf_counter())
        in_flight += 1
        most = max(most, in_flight)
        first = await read_stream(port, body)
        in_flight -= 1
        return first - began - at_s

    firsts = await asyncio.gather(*(client(job["at_s"], body) for job, body in zip(jobs, bodies, strict=True)))
    seconds = time.perf_counter() - began
    tokens = sum(job["max_new_tokens"] for job in jobs)
    return {"tokens_per_s": tokens / seconds, "ttft_p50_ms": statistics.median(firsts) * 1e3, "most_streams": most}


def run_offline(checkpoint: Path, requests: Path, flags: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "engine.tools", "bench", "--requests", str(requests), *flags, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=machine.ROOT)
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return {key: figures[key] for key in ("tokens_per_s", "ttft_p50_ms")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    flags = ["--kv-blocks", "4096", "--threads", str(args.threads), "--no-prefix-cache"]
    offline, served = [], []
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, requests = Path(scratch) / "model", Path(scratch) / "requests.jsonl"
        make_llama_42m(checkpoint)
        # Lengths a little apart, or whole batches would end in the same step.
        work = [trace.Job(78, 140 + 37 * seed % 64, seed) for seed in range(args.requests)]
        trace.write_requests(work, VOCAB, requests)
        jobs = [json.loads(line) for line in requests.read_text(encoding="utf-8").splitlines()]
        clock, at_s = random.Random(1), 0.0
        for job in jobs:
            at_s += clock.expovariate(args.rate)
            job["at_s"] = at_s
        requests.write_text("".join(json.dumps(job) + "\n" for job in jobs), encoding="utf-8")
        for _ in range(args.rounds):
            offline.append(run_offline(checkpoint, requests, flags))
            with serve(str(checkpoint), *flags) as server:
                asyncio.run(run_served(server.port, [{**job, "max_new_tokens": 8} for job in jobs[:4]]))
                served.append(asyncio.run(run_served(server.port, jobs)))
            print(f"offline {offline[-1]}, served {served[-1]}", file=sys.stderr, flush=True)
    figures: dict[str, Any] = {
        name: {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        for name, runs in (("offline", offline), ("served", served))
    }
    figures["added_ttft_p50_ms"] = figures["served"]["ttft_p50_ms"] - figures["offline"]["ttft_p50_ms"]
    figures["tokens_per_s_lost"] = 1 - figures["served"]["tokens_per_s"] / figures["offline"]["tokens_per_s"]
    path = machine.write(
        "overhead", f"python -m loadtest.overhead --rate {args.rate:g} --threads {args.threads}", figures
    )
    print(json.dumps(figures, indent=1))
    print(f"written to {path.relative_to(machine.ROOT)}")


if __name__ == "__main__":
    main()
