"""What the canary costs on a loaded model, and how equal its runs are.

    python -m quire.engine.tools canary MODEL [--runs 20]

and any option of an engine.  A request runs before each run, so that the canary gets other blocks.  Prints one line of
JSON:

    run_ms, cpu_ms   of a run, medians: on the clock, and of all threads of this process
    share            cpu_ms over the period in which the canary runs on an idle engine: a fraction of one core
    difference       greatest difference of a log-probability from the first run, nats
    first_ms         on the clock: the run that gives the reference
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import msgspec

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.llm import LLM
from quire.engine.observers.canary import MOST_SHARE
from quire.engine.wire.messages import Sampling


def measure(llm: LLM, runs: int) -> dict[str, float]:
    """Run the canary `runs` times after its first run, with a request before each."""
    canary, counts = llm.engine.canary, llm.engine.canary.counts
    vocab, times, cpu, greatest = llm.executor.info.vocab_size, [], [], 0.0
    for turn in range(runs + 1):
        llm.generate([[(turn + 3 * at) % vocab for at in range(40)]], Sampling(temperature=0.0), max_new_tokens=4)
        began, cpu_began = time.perf_counter(), time.process_time()
        canary.run()
        times.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
        greatest = max(greatest, counts.difference)
    middle, used = statistics.median(times[1:]), statistics.median(cpu[1:])
    period = max(canary.every_s, middle / MOST_SHARE)
    return {
        "runs": runs,
        "equal": counts.equal - 1,
        "first_ms": times[0] * 1e3,
        "run_ms": middle * 1e3,
        "cpu_ms": used * 1e3,
        "period_s": period,
        "share": used / period,
        "difference": greatest,
    }


def main(argv: list[str]) -> int:
    """2 with one line on stderr when the model can't be loaded."""
    name = "python -m quire.engine.tools canary"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--runs", type=int, default=20)
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    try:
        llm = LLM.over(config, loading.load(config))
        print(msgspec.json.encode(measure(llm, own.runs)).decode())
        llm.close()
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0
