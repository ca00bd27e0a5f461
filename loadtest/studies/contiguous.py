"""Paging compared with contiguous allocation on loads without benefit: single requests, short jobs of equal length.

    python -m quire.loadtest.studies contiguous DIR [--pairs 7] [--alone 4] [--jobs 32]

The 42M model is made in DIR if the directory holds no model.  Two servers run, one with `--admission static` of the
study `baselines` (each sequence has one run of blocks for its maximum length, as in an engine without block tables),
one with `--admission forecast`.  The pool is large enough for all sequences of both servers; neither server has a
prefix cache.  The servers take turns, also in being the first of a pair:

    alone     `--alone` requests, one after the other, 128 tokens in, 128 out
    uniform   `--jobs` requests at once, 50 tokens in, 50 out

For each, milliseconds per token on the clock (alone: between two tokens; uniform: until the last one, over all tokens),
and CPU milliseconds of the engine's process per token, which other programs on the machine disturb less.  The result is
the median over pairs of the ratio paged / static.  At a ratio of 1 paging costs nothing.  Writes
loadtest/results/contiguous_<device>.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire.loadtest import machine
from quire.loadtest.checkpoint import make_llama_42m
from quire.loadtest.replay import Options, replay
from quire.loadtest.server import MODEL_NAME, engine_processes
from quire.loadtest.stats import Record
from quire.loadtest.studies.burst_modes import serve_baseline
from quire.loadtest.trace import Job
from quire.loadtest.workloads import Arrival

ALONE, UNIFORM = (128, 128), (50, 50)  # tokens in and out
MODES = {"static": "static", "paged": "forecast"}  # allocation -> admission mode
FLAGS = ("--no-prefix-cache", "--no-spare", "--kv-blocks", "2048", "--max-seqs", "64", "--threads", "1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="directory of the model; the 42M model is made there if empty")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of each load; default 7")
    parser.add_argument("--alone", type=int, default=4, help="requests of a run one after the other; default 4")
    parser.add_argument("--jobs", type=int, default=32, help="requests of a run at once; default 32")
    parser.add_argument("--server", default="", help="further options of both servers, in one string")


def send(options: Options, jobs: Sequence[Job]) -> list[Record]:
    """Send all jobs at once and return their records.  Raises RuntimeError when one does not complete."""
    records, _ = asyncio.run(replay([Arrival(0.0, "all", job) for job in jobs], options))
    if failed := [record for record in records if record.outcome != "ok" or record.tokens != record.output_len]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0].outcome} {failed[0].error}")
    return records


def alone_ms(options: Options, count: int, seed: int) -> float:
    """Return the median of the requests' mean milliseconds per token, each sent when the one before has ended."""
    means = [send(options, [Job(*ALONE, seed + at)])[0].mean_itl_s for at in range(count)]
    return statistics.median(means) * 1e3


def uniform_ms(options: Options, count: int, seed: int) -> float:
    """Return the milliseconds until the last token, over all tokens, of jobs of equal length that arrive together."""
    records = send(options, [Job(*UNIFORM, seed + at) for at in range(count)])
    return max(record.end_s for record in records) * 1e3 / sum(record.tokens for record in records)


def pairs(measure: Callable[[str, int], Sequence[float]], names: Sequence[str], count: int) -> dict[str, Any]:
    """Measure both modes `count` times in turn, as `measure(mode, seed)`; the first of a pair alternates.

    `names` of the values that it returns.  Returns for each name all values, and the ratios paged / static: their
    median, minimum and maximum."""
    rows: dict[str, list[Sequence[float]]] = {mode: [] for mode in MODES}
    for pair in range(count):
        for mode in MODES if pair % 2 == 0 else reversed(MODES):
            rows[mode].append(measure(mode, pair * 1000))
    found = {}
    for at, name in enumerate(names):
        values = {mode: [row[at] for row in rows[mode]] for mode in MODES}
        ratios = [paged / static for static, paged in zip(values["static"], values["paged"], strict=True)]
        found[name] = {
            **{mode: [round(value, 3) for value in values[mode]] for mode in MODES},
            "ratio_median": round(statistics.median(ratios), 4),
            "ratio_least": round(min(ratios), 4),
            "ratio_most": round(max(ratios), 4),
        }
    return found


def main(args: argparse.Namespace, command: str) -> int:
    if not (args.directory / "config.json").exists():
        make_llama_42m(args.directory)
    vocab = json.loads((args.directory / "config.json").read_text(encoding="utf-8"))["vocab_size"]

    with ExitStack() as stack:
        flags = [*FLAGS, *args.server.split()]
        servers = {
            mode: stack.enter_context(serve_baseline(str(args.directory), "--admission", admission, *flags))
            for mode, admission in MODES.items()
        }

        def measured(load: Callable[[Options, int, int], float], count: int, tokens: int) -> dict[str, Any]:
            def once(mode: str, seed: int) -> tuple[float, float]:
                server = servers[mode]
                options = Options(
                    url=server.url, model=MODEL_NAME, metrics_url=f"{server.url}/metrics", vocab_size=vocab
                )
                engine = engine_processes(server.process)[0]
                before = sum(engine.cpu_times()[:2])
                clock_ms = load(options, count, seed)
                return clock_ms, (sum(engine.cpu_times()[:2]) - before) * 1e3 / (count * tokens)

            for mode in MODES:  # warm-up: the first steps load kernels
                once(mode, -1000)
            return pairs(once, ("clock_ms", "engine_cpu_ms"), args.pairs)

        figures = {
            "alone": measured(alone_ms, args.alone, ALONE[1]),
            "uniform": measured(uniform_ms, args.jobs, UNIFORM[1]),
        }
    for load, values in figures.items():
        for name, found in values.items():
            middle = {mode: statistics.median(found[mode]) for mode in MODES}
            print(
                f"{load}, {name} per token: static {middle['static']:.2f}, paged {middle['paged']:.2f}; paged / static "
                f"{found['ratio_median']:.3f}, from {found['ratio_least']:.3f} to {found['ratio_most']:.3f}"
            )
    command = command.replace(str(args.directory), "DIRECTORY")
    path = machine.write(f"contiguous_{machine.device()}", command, figures)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
