"""What a client that watches the engines costs: the same deployment with and without it, in turn.

    python -m tests.system.watchcost [--streams 64] [--tokens 400] [--rounds 6] [--step-ms 5 | --real]

Prints tokens/s and the engine's CPU time per token of each pair, then the medians of the pairs' ratios.  `--real`:
the 42M-parameter model of loadtest.throughput, not the scripted engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

from quire.loadtest.checkpoint import make_llama_42m
from quire.loadtest.studies.gateway import measure
from tests.pace import patience
from tests.system.logcost import WARM_UP, Deployment, deployment
from tests.system.processes import QUIRE


@contextlib.contextmanager
def watching(port: int) -> Iterator[list[int]]:
    """A context in which a client reads the engines' state.  Yields the number of bytes of each line it has read."""
    sizes: list[int] = []
    response = urllib.request.urlopen(f"http://127.0.0.1:{port}/engine/state", timeout=patience(60))
    stopping = threading.Event()

    def read() -> None:
        while not stopping.is_set() and (line := response.readline()):
            sizes.append(len(line))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield sizes
    finally:
        stopping.set()  # an event follows within a second
        reader.join()
        response.close()


def run(made: Deployment, streams: int, tokens: int, *, watched: bool) -> dict[str, float]:
    """Read answers once, with or without a watcher."""
    engine, gateway = psutil.Process(made.engine.popen.pid), psutil.Process(made.gateway.popen.pid)
    with contextlib.ExitStack() as stack:
        sizes = stack.enter_context(watching(made.port)) if watched else []
        before = engine.cpu_times()
        found = asyncio.run(measure(made.port, streams, tokens, gateway))
        after = engine.cpu_times()
        spent = after.user + after.system - before.user - before.system
        seconds = streams * tokens / found["tokens_per_s"]
        watched_bytes = sum(sizes)
    return {
        "tokens_per_s": found["tokens_per_s"],
        "itl_p50_ms": found["itl_p50_ms"],
        "engine_cpu_us_per_token": round(spent / (streams * tokens) * 1e6, 2),
        "gateway_cpu_us_per_token": found["gateway_cpu_us_per_token"],
        "watched_bytes_per_s": round(watched_bytes / seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="of each")
    parser.add_argument("--rounds", type=int, default=6, help="pairs")
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the scripted engine")
    parser.add_argument("--real", action="store_true", help="a model that computes, on one thread")
    options = parser.parse_args()
    engine = [f"--max-seqs={options.streams}"]
    engine += ["--threads=1", "--kv-blocks=4096"] if options.real else ["--executor=scripted", "--kv-blocks=100000"]
    engine += [] if options.real else [f"--scripted-step-ms={options.step_ms}"]
    ratios: dict[str, list[float]] = {"tokens_per_s": [], "engine_cpu_us_per_token": []}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "model"
        make_llama_42m(checkpoint)
        with deployment(Path(scratch) / "one", checkpoint, [*QUIRE, "engine"], engine) as made:
            run(made, options.streams, WARM_UP, watched=True)
            for number in range(options.rounds):
                pair = {
                    watched: run(made, options.streams, options.tokens, watched=watched)
                    for watched in ((False, True) if number % 2 else (True, False))  # the machine may drift
                }
                print(json.dumps({"without": pair[False], "with": pair[True]}), file=sys.stderr, flush=True)
                for key, found in ratios.items():
                    found.append(pair[True][key] / pair[False][key])
    medians = {key: round(statistics.median(found), 4) for key, found in ratios.items()}
    print(json.dumps({"with_over_without": medians, "pairs": ratios}, indent=1))


if __name__ == "__main__":
    main()
