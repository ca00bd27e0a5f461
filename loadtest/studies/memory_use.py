"""Memory use with paging and the prefix cache: filled slots, eta, KV-cache utilisation and hit rate, by workload.

    python -m quire.loadtest.studies memory-use DIR [--seconds 30] [--rates sharegpt=1.5,alpaca=6,...]

The 42M model is made in DIR if the directory holds no model.  One server gets one workload after another, open-loop, at
the workload's rate; between two of them it becomes idle.  The server's own metrics are read four times per second:

    slots filled   token slots with a token, of those in blocks that sequences hold
    eta            blocks held / blocks of static allocation (prompt and max_tokens of each sequence)
    pool           blocks held, of all
    hit rate       prompt tokens found in the prefix cache / all prompt tokens

`--server` adds options of the server, as one string.  Writes loadtest/results/memory_use_<device>.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quire.loadtest import machine, replay
from quire.loadtest.checkpoint import make_llama_42m
from quire.loadtest.clients import ProfileError, parse_shares
from quire.loadtest.server import MODEL_NAME, serve
from quire.loadtest.workloads import WORKLOADS

# Workload -> requests per second, which two slow cores can serve.
RATES = "sharegpt=1.2,alpaca=5,uniform-50=5,chat=1.2,rag=2,agents=2,translation=6"
SEEDS = 1_000_000  # distance between the seeds of two workloads, so that their prompts share no prefix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="directory of the model; the 42M model is made there if empty")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of arrivals of each workload")
    parser.add_argument("--rates", default=RATES, help="workloads, and requests per second of each")
    parser.add_argument("--block-size", default="16", help="tokens of a block; default 16")
    parser.add_argument("--server", default="", help="further options of the server, in one string")


def workload_name(text: str) -> str:
    """Return a workload's name.  Raises ProfileError for another word."""
    if text not in WORKLOADS:
        raise ProfileError(f"{text} is no workload; there are {', '.join(WORKLOADS)}")
    return text


def figures_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return the memory measurements in a result of replay.  Raises SystemExit if the server has no such metrics."""
    server, work = result["figures"]["server"], result["config"]["work"]
    if server["slots_filled_mean"] is None or server["eta_mean"] is None:
        raise SystemExit(
            "no sample shows filled slots and static blocks: did no sequence run, or is it another server?"
        )
    samples = result["series"]["samples"]
    return {
        "requests": work["requests"],
        "mean_prompt": round(work["prompt_tokens"] / work["requests"], 1),
        "mean_output": round(work["output_tokens"] / work["requests"], 1),
        "completed": result["figures"]["completed"],
        "slots_filled": server["slots_filled_mean"],
        "eta": server["eta_mean"],
        "pool_mean": server["kv_mean"],
        "pool_max": server["kv_max"],
        "hit_rate": result["figures"]["prefix_hits"]["rate"],
        "preemptions": server["preemptions"],
        "samples": {name: samples[name] for name in ("t", "filled", "eta", "kv")},
    }


def main(args: argparse.Namespace, command: str) -> int:
    try:
        rates = parse_shares(args.rates, workload_name)
    except ProfileError as error:
        raise SystemExit(f"--rates: {error}") from None
    if not (args.directory / "config.json").exists():
        make_llama_42m(args.directory)
    vocab = json.loads((args.directory / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    figures: dict[str, Any] = {}
    flags = ["--block-size", args.block_size, "--no-spare", *args.server.split()]
    with serve(str(args.directory), *flags) as server:
        for number, (workload, rate) in enumerate(rates.items(), 1):
            words = [server.url, "--model", MODEL_NAME, "--vocab-size", str(vocab), "--workload", workload]
            words += ["--rate", f"{rate:g}", "--seconds", f"{args.seconds:g}", "--seed", str(number * SEEDS)]
            result, _ = replay.run(words, {}, command)
            figures[workload] = figures_of(result)
            show(workload, figures[workload])
    command = command.replace(str(args.directory), "DIRECTORY")
    path = machine.write(f"memory_use_{machine.device()}", command, figures)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0


def show(workload: str, found: dict[str, Any]) -> None:
    lengths = f"{found['mean_prompt']:g} in, {found['mean_output']:g} out"
    print(
        f"{workload} ({lengths}): slots filled {found['slots_filled']:.1%}, eta {found['eta']:.3f}, "
        f"pool mean {found['pool_mean']:.1%}, most {found['pool_max']:.1%}, hit rate {found['hit_rate']:.1%}, "
        f"{found['completed']} of {found['requests']} completed",
        flush=True,
    )
