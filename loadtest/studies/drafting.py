"""Compare an engine's tokens per second with and without speculative decoding (drafts), on repetitive and other texts.

    python -m quire.loadtest.studies drafting MODEL --text FILE [--kinds prose,ramp] [--streams 1,8,64,256] [--new 64]
                                              [--rounds 2] [--part 1200] [--ramp 256] [--clock cpu] [--name NAME]

and any option of an engine.  FILEs are plain text, one per `--text`; a request uses a part of it of `--part`
characters (fewer in loads of more than 64 streams):

    rewrite   the part, a request to repeat it, and its first words: greedy
    quote     the part, a question, and the first words of a sentence of it: greedy
    agent     the part as the result of a tool, and a call of another tool that quotes its first words: greedy
    rag       the part as three passages, a question about the second one, and an answer that quotes it: greedy
    prose     the part alone, temperature 1: nothing to repeat
    ramp      prose with short prompts: requests join until `--ramp` of them run, then they end one after the other

Two engines in this process answer the same requests, one without drafts.  After prefill their steps alternate, so that
other work on the machine delays both equally.  All streams run until they have `--new` tokens on average,
those of a ramp to their end.  The next round has other requests, and the other engine drafts, because one engine's
weights may be better placed in memory.  So `--rounds` is even.  The tokens of both engines must be equal.  One stream
runs before anything is measured, so that the engines know their step times.

With `--clock cpu` all times are CPU times of the process, including the step times from which the engines learn.  So
other processes disturb neither the measurement nor the engines' decisions.  Use it on a busy machine, with
`--threads 1`: threads that wait for each other take CPU time, too.

Prints one line of JSON: by kind and streams, tokens/s with drafts over tokens/s without (of all rounds, and the minimum
and maximum of a round), `cpu`: the same in tokens per second of the process's CPU time, `noise`: the ratio in the turns
in which neither engine computed a draft, tokens per step of a stream (of a ramp: of all), the share of computed drafts
that were accepted, and `host`: the share of the CPU time that the drafter and the controller took.  With --name they
are written to loadtest/results/NAME.json as well.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from unittest import mock

import msgspec

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.core.limits import Totals
from quire.engine.executor import loading
from quire.engine.executor.models import hf
from quire.engine.llm import LLM, Completion
from quire.engine.loop import ConfigError
from quire.engine.tokenizers.files import load_tokenizer
from quire.engine.tools.bench import say
from quire.engine.wire.messages import Sampling
from quire.loadtest import machine
from quire.loadtest.studies.timing import prefill

T = TypeVar("T")


def thirds(part: str) -> list[str]:
    """Divide a text into three passages."""
    size = len(part) // 3
    return [part[at * size :][:size] for at in range(3)]


RAMP_PART = 200  # characters of each prompt of a ramp
FULL_PARTS = 64  # maximum number of streams with parts of `--part` characters
SPARE = 4  # maximum length of an answer as a multiple of `--new`, so that no stream ends during the measurement
JOINS = 8  # requests of a ramp that join in each step
KV_GIB = 4.0  # GiB of KV cache per engine
TEXTS: dict[str, tuple[Callable[[str], str], float]] = {  # (prompt from a part of FILE, temperature)
    "rewrite": (lambda part: f"{part}\n\nThe same text once more, unchanged:\n\n{part[:60]}", 0.0),
    "agent": (
        lambda part: f'read_file -> {{"text": "{part}"}}\n\nwrite_file <- {{"text": "{part[:60]}',
        0.0,
    ),
    "rag": (
        lambda part: (
            "\n\n".join(f"[{at + 1}] {passage}" for at, passage in enumerate(thirds(part)))
            + f'\n\nQuestion: what does passage 2 say?\nAnswer: passage 2 says: "{thirds(part)[1][:60]}'
        ),
        0.0,
    ),
    "quote": (lambda part: f"{part}\n\nQuestion: what does the text say? It says:\n{part[100:150]}", 0.0),
    "prose": (lambda part: part, 1.0),
    "ramp": (lambda part: part[:RAMP_PART], 1.0),
}


@dataclass(slots=True)
class Run:
    """The requests of one round on one engine: sums over its steps after prefill."""

    llm: LLM
    seconds: float = 0.0
    cpu_s: float = 0.0  # CPU seconds of the process
    host_s: float = 0.0  # CPU seconds of the drafter and the controller
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    waiting: list[tuple[int, list[int]]] = field(default_factory=list)  # seed, prompt
    completions: list[Completion] = field(default_factory=list)
    turns: list[tuple[float, int]] = field(default_factory=list)  # seconds and drafts of each step

    def join(self, count: int, temperature: float, tokens: int) -> None:
        """Submit the next `count` requests."""
        for seed, ids in self.waiting[:count]:
            sampling = Sampling(temperature=temperature, seed=seed, ignore_eos=True)
            self.completions.append(self.llm.submit(ids, sampling, max_new_tokens=tokens))
        del self.waiting[:count]

    def step(self) -> None:
        """Run one step of the engine and measure it."""
        totals = self.llm.engine.core.report.totals
        before = self._counts(totals)
        with timed_calls(self.llm) as host:
            began, cpu = time.perf_counter(), time.process_time()
            self.llm.step()
            seconds = time.perf_counter() - began
            self.seconds += seconds
            self.cpu_s += time.process_time() - cpu
        self.host_s += sum(host)
        tokens, drafted, accepted = (now - then for now, then in zip(self._counts(totals), before, strict=True))
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted
        self.steps += 1
        self.turns.append((seconds, drafted))

    @staticmethod
    def _counts(totals: Totals) -> tuple[int, int, int]:
        return totals.generated_tokens, sum(totals.drafted_tokens.values()), sum(totals.accepted_drafts.values())

    def answers(self) -> list[list[int]]:
        """Return the tokens of each request so far."""
        return [completion.outputs[0].token_ids for completion in self.completions]


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


@contextmanager
def step_clock(name: str) -> Iterator[None]:
    """A context in which engines measure their steps with a clock: wall, or cpu (CPU time of the process)."""
    if name == "wall":
        yield
        return
    with mock.patch.object(time, "perf_counter", time.process_time):
        yield


@contextmanager
def without_drafts(llm: LLM) -> Iterator[None]:
    """A context in which an engine computes no drafts.  The engine must be idle at its begin and end."""
    with mock.patch.object(llm.engine.core.drafts, "drafter", None):
        yield


def race(llms: Sequence[LLM], prompts: list[list[int]], temperature: float, new: int, *, ramp: bool) -> list[Run]:
    """Answer the prompts on both engines, in alternate steps; the first engine computes no drafts.

    Raises ConfigError if a text differs."""
    runs = [Run(llm, waiting=list(enumerate(prompts))) for llm in llms]
    most = new if ramp else SPARE * new
    if not ramp:
        for one in runs:
            one.join(len(prompts), temperature, most)
            prefill(one.llm)
    turns = runs
    while turns := [
        one
        for one in reversed(turns)  # the engine that steps first alternates
        if one.waiting or (one.llm.unfinished and (ramp or one.tokens < new * len(prompts)))
    ]:
        for one in turns:
            one.join(JOINS, temperature, most)
            one.step()
    for one in runs:
        one.llm.cancel()
    if any(
        one[: len(other)] != other[: len(one)] for one, other in zip(*(each.answers() for each in runs), strict=True)
    ):
        raise ConfigError("drafts changed a text: use --deterministic, where the start log names a batch dependence")
    return runs


def compare(
    llms: Sequence[LLM], rounds: list[list[list[int]]], temperature: float, new: int, *, ramp: bool = False
) -> dict[str, float]:
    """Return the module's measurements; `rounds`: prompts of each round.  Raises ConfigError if a text differs."""
    pairs = []
    for at, prompts in enumerate(rounds):
        order = llms if at % 2 == 0 else llms[::-1]
        with without_drafts(order[0]):
            pairs.append(race(order, prompts, temperature, new, ramp=ramp))
    plain, drafted = zip(*pairs, strict=True)

    def tokens_per_s(runs: Sequence[Run]) -> float:
        return sum(one.tokens for one in runs) / sum(one.seconds for one in runs)

    def tokens_per_cpu_s(runs: Sequence[Run]) -> float:
        return sum(one.tokens for one in runs) / sum(one.cpu_s for one in runs)

    # Seconds of both engines in the turns without drafts: they differ by noise and memory placement only.
    same = [(a[0], b[0]) for one, other in pairs for a, b in zip(one.turns, other.turns, strict=False) if not b[1]]
    steps = sum(one.steps for one in drafted)
    computed = sum(one.drafted for one in drafted)
    each = [tokens_per_s([pair[1]]) / tokens_per_s([pair[0]]) for pair in pairs]
    found = {
        "ratio": tokens_per_s(drafted) / tokens_per_s(plain),
        "minimum": min(each),
        "maximum": max(each),
        "cpu": tokens_per_cpu_s(drafted) / tokens_per_cpu_s(plain),
        "noise": sum(a for a, _ in same) / sum(b for _, b in same) if same else 1.0,
        "tokens_per_step": sum(one.tokens for one in drafted) / (steps * (1 if ramp else len(rounds[0]))),
        "accepted": sum(one.accepted for one in drafted) / max(1, computed),
        "drafts": computed,
        "plain_tokens": sum(one.tokens for one in plain),
        "plain_step_ms": 1000 * sum(one.seconds for one in plain) / sum(one.steps for one in plain),
        "host": sum(one.host_s for one in drafted) / sum(one.cpu_s for one in drafted),
    }
    return {name: round(value, 4) for name, value in found.items()}


