"""Offline throughput beside the peers, on the same requests, the same checkpoint and the same machine, one by one.

    python -m loadtest.throughput [--vllm-python PATH] [--rounds 3]

Model: llama shape, 42M parameters, bf16, seeded random weights.  Work: 64 requests with lognormal lengths, means 78 in
and 172 out, greedy, end-of-sequence ignored, all submitted at once.  Writes loadtest/results/throughput_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from loadtest import machine, trace
from loadtest.checkpoint import VOCAB, make_llama_42m

KV_TOKENS = 32_768
PEERS = Path(__file__).resolve().parent / "peers"


def run(command: list[str]) -> dict[str, float]:
    """What one system prints about its run."""
    # vLLM keeps a core for itself on a CPU unless told otherwise, and looks for its model on the hub.
    cores = f"0-{(os.cpu_count() or 1) - 1}"
    peers = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=machine.ROOT, env=os.environ | peers
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    # The figures are the last line that is JSON: vLLM says goodbye after it.
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    figures: dict[str, float] = json.loads(line)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="interpreter of an environment that has vLLM; left out without one")
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each system, taken in turn; medians are reported"
    )
    parser.add_argument("--name", default="throughput_cpu", help="of the file in loadtest/results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, requests = Path(scratch) / "model", Path(scratch) / "requests.jsonl"
        make_llama_42m(checkpoint)
        jobs = trace.lognormal(64, 78, 172, seed=1167)
        trace.write_requests(jobs, VOCAB, requests)
        blocks = str(KV_TOKENS // 16)
        quire = [
            sys.executable,
            "-m",
            "engine.offline",
            "--requests",
            str(requests),
            "--kv-blocks",
            blocks,
            str(checkpoint),
        ]
        systems = {
            "quire": quire,
            "transformers": [sys.executable, str(PEERS / "transformers_batching.py"), str(checkpoint), str(requests)],
        }
        if args.vllm_python:
            systems["vllm"] = [args.vllm_python, str(PEERS / "vllm_offline.py"), str(checkpoint), str(requests)]
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
        for turn in range(args.rounds):
            for name, command in systems.items():
                rounds[name].append(run(command))
                print(f"round {turn + 1}: {name} {rounds[name][-1]}", file=sys.stderr, flush=True)
    figures: dict[str, Any] = {
        name: {key: statistics.median(each[key] for each in runs) for key in runs[0]} for name, runs in rounds.items()
    }
    for name in systems:
        if name != "quire":
            figures[name]["quire_is_faster_by"] = figures["quire"]["tokens_per_s"] / figures[name]["tokens_per_s"]
    figures["work"] = {
        "requests": len(jobs),
        "prompt_tokens": sum(job.prompt_len for job in jobs),
        "output_tokens": sum(job.output_len for job in jobs),
    }
    path = machine.write(args.name, "python -m loadtest.throughput", figures)
    print(json.dumps(figures, indent=1))
    print(f"written to {path.relative_to(machine.ROOT)}")


if __name__ == "__main__":
    main()
