"""Time an engine's decode steps on a CPU while other processes use the same cores.

    python -m quire.loadtest.studies neighbours MODEL [--streams 1,16] [--busy 0,1,2,4] [--new 128] [--rounds 3]

and any option of an engine.  A neighbour is a Python process that computes without a pause.  Rounds with different
numbers of neighbours take turns, so that the machine's own changes reach all of them.  Prompts are random token ids.
Prints one line of JSON: for each number of streams and of neighbours

    tokens_s   output tokens per second, the median round
    step_ms    median time of a decode step
    p99        99th percentile of the steps, as a multiple of that median
    share      tokens_s over tokens_s without neighbours
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.llm import LLM
from quire.engine.tools.bench import GREEDY, prompt, say
from quire.loadtest.studies.timing import prefill, timed

PROMPT = 64  # tokens of a prompt


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """A context in which `count` other processes compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def decode_steps(llm: LLM, streams: int, new: int) -> list[float]:
    """Return the seconds of each step in which `streams` sequences decode."""
    for seed in range(streams):
        llm.submit(prompt(PROMPT, llm.executor.info.vocab_size, seed), GREEDY, max_new_tokens=new)
    prefill(llm)
    steps = []
    while llm.engine.core.batch.decoding == streams:
        steps.append(timed(llm))
    while llm.unfinished:
        llm.step()
    return steps


def figures(rounds: dict[int, list[list[float]]], streams: int) -> dict[str, dict[str, float]]:
    """Return the values of the module's docstring, by number of neighbours, from the steps of all rounds."""
    speeds = {
        count: statistics.median(streams * len(steps) / sum(steps) for steps in of) for count, of in rounds.items()
    }
    found = {}
    for count, of in rounds.items():
        steps = sorted(step for each in of for step in each)
        median = statistics.median(steps)
        found[str(count)] = {
            "tokens_s": round(speeds[count], 1),
            "step_ms": round(1e3 * median, 2),
            "p99": round(steps[int(0.99 * len(steps))] / median, 2),
            "share": round(speeds[count] / speeds[min(speeds)], 3),
        }
    return found


def main(argv: list[str]) -> int:
    """Return 2 with one line on stderr if the model can't be loaded."""
    name = "python -m quire.loadtest.studies neighbours"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    for flag, default in (("--streams", [1, 16]), ("--busy", [0, 1, 2, 4])):
        parser.add_argument(flag, type=lambda text: [int(part) for part in text.split(",")], default=default)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    try:
        llm = LLM.over(config, loading.load(config))
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    found = {}
    for streams in own.streams:
        decode_steps(llm, streams, 8)
        rounds: dict[int, list[list[float]]] = defaultdict(list)
        for _ in range(own.rounds):
            for count in own.busy:
                with busy(count):
                    rounds[count].append(decode_steps(llm, streams, own.new))
        found[str(streams)] = figures(rounds, streams)
        say(f"{streams} streams: {found[str(streams)]}")
    llm.close()
    print(msgspec.json.encode({"model": config.model, "cpus": os.cpu_count(), "streams": found}).decode())
    return 0