def numbers(text: str) -> list[int]:
    """Parse `1,4`."""
    return [int(part) for part in text.split(",")]


def parts_of(text: str, size: int, count: int) -> list[str]:
    """Return `count` parts of a text.  Raises ConfigError if it is too short."""
    if len(text) < size * count:
        raise ConfigError(f"the texts have {len(text)} characters, {size * count} are needed")
    return [text[size * at :][:size] for at in range(count)]


def open_engines(config: EngineConfig) -> tuple[LLM, LLM]:
    """Return two engines that draft.  Raises OperatorError."""
    # Throughput is measured, not ITL, so prompts may fill a step.
    config = msgspec.structs.replace(config, drafts="on", prefix_cache=False, itl_stretch=0.0, step_target_s=0.0)
    if not config.kv_blocks and not config.kv_memory_gib:
        config = msgspec.structs.replace(config, kv_memory_gib=KV_GIB)
    return LLM.over(config, loading.load(config)), LLM.over(config, loading.load(config))


def measured(config: EngineConfig, text: str, own: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the measurements of `compare` for each kind of text and number of streams.  Raises OperatorError."""
    found: dict[str, dict[str, float]] = {}
    llms = open_engines(config)
    encode = load_tokenizer(str(hf.find(config.model))).encode
    compare(llms, [[encode(text[:RAMP_PART])]] * 2, 1.0, own.new)  # warm-up: the engines measure their step times
    for kind in own.kinds:
        prompt_of, temperature = TEXTS[kind]
        for streams in [own.ramp] if kind == "ramp" else own.streams:
            size = RAMP_PART if kind == "ramp" else own.part * FULL_PARTS // max(FULL_PARTS, streams)
            prompts = [encode(prompt_of(part)) for part in parts_of(text, size, own.rounds * streams)]
            rounds = [prompts[first :: own.rounds] for first in range(own.rounds)]
            label = f"{kind}, {streams} streams"
            found[label] = compare(llms, rounds, temperature, own.new, ramp=kind == "ramp")
            say(f"{label}: {found[label]}")
    for llm in llms:
        llm.close()
    return found


def main(argv: list[str]) -> int:
    """Return 2 with one line on stderr if the model can't be loaded, the text is too short, or a text differs."""
    name = "python -m quire.loadtest.studies drafting"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--text", type=Path, required=True, action="append")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=[*TEXTS])
    parser.add_argument("--streams", type=numbers, default=[1, 4])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--part", type=int, default=1200)
    parser.add_argument("--ramp", type=int, default=256)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--name", type=machine.result_name)
    own, rest = parser.parse_known_args(argv)
    if own.rounds % 2 or own.rounds < 2:
        parser.error(f"--rounds is {own.rounds}, it must be even")
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in own.text)
    try:
        with step_clock(own.clock):
            found = measured(config, text, own)
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    figures = {"model": config.model, "clock": own.clock, "texts": found}
    if own.name:
        machine.write(own.name, " ".join([name, *argv]), figures)
    print(msgspec.json.encode({**machine.describe(), **figures}).decode())
    return 0
