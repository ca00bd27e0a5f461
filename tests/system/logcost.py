"""What the token log costs: the same engine with and without it, in turn.

    python -m tests.system.logcost [--streams 256] [--tokens 400] [--rounds 5] [--step-ms 5 | --real] [--result NAME]

Two deployments stand side by side, each with a Redis, a gateway and an engine of its own, and only one is asked at a
time.  Medians over the rounds.  `--real`: the 42M-parameter model of loadtest.throughput, not the scripted engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.loadtest import machine
from quire.loadtest.checkpoint import make_llama_42m
from quire.loadtest.studies.gateway import measure
from tests.ports import free_port
from tests.system.processes import QUIRE, Process, ending, wait_until_ready

ENGINES = {"on": [*QUIRE, "engine"], "off": [sys.executable, "-m", "tests.system.unlogged"]}
WARM_UP = 16  # tokens


@dataclass
class Deployment:
    """Redis, one gateway, one engine."""

    server: EmbeddedRedis
    port: int
    gateway: Process
    engine: Process

    def run(self, streams: int, tokens: int) -> dict[str, float]:
        """Ask, and add what Redis spent and kept."""
        cpu = psutil.Process(self.server.pid)
        with redis.Redis.from_url(self.server.url) as client:
            known = set(client.scan_iter("*:log:*", count=1000))
            before = cpu.cpu_times()
            found = asyncio.run(measure(self.port, streams, tokens, psutil.Process(self.gateway.popen.pid)))
            after = cpu.cpu_times()
            kept = [key for key in client.scan_iter("*:log:*", count=1000) if key not in known]
            held = sum(client.memory_usage(key) or 0 for key in kept)
        spent = after.user + after.system - before.user - before.system
        return {
            "tokens_per_s": found["tokens_per_s"],
            "itl_p50_ms": found["itl_p50_ms"],
            "redis_cpu_us_per_token": spent / (streams * tokens) * 1e6,
            "redis_bytes_per_token": held / (streams * tokens),
        }


@contextlib.contextmanager
def deployment(folder: Path, checkpoint: Path, command: list[str], options: list[str]) -> Iterator[Deployment]:
    folder.mkdir()
    with EmbeddedRedis() as server, ending([]) as processes:
        port = free_port()
        shared = [str(checkpoint), "--served-name=bench", f"--redis-url={server.url}"]
        gateway = Process(folder / "gateway.log", *shared, f"--port={port}", command=[*QUIRE, "gateway"])
        processes.append(gateway)
        engine = Process(folder / "engine.log", *shared, *options, command=command)
        processes.append(engine)
        wait_until_ready(f"http://127.0.0.1:{port}")
        yield Deployment(server, port, gateway, engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="of each")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind")
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the scripted engine")
    parser.add_argument("--real", action="store_true", help="a model that computes, on one thread")
    parser.add_argument("--result", help="write the figures to loadtest/results/NAME.json")
    options = parser.parse_args()
    engine = [f"--max-seqs={options.streams}", "--kv-blocks=16000"]
    engine += ["--threads=1"] if options.real else ["--executor=scripted", f"--scripted-step-ms={options.step_ms}"]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        checkpoint = Path(scratch) / "model"
        make_llama_42m(checkpoint)
        made = {
            name: stack.enter_context(deployment(Path(scratch) / name, checkpoint, command, engine))
            for name, command in ENGINES.items()
        }
        for one in made.values():
            one.run(options.streams, WARM_UP)
        for number in range(options.rounds):
            for name in sorted(made, reverse=bool(number % 2)):  # who is first changes, for the machine may drift
                runs[name].append(made[name].run(options.streams, options.tokens))
                print(name, runs[name][-1], file=sys.stderr, flush=True)
    figures: dict[str, Any] = {
        name: {key: round(statistics.median(one[key] for one in each), 3) for key in each[0]}
        for name, each in runs.items()
    }
    on, off = figures["on"], figures["off"]
    figures["tokens_per_s_lost"] = round(1 - on["tokens_per_s"] / off["tokens_per_s"], 4)
    figures["added_itl_p50_ms"] = round(on["itl_p50_ms"] - off["itl_p50_ms"], 3)
    print(json.dumps(figures, indent=1))
    if options.result:
        machine.write(options.result, shlex.join(["python", "-m", "tests.system.logcost", *sys.argv[1:]]), figures)


if __name__ == "__main__":
    main()
