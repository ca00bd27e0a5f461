"""Offline throughput and latency of Quire, transformers and vLLM: the same requests on the same machine, in turn.

    python -m quire.loadtest throughput [--device cuda] [--vllm-python PATH] [--systems quire,vllm] [--rounds 3]

All requests are submitted at once.  Sampling is greedy, end-of-sequence is ignored, prompts are token ids.

On a GPU: the shapes of Llama 8B and Qwen3 0.6B with random weights made on the device. 1,000 requests of ShareGPT-like
lengths (loadtest/traces), Quire with and without its prefix cache.  Then 128 tokens in, 256 out, batch sizes 1 to 256.
Each value is printed with its floor (loadtest/roofline.py), from ceilings measured in the same run.  On a CPU: a
llama shape of 42M parameters in bf16; 64 requests with lognormal lengths, means 78 in and 172 out.

Writes loadtest/results/throughput_<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.loadtest import command_line, machine, shapes, trace
from quire.loadtest.checkpoint import VOCAB, make_llama_42m
from quire.loadtest.roofline import Machine, Shape

PEERS = Path(__file__).resolve().parent / "peers"
BATCHES = (1, 8, 32, 128, 256)
PROMPT, OUTPUT = 128, 256  # tokens of the sequences whose latency is measured
CPU_KV_TOKENS = 32_768
MODEL_LEN = 8192  # tokens, on a GPU
# transformers' continuous batching took 38 s for 36,172 tokens of the 8B shape, so it runs only the trace's start.
CLIPPED_REQUESTS, CLIPPED_OUTPUT = 200, 256


@dataclass
class Work:
    """One model and the commands that run each system with it."""

    name: str
    jobs: list[trace.Job]
    systems: dict[str, list[str]]
    floors: dict[str, float] = field(default_factory=dict)  # name of a measurement -> its roofline


class RunError(Exception):
    """A system failed; its reason is on stderr."""


def run(command: list[str]) -> dict[str, float]:
    """Run one system and return the results that it prints.  Raises RunError."""
    # By default vLLM reserves a core on a CPU, and searches for its model on the hub.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    peers = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    peers |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # greedy sampling does not need it, and it may not be installed
    began = time.time()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, cwd=machine.ROOT, env=os.environ | peers
    )
    if done.returncode:
        raise RunError(f"{' '.join(command)}: exit status {done.returncode}")
    # The results are the last line of output that is JSON: vLLM logs other lines after it.
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    figures: dict[str, float] = json.loads(line)
    if first := figures.pop("first_token_at", None):
        figures["start_to_first_token_s"] = first - began
    return figures


def engine(directory: Path, requests: Path, *options: str) -> list[str]:
    # No system has streaming clients here, so prompt chunks may be large.
    words = ["--requests", str(requests), "--itl-stretch", "0", *options, str(directory)]
    return [sys.executable, "-m", "quire.engine.tools", "bench", *words]


def peer(python: str, name: str, directory: Path, requests: Path, *options: str) -> list[str]:
    return [python, str(PEERS / f"{name}.py"), str(directory), str(requests), *options]


def cpu_work(scratch: Path, args: argparse.Namespace) -> list[Work]:
    directory, requests = scratch / "model", scratch / "requests.jsonl"
    make_llama_42m(directory)
    jobs = trace.lognormal(64, 78, 172, seed=1167)
    trace.write_requests(jobs, VOCAB, requests)
    systems = {
        "quire": engine(directory, requests, "--kv-blocks", str(CPU_KV_TOKENS // 16), "--latency", "1", "--slots"),
        "transformers": peer(sys.executable, "transformers_batching", directory, requests),
    }
    if args.vllm_python:
        systems["vllm"] = peer(args.vllm_python, "vllm_offline", directory, requests, "--kv-tokens", str(CPU_KV_TOKENS))
    return [Work("llama-42m", jobs, systems)]


def gpu_work(scratch: Path, args: argparse.Namespace) -> list[Work]:
    ceilings = run([sys.executable, "-m", "quire.loadtest.kernels", "--only", "ceilings"])
    top = Machine(ceilings["read_gbps"], ceilings["matmul_8192_tflops"])
    jobs = trace.read("sharegpt_like")
    works = []
    for name in args.models.split(","):
        config = shapes.CONFIGS[name]
        directory, requests, clipped = scratch / name, scratch / f"{name}.jsonl", scratch / f"{name}-clipped.jsonl"
        shapes.write(name, directory)
        trace.write_requests(jobs, config["vocab_size"], requests)
        short = [trace.Job(j.prompt_len, min(j.output_len, CLIPPED_OUTPUT), j.prompt_seed) for j in jobs]
        trace.write_requests(short[:CLIPPED_REQUESTS], config["vocab_size"], clipped)
        quire = ["--load", "random", "--max-model-len", str(MODEL_LEN), "--latency", args.latency]
        quire += ["--compare-prefix-cache", "--rounds", str(args.rounds)]
        systems = {
            "quire": engine(directory, requests, *quire, *args.options.split()),
            "transformers": peer(sys.executable, "transformers_batching", directory, clipped, "--device", "cuda"),
        }
        if args.vllm_python:
            vllm = ["--device", "cuda", "--latency", args.latency]
            systems["vllm"] = peer(args.vllm_python, "vllm_offline", directory, requests, *vllm)
        shape = Shape.of(config)
        middle = PROMPT + OUTPUT / 2
        floors = {f"batch{n}_ms_per_token": top.token_ms(shape, n, middle) for n in map(int, args.latency.split(","))}
        floors["tokens_per_s"] = sum(job.output_len for job in jobs) / top.trace(shape, jobs)
        works.append(Work(name, jobs, systems, floors))
    return works


def measure(work: Work, rounds: int, systems: set[str]) -> dict[str, Any]:
    """Run every system in turn, `rounds` times; return medians.  The result omits a system that fails."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in work.systems if name in systems}
    for turn in range(rounds):
        for name, runs in seen.items():
            try:
                runs.append(run(work.systems[name]))
            except RunError as error:
                print(f"{work.name}, round {turn + 1}: {error}", file=sys.stderr, flush=True)
                continue
            print(f"{work.name}, round {turn + 1}: {name} {runs[-1]}", file=sys.stderr, flush=True)
    figures: dict[str, Any] = {
        name: {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        for name, runs in seen.items()
        if runs
    }
    for name in figures.keys() - {"quire"}:
        if "quire" in figures:
            figures[name]["quire_is_faster_by"] = figures["quire"]["tokens_per_s"] / figures[name]["tokens_per_s"]
    if work.floors:
        figures["floor"] = work.floors
    figures["work"] = {
        "requests": len(work.jobs),
        "prompt_tokens": sum(job.prompt_len for job in work.jobs),
        "output_tokens": sum(job.output_len for job in work.jobs),
    }
    return figures


def show(name: str, figures: dict[str, Any]) -> None:
    """Print a table with a line per measurement and a column per system."""
    systems = [key for key in figures if key != "work"]
    print(f"\n{name:32}" + "".join(f"{system:>18}" for system in systems))
    for key in dict.fromkeys(key for system in systems for key in figures[system]):
        cells = (figures[system].get(key) for system in systems)
        print(f"{key:32}" + "".join(f"{'' if cell is None else format(cell, ',.2f'):>18}" for cell in cells))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU if there is one"
    )
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM; without it vLLM is not run")
    parser.add_argument("--systems", default="quire,transformers,vllm", help="systems to run; default: all")
    parser.add_argument("--models", default=",".join(shapes.CONFIGS), help="shapes to run on a GPU; default: all")
    parser.add_argument("--latency", default=",".join(map(str, BATCHES)), help="batch sizes on a GPU")
    parser.add_argument("--options", default="", help="further options of Quire's engine on a GPU, in one string")
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="runs of each system in turn, medians are reported; on a GPU: runs of the trace in one start; default 3",
    )
    parser.add_argument(
        "--name", type=machine.result_name, help="write loadtest/results/NAME.json; default: throughput_<device>"
    )


def main(args: argparse.Namespace, command: str) -> int:
    gpu = machine.gpu_name() if args.device != "cpu" else ""
    if args.device == "cuda" and not gpu:
        raise SystemExit("--device cuda: nvidia-smi finds no GPU")
    device = machine.slug(gpu.split(",")[0]) if gpu else "cpu"
    figures: dict[str, Any] = {}
    if args.vllm_python:
        ask = "from importlib.metadata import version; print(version('vllm'))"
        figures["vllm_version"] = subprocess.check_output([args.vllm_python, "-c", ask], text=True).strip()
    asked = set(args.systems.split(","))
    with tempfile.TemporaryDirectory() as scratch:
        works = (gpu_work if gpu else cpu_work)(Path(scratch), args)
        for work in works:
            figures[work.name] = measure(work, 1 if gpu else args.rounds, asked)
            show(work.name, figures[work.name])
            path = machine.write(args.name or f"throughput_{device}", command, figures)  # the results so far
            print(f"written to {path.relative_to(machine.ROOT)}", flush=True)
    return int(any(not (asked & work.systems.keys()) <= figures[work.name].keys() for work in works))


if __name__ == "__main__":
    sys.exit(command_line.run("throughput", __doc__, add_arguments, main))
