"""Measure what the prefix cache costs on requests that share no prefix, in pairs.

    python -m quire.loadtest.studies cache-cost MODEL [--requests 8] [--prompt 512] [--new 64] [--rounds 7] [--wall]

and any option of an engine.  Two engines are loaded: one with the prefix cache, one without.  Each round computes the
same new random prompts with both, the order alternates.  With recurrent layers the first one also writes checkpoints.

Prints one line of JSON: CPU ms per token (prompts included) of the loop's thread, and median, minimum and maximum of
the ratios over the rounds.  With --threads 1 that is all computation on a CPU.  --wall: elapsed time, for a GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable

import msgspec

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.llm import LLM
from quire.engine.process.interpreter import tune_interpreter
from quire.engine.wire.messages import Sampling

GREEDY = Sampling(temperature=0.0, ignore_eos=True)


def ms_per_token(llm: LLM, prompts: list[list[int]], new: int, clock: Callable[[], float]) -> float:
    """Return the ms per token, prompts included, of answers to all prompts at once."""
    began = clock()
    llm.generate(prompts, GREEDY, max_new_tokens=new)
    return 1e3 * (clock() - began) / sum(len(prompt) + new for prompt in prompts)


def main(argv: list[str]) -> int:
    """Return 2 with one line on stderr if the model can't be loaded."""
    name = "python -m quire.loadtest.studies cache-cost"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wall", action="store_true")
    own, rest = parser.parse_known_args(argv)
    kind, clock = ("wall", time.perf_counter) if own.wall else ("cpu", time.thread_time)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    # Measured times must not decide how prompts are cut into steps.
    config = msgspec.structs.replace(config, itl_stretch=0.0, step_target_s=0.0)
    tune_interpreter()
    times: dict[bool, list[float]] = {True: [], False: []}
    try:
        engines = {
            cached: LLM.over(one, loading.load(one))
            for cached, one in ((on, msgspec.structs.replace(config, prefix_cache=on)) for on in (True, False))
        }
        vocab, rng = engines[True].executor.info.vocab_size, random.Random(0)
        for turn in range(-1, own.rounds):  # the first one warms up
            prompts = [[rng.randrange(3, vocab) for _ in range(own.prompt)] for _ in range(own.requests)]
            for cached in (True, False) if turn % 2 else (False, True):
                spent = ms_per_token(engines[cached], prompts, own.new, clock)
                if turn >= 0:
                    times[cached].append(spent)
        for llm in engines.values():
            llm.close()
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
    figures = {
        "model": config.model,
        "requests": own.requests,
        "prompt": own.prompt,
        "new": own.new,
        f"cached_{kind}_ms": round(statistics.median(times[True]), 4),
        f"uncached_{kind}_ms": round(statistics.median(times[False]), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_minimum": round(min(ratios), 4),
        "ratio_maximum": round(max(ratios), 4),
    }
    print(msgspec.json.encode(figures).decode())
    return 0
