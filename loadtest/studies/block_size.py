"""Compare block sizes of 8, 16, 32 and 64 tokens: throughput, filled slots, and the cost of a preemption.

    python -m quire.loadtest.studies block-size DIR [--sizes 8,16,32,64] [--requests 1000] [--lengths 128,512,2048,8192]

The 42M model is made in DIR if the directory holds no model.  For each size, requests of ShareGPT-like lengths run all
at once (`engine.tools bench --requests --slots`).  Then, for each length of a sequence, moving its blocks to the host's
memory and back is compared with computing them again.  `--preempt auto` is right if it
chooses the faster way, as timed in the same run.  Writes loadtest/results/block_size_<device>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.common import settings
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.llm import LLM
from quire.engine.tools.bench import GREEDY, prompt, say
from quire.loadtest import machine, trace
from quire.loadtest.checkpoint import make_llama_42m


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="directory of the model; the 42M model is made there if empty")
    parser.add_argument("--sizes", default="8,16,32,64", help="tokens of a block; default 8,16,32,64")
    parser.add_argument("--requests", type=int, default=1000, help="number of requests of the trace; default 1000")
    parser.add_argument("--lengths", default="128,512,2048,8192", help="tokens of the preempted sequence")
    parser.add_argument("--options", default="", help="further options of the engine, in one string")


def bench(directory: Path, *words: str) -> dict[str, float]:
    command = [sys.executable, "-m", "quire.engine.tools", "bench", str(directory), *words]
    output = subprocess.run(command, cwd=machine.ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    figures: dict[str, float] = json.loads(output)
    return figures


def swap(config: EngineConfig, tokens: int) -> dict[str, float]:
    """Measure, per block size, the time to swap the blocks of `tokens` tokens to host memory and back, and the time to
    recompute them as one prompt; report the choice of mode "auto"."""
    figures: dict[str, float] = {}
    say("block size   GB/s   swap ms   recompute ms   auto")
    for size in (8, 16, 32, 64):
        config = msgspec.structs.replace(config, block_size=size, prefix_cache=False, preempt="auto")
        executor = loading.load(config)
        llm, info = LLM.over(config, executor), executor.info
        times = []
        for turn in range(6):  # the first turn is a warm-up
            begin = time.perf_counter()
            llm.generate([prompt(tokens, info.vocab_size, seed=turn)], GREEDY, max_new_tokens=1)
            times.append(time.perf_counter() - begin)
        again = statistics.median(times[1:])
        moved = 2 * -(-tokens // size) * size * info.kv_bytes_per_token
        there_and_back = moved / executor.swap_bytes_per_s
        pays = llm.engine.core.step_cost.swap_pays(moved, tokens)
        rate, kind = executor.swap_bytes_per_s / 1e9, "swap" if pays else "recompute"
        say(f"{size:>10} {rate:>6.2f} {there_and_back * 1e3:>9.2f} {again * 1e3:>14.2f}   {kind}")
        figures |= {
            f"swap{size}_gb_per_s": rate,
            f"swap{size}_ms": there_and_back * 1e3,
            f"recompute{size}_ms": again * 1e3,
            f"auto{size}_swaps": float(pays),
        }
        llm.close()
    return figures


def trade_off(found: dict[str, float], sizes: list[int]) -> dict[str, dict[str, Any]]:
    """Return swap and recompute times by block size, and whether `auto` chose the faster way."""
    cells = {}
    for size in sizes:
        swap, again = found[f"swap{size}_ms"], found[f"recompute{size}_ms"]
        swaps = bool(found[f"auto{size}_swaps"])
        cells[str(size)] = {
            "swap_ms": round(swap, 3),
            "recompute_ms": round(again, 3),
            "auto": "swap" if swaps else "recompute",
            "right": swaps == (swap < again),
        }
    return cells


def main(args: argparse.Namespace, command: str) -> int:
    if not (args.directory / "config.json").exists():
        make_llama_42m(args.directory)
    vocab = json.loads((args.directory / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    sizes, more = [int(size) for size in args.sizes.split(",")], args.options.split()
    work: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        requests = Path(scratch, "requests.jsonl")
        trace.write_requests(trace.read("sharegpt_like")[: args.requests], vocab, requests)
        for size in sizes:
            words = ["--requests", str(requests), "--slots", "--itl-stretch", "0", "--block-size", str(size)]
            found = bench(args.directory, *words, *more)
            work[str(size)] = {name: round(found[name], 4) for name in ("tokens_per_s", "slots_filled", "eta")}
            print(f"blocks of {size}: {work[str(size)]}", flush=True)
    cells: dict[str, Any] = {}
    config = settings.parse(EngineConfig, [str(args.directory), *more], {}, positional="model")
    for length in args.lengths.split(","):
        cells[length] = trade_off(swap(config, int(length)), sizes)
        print(f"{length} tokens: {cells[length]}", flush=True)
    right = statistics.fmean(cell["right"] for row in cells.values() for cell in row.values())
    print(f"auto chose the faster way in {right:.0%} of {len(cells) * len(sizes)} cells")
    figures = {"requests": work, "preemption": cells, "auto_right": right}
    path = machine.write(f"block_size_{machine.device()}", command.replace(str(args.directory), "DIRECTORY"), figures)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
