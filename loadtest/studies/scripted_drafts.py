"""Compare tokens per second with and without drafts on a model with random weights, whose drafts follow a script.

    python -m quire.loadtest.studies scripted-drafts SHAPE --load random [--streams 1,4,8] [--new 128] [--rounds 2]
                                                     [--texts rewrite,prose] [--traces NAME] [--ramp 256] [--prompt 512]
                                                     [--clock cpu] [--name NAME]

and any option of an engine; `--drafts on` is implied.  `python -m quire.loadtest.studies shapes` writes a SHAPE.

With random weights no drafter finds anything.  So requests sample at a temperature of a million: their tokens depend
only on seed and position.  A run without drafts records the tokens.  A script then drafts them, with random errors.
Each kind of text has a share of positions with drafts, a length of spans with drafts, and the probability that a draft
token is right if those before it are:

    rewrite   every position has drafts; a token is right with 0.92
    quote     half of them, in spans of 32 tokens; 0.88
    prose     a tenth, in spans of 2, by short matches; 0.3

With `--traces` the drafts follow loadtest/results/NAME.json instead, which the study `draft-traces` wrote: a draft is
found and right where one was in real answers, and `--texts` are the kinds of these.

The controller decides from measured times which drafts are computed.  The real drafter searches as well, so that its
time counts.  Runs with and without drafts alternate.  A run begins after prefill and ends when its streams have
`--new` tokens on average, so that all of them run all the time.  `ramp` is prose of which 1, 2, 4, ... and more streams
begin 16 steps apart; it runs to its end.

Prints one line of JSON: by text and streams the median of tokens/s with drafts over without, `spread`: the maximum over
the minimum time of the runs without drafts, tokens/s without drafts, tokens per step of a stream, the share of computed
drafts that were accepted, the mean ms of a step with drafts and of one without, the ms that the device waited for a
step with drafts, and `flips`: tokens that drafts changed.  With --name they are written to loadtest/results/NAME.json
as well, after each text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.core.batch import IssuedPlan
from quire.engine.core.plan import Draft, Drafter, StepResult
from quire.engine.executor import loading
from quire.engine.llm import LLM
from quire.engine.loop import ConfigError
from quire.engine.tools.bench import prompt, say
from quire.engine.wire.messages import Sampling
from quire.loadtest import machine
from quire.loadtest.studies.draft_traces import read_trace
from quire.loadtest.studies.drafting import step_clock
from quire.loadtest.studies.timing import prefill

HOT = 1e6  # a temperature at which all tokens are equally probable
LENGTH = 24  # maximum tokens of a draft, as for the real drafter
# Maximum share of tokens that drafts change.  On a GPU logits depend on the batch, and at this temperature about one in
# a million tokens is a near-tie.
MAX_FLIPS = 1e-4
WAVE = 16  # steps between two waves of the ramp
SPARE = 3  # maximum length of an answer as a multiple of `--new`, so that no stream ends during the measurement
FIRST_TRACES = 5  # traces between the first streams of two rounds


Script = list[tuple[int, list[int]]]  # by output position: tokens of the match, and the draft; no tokens: no draft


class Scripts(Protocol):
    """Makes the scripts of a kind of text."""

    def script(self, answer: list[int], stream: int, seed: int, vocab_size: int) -> Script:
        """Return the script of a request with this answer.  `stream`: its index in the round;  `seed`: the round."""


class Text(NamedTuple):
    """Parameters of one kind of text."""

    share: float  # share of positions with drafts
    span: int  # number of consecutive positions with drafts
    right: float  # probability that a token of a draft is right if those before it are
    match: int  # tokens of a match

    def script(self, answer: list[int], stream: int, seed: int, vocab_size: int) -> Script:
        draw, script = random.Random(f"{seed} {stream}"), Script()
        while len(script) < len(answer):
            has_drafts = draw.random() < self.share
            for at in range(len(script), len(script) + self.span):
                count = min(LENGTH, self.match, len(answer) - at) if has_drafts else 0
                right = next((one for one in range(count) if draw.random() > self.right), count)
                script.append((self.match, partly_right(answer, at, count, right, vocab_size)))
        return script


class Traces(NamedTuple):
    """Traces of real answers; the first stream of each round takes another one."""

    traces: list[str]

    def script(self, answer: list[int], stream: int, seed: int, vocab_size: int) -> Script:
        trace = read_trace(self.traces[(stream + seed * FIRST_TRACES) % len(self.traces)])
        script = Script()
        for at in range(len(answer)):
            match, count, right = trace[at % len(trace)]
            script.append((match, partly_right(answer, at, count, right, vocab_size)))
        return script


def partly_right(answer: list[int], at: int, count: int, right: int, vocab_size: int) -> list[int]:
    """Return a draft of `count` tokens for the answer from position `at`, of which the first `right` are right."""
    tokens = answer[at : at + count]
    if right < len(tokens):
        tokens[right] = (tokens[right] + 1) % vocab_size
    return tokens


TEXTS: dict[str, Scripts] = {
    "rewrite": Text(1.0, 64, 0.92, 16),
    "quote": Text(0.5, 32, 0.88, 8),
    "prose": Text(0.1, 2, 0.3, 2),
}


class ScriptedDrafter:
    """Returns the script's drafts.  The real drafter searches, too, but its drafts are dropped."""

    def __init__(self, real: Drafter, vocab_size: int) -> None:
        self._real, self._vocab_size = real, vocab_size
        self._scripts: dict[tuple[int, ...], Script] = {}  # by the first tokens of a prompt
        self._followed: dict[int, tuple[Script, int]] = {}  # slot -> (script, tokens of the prompt)
        self._known: dict[int, int] = {}  # slot -> number of tokens of its sequence
        self._changed: set[int] = set()

    def follow(self, scripts: Scripts, answers: dict[tuple[int, ...], list[int]], seed: int) -> None:
        """Make the scripts of these answers, by the first tokens of their prompts."""
        self._scripts = {
            key: scripts.script(answer, stream, seed, self._vocab_size)
            for stream, (key, answer) in enumerate(answers.items())
        }

    def begin(self, slot: int, owner: str, tokens: list[int], prompt_len: int, predicted: list[int]) -> None:
        self._real.begin(slot, owner, tokens, prompt_len, predicted)
        self._followed[slot], self._known[slot] = (self._scripts.get(key_of(tokens), []), prompt_len), len(tokens)
        self._changed.add(slot)

    def extend(self, slot: int, tokens: list[int]) -> None:
        self._real.extend(slot, tokens)
        self._known[slot] = len(tokens)
        self._changed.add(slot)

    def find(self, slots: list[int], tokens: list[int], least: int) -> list[Draft]:
        self._real.find(slots, tokens, least)
        for slot in slots:
            if slot in self._known:
                self._known[slot] += 1
                self._changed.add(slot)
        changed, self._changed = self._changed, set()
        found = []
        for slot in changed:
            script, prompt_len = self._followed[slot]
            match, draft = script[at] if (at := self._known[slot] - prompt_len) < len(script) else (0, [])
            if draft and match >= least:
                found.append(Draft(slot, draft, match, 0))
        return found

    def end(self, slot: int, *, keep: bool) -> None:
        self._real.end(slot, keep=keep)
        del self._followed[slot], self._known[slot]
        self._changed.discard(slot)

    def close(self) -> None:
        self._real.close()


