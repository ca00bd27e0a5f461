"""The same burst of requests against every admission mode: for each, start a server, replay, stop it.

    python -m loadtest burst DIR [--modes forecast,threshold,...] [--seeds 1,2,3] [--vllm-python PATH]

DIR holds the model; the 42M model is made there if it holds none.  Each run writes a result that `report` reads, and
then rewrites the summary burst.json (medians over seeds).  A second start continues with the missing runs: a result of
the same work, server and commit is kept.  A failed run is reported and does not end the others; the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest import machine, replay
from loadtest.checkpoint import prepare
from loadtest.report import look_up, show
from loadtest.server import MODEL_NAME, Server, ServerError, serve, serve_vllm

MODES = ("forecast", "threshold", "watermark", "reserve", "none")
BLOCK, SEQS = 16, 256
START_S, VLLM_START_S, DRAIN_S, STOP_S = 6, 60, 20, 2  # of a run, for the estimate of the time it takes


@dataclass(frozen=True)
class Run:
    system: str
    seed: int
    server: str  # the command that starts it, for display and to recognise a result of the same server
    start: Callable[[], AbstractContextManager[Server]]
    words: tuple[str, ...]  # options of `replay`, without the URL

    @property
    def file(self) -> str:
        return f"burst_{self.system}_{self.seed}.json"


@dataclass(frozen=True)
class Column:
    """A figure of the summary, in a unit of report.show()."""

    name: str
    path: str
    unit: str


def _phases() -> list[Column]:
    return [
        Column(f"{what} {p}, {phase}", f"phases.{phase}.{field}.{p}", "ms")
        for what, field in (("TTFT", "ttft_s"), ("ITL", "itl_s"))
        for phase in ("base", "burst", "after")
        for p in ("p50", "p99")
    ]


COLUMNS = (
    Column("requests", "requests", ""),
    Column("completed", "completed", ""),
    Column("failed", "failed", ""),
    Column("preemptions", "server.preemptions", ""),
    Column("recomputed tokens", "server.recomputed_tokens", ""),
    Column("KV in use while requests wait", "server.kv_mean_while_queueing", "%"),
    Column("KV in use, highest", "server.kv_max", "%"),
    Column("goodput", "goodput.fraction", "%"),
    Column("goodput in the burst", "phases.burst.goodput_fraction", "%"),
    Column("goodput", "goodput.requests_per_s", "/s"),
    Column("tokens out", "output_tokens_per_s", "/s"),
    *_phases(),
    Column("longest gap", "itl_s.max", "ms"),
    Column("TTFT back at base after", "recovery_s", "s"),
    Column("refused at least once", "refusals.requests_refused", ""),
    Column("refused for good", "refused_for_good", ""),
    Column("first retry admitted", "refusals.first_retry_success", "%"),
    Column("Retry-After p50", "refusals.retry_after_s.p50", "s"),
    Column("Retry-After's error p50", "refusals.retry_after_error.p50", "%"),
    Column("seconds until the last ended", "seconds", "s"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="DIR", help="directory of the model; made there if empty")
    parser.add_argument("--modes", default=",".join(MODES), help="admission modes to run; default: all")
    parser.add_argument("--seeds", default="1,2,3", help="one run of every mode for each; default 1,2,3")
    parser.add_argument(
        "--vllm-python", help="interpreter of an environment with vLLM's CPU build; runs the first seed"
    )
    parser.add_argument("--kv-tokens", type=int, default=8192, help="KV pool of each server, tokens; default 8192")
    parser.add_argument("--context", type=int, default=2048, help="context of the model, tokens; default 2048")
    parser.add_argument("--server", default="--queue-wait-s 2", help="further options of `quire serve`, in one string")
    parser.add_argument(
        "--rate", type=float, default=5.0, help="requests a second before and after the burst; default 5"
    )
    parser.add_argument("--peak", type=float, default=15.0, help="requests a second in the burst; default 15")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds before the burst; default 8")
    parser.add_argument("--peak-seconds", type=float, default=30.0, help="seconds of the burst; default 30")
    parser.add_argument("--after-seconds", type=float, default=25.0, help="seconds after the burst; default 25")
    parser.add_argument(
        "--scale", type=float, default=0.48, help="factor on ShareGPT-like lengths; default 0.48: 77 tokens in, 162 out"
    )
    parser.add_argument("--retry", default="obey", help="as in replay: reaction to a refusal; default obey")
    parser.add_argument("--ask-tokens", type=int, default=0, help="as in replay: max_tokens that hides output lengths")
    parser.add_argument("--drain", type=float, default=120.0, help="seconds to wait for the last answers; default 120")
    parser.add_argument("--into", type=Path, default=machine.RESULTS / "burst", help="directory of the results")


def runs_of(args: argparse.Namespace, vocab: int, eos: int) -> list[Run]:
    """Return the runs in the order they are measured.  Raises SystemExit for an unknown mode or an invalid seed.

    Every mode of a seed runs before the next seed, so that a machine that slows down slows all modes.  vLLM, which
    starts slowly, is last."""
    modes, seeds = args.modes.split(","), args.seeds.split(",")
    if unknown := set(modes) - set(MODES):
        raise SystemExit(f"--modes: {min(unknown)!r} is none; there are {', '.join(MODES)}")
    if not all(seed.isdecimal() for seed in seeds):
        raise SystemExit(f"--seeds: {args.seeds!r} must be whole numbers >= 0 with commas between them")
    model, room = str(args.model), args.server.split()
    room += ["--max-seqs", str(SEQS), "--max-model-len", str(args.context)]

    def quire(mode: str) -> tuple[str, ...]:
        return ("--kv-blocks", str(args.kv_tokens // BLOCK), *room, "--admission", mode)

    def words(seed: str) -> tuple[str, ...]:
        given = {
            "scale": args.scale, "rate": args.rate, "seconds": args.seconds, "peak": args.peak,
            "peak-seconds": args.peak_seconds, "after-seconds": args.after_seconds, "context": args.context,
            "vocab-size": vocab, "eos-id": eos, "retry": args.retry, "ask-tokens": args.ask_tokens,
            "drain": args.drain, "seed": seed,
        }  # fmt: skip
        return tuple(word for name, value in given.items() for word in (f"--{name}", str(value)))

    def starter(mode: str) -> Callable[[], AbstractContextManager[Server]]:
        return lambda: serve(model, *quire(mode))

    runs = [
        Run(mode, int(seed), " ".join(["quire serve DIR", *quire(mode)]), starter(mode), words(seed))
        for seed in seeds
        for mode in modes
    ]
    if args.vllm_python:
        flags = ("--max-model-len", str(args.context), "--max-num-seqs", str(SEQS))
        shown = " ".join([f"vllm serve DIR, a pool of {args.kv_tokens} tokens,", *flags])
        vllm = lambda: serve_vllm(args.vllm_python, model, args.kv_tokens, *flags)  # noqa: E731
        runs.append(Run("vllm", int(seeds[0]), shown, vllm, words(seeds[0])))
    return runs


def estimate_s(run: Run, args: argparse.Namespace) -> float:
    start = VLLM_START_S if run.system == "vllm" else START_S
    return float(start + args.seconds + args.peak_seconds + args.after_seconds + DRAIN_S + STOP_S)


def earlier_result(run: Run, path: Path) -> dict[str, Any] | None:
    """Return the result in `path` if it is of the same work, server and commit."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        args = replay.parse(["http://127.0.0.1", *run.words])
        same = (
            result["server"] == run.server
            and result["commit"].removesuffix("-dirty") == machine.commit().removesuffix("-dirty")
            and result["config"]["work"] == json.loads(json.dumps(replay.work(args, *replay.arrivals_of(args))))
        )
        return result if same else None
    return None


