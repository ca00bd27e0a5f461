"""Requests per second of static, paged and shared allocation in one pool, by lengths, samples and block size.

    python -m quire.loadtest.studies sharing-gain [--requests 60] [--kv-tokens 65536] [--beams] [--name NAME]

The scheduler and the block pool are the engine's own; only the clock is virtual, and a step takes as long as one of an
8B model on an H200 does (`STEP`, without the time to read the keys of long contexts).  All requests wait from the
start, output lengths are exponential and unknown to the server, and each client asks for `max_tokens`.  Three ways to
give a request of n samples its memory:

    static    n runs of prompt + max_tokens, reserved at the start (the study `baselines`)
    paged     n sequences that share nothing
    shared    n samples that share the blocks of their prompt

The table has the requests per second of each, over those of `static`, and of `shared` over `paged`.  For beam searches
`shared` are beams whose forks are drawn at random (`virtual_beams.py`).
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import msgspec

from quire.engine.tools.simulate import engine_limits, simulate
from quire.engine.tools.step_time import StepTime
from quire.engine.tools.trace import Job
from quire.loadtest import machine
from quire.loadtest.studies import baselines  # noqa: F401  (registers the admission mode "static")
from quire.loadtest.studies.virtual_beams import simulate_beams

# Seconds of a step of the 8B shape: loadtest/results/throughput_h200.json; prompt tokens as at its 550 TFLOP/s.
STEP = StepTime(fixed=0.00404, row=0.0000219, prompt_token=0.00003)
MAX_SEQS, STEP_TOKENS = 1024, 8192
SEED = 20231023
# name -> (mean prompt, mean output, max_tokens) in tokens
LENGTHS: dict[str, tuple[int, int, int]] = {
    "below 200": (50, 50, 128),
    "Alpaca": (19, 58, 512),
    "ShareGPT": (161, 338, 1024),
    "4k": (3000, 500, 1024),
    "beyond 8k": (10_000, 500, 1024),
}
WAYS = (1, 2, 4, 6)
BEAMS = (2, 4, 6)
BEAM_LENGTHS = ("ShareGPT", "4k")  # where drawn forks share as much as a model's
BLOCK_SIZES = (8, 16, 32, 64)


def jobs_of(lengths: tuple[int, int, int], requests: int, n: int) -> list[Job]:
    """Return requests of `n` samples; prompts of one length, because their spread matters less than that of outputs."""
    prompt, output, most = lengths
    rng = random.Random(SEED)
    return [
        Job(prompt, min(most, 1 + int(rng.expovariate(1 / output))), max_tokens=most, prompt_seed=at + 1, n=n)
        for at in range(requests)
    ]


def apart(jobs: list[Job]) -> list[Job]:
    """Return a request of one sample for each sample."""
    return [msgspec.structs.replace(job, n=1) for job in jobs for _ in range(job.n)]


def requests_per_s(jobs: list[Job], requests: int, mode: str, kv_tokens: int, block_size: int) -> float:
    limits = engine_limits(mode, max_seqs=MAX_SEQS, step_tokens=STEP_TOKENS)
    blocks = kv_tokens // block_size
    report = simulate(jobs, limits, blocks, block_size=block_size, caching=False, step_time=STEP, depth=2)
    return requests / report.seconds


def beams_per_s(jobs: list[Job], requests: int, kv_tokens: int, block_size: int) -> float:
    sizes = {"max_seqs": MAX_SEQS, "step_tokens": STEP_TOKENS}
    report, _ = simulate_beams(jobs, kv_tokens // block_size, block_size, STEP, **sizes)
    return requests / report.seconds


def compare(
    lengths: tuple[int, int, int], n: int, requests: int, kv_tokens: int, block_size: int, *, beams: bool = False
) -> dict[str, float]:
    """Return requests per second of each allocation, and their ratios."""
    jobs = jobs_of(lengths, requests, n)
    speeds = {
        "static": requests_per_s(apart(jobs), requests, "static", kv_tokens, block_size),
        "paged": requests_per_s(apart(jobs), requests, "forecast", kv_tokens, block_size),
        "shared": beams_per_s(jobs, requests, kv_tokens, block_size)
        if beams
        else requests_per_s(jobs, requests, "forecast", kv_tokens, block_size),
    }
    ratios = {
        "paged over static": speeds["paged"] / speeds["static"],
        "shared over static": speeds["shared"] / speeds["static"],
        "shared over paged": speeds["shared"] / speeds["paged"],
    }
    return {name: round(value, 3) for name, value in (speeds | ratios).items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=60, help="requests of each run; default 60")
    parser.add_argument("--kv-tokens", type=int, default=65536, help="KV pool in tokens; default 65536")
    parser.add_argument("--beams", action="store_true", help="measure beam searches instead of samples")
    parser.add_argument("--name", type=machine.result_name, default="sharing_gain", help="name of the result file")


def main(args: argparse.Namespace, command: str) -> int:
    table: dict[str, Any] = {}
    cases = [(name, "n", n, 16) for name in LENGTHS for n in WAYS]
    cases += [("ShareGPT", "n", 4, size) for size in BLOCK_SIZES if size != 16]
    if args.beams:
        cases = [(name, "beams", n, 16) for name in BEAM_LENGTHS for n in BEAMS]
    print(f"{'lengths':12}{'n':>8}{'block':>7}{'static':>9}{'paged':>9}{'shared':>9}{'p/s':>7}{'sh/s':>7}{'sh/p':>7}")
    for name, kind, n, size in cases:
        found = compare(LENGTHS[name], n, args.requests, args.kv_tokens, size, beams=kind == "beams")
        table[f"{name}, {kind} {n}, blocks of {size}"] = found
        cells = "".join(f"{value:>{9 if at < 3 else 7}.2f}" for at, value in enumerate(found.values()))
        print(f"{name:12}{kind:>5}{n:>3}{size:>7}{cells}", flush=True)
    path = machine.write(args.name, command, table)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
