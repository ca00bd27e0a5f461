"""The cost of Redis, gateway and HTTP compared with the same engine offline: time to first token, tokens per second.

    python -m quire.loadtest.studies overhead [--rate 10] [--requests 200] [--rounds 3] [--threads 1]

The model is the 42M one of loadtest/checkpoint.py, prompts have 78 tokens, outputs about 172, sampling is greedy.
Requests arrive at `--rate` per second, at the same seeded random times offline and served.  A request that arrives
during a step waits for the step's end, offline too, and time to first token counts from the arrival.  Offline and
served runs alternate; medians are reported.  The engine has `--threads` threads in both, so on a machine with two cores
the other core is free for gateway, Redis and this client.
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
from itertools import accumulate
from pathlib import Path
from typing import Any

from quire.loadtest import machine, trace
from quire.loadtest.checkpoint import VOCAB, make_llama_42m
from quire.loadtest.replay import Options, replay
from quire.loadtest.server import MODEL_NAME, Server, serve
from quire.loadtest.stats import Record
from quire.loadtest.workloads import Arrival


def peak_concurrency(records: list[Record]) -> int:
    """Return the maximum number of concurrent requests, each from its due time to its end."""
    changes = sorted([(record.due_s, 1) for record in records] + [(record.end_s, -1) for record in records])
    return max(accumulate(change for _, change in changes))


def run_served(server: Server, jobs: list[trace.Job], arrivals_s: list[float]) -> dict[str, float]:
    """Replay all jobs.  Raises RuntimeError when a request does not complete."""
    arrivals = [Arrival(at_s, "served", job) for at_s, job in zip(arrivals_s, jobs, strict=True)]
    options = Options(url=server.url, model=MODEL_NAME, metrics_url=f"{server.url}/metrics", vocab_size=VOCAB)
    records, _ = asyncio.run(replay(arrivals, options))
    if failed := [record for record in records if record.outcome != "ok"]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0].outcome} {failed[0].error}")
    return {
        "tokens_per_s": sum(job.output_len for job in jobs) / max(record.end_s for record in records),
        "ttft_p50_ms": statistics.median(record.ttft_s or 0.0 for record in records) * 1e3,
        "most_streams": peak_concurrency(records),
    }


def run_offline(checkpoint: Path, requests: Path, flags: list[str]) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "quire.engine.tools",
        "bench",
        "--requests",
        str(requests),
        *flags,
        str(checkpoint),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=machine.ROOT)
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return {key: figures[key] for key in ("tokens_per_s", "ttft_p50_ms")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second; default 10")
    parser.add_argument("--requests", type=int, default=200, help="requests of each run; default 200")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind, medians are reported; default 3")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine; default 1")


def main(args: argparse.Namespace, command: str) -> int:
    flags = ["--kv-blocks", "4096", "--threads", str(args.threads), "--no-prefix-cache"]
    # Lengths differ slightly, because otherwise whole batches would end in the same step.
    jobs = [trace.Job(78, 140 + 37 * seed % 64, seed) for seed in range(args.requests)]
    clock = random.Random(1)
    arrivals_s = list(accumulate(clock.expovariate(args.rate) for _ in jobs))
    warm_up = [trace.Job(job.prompt_len, 8, job.prompt_seed) for job in jobs[:4]]
    offline, served = [], []
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, requests = Path(scratch) / "model", Path(scratch) / "requests.jsonl"
        make_llama_42m(checkpoint)
        trace.write_requests(jobs, VOCAB, requests, arrivals_s)
        for _ in range(args.rounds):
            offline.append(run_offline(checkpoint, requests, flags))
            with serve(str(checkpoint), *flags) as server:
                run_served(server, warm_up, arrivals_s[: len(warm_up)])
                served.append(run_served(server, jobs, arrivals_s))
            print(f"offline {offline[-1]}, served {served[-1]}", file=sys.stderr, flush=True)
    figures: dict[str, Any] = {
        name: {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        for name, runs in (("offline", offline), ("served", served))
    }
    figures["added_ttft_p50_ms"] = figures["served"]["ttft_p50_ms"] - figures["offline"]["ttft_p50_ms"]
    figures["tokens_per_s_lost"] = 1 - figures["served"]["tokens_per_s"] / figures["offline"]["tokens_per_s"]
    path = machine.write("overhead", command, figures)
    print(json.dumps(figures, indent=1))
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
