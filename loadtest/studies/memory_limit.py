"""Compare paging, admission and the prefix cache with 12 GB of KV memory, which limits the batch.

    python -m quire.loadtest.studies memory-limit [--shape llama-13b] [--kv-memory-gib 11.2] [--workload chat|prefix]

Uses the shape of LLaMA-13B with random weights, and the KV memory that a 40 GB GPU would have left.  Two workloads:

    chat     ShareGPT-like lengths (loadtest/traces/sharegpt_like.jsonl); rates, then all at once
    prefix   the same, after a system prompt of --prefix tokens that all requests share; all at once

Each request has the rest of the model's context as max_tokens and ends by itself.  The study
`rates` defines the measurements.  Writes loadtest/results/memory_limit_<workload>_<device>.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.loadtest import machine, shapes, trace

PREFIX_SEED = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=shapes.CONFIGS, default="llama-13b", help="model shape; default llama-13b")
    parser.add_argument("--kv-memory-gib", default="11.2", help="KV memory in GiB; default 11.2, which is 12 GB")
    parser.add_argument("--workload", choices=["chat", "prefix"], default="chat", help="see above; default chat")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens of the shared system prompt; default 1024")
    parser.add_argument("--rates", default="1,2,3,6,9,12,15", help="request rates of the workload chat, per second")
    parser.add_argument("--seconds", default="20", help="seconds of arrivals at each rate; default 20")
    parser.add_argument("--at-once", default="120", help="requests that arrive together; default 120")
    parser.add_argument("--options", default="", help="further options of the engine, in one string")


def jobs(workload: str, prefix: int, most: int) -> list[trace.Job]:
    """Return the requests of a workload; omits requests of more than `most` tokens."""
    found = trace.read("sharegpt_like")
    if workload == "prefix":
        found = [
            replace(j, prompt_len=j.prompt_len + prefix, prefix_len=prefix, prefix_seed=PREFIX_SEED) for j in found
        ]
    return [job for job in found if job.prompt_len + job.output_len <= most]


def main(args: argparse.Namespace, command: str) -> int:
    config = shapes.CONFIGS[args.shape]
    with tempfile.TemporaryDirectory() as scratch:
        directory, requests = Path(scratch, "model"), Path(scratch, "requests.jsonl")
        shapes.write(args.shape, directory)
        work = jobs(args.workload, args.prefix, config["max_position_embeddings"])
        trace.write_requests(work, config["vocab_size"], requests)
        rates = args.rates if args.workload == "chat" else ""
        words = ["rates", str(directory), "--load", "random", "--requests", str(requests), "--rates", rates]
        words += ["--seconds", args.seconds, "--at-once", args.at_once, "--kv-memory-gib", args.kv_memory_gib]
        tool = [sys.executable, "-m", "quire.loadtest.studies", *words, *args.options.split()]
        output = subprocess.run(tool, cwd=machine.ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    figures = json.loads(output)
    show(figures)
    path = machine.write(f"memory_limit_{args.workload}_{machine.device()}", command, figures)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0


def show(figures: dict[str, list[dict[str, Any]]]) -> None:
    print("way            rate   normalised ms   batch   most   requests/s   preemptions")
    for way, runs in figures.items():
        for run in runs:
            rate = f"{run['rate']:g}" if run["rate"] else "all"
            print(
                f"{way:<13}{rate:>6}{run['normalised_ms']:>16.1f}{run['batch']:>8.1f}{run['most']:>7}"
                f"{run['requests_per_s']:>13.2f}{run['preemptions']:>14}"
            )
