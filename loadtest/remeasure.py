"""Repeat the measurements behind the pages before a release, and write the new values to the pages: `make figures`.

    python -m quire.loadtest remeasure [--device cpu | cuda] [--only NAME,...] [--list]

Needs an idle machine and a clean Git tree: each result records its commit.  The CPU part takes about two hours on two
cores, the GPU part half an hour on an H200.  A measurement that fails is named at the end; the others are kept.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from quire.loadtest import figures, machine

STUDIES = "quire.loadtest.studies"
CHAOS = "tests.system.chaos"


@dataclass(frozen=True)
class Measurement:
    """One command.  SCRATCH in it stands for an empty folder, MODEL for a folder in which the 42M model is created."""

    name: str  # result file, without .json
    words: str  # module and its options
    minutes: float  # approximate duration on a machine with its device
    device: str = "cpu"
    written: str = ""  # path of the command's result, if not in loadtest/results/


ALL = (
    Measurement("throughput_cpu", "quire.loadtest.throughput --device cpu --systems quire,transformers", 4),
    Measurement("redis_load", f"{STUDIES} redis-load --name redis_load", 2),
    Measurement(
        "chaos_cpu_kills", f"{CHAOS} --machines 1 --kinds 'kill engine' --rounds 100 --result chaos_cpu_kills", 8
    ),
    Measurement("chaos_cpu_failover", f"{CHAOS} --minutes 30 --seed 11 --streams 32 --result chaos_cpu_failover", 31),
    Measurement("same_tokens_cpu", f"{CHAOS} same-tokens --requests 500 --result same_tokens_cpu", 4),
    Measurement("soak_cpu", f"{CHAOS} soak --operations 1000000 --seed 6 --result soak_cpu", 7),
    Measurement("capacity", f"{STUDIES} capacity MODEL --server=--no-spare", 12),
    Measurement("memory_use_cpu", f"{STUDIES} memory-use MODEL --seconds 24", 4),
    Measurement("block_size_cpu", f"{STUDIES} block-size MODEL --requests 100 --lengths 128,512,1024,1900", 5),
    Measurement("beams_cpu", f"{STUDIES} beams --rounds 1 --dtype float32 --threads 2", 6),
    Measurement("virtual_burst", f"{STUDIES} virtual-burst", 2),
    Measurement("sharing_gain", f"{STUDIES} sharing-gain", 6),
    Measurement("virtual_fairness", f"{STUDIES} virtual-fairness", 3),
    Measurement("long_prompt_cpu", f"{STUDIES} long-prompt MODEL --tokens 32768 --steps 60", 4),
    Measurement(
        "burst_cpu/burst",
        "quire.loadtest burst MODEL --loads known --systems lanes,fifo --rate 3.298 --seeds 1,2,3 --drain 120 "
        "--server=--no-spare --into SCRATCH",
        18,
        written="burst.json",
    ),
    Measurement(
        "throughput_h200",
        "quire.loadtest.throughput --device cuda --systems quire --rounds 1 --latency 1,32,256",
        4,
        "cuda",
    ),
    Measurement(
        "recovery_h200",
        "quire.loadtest recovery llama-8b --device cuda --streams 64 --tokens 2000 --kills 6 --name recovery_h200",
        5,
        "cuda",
    ),
    Measurement("kernels_h200", "quire.loadtest.kernels", 2, "cuda"),
    Measurement(
        "beams_h200", f"{STUDIES} beams --shape llama-8b --rounds 1 --kv-blocks 8192 --max-seqs 1024", 4, "cuda"
    ),
    Measurement("memory_limit_prefix_h200", f"{STUDIES} memory-limit --workload prefix --at-once 80", 5, "cuda"),
    Measurement(
        "memory_limit_chat_h200",
        f"{STUDIES} memory-limit --workload chat --rates 2,4,8,16 --seconds 8 --at-once 80",
        10,
        "cuda",
    ),
)


def run(measurement: Measurement, scratch: Path) -> int:
    """Run one command and move its result to loadtest/results/; return the exit status."""
    model, into = scratch / "model", scratch / measurement.name.replace("/", "_")
    into.mkdir()
    line = measurement.words.replace("SCRATCH", str(into)).replace("MODEL", str(model))
    command = f"{sys.executable} -m {line}"
    done = subprocess.run(command, shell=True, cwd=machine.ROOT, check=False)
    if not done.returncode and measurement.written:
        shutil.copy(into / measurement.written, machine.RESULTS / f"{measurement.name}.json")
    return done.returncode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    device = "cuda" if machine.gpu_name() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device, help=f"what to measure; default {device}")
    parser.add_argument(
        "--only", default="", help="names of results, with commas between them; default: all of the device"
    )
    parser.add_argument("--list", action="store_true", help="print names, minutes and commands, and measure nothing")


def main(args: argparse.Namespace, command: str) -> int:
    names = set(filter(None, args.only.split(",")))
    if unknown := names - {one.name for one in ALL}:
        raise SystemExit(f"--only: no such result: {', '.join(sorted(unknown))}")
    chosen = [one for one in ALL if (one.name in names if names else one.device == args.device)]
    if args.list:
        for one in chosen:
            print(f"{one.name:26}{one.minutes:4g} min  python -m {one.words}")
        return 0
    if machine.commit().endswith("-dirty"):
        raise SystemExit("the tree has uncommitted changes; commit them, so that results can name their code")
    if (load := os.getloadavg()[0]) > 1:
        print(f"the load average is {load:.1f}: other programs will slow the measurements down", file=sys.stderr)
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for one in chosen:
            began = time.monotonic()
            print(f"{one.name}: about {one.minutes:g} minutes", flush=True)
            if run(one, Path(scratch)):
                failed.append(one.name)
            print(f"{one.name}: {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    status = figures.main(argparse.Namespace(check=False), command)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return status or bool(failed)
