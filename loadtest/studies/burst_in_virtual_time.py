"""A threefold burst on a busy engine in every admission mode, in virtual time: preemptions, gaps, use of the pool.

    python -m quire.loadtest.studies virtual-burst [--use 0.8] [--seeds 1,2,3] [--name NAME]

The scheduler, its forecast and the block pool are the engine's own; a step takes as long as `engine.tools simulate`
assumes.  There is one engine and no gateway, so requests start in the order of arrival (`python -m quire.loadtest
burst` measures the two lanes).  The base rate is the one whose requests hold --use of the pool, found by
bisection.  Lengths are known (`ignore_eos`), or unknown with max_tokens of 1,024 after 200 requests from which the
forecast learns; these do not count.  Medians over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import msgspec

from quire.engine.tools.simulate import Report, engine_limits, simulate
from quire.engine.tools.trace import Job, burst
from quire.loadtest import machine
from quire.loadtest.studies import baselines

BLOCKS = 512  # blocks of the pool, 16 tokens each
MAX_TOKENS = 1024
LEARNED = 200  # requests before a burst of unknown lengths, from which the forecast learns
BASE_S, BURST_S = 20.0, 30.0
STEADY_S = 60.0  # seconds of the runs that find the base rate
MODES = tuple(mode for mode in baselines.MODES if mode != "static")


def base_rate(use: float) -> float:
    """Return the requests per second that hold the fraction `use` of the pool."""
    low, high = 2.0, 16.0
    while high - low > 0.2:
        rate = (low + high) / 2
        jobs = burst(0, base=rate, peak=rate, peak_s=0.0, rest_s=STEADY_S / 2, max_tokens=MAX_TOKENS, ends_known=True)
        low, high = (rate, high) if run(jobs, "forecast").held < use else (low, rate)
    return round(low, 1)


def run(jobs: list[Job], mode: str) -> Report:
    return simulate(jobs, engine_limits(mode), BLOCKS, caching=False)


def jobs_of(seed: int, rate: float, *, known: bool) -> tuple[list[Job], int]:
    """Return the requests of a seed, and how many of them are only there to learn from."""
    jobs = burst(seed, base=rate, peak=3 * rate, peak_s=BURST_S, rest_s=BASE_S, max_tokens=MAX_TOKENS, ends_known=known)
    if known:
        return jobs, 0
    before_s = LEARNED / rate
    first = burst(
        1000 + seed, base=rate, peak=rate, peak_s=0.0, rest_s=before_s / 2, max_tokens=MAX_TOKENS, ends_known=False
    )
    later = [msgspec.structs.replace(job, at_s=job.at_s + before_s) for job in jobs]
    return first + later, len(first)


def figures(report: Report, counted: int) -> dict[str, float]:
    return {
        "preemptions_per_1000": 1000 * report.preemptions / counted,
        "recomputed_tokens": report.recomputed_tokens,
        "pauses": report.pauses,
        "pool_while_waiting": report.utilisation,
        "on_time": report.goodput,
        "itl_p99_ms": 1000 * report.itl[2],
        "longest_gap_s": report.itl_max,
        "seconds": report.seconds,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--use", type=float, default=0.8, help="pool use at the base rate, 0 to 1; default 0.8")
    parser.add_argument("--seeds", default="1,2,3", help="one run of every mode per seed; default 1,2,3")
    parser.add_argument("--name", type=machine.result_name, default="virtual_burst", help="name of the result file")


def main(args: argparse.Namespace, command: str) -> int:
    rate = base_rate(args.use)
    print(f"base {rate:g} requests/s, burst {3 * rate:g}", flush=True)
    table: dict[str, Any] = {"base_rate": rate, "blocks": BLOCKS}
    for load in ("known", "learned"):
        for mode in MODES:
            runs = []
            for seed in map(int, args.seeds.split(",")):
                jobs, _ = jobs_of(seed, rate, known=load == "known")
                runs.append(figures(run(jobs, mode), len(jobs)))
            median = {key: round(statistics.median(each[key] for each in runs), 4) for key in runs[0]}
            table[f"{load}, {mode}"] = median
            print(f"{load:8} {mode:10} {median}", flush=True)
    path = machine.write(args.name, command, table)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
