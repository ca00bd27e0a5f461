"""Measurements on one loaded model, without Redis and HTTP: throughput of a file of requests, TPOT, start time.

    python -m quire.engine.tools bench MODEL --requests FILE [--rounds 2] [--latency 1,32] [--compare-prefix-cache]
    python -m quire.engine.tools bench MODEL --latency 1,32 [--latency-tokens 256]  TPOT and TTFT by batch size
    python -m quire.engine.tools bench MODEL --beams 8  TPOT of one request with 8 beams, and of 8 plain sequences

and any option of an engine.  Prints one line of JSON: medians over the rounds.  The start log goes to stderr.  FILE has
one JSON object per line with "token_ids", "max_new_tokens" and, for a request that arrives later, "at_s".
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import statistics
import sys
import time
from pathlib import Path

import msgspec

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.llm import LLM, Completion
from quire.engine.loop import ConfigError
from quire.engine.process.interpreter import keep_what_is_loaded
from quire.engine.wire.messages import Beams, Sampling

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
PROMPT, OUTPUT = 128, 256  # tokens per sequence in measurements of TPOT


class Job(msgspec.Struct):
    """One line of a file of requests."""

    token_ids: list[int]
    max_new_tokens: int
    at_s: float = 0.0


class Options(msgspec.Struct):
    """The measurements to run."""

    requests: Path | None
    rounds: int
    latency: list[int]  # batch sizes
    compare_prefix_cache: bool
    slots: bool
    latency_tokens: int = OUTPUT  # tokens per sequence of `latency`
    beams: list[int] = []  # beam widths


def read_jobs(path: Path) -> list[Job]:
    """Read a file of requests.  Raises ConfigError, with the line number, for an invalid line."""
    jobs: list[Job] = []
    try:
        for line in path.read_bytes().splitlines():
            jobs.append(msgspec.json.decode(line, type=Job))
    except OSError as error:
        raise ConfigError(f"--requests {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--requests {path}, line {len(jobs) + 1}: {error}") from None
    return jobs


def bench(config: EngineConfig, options: Options) -> dict[str, float]:
    """Run all requested measurements on one loaded model."""
    jobs = read_jobs(options.requests) if options.requests else []
    begin = time.perf_counter()
    llm = LLM.over(config, loading.load(config))
    keep_what_is_loaded()
    figures = {"start_s": time.perf_counter() - begin, "kv_tokens": llm.executor.blocks * config.block_size}
    vocab = llm.executor.info.vocab_size
    llm.generate([prompt(16, vocab, seed=-1)], GREEDY, max_new_tokens=1)
    figures["first_token_at"] = time.time()  # unix time; the caller knows the start time of this process
    llm.generate([prompt(16, vocab, seed) for seed in range(-5, -1)], GREEDY, max_new_tokens=8)
    if jobs:
        pool = llm.engine.core.pool
        with_cache, without = [], []
        for turn in range(options.rounds):
            # Different token ids in every round; otherwise the prefix cache would hit all prompts from round 2 on.
            jobs = [Job([(i + turn) % vocab for i in j.token_ids], j.max_new_tokens, j.at_s) for j in jobs]
            with_cache.append(run(llm, jobs, slots=options.slots))
            say(f"requests, round {turn + 1}: {with_cache[-1]}")
            if options.compare_prefix_cache:
                pool.caching = False
                pool.forget_all()
                without.append(run(llm, jobs, slots=False))
                say(f"the same without prefix cache: {without[-1]}")
                pool.caching = True
        figures |= medians(with_cache)
        figures |= {f"{name}_without_prefix_cache": value for name, value in medians(without).items()}
    for batch in options.latency:
        figures |= latency(llm, batch, vocab, tokens=options.latency_tokens)
    for width in options.beams:
        figures |= latency(llm, width, vocab) | latency(llm, width, vocab, Beams(width))
    gc.unfreeze()
    llm.close()
    return figures


def run(llm: LLM, jobs: list[Job], *, slots: bool) -> dict[str, float]:
    """Run all requests, each from its `at_s` on.  `slots`: also measure KV occupancy, which slows down steps."""
    core = llm.engine.core
    submitted: list[Completion] = []
    silent: list[tuple[Job, Completion]] = []  # requests without a token yet
    firsts: list[float] = []  # seconds from `at_s` to the first token
    filled = allocated = static = 0  # KV positions, summed over every 8th step; static: max_model_len per sequence
    preempted, steps, most = core.report.totals.preemptions, core.step, 0
    begin = time.perf_counter()
    while llm.unfinished or len(submitted) < len(jobs):
        now = time.perf_counter() - begin
        while len(submitted) < len(jobs) and jobs[len(submitted)].at_s <= now:
            job = jobs[len(submitted)]
            submitted.append(llm.submit(job.token_ids, GREEDY, max_new_tokens=job.max_new_tokens))
            silent.append((job, submitted[-1]))
        llm.step()
        most = max(most, core.running)
        if silent:
            now = time.perf_counter() - begin
            firsts += [now - job.at_s for job, completion in silent if completion.outputs[0].token_ids]
            silent = [pair for pair in silent if not pair[1].outputs[0].token_ids]
        if slots and core.step % 8 == 0:
            used = core.occupancy.used_positions()
            filled, allocated = filled + used[0], allocated + used[1]
            static += core.running * llm.executor.info.max_model_len
    seconds = time.perf_counter() - begin
    tokens = sum(len(completion.outputs[0].token_ids) for completion in submitted)
    firsts.sort()
    figures = {
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "requests_per_s": len(jobs) / seconds,
        "ttft_p50_ms": statistics.median(firsts) * 1e3,
        "ttft_p99_ms": firsts[len(firsts) * 99 // 100] * 1e3,
        "steps": core.step - steps,
        "preemptions": core.report.totals.preemptions - preempted,
        "most_running": most,
    }
    if slots:  # eta: KV positions with paged allocation / with static allocation, for the same sequences
        figures |= {"slots_filled": filled / max(1, allocated), "eta": allocated / max(1, static)}
    return figures


def latency(llm: LLM, batch: int, vocab: int, beams: Beams | None = None, *, tokens: int = OUTPUT) -> dict[str, float]:
    """Measure TPOT, (time of `tokens` tokens - time of 1 token) / (tokens - 1), and TTFT, with `batch` concurrent
    sequences.

    `beams`: measure one request with `batch` beams instead."""
    first: list[float] = []
    last: list[float] = []
    for turn in range(6 if batch == 1 else 4):  # the first turn is a warm-up
        for count, times in ((1, first), (tokens, last)):
            group = (batch * 10 + turn) * tokens + count  # all prompts differ, so that none is in the prefix cache
            rows = range(batch, batch + 1) if beams else range(batch)  # a beam search uses a further prompt
            prompts = [prompt(PROMPT, vocab, seed=group * 4096 + i) for i in rows]
            begin = time.perf_counter()
            llm.generate(prompts, GREEDY, max_new_tokens=count, beams=beams)
            times.append(time.perf_counter() - begin)
    one, all_ = statistics.median(first[1:]), statistics.median(last[1:])
    kind = "beams" if beams else "batch"
    say(f"{kind} {batch}: {(all_ - one) / (tokens - 1) * 1e3:.3f} ms per token, first {one * 1e3:.1f} ms")
    return {
        f"{kind}{batch}_ms_per_token": (all_ - one) / (tokens - 1) * 1e3,
        f"{kind}{batch}_first_token_ms": one * 1e3,
        f"{kind}{batch}_tokens_per_s": batch * tokens / all_,
    }


def prompt(length: int, vocab: int, seed: int) -> list[int]:
    """Return random token ids, which differ for every seed."""
    return random.Random(seed).choices(range(vocab), k=length)


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in (rounds or [{}])[0]}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Run the tool.  Returns 2, with one line on stderr, if the model cannot be loaded."""
    name = "python -m quire.engine.tools bench"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--requests", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    for flag in ("--latency", "--beams"):
        parser.add_argument(flag, type=lambda text: [int(part) for part in text.split(",")], default=[])
    parser.add_argument("--latency-tokens", type=int, default=OUTPUT)
    parser.add_argument("--compare-prefix-cache", action="store_true")
    parser.add_argument("--slots", action="store_true")
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        print(msgspec.json.encode(bench(config, Options(**vars(own)))).decode())
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0