def key_of(prompt_tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(prompt_tokens[:8])


class Run(NamedTuple):
    """One run of the requests of a round."""

    seconds: float
    tokens: int
    steps: list[tuple[bool, float, float]]  # decode steps: (with drafts, seconds, seconds on the device)
    drafted: int
    accepted: int
    answers: dict[tuple[int, ...], list[int]]


def run(
    llm: LLM, prompts: list[list[int]], new: int, waves: list[int], drafter: Drafter | None, *, to_end: bool = False
) -> Run:
    """Answer the prompts; `waves`: requests that start together, WAVE steps apart.

    A single wave is measured after prefill, until its streams have `new` tokens on average, or SPARE times as many
    with `to_end`.  Several waves run until they end."""
    core, totals = llm.engine.core, llm.engine.core.report.totals
    core.drafts.drafter = drafter
    before = sum(totals.drafted_tokens.values()), sum(totals.accepted_drafts.values())
    steps: list[tuple[bool, float, float]] = []
    record = core._record_times

    def note(result: StepResult, issued: IssuedPlan) -> None:
        if issued.prompt_tokens == issued.drafting + issued.drafts:
            steps.append((issued.drafting > 0, result.step_s, result.device_s))
        record(result, issued)

    core._record_times = note  # type: ignore[method-assign]
    left, ramp = list(enumerate(prompts)), len(waves) > 1
    completions, began, next_wave, first = [], time.perf_counter(), 0, totals.generated_tokens
    while left or llm.unfinished:
        if left and core.step >= next_wave:
            for seed, ids in left[: waves[0]]:
                sampling = Sampling(temperature=HOT, seed=seed, ignore_eos=True)
                completions.append(llm.submit(ids, sampling, max_new_tokens=new if ramp else SPARE * new))
            left, next_wave = left[waves[0] :], core.step + WAVE
            waves = waves[1:]
            if not ramp:
                prefill(llm)
                began, first = time.perf_counter(), totals.generated_tokens
                steps.clear()
        llm.step()
        if not ramp and not to_end and totals.generated_tokens - first >= new * len(prompts):
            break
    seconds, tokens = time.perf_counter() - began, totals.generated_tokens - first
    llm.cancel()
    core._record_times = record  # type: ignore[method-assign]
    core.drafts.drafter = None
    answers = {key_of(each.prompt_token_ids): each.outputs[0].token_ids for each in completions}
    after = sum(totals.drafted_tokens.values()), sum(totals.accepted_drafts.values())
    return Run(seconds, tokens, steps, after[0] - before[0], after[1] - before[1], answers)


def flipped(runs: Sequence[Run], answers: dict[tuple[int, ...], list[int]]) -> tuple[int, int]:
    """Return how many tokens of the runs are not those of `answers`, and how many there are.

    The tokens depend on seed and position only, so that another token does not change those after it."""
    pairs = [
        (token, other)
        for each in runs
        for key, answer in each.answers.items()
        for token, other in zip(answer, answers[key], strict=False)
    ]
    return sum(token != other for token, other in pairs), len(pairs)


def compare(
    llm: LLM, drafter: ScriptedDrafter, text: Scripts, waves: list[int], new: int, rounds: int, length: int
) -> dict[str, float]:
    """Return the values of the module's docstring.  Raises ConfigError if drafts changed a text."""
    vocab, streams = llm.executor.info.vocab_size, sum(waves)
    prompts = [prompt(length, vocab, seed) for seed in range(streams)]
    first = run(llm, prompts, new, waves, None, to_end=True)  # warm-up, which records the tokens
    plain, drafted = list[Run](), list[Run]()
    for at in range(rounds):
        drafter.follow(text, first.answers, at)
        for drafts in (at % 2 == 0, at % 2 == 1):
            (drafted if drafts else plain).append(run(llm, prompts, new, waves, drafter if drafts else None))
    flips, sampled = flipped(drafted, first.answers)
    if flips > MAX_FLIPS * sampled:
        raise ConfigError(f"drafts changed {flips} of {sampled} tokens")
    total = sum(each.drafted for each in drafted)
    steps = [step for each in drafted for step in each.steps]
    with_drafts = [step for step in steps if step[0]]
    alone = [seconds for each in plain for _, seconds, _ in each.steps]
    plain_s, drafted_s = ([one.seconds / one.tokens for one in runs] for runs in (plain, drafted))  # per token
    ratios = [one / other for one, other in zip(plain_s, drafted_s, strict=True)]
    return {
        "median": round(statistics.median(ratios), 3),
        "minimum": round(min(ratios), 3),
        "flips": flips,
        "spread": round(max(plain_s) / min(plain_s), 3),
        "tokens_per_s_without": round(1 / statistics.median(plain_s), 1),
        "tokens_per_step": round(sum(each.tokens for each in drafted) / streams / max(1, len(steps)), 2),
        "accepted": round(sum(each.accepted for each in drafted) / total, 3) if total else 0.0,
        "drafts_per_step": round(total / max(1, len(with_drafts)), 1),
        "steps_with_drafts": round(len(with_drafts) / max(1, len(steps)), 3),
        "ms_without": round(1000 * statistics.fmean(alone), 3),
        "ms_with": round(1000 * statistics.fmean(step[1] for step in with_drafts), 3) if with_drafts else 0.0,
        "ms_idle": round(1000 * statistics.fmean(step[1] - step[2] for step in with_drafts), 3) if with_drafts else 0.0,
    }


def main(argv: list[str]) -> int:
    """Return 2 with one line on stderr if the model can't be loaded, or drafts changed a text."""
    name = "python -m quire.loadtest.studies scripted-drafts"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8])
    parser.add_argument("--texts", type=lambda text: text.split(","), default=[*TEXTS])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ramp", type=int, default=0, help="maximum number of streams of the ramp; 0: no ramp")
    parser.add_argument("--traces", type=machine.result_name)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--name", type=machine.result_name)
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    # Throughput is measured, not ITL, so prompts may fill a step.
    config = msgspec.structs.replace(config, drafts="on", prefix_cache=False, itl_stretch=0.0, step_target_s=0.0)
    scripts = read_traces(own.traces) if own.traces else TEXTS
    figures = {"model": config.model, "clock": own.clock, "texts": dict[str, dict[str, float]]()}
    try:
        with step_clock(own.clock):
            for title, values in measured(config, scripts, own):
                say(f"{title}: {values}")
                figures["texts"][title] = values
                if own.name:
                    machine.write(own.name, " ".join([name, *argv]), figures)
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(figures).decode())
    return 0


def measured(
    config: EngineConfig, scripts: dict[str, Scripts], own: argparse.Namespace
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield title and measurements of each text and number of streams, the ramp last.  Raises OperatorError."""
    llm = LLM.over(config, loading.load(config))
    real = llm.engine.core.drafts.drafter
    assert real is not None
    drafter = ScriptedDrafter(real, llm.executor.info.vocab_size)
    jobs = [(f"{kind}, {streams} streams", kind, [streams]) for streams in own.streams for kind in own.texts]
    if own.ramp:
        waves = [1, *(2**power for power in range(own.ramp.bit_length() - 1))]
        jobs.append((f"ramp, prose, 1 to {own.ramp} to 1 streams", "prose", waves))
    for title, kind, waves in jobs:
        yield title, compare(llm, drafter, scripts[kind], waves, own.new, own.rounds, own.prompt)
    llm.close()


def read_traces(name: str) -> dict[str, Scripts]:
    """Return the traces of loadtest/results/NAME.json by kind of text."""
    found = json.loads((machine.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return {kind: Traces(traces) for kind, traces in found["figures"]["traces"].items()}
