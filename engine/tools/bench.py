"""Measurements on one loaded model, without Redis and HTTP: throughput of a file of requests, TPOT, start time.

    python -m quire.engine.tools bench MODEL --requests FILE [--rounds 2] [--latency 1,32] [--compare-prefix-cache]
    python -m quire.engine.tools bench MODEL --latency 1,32 [--latency-tokens 256]  TPOT and TTFT by batch size
    python -m quire.engine.tools bench MODEL --beams 8  TPOT of one request with 8 beams, and of 8 plain sequences
    python -m quire.engine.tools bench MODEL --swap 512  time of a preemption by block size, swapped and recomputed
    python -m quire.engine.tools bench MODEL --long-prompt 8192  ITL of 32 sequences while a long prompt is computed
    python -m quire.engine.tools bench MODEL --long-prompt 32768 --long-prompt-steps 100  ITL at each quarter of it

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
from quire.engine.executor import loading, local
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
    swap: int = 0  # tokens of the preempted sequence; 0: not measured
    long_prompt: int = 0  # tokens of the long prompt; 0: not measured
    long_prompt_steps: int = 0  # steps measured at each quarter of the prompt; 0: all steps, and with other bounds, too


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
    """Run all requested measurements on one loaded model; --swap and --long-prompt load the model again."""
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
    if options.swap:
        figures |= swap(config, options.swap)
    if options.long_prompt:
        if options.long_prompt_steps:
            figures |= stall_sampled(config, options.long_prompt, options.long_prompt_steps)
        else:
            figures |= stall(config, options.long_prompt)
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


def stall(config: EngineConfig, length: int, rows: int = 32, steps: int = 300) -> dict[str, float]:
    """Measure ITL, p50 and p99, of `rows` sequences: alone, and while a prompt of `length` tokens is computed, too.

    Three ways: as configured; with steps bounded only by step_tokens; with unbounded steps."""
    config = msgspec.structs.replace(config, prefix_cache=False, admission="threshold", admit_threshold=1.0)
    normal = config.step_tokens or local.SIZES[local.device_kind(config)][1]
    executor = loading.load(msgspec.structs.replace(config, step_tokens=max(normal, length + rows + 1)))
    figures: dict[str, float] = {}
    llm = LLM.over(config, executor)
    core = llm.engine.core
    ways = {
        "bounded": (config.itl_stretch, config.step_target_s, normal),
        "budget": (0.0, 0.0, normal),
        "unchunked": (0.0, 0.0, executor.step_tokens),
    }
    for turn in range(2):  # the first turn is a warm-up
        for name, (stretch, target_s, step_tokens) in ways.items():
            core.limits = msgspec.structs.replace(
                core.limits,
                itl_stretch=stretch,
                step_target_s=target_s,
                step_tokens=step_tokens,
                chunk_tokens=step_tokens,
            )
            alone, beside = beside_a_prompt(llm, length, rows, steps, seed=turn)
            figures |= {
                f"{name}_alone_p50_ms": alone[len(alone) // 2] * 1e3,
                f"{name}_alone_p99_ms": alone[len(alone) * 99 // 100] * 1e3,
                f"{name}_beside_p50_ms": beside[len(beside) // 2] * 1e3,
                f"{name}_beside_p99_ms": beside[len(beside) * 99 // 100] * 1e3,
                f"{name}_prompt_s": sum(beside),
            }
    llm.close()
    return figures


def stall_sampled(config: EngineConfig, length: int, window: int, rows: int = 32) -> dict[str, float]:
    """Measure ITL, p50 and p99, of `rows` sequences while a prompt of `length` tokens is computed, as configured.

    Samples `window` steps at the beginning of each quarter of the prompt and at its end.  Before each sample, as many
    steps without the prompt are measured, since the sequences' own contexts grow, too.  Reports all samples together,
    and each position separately."""
    config = msgspec.structs.replace(config, prefix_cache=False, admission="threshold", admit_threshold=1.0)
    llm = LLM.over(config, loading.load(config))
    core, vocab = llm.engine.core, llm.executor.info.vocab_size
    configured = core.limits
    decode(llm, rows, seed=0)
    # The first prompt is a warm-up, from which the scheduler learns the time per prompt token.
    llm.submit(prompt(max(1, length // 8), vocab, seed=-1), GREEDY, max_new_tokens=1)
    while len(llm.unfinished) > rows:
        llm.step()
    answer = llm.submit(prompt(length, vocab, seed=-2), GREEDY, max_new_tokens=1).outputs[0]
    llm.step()
    joined = next(seq for seq in core.live() if seq.prompt_len == length)
    figures: dict[str, float] = {}
    all_alone: list[float] = []
    all_beside: list[float] = []
    for start in [*range(0, length, max(1, length // 4)), length - 8 * window]:
        core.limits = msgspec.structs.replace(configured, itl_stretch=0.0, step_target_s=0.0)
        while joined.computed < start and not answer.token_ids:
            llm.step()
        if answer.token_ids:  # the prompt is so short that it has ended
            break
        core.limits = msgspec.structs.replace(configured, chunk_tokens=0)
        alone = [timed(llm) for _ in range(window)]
        core.limits, at = configured, joined.computed
        beside = [timed(llm) for _ in range(window)]
        all_alone += alone
        all_beside += beside
        here = percentiles(alone, "alone") | percentiles(beside, "beside")
        here["prompt_tokens_a_step"] = (joined.computed - at) / window
        say(f"at {at}: " + ", ".join(f"{name} {value:.1f}" for name, value in here.items()))
        figures |= {f"at_{start}_{name}": value for name, value in here.items()}
    llm.cancel()
    llm.close()
    figures |= percentiles(all_alone, "alone") | percentiles(all_beside, "beside")
    return figures | {"beside_p99_over_alone_p99": figures["beside_p99_ms"] / figures["alone_p99_ms"]}


def percentiles(seconds: list[float], name: str) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"{name}_p{p}_ms": ordered[len(ordered) * p // 100] * 1e3 for p in (50, 99)}


def decode(llm: LLM, rows: int, seed: int) -> None:
    """Submit `rows` sequences that decode up to the maximum length, and run 20 steps."""
    vocab, most = llm.executor.info.vocab_size, llm.executor.info.max_model_len - PROMPT
    for row in range(rows):
        llm.submit(prompt(PROMPT, vocab, seed=seed * 1000 + row), GREEDY, max_new_tokens=most)
    for _ in range(20):
        llm.step()


def prefill(llm: LLM) -> None:
    """Run steps until all submitted prompts are computed."""
    core = llm.engine.core
    llm.step()  # accepts the requests
    while core.waiting or core.batch.prefilling:
        llm.step()


def timed(llm: LLM) -> float:
    """Run one step, and return its seconds."""
    begin = time.perf_counter()
    llm.step()
    return time.perf_counter() - begin


def beside_a_prompt(llm: LLM, length: int, rows: int, steps: int, seed: int) -> tuple[list[float], list[float]]:
    """Return sorted seconds of (`steps` decode-only steps of `rows` sequences, the steps of a long prompt)."""
    decode(llm, rows, seed)
    alone = sorted(timed(llm) for _ in range(steps))
    joined = llm.submit(prompt(length, llm.executor.info.vocab_size, seed=seed - 1), GREEDY, max_new_tokens=1)
    beside = []
    while not joined.outputs[0].token_ids:
        beside.append(timed(llm))
        if joined.outputs[0].message:
            raise ConfigError(joined.outputs[0].message)
    llm.cancel()
    return alone, sorted(beside)


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
    parser.add_argument("--swap", type=int, default=0)
    parser.add_argument("--long-prompt", type=int, default=0)
    parser.add_argument("--long-prompt-steps", type=int, default=0)
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        print(msgspec.json.encode(bench(config, Options(**vars(own)))).decode())
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0
