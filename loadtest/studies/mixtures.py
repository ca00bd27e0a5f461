"""Decode steps of mixtures of experts with quantised experts and in bfloat16, on a GPU with random weights.

    python -m quire.loadtest.studies mixtures [--cases qwen3-30b-a3b,qwen3-30b-a3b-fp8,gpt-oss-20b,gpt-oss-20b-mxfp4]
        [--batches 1,8,32,64,128,256] [--tokens 256] [--kv-memory-gib 6] [--name NAME]

Each case is a process of its own: `shapes SHAPE DIR`, then `engine.tools bench DIR --load random --latency BATCHES`.
Writes loadtest/results/mixtures_<device>.json: per case ms per token of decode steps, ms to the first tokens of as many
prompts of 128 tokens, and the memory that experts take, as the engine's start log says.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from quire.loadtest import machine, shapes

# case -> shape, more options of the engine
CASES: dict[str, tuple[str, list[str]]] = {
    "qwen3-30b-a3b": ("qwen3-30b-a3b", []),
    "qwen3-30b-a3b-fp8": ("qwen3-30b-a3b", ["--quantize", "fp8"]),
    "gpt-oss-20b": ("gpt-oss-20b", []),
    "gpt-oss-20b-mxfp4": ("gpt-oss-20b-mxfp4", []),
}
MEMORY = re.compile(r"experts of \d+ layers stay in \w+: they take ([\d.]+) GB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default=",".join(CASES), help="cases to measure; default: all")
    parser.add_argument("--batches", default="1,8,32,64,128,256", help="batch sizes; default 1,8,32,64,128,256")
    parser.add_argument("--tokens", default="256", help="output tokens per sequence; default 256")
    parser.add_argument("--kv-memory-gib", default="6", help="memory of the KV cache; default 6")
    parser.add_argument("--name", type=machine.result_name, help="name of the file in loadtest/results")


def measure(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one case.  Raises CalledProcessError if the model cannot be loaded."""
    shape, more = CASES[case]
    with tempfile.TemporaryDirectory() as scratch:
        shapes.write(shape, directory := Path(scratch, shape))
        command = [sys.executable, "-m", "quire.engine.tools", "bench", str(directory), "--load", "random"]
        command += ["--dtype", "bfloat16", "--max-model-len", "2048", "--kv-memory-gib", args.kv_memory_gib]
        command += ["--latency", args.batches, "--latency-tokens", args.tokens, *more]
        run = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        print(run.stderr, file=sys.stderr)
    run.check_returncode()
    return figures_of(json.loads(run.stdout), run.stderr)


def figures_of(found: dict[str, float], log: str) -> dict[str, Any]:
    """Return the figures of one case.  found: what `bench` printed.  log: its start log."""
    figures: dict[str, Any] = {"ms_per_token": {}, "first_tokens_ms": {}}
    for key, value in found.items():
        if match := re.fullmatch(r"batch(\d+)_ms_per_token", key):
            figures["ms_per_token"][match[1]] = round(value, 3)
        elif match := re.fullmatch(r"batch(\d+)_first_token_ms", key):
            figures["first_tokens_ms"][match[1]] = round(value, 1)
    figures["start_s"] = round(found["start_s"], 1)
    if memory := MEMORY.search(log):
        figures["packed_experts_gb"] = float(memory[1])
    return figures


def main(args: argparse.Namespace, command: str) -> int:
    cases = args.cases.split(",")
    if unknown := sorted(set(cases) - CASES.keys()):
        print(f"--cases: {unknown[0]} is none of {', '.join(CASES)}", file=sys.stderr)
        return 2
    figures = {}
    for case in cases:
        figures[case] = measure(case, args)
        print(f"{case}: {figures[case]}", flush=True)
    path = machine.write(args.name or f"mixtures_{machine.device()}", command, figures)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