def measure(run: Run, path: Path) -> dict[str, Any]:
    """Run once and write the result to `path`.  Raises ServerError if the server does not start."""
    with run.start() as server:
        command = " ".join(["python -m loadtest replay URL", *run.words])
        result, _ = replay.run([server.url, "--model", MODEL_NAME, "--note", run.server, *run.words], {}, command)
    result |= {"system": run.system, "server": run.server}
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


def median(values: Sequence[float | None]) -> float | None:
    """Return the upper median, with None larger than every number; None if None is the median."""
    middle = statistics.median_high(math.inf if value is None else value for value in values)
    return None if math.isinf(middle) else middle


def summarise(results: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float | None]]:
    """Return system -> figure -> median over its seeds."""
    return {
        system: {
            f"{column.name} [{column.unit}]": median([look_up(result["figures"], column.path) for result in runs])
            for column in COLUMNS
        }
        for system, runs in results.items()
    }


def table(summary: dict[str, dict[str, float | None]], seeds: dict[str, int]) -> str:
    """Return a table with a line for each figure and a column for each system."""
    lines = [f"{'medians over seeds':32}" + "".join(f"{f'{name} ({seeds[name]})':>15}" for name in summary)]
    for column in COLUMNS:
        cells = (show(figures[f"{column.name} [{column.unit}]"], column.unit) for figures in summary.values())
        lines.append(f"{column.name:32}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def main(args: argparse.Namespace, command: str) -> int:
    runs = runs_of(args, *prepare(args.model))
    args.into.mkdir(parents=True, exist_ok=True)
    found = {run: earlier_result(run, args.into / run.file) for run in runs}
    missing = [run for run in runs if found[run] is None]
    minutes = sum(estimate_s(run, args) for run in missing) / 60
    print(f"{len(missing)} of {len(runs)} runs to do, about {minutes:.0f} minutes, until "
          f"{time.strftime('%H:%M', time.localtime(time.time() + minutes * 60))}", flush=True)  # fmt: skip
    results: dict[str, list[dict[str, Any]]] = {}
    failed = 0
    for number, run in enumerate(runs, 1):
        result = found[run]
        if result is None:
            print(f"\n[{number}/{len(runs)}] {run.server}, seed {run.seed}", flush=True)
            try:
                result = measure(run, args.into / run.file)
            except ServerError as error:
                failed += 1
                print(f"{run.system}, seed {run.seed}: {error}", file=sys.stderr, flush=True)
                continue
            replay.show(result["figures"])
        results.setdefault(run.system, []).append(result)
        summary = summarise(results)
        counts = {system: len(each) for system, each in results.items()}
        page = {"command": command, **machine.describe(), "runs": counts, "figures": summary}
        (args.into / "burst.json").write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")
    if results:
        print(f"\n{table(summary, counts)}\nwritten to {args.into}", flush=True)
    return int(failed > 0)
