"""Compare an engine's tokens per second with drafts and without, in pairs, on texts that repeat and texts that do not.

    python -m quire.loadtest.studies drafting MODEL --text FILE [--streams 1,4] [--new 96] [--rounds 5]

and any option of an engine; `--drafts on` is implied.  FILE is plain text; each round takes another part of it:

    rewrite   the part, a request to repeat it, and its first words: greedy
    quote     the part, a question, and the first words of a sentence of it: greedy
    prose     the part alone, temperature 1: nothing to repeat

A round runs the same requests without drafts and with them, in either order by turns.  The tokens of both must be
equal.  Prints one line of JSON: by text and streams, tokens/s with drafts over tokens/s without (median, minimum
and maximum of the rounds), tokens per step of a stream, and the share of computed drafts that were accepted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.executor.models import hf
from quire.engine.llm import LLM
from quire.engine.loop import ConfigError
from quire.engine.tokenizers.files import load_tokenizer
from quire.engine.tools.bench import prefill, say
from quire.engine.wire.messages import Sampling

PART = 1200  # characters
TEXTS: dict[str, tuple[Callable[[str], str], float]] = {  # (prompt from a part of FILE, temperature)
    "rewrite": (lambda part: f"{part}\n\nThe same text once more, unchanged:\n\n{part[:80]}", 0.0),
    "quote": (lambda part: f"{part}\n\nQuestion: what does the text say? It says:\n{part[400:460]}", 0.0),
    "prose": (lambda part: part, 1.0),
}


class Run(NamedTuple):
    """One run of the requests of a round."""

    seconds: float
    steps: int
    drafted: int
    accepted: int
    answers: list[list[int]]


def run(llm: LLM, prompts: list[list[int]], temperature: float, new: int, *, drafts: bool) -> Run:
    """Answer the prompts at the same time; the time is that of their decode steps."""
    core, totals = llm.engine.core, llm.engine.core.report.totals
    drafter = core.drafts.drafter
    core.drafts.drafter = drafter if drafts else None
    before = sum(totals.drafted_tokens.values()), sum(totals.accepted_drafts.values())
    for seed, prompt in enumerate(prompts):
        llm.submit(prompt, Sampling(temperature=temperature, seed=seed, ignore_eos=True), max_new_tokens=new)
    completions = list(llm.unfinished.values())
    prefill(llm)
    began, first = time.perf_counter(), core.step
    while llm.unfinished:
        llm.step()
    seconds, steps = time.perf_counter() - began, core.step - first
    core.drafts.drafter = drafter
    answers = [completion.outputs[0].token_ids for completion in completions]
    after = sum(totals.drafted_tokens.values()), sum(totals.accepted_drafts.values())
    return Run(seconds, steps, after[0] - before[0], after[1] - before[1], answers)


def compare(llm: LLM, rounds: list[list[list[int]]], temperature: float, new: int) -> dict[str, float]:
    """Return what the docstring says; `rounds`: the prompts of each round.  Raises ConfigError if a text differs."""
    ratios, steps, drafted, accepted = [], 0, 0, 0
    for at, prompts in enumerate(rounds):
        pair = {drafts: run(llm, prompts, temperature, new, drafts=drafts) for drafts in (at % 2 == 0, at % 2 == 1)}
        if pair[True].answers != pair[False].answers:
            raise ConfigError(
                "drafts changed a text: use --deterministic, where the start log names a batch dependence"
            )
        ratios.append(pair[False].seconds / pair[True].seconds)
        steps, drafted, accepted = (
            steps + pair[True].steps,
            drafted + pair[True].drafted,
            accepted + pair[True].accepted,
        )
    return {
        "median": round(statistics.median(ratios), 3),
        "minimum": round(min(ratios), 3),
        "maximum": round(max(ratios), 3),
        "tokens_per_step": round(new * len(rounds) / steps, 2),
        "accepted": round(accepted / drafted, 3) if drafted else 0.0,
    }


def main(argv: list[str]) -> int:
    """2 with one line on stderr when the model can't be loaded, the text is too short, or a text differs."""
    name = "python -m quire.loadtest.studies drafting"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4])
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    config = msgspec.structs.replace(config, drafts="on", prefix_cache=False)
    text, most = own.text.read_text(encoding="utf-8"), max(own.streams)
    try:
        if len(text) < PART * own.rounds * most:
            raise ConfigError(
                f"{own.text}: {len(text)} characters; {own.rounds} rounds need {PART * own.rounds * most}"
            )
        llm = LLM.over(config, loading.load(config))
        encode = load_tokenizer(str(hf.find(config.model))).encode
        found: dict[str, dict[str, float]] = {}
        for kind, (prompt_of, temperature) in TEXTS.items():
            for streams in own.streams:
                rounds = [
                    [encode(prompt_of(text[PART * at :][:PART])) for at in range(first * most, first * most + streams)]
                    for first in range(own.rounds)
                ]
                found[f"{kind}, {streams} streams"] = compare(llm, rounds, temperature, own.new)
                say(f"{kind}, {streams} streams: {found[f'{kind}, {streams} streams']}")
        llm.close()
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.encode({"model": config.model, "cpus": os.cpu_count(), "texts": found}).decode())
    return 0
