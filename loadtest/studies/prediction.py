"""How well `python -m quire.engine.tools simulate` predicts a measured run from the engine's request log.

    python -m quire.loadtest.studies prediction DIR [--rate 8] [--peak 24] [--seconds 20] [--name NAME]

A server with `--request-log` gets a threefold burst, and its log is then simulated with the same pool.  DIR holds the
model; the 42M model is made there if it holds none.  The server knows the output lengths.  Reported are the share of
requests on time (first token within 2 s, 0.2 s per later token) and the preemptions, measured and predicted, and the
largest accepted differences: 3 percentage points, and 1 preemption in 1,000 requests.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.config import EngineConfig
from quire.engine.observers.request_log import RequestLine
from quire.engine.tools import simulate, trace
from quire.engine.tools.step_fit import fit
from quire.loadtest import machine, replay
from quire.loadtest.checkpoint import prepare
from quire.loadtest.server import MODEL_NAME, serve

POINTS, PREEMPTIONS = 0.03, 1 / 1000  # aims: differences of the shares on time, and of preemptions per request


def predicted(log: Path, blocks: int, max_seqs: int) -> dict[str, Any]:
    """Return what a request log says, what a simulation of it says, and their differences."""
    lines = simulate.counted([line for line in trace.read_lines(log) if isinstance(line, RequestLine)])
    times, engine = fit(lines), EngineConfig()
    if times is None:
        raise SystemExit("the log has too few complete answers to fit the time of a step: use more --seconds")
    limits = simulate.engine_limits(
        "forecast", max_seqs=max_seqs, itl_stretch=engine.itl_stretch, step_target_s=engine.step_target_s
    )
    jobs = trace.read_trace(log, max_tokens=0, rate=0.0)
    report = simulate.simulate(jobs, limits, blocks, step_time=times)
    share = simulate.share_on_time(lines)
    preemptions = sum(line.preemptions for line in lines)
    points = abs(report.goodput - share)
    per_request = abs(report.preemptions - preemptions) / max(1, len(lines))
    return {
        "requests": len(lines),
        "on_time": {"measured": round(share, 4), "predicted": round(report.goodput, 4)},
        "preemptions": {"measured": preemptions, "predicted": report.preemptions},
        "step_ms": [round(1000 * seconds, 4) for seconds in msgspec.structs.astuple(times)],
        "points_off": round(100 * points, 2),
        "preemptions_off_per_1000": round(1000 * per_request, 2),
        "within_aims": points <= POINTS and per_request <= PREEMPTIONS,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="DIR", help="directory of the model; made there if empty")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second before and after; default 8")
    parser.add_argument("--peak", type=float, default=24.0, help="requests per second of the burst; default 24")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each phase; default 20")
    parser.add_argument("--seeds", default="1", help="one run per seed; default 1")
    parser.add_argument("--kv-blocks", type=int, default=512, help="pool in blocks of 16 tokens; default 512")
    parser.add_argument("--scale", type=float, default=0.48, help="factor on ShareGPT-like lengths; default 0.48")
    parser.add_argument("--server", default="", help="further options of `quire serve`, in one string")
    parser.add_argument("--name", type=machine.result_name, default="prediction", help="name of the result file")


def main(args: argparse.Namespace, command: str) -> int:
    vocab, eos = prepare(args.model)
    figures: dict[str, Any] = {}
    for seed in map(int, args.seeds.split(",")):
        words = ["--context", "2048", "--vocab-size", str(vocab), "--eos-id", str(eos), "--seed", str(seed)]
        for name in ("rate", "peak", "seconds", "scale"):
            words += [f"--{name}", f"{getattr(args, name):g}"]
        words += ["--peak-seconds", f"{args.seconds:g}", "--after-seconds", f"{args.seconds:g}"]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "requests.jsonl")
            flags = ["--kv-blocks", str(args.kv_blocks), "--max-model-len", "2048", "--request-log", str(log)]
            with serve(str(args.model), *flags, "--no-spare", *args.server.split()) as server:
                replay.run([server.url, "--model", MODEL_NAME, *words], {}, "")
            figures[f"seed {seed}"] = predicted(log, args.kv_blocks, 256)
        print(f"seed {seed}: {json.dumps(figures[f'seed {seed}'])}", flush=True)
    path = machine.write(args.name, command.replace(str(args.model), "DIR"), figures)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
