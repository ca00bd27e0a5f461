"""Compare an engine's tokens per second with drafts and without, in pairs, on texts that repeat and texts that do not.

    python -m quire.loadtest.studies drafting MODEL --text FILE [--kinds prose,ramp] [--streams 1,4] [--new 96]
                                              [--rounds 5] [--part 1200] [--ramp 256]

and any option of an engine; `--drafts on` is implied.  FILE is plain text; each request takes another part of it, of
`--part` characters:

    rewrite   the part, a request to repeat it, and its first words: greedy
    quote     the part, a question, and the first words of a sentence of it: greedy
    prose     the part alone, temperature 1: nothing to repeat
    ramp      prose with short prompts: requests join until `--ramp` of them run, then they end one after the other

All streams run until they have `--new` tokens on average, those of a ramp to their end.  One stream runs before
anything is measured, so that the engine knows its step times.  A round runs the same requests without drafts and with
them, in either order by turns.  The tokens of both must be equal.  Prints one line of JSON: by kind and streams,
tokens/s with drafts over tokens/s without (median, minimum and maximum of the rounds), `cpu`: the same in tokens per
second of the process's CPU time (median), tokens per step of a stream (of a ramp: of all), the share of computed drafts
that were accepted, and `host`: the share of the CPU time that the drafter and the controller took.  Other work on the
machine disturbs `cpu` less than the rest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar
from unittest import mock

import msgspec

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.executor.models import hf
from quire.engine.llm import LLM, Completion
from quire.engine.loop import ConfigError
from quire.engine.tokenizers.files import load_tokenizer
from quire.engine.tools.bench import prefill, say
from quire.engine.wire.messages import Sampling

T = TypeVar("T")

RAMP_PART = 200  # characters of a ramp's prompts
SPARE = 4  # times `--new` that an answer may grow to, so that no stream ends while the others are measured
JOINS = 8  # requests of a ramp that join in each step
TEXTS: dict[str, tuple[Callable[[str], str], float]] = {  # (prompt from a part of FILE, temperature)
    "rewrite": (lambda part: f"{part}\n\nThe same text once more, unchanged:\n\n{part[:60]}", 0.0),
    "quote": (lambda part: f"{part}\n\nQuestion: what does the text say? It says:\n{part[100:150]}", 0.0),
    "prose": (lambda part: part, 1.0),
    "ramp": (lambda part: part[:RAMP_PART], 1.0),
}


class Run(NamedTuple):
    """One run of the requests of a round."""

    seconds: float
    cpu_s: float  # CPU seconds of the process
    host_s: float  # CPU seconds of the drafter and the controller
    tokens: int  # tokens computed in that time
    steps: int
    drafted: int
    accepted: int
    answers: list[list[int]]


@contextmanager
def timed_calls(llm: LLM) -> Iterator[list[float]]:
    """A context in which the CPU seconds of each call of the drafter and the controller are appended to a list."""
    seconds: list[float] = []

    def timed(call: Callable[..., T]) -> Callable[..., T]:
        def run(*args: object, **named: object) -> T:
            began = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                seconds.append(time.thread_time() - began)

        return run

    drafts = llm.engine.core.drafts
    with mock.patch.multiple(drafts, take=timed(drafts.take), choose=timed(drafts.choose), settle=timed(drafts.settle)):
        yield seconds


def run(llm: LLM, prompts: list[list[int]], temperature: float, new: int, *, drafts: bool, ramp: bool) -> Run:
    """Answer the prompts at the same time, or as a ramp.  Times are those of the steps behind the prompts."""
    core, totals = llm.engine.core, llm.engine.core.report.totals
    drafter = core.drafts.drafter
    core.drafts.drafter = drafter if drafts else None
    before = sum(totals.drafted_tokens.values()), sum(totals.accepted_drafts.values())
    completions: list[Completion] = []
    waiting = list(enumerate(prompts))

    def join(count: int) -> None:
        for seed, ids in waiting[:count]:
            sampling = Sampling(temperature=temperature, seed=seed, ignore_eos=True)
            completions.append(llm.submit(ids, sampling, max_new_tokens=new if ramp else SPARE * new))
        del waiting[:count]

    if not ramp:
        join(len(prompts))
        prefill(llm)
    generated, first = totals.generated_tokens, core.step
    with timed_calls(llm) as host:
        began, cpu = time.perf_counter(), time.process_time()
        while waiting or (llm.unfinished and (ramp or totals.generated_tokens - generated < new * len(prompts))):
            join(JOINS)
            llm.step()
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    tokens, steps = totals.generated_tokens - generated, core.step - first
    llm.cancel()
    core.drafts.drafter = drafter
    answers = [completion.outputs[0].token_ids for completion in completions]
    return Run(
        seconds,
        cpu_s,
        sum(host),
        tokens,
        steps,
        sum(totals.drafted_tokens.values()) - before[0],
        sum(totals.accepted_drafts.values()) - before[1],
        answers,
    )


def compare(
    llm: LLM, rounds: list[list[list[int]]], temperature: float, new: int, *, ramp: bool = False
) -> dict[str, float]:
    """Return what the docstring says; `rounds`: the prompts of each round.  Raises ConfigError if a text differs."""
    wall, cpu, drafting = [], [], []
    for at, prompts in enumerate(rounds):
        orders = (at % 2 == 0, at % 2 == 1)
        pair = {drafts: run(llm, prompts, temperature, new, drafts=drafts, ramp=ramp) for drafts in orders}
        plain, drafted = pair[False], pair[True]
        answers = plain.answers, drafted.answers
        if any(one[: len(other)] != other[: len(one)] for one, other in zip(*answers, strict=True)):
            raise ConfigError(
                "drafts changed a text: use --deterministic, where the start log names a batch dependence"
            )
        wall.append((drafted.tokens / drafted.seconds) / (plain.tokens / plain.seconds))
        cpu.append((drafted.tokens / drafted.cpu_s) / (plain.tokens / plain.cpu_s))
        drafting.append(drafted)
    computed = sum(one.drafted for one in drafting)
    slots = sum(one.steps for one in drafting) * (1 if ramp else len(rounds[0]))
    found = {
        "median": statistics.median(wall),
        "minimum": min(wall),
        "maximum": max(wall),
        "cpu": statistics.median(cpu),
        "cpu_minimum": min(cpu),
        "tokens_per_step": sum(one.tokens for one in drafting) / slots,
        "accepted": sum(one.accepted for one in drafting) / max(1, computed),
        "drafts": computed,
        "step_ms": 1000 * sum(one.seconds for one in drafting) / sum(one.steps for one in drafting),
        "host": sum(one.host_s for one in drafting) / sum(one.cpu_s for one in drafting),
    }
    return {name: round(value, 4) for name, value in found.items()}


def numbers(text: str) -> list[int]:
    """Parse `1,4`."""
    return [int(part) for part in text.split(",")]


def main(argv: list[str]) -> int:
    """2 with one line on stderr when the model can't be loaded, the text is too short, or a text differs."""
    name = "python -m quire.loadtest.studies drafting"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=[*TEXTS])
    parser.add_argument("--streams", type=numbers, default=[1, 4])
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", type=int, default=1200)
    parser.add_argument("--ramp", type=int, default=256)
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    # Answers are timed, not waits: prompts may fill a step.
    config = msgspec.structs.replace(config, drafts="on", prefix_cache=False, itl_stretch=0.0, step_target_s=0.0)
    text = own.text.read_text(encoding="utf-8")
    found: dict[str, dict[str, float]] = {}
    try:
        llm = LLM.over(config, loading.load(config))
        encode = load_tokenizer(str(hf.find(config.model))).encode
        compare(llm, [[encode(text[:RAMP_PART])]] * 2, 1.0, own.new)  # so that step times are known
        for kind in own.kinds:
            prompt_of, temperature = TEXTS[kind]
            for streams in [own.ramp] if kind == "ramp" else own.streams:
                size = RAMP_PART if kind == "ramp" else own.part
                if len(text) < size * own.rounds * streams:
                    raise ConfigError(f"{own.text}: {len(text)} characters, {size * own.rounds * streams} are needed")
                rounds = [
                    [
                        encode(prompt_of(text[size * at :][:size]))
                        for at in range(first * streams, (first + 1) * streams)
                    ]
                    for first in range(own.rounds)
                ]
                label = f"{kind}, {streams} streams"
                found[label] = compare(llm, rounds, temperature, own.new, ramp=kind == "ramp")
                say(f"{label}: {found[label]}")
        llm.close()
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    load = round(os.getloadavg()[0], 1)
    print(msgspec.json.encode({"model": config.model, "cpus": os.cpu_count(), "load": load, "texts": found}).decode())
    return 0
