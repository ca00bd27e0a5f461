"""Normalised latency by request rate, and batch size, for four ways to allocate the same KV memory.

    python -m quire.loadtest.studies rates MODEL --requests FILE --kv-memory-gib 11.2 [--rates 2,4,8] [--seconds 20]
                                       [--at-once 120] [--ways static,paged,admission,prefix-cache]

and any option of an engine.  The ways:

    static         a sequence reserves one contiguous run for its prompt and max_tokens
    paged          a sequence takes blocks as it grows, and starts as soon as its prompt fits
    admission      a sequence starts when the predicted peak of all sequences fits
    prefix-cache   as above, and equal prefixes are stored once

FILE: one {"token_ids", "max_new_tokens"} per line.  A request's max_tokens is --ask (0, the default: the rest of the
model's context), and it ends by itself after its max_new_tokens, which the engine does not know.  For each rate,
requests arrive for --seconds at exponential intervals; higher rates are left out once the mean normalised latency
passes --limit-ms.  Then --at-once requests arrive together.  No Redis and no HTTP.  Prints one line of JSON, a list
for each way:

    rate             requests per second; null: all at once
    normalised_ms    seconds from arrival to the last token / its number of tokens: mean over all requests, in ms
    batch, most      running sequences: mean over time, maximum
    requests_per_s   finished requests per second, from the first arrival to the last token
    preemptions      number of preemptions

Source: normalised latency, request rates and the baseline are those of section 6 of Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention", SOSP 2023.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.llm import LLM, Completion
from quire.engine.loop import ConfigError
from quire.engine.tools.bench import Job, say
from quire.engine.wire.messages import Sampling
from quire.loadtest.studies.baselines import BaselineConfig

WAYS: dict[str, dict[str, Any]] = {
    "static": {"admission": "static", "prefix_cache": False},
    "paged": {"admission": "none", "prefix_cache": False},
    "admission": {"admission": "forecast", "prefix_cache": False},
    "prefix-cache": {"admission": "forecast", "prefix_cache": True},
}
END_BIAS = 100.0  # added to the logit of the EOS token, which then is the maximum
SEED = 20231023


class Run(msgspec.Struct):
    """Measurements of one load."""

    rate: float | None
    requests: int
    normalised_ms: float
    batch: float
    most: int
    requests_per_s: float
    preemptions: int


def ends_after(tokens: int, end: int) -> Sampling:
    """Return sampling parameters with which an answer ends with the EOS token after `tokens` tokens."""
    return Sampling(temperature=0.0, min_tokens=tokens - 1, logit_bias=[(end, END_BIAS)])


def arrivals(rate: float | None, count: int) -> list[float]:
    """Return the arrival times in seconds: a Poisson process; None: all at once."""
    rng, at, found = random.Random(SEED), 0.0, []
    for _ in range(count):
        found.append(at)
        at += rng.expovariate(rate) if rate else 0.0
    return found


def measure(llm: LLM, jobs: list[Job], rate: float | None, ask: int) -> Run:
    """Run these requests to their end, and return the measurements."""
    core, end = llm.engine.core, llm.executor.info.eos_ids[0]
    due = arrivals(rate, len(jobs))
    preempted, most, area = core.report.totals.preemptions, 0, 0.0
    open_ones: dict[int, Completion] = {}  # index of a request -> its completion
    begun, ends = 0, dict[int, float]()
    start = last = time.perf_counter()
    while len(ends) < len(jobs):
        while begun < len(jobs) and due[begun] <= last - start:
            job = jobs[begun]
            asked = min(ask or llm.executor.info.max_model_len, llm.executor.info.max_model_len - len(job.token_ids))
            how = ends_after(job.max_new_tokens, end)
            open_ones[begun] = llm.submit(job.token_ids, how, max_new_tokens=asked)
            begun += 1
        llm.step()
        now = time.perf_counter()
        area, most = area + core.running * (now - last), max(most, core.running)
        last = now
        for i in [i for i, completion in open_ones.items() if is_done(completion)]:
            ends[i] = now - start
            del open_ones[i]
    while not core.idle:  # wait for the last steps in flight
        llm.step()
    return Run(
        rate=rate,
        requests=len(jobs),
        normalised_ms=statistics.fmean((ends[i] - due[i]) / jobs[i].max_new_tokens for i in range(len(jobs))) * 1e3,
        batch=area / (last - start),
        most=most,
        requests_per_s=len(jobs) / (last - start),
        preemptions=core.report.totals.preemptions - preempted,
    )


def is_done(completion: Completion) -> bool:
    """Return whether a request has ended.  Raises ConfigError if it failed."""
    output = completion.outputs[0]
    if output.message:
        raise ConfigError(output.message)
    return output.finish_reason != "error"  # "error" is also the value before its end


def sweep(config: EngineConfig, jobs: list[Job], own: argparse.Namespace) -> dict[str, list[Run]]:
    """Measure each way, one after the other.  Raises OperatorError."""
    found: dict[str, list[Run]] = {}
    for way in own.ways:
        found[way] = []
        chosen = msgspec.structs.replace(config, **WAYS[way])
        llm = LLM.over(chosen, loading.load(chosen))  # loaded again, since slots belong to one scheduler
        if not llm.executor.info.eos_ids:
            raise ConfigError(f"{config.model} has no EOS token, with which answers could end")
        measure(llm, jobs[:8], None, own.ask)  # warm-up
        llm.engine.core.pool.forget_all()
        counts = [(rate, int(rate * own.seconds)) for rate in own.rates] + [(None, own.at_once)]
        for rate, count in counts:
            past = rate and found[way] and found[way][-1].normalised_ms > own.limit_ms
            if not count or past:
                continue
            found[way].append(measure(llm, jobs[:count], rate, own.ask))
            llm.engine.core.pool.forget_all()  # empty the prefix cache, since the next load has the same prompts
            say(f"{way}: {found[way][-1]}")
        llm.close()
    return found


def main(argv: list[str]) -> int:
    """Return 2 with one line on stderr if the model can't be loaded or the requests do not suffice."""
    name = "python -m quire.loadtest.studies rates"
    numbers = lambda text: [float(part) for part in text.split(",") if part]  # noqa: E731
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--rates", type=numbers, default=[])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--at-once", type=int, default=0)
    parser.add_argument("--ask", type=int, default=0)
    parser.add_argument("--limit-ms", type=float, default=200.0)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    own, rest = parser.parse_known_args(argv)
    config = settings.load(BaselineConfig, rest, os.environ, prog=name, positional="model")
    try:
        if unknown := [way for way in own.ways if way not in WAYS]:
            raise ConfigError(f"--ways: no {unknown[0]!r}; there are {', '.join(WAYS)}")
        jobs = [msgspec.json.decode(line, type=Job) for line in own.requests.read_bytes().splitlines()]
        most = max([own.at_once, *(int(rate * own.seconds) for rate in own.rates)])
        if not 0 < most <= len(jobs):
            raise ConfigError(f"{own.requests} has {len(jobs)} requests; --rates and --at-once ask for {most}")
        figures = sweep(config, jobs, own)
        print(msgspec.json.encode(figures).decode())
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0
