"""The cost of grammars: tokens per second with and without them, in pairs on one loaded model, and the time of masks.

    python -m quire.loadtest.studies structured MODEL [--batch 1,64,256] [--tokens 256] [--rounds 5] [--max-length 40]

and any option of an engine.  MODEL needs a tokenizer.json.  Each sequence has a schema of its own, of five kinds, whose
answers are longer than --tokens: all sequences of a pair compute the same number of tokens.  --max-length bounds the
strings of the schemas.  That makes masks slow, because a string that must end soon forbids tokens by their length.

Prints one line of JSON:

    batchN_plain_tokens_per_s, batchN_structured_tokens_per_s   medians over the rounds
    batchN_ratio, batchN_ratio_low, batchN_ratio_high           structured / plain, by pair: median, minimum, maximum
    batchN_added_ms_a_token                                     median of the differences
    batchN_mask_ms, batchN_mask_p99_ms                          time of the tokens and masks of a step, on threads of
                                                                their own from 4 sequences on
    batchN_plain_steps, batchN_structured_steps                 median number of steps of a round
    batchN_jumped                                               share of the structured tokens that took no step of
                                                                their own, because the grammar forced them
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
from llguidance import LLMatcher

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.executor.grammars import Grammars
from quire.engine.llm import LLM
from quire.engine.loop import ConfigError
from quire.engine.tools.bench import PROMPT, prompt, say
from quire.engine.wire.messages import Sampling
from quire.loadtest.studies.timing import percentiles

LONG = 1_000_000  # maximum items of an array, more than any answer has


def schemas(count: int, max_length: int) -> list[dict[str, Any]]:
    """Return nested schemas of five kinds: records, unions, enums, patterns, maps.  No two are equal."""

    def array(items: dict[str, Any]) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": LONG}

    def record(**properties: Any) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    text: dict[str, Any] = {"type": "string"} | ({"maxLength": max_length} if max_length else {})
    number: dict[str, Any] = {"type": "integer"}
    truth: dict[str, Any] = {"type": "boolean"}
    found: list[dict[str, Any]] = []
    for i in range(count):
        spot: dict[str, Any] = {"type": "array", "items": {"type": "number"}, "maxItems": 3}
        place = record(**{f"city_{i}": text, "at": spot})
        kinds: list[dict[str, Any]] = [
            record(**{f"name_{i}": text, "age": number, "home": place, "alive": truth}),
            {"anyOf": [record(**{f"kind_{i}": {"const": "a"}, "value": number}), record(text=text, where=place)]},
            record(**{f"colour_{i}": {"enum": [f"shade {i} {j}" for j in range(30)]}, "weight": {"type": "number"}}),
            record(**{f"id_{i}": {"type": "string", "pattern": f"^[a-f0-9]{{8}}-{i}-[A-Z]{{3,12}}$"}, "note": text}),
            {
                "type": "object",
                "additionalProperties": record(**{f"left_{i}": number, "right": text}),
                "minProperties": 5,
            },
        ]
        found.append(array(kinds[i % len(kinds)]))
    return found


def compile_all(count: int, max_length: int) -> list[str]:
    blanks = {"x-guidance": {"whitespace_pattern": "[ \\n]?"}}
    return [LLMatcher.grammar_from_json_schema(json.dumps(one | blanks)) for one in schemas(count, max_length)]


@contextmanager
def timed_masks() -> Iterator[list[float]]:
    """A context with a list of the seconds of each `Grammars.compute`: tokens and masks of one step."""
    seconds: list[float] = []
    compute = Grammars.compute

    def timed(grammars: Grammars) -> None:
        begin = time.perf_counter()
        compute(grammars)
        seconds.append(time.perf_counter() - begin)

    with mock.patch.object(Grammars, "compute", timed):
        yield seconds


def tokens_per_s(llm: LLM, batch: int, tokens: int, grammars: list[str], seed: int) -> float:
    """Return tokens/s of sequences that run at once, prefill included.  Raises ConfigError if one ends early."""
    vocab = llm.executor.info.vocab_size
    prompts = [prompt(PROMPT, vocab, seed=seed * 4096 + row) for row in range(batch)]
    asked = [
        Sampling(seed=row, ignore_eos=not grammars, grammar=grammars[row] if grammars else "") for row in range(batch)
    ]
    begin = time.perf_counter()
    answers = llm.generate(prompts, asked, max_new_tokens=tokens)
    seconds = time.perf_counter() - begin
    for answer in answers:
        if (output := answer.outputs[0]).finish_reason != "length":
            raise ConfigError(f"an answer ended after {len(output.token_ids)} tokens: {output.message or 'stop'}")
    return batch * tokens / seconds


def measure(llm: LLM, batch: int, tokens: int, rounds: int, max_length: int) -> dict[str, float]:
    grammars = compile_all(batch, max_length)
    tokens_per_s(llm, batch, 16, grammars, seed=-1)  # warm-up: grammars are compiled once
    plain: list[float] = []
    structured: list[float] = []
    steps: dict[bool, list[int]] = {False: [], True: []}
    core, totals = llm.engine.core, llm.engine.core.report.totals
    jumped_before = totals.jumped_tokens
    with timed_masks() as masks:
        for turn in range(rounds):
            for kind, times in ((grammars, structured), ([], plain))[:: 1 if turn % 2 else -1]:
                before = core.step
                times.append(tokens_per_s(llm, batch, tokens, kind, seed=2 * turn + bool(kind)))
                steps[bool(kind)].append(core.step - before)
    ratios = [a / b for a, b in zip(structured, plain, strict=True)]
    added = [(1 / a - 1 / b) * batch * 1e3 for a, b in zip(structured, plain, strict=True)]
    masks.sort()
    figures = {
        "plain_tokens_per_s": statistics.median(plain),
        "structured_tokens_per_s": statistics.median(structured),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "added_ms_a_token": statistics.median(added),
        "mask_ms": statistics.mean(masks) * 1e3,
        "mask_p99_ms": percentiles(masks, "mask")["mask_p99_ms"],
        "plain_steps": statistics.median(steps[False]),
        "structured_steps": statistics.median(steps[True]),
        "jumped": (totals.jumped_tokens - jumped_before) / (rounds * batch * tokens),
    }
    say(f"batch {batch}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    return {f"batch{batch}_{name}": value for name, value in figures.items()}


def main(argv: list[str]) -> int:
    """Return 2 with one line on stderr if the model can't be loaded or cannot follow grammars."""
    name = "python -m quire.loadtest.studies structured"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--batch", type=lambda text: [int(part) for part in text.split(",")], default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-length", type=int, default=0)
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    try:
        llm = LLM.over(config, loading.load(config))
        if not llm.executor.info.grammars:
            raise ConfigError("this model cannot follow grammars: it has no tokenizer.json or no EOS token")
        figures: dict[str, float] = {}
        for batch in own.batch:
            figures |= measure(llm, batch, own.tokens, own.rounds, own.max_length)
        llm.close()
        print(msgspec.json.encode(figures).decode())
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0
