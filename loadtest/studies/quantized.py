"""Quality and speed of quantised weights or an 8-bit KV cache, compared with the unquantised model in pairs.

    python -m quire.loadtest.studies quantized MODEL --text FILE --quantize int8 [--text-tokens 1024] [--cpu-time]
    python -m quire.loadtest.studies quantized MODEL --text FILE --kv-dtype e4m3

and any option of an engine.  MODEL needs a tokenizer.  --cpu-time measures CPU time of the process, which depends less
on other work on the machine; use it with --threads 1 on a CPU.  Prints one line of JSON:

    perplexity_plain, perplexity      of the first --text-tokens tokens of FILE, in windows of 512
    agreement                         share of these positions with the same most probable next token
    greedy_agreement                  share of 16 greedy answers' tokens before the first one that differs
    decode_ratio, prompt_ratio        time of the plain model / of the quantised one, medians of pairs: per token at
                                      batch 1 after 128 tokens, and for a prompt of 512 tokens; also minimum and maximum
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.executor.models import hf
from quire.engine.llm import LLM
from quire.engine.loop import ConfigError
from quire.engine.tokenizers.files import load_tokenizer
from quire.engine.tools.bench import GREEDY, PROMPT, prompt, say
from quire.engine.wire.messages import Sampling

WINDOW = 512  # tokens of a scored window, and of the timed prompt
ANSWERS, ANSWER = 16, 32  # number of greedy answers, and tokens of each
DECODED = 65  # tokens of a timed answer


def score(llm: LLM, tokens: list[int]) -> tuple[float, list[int]]:
    """Return the perplexity of a text, and the most probable token at each scored position."""
    windows = [tokens[at : at + WINDOW] for at in range(0, len(tokens), WINDOW)]
    sampling = Sampling(temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    positions = []
    for completion in llm.generate([window for window in windows if len(window) > 1], sampling, max_new_tokens=1):
        if completion.prompt_logprobs is None:
            raise ConfigError(completion.outputs[0].message)
        positions += completion.prompt_logprobs
    loss = -statistics.fmean(position.logprob for position in positions)
    return math.exp(loss), [position.top[0][0] for position in positions]


def answers(llm: LLM, tokens: list[int]) -> list[list[int]]:
    """Return greedy answers to excerpts of a text."""
    size = max(2, min(64, len(tokens) // ANSWERS))
    pieces = [tokens[at : at + size] for at in range(0, size * ANSWERS, size) if tokens[at : at + size]]
    return [found.outputs[0].token_ids for found in llm.generate(pieces, GREEDY, max_new_tokens=ANSWER)]


def common(left: list[int], right: list[int]) -> int:
    """Return the number of equal tokens before the first difference."""
    same = [a == b for a, b in zip(left, right, strict=True)]
    return same.index(False) if False in same else len(same)


def seconds(llm: LLM, clock: Callable[[], float], seed: int) -> tuple[float, float]:
    """Return the seconds per token at batch 1, and of a prompt of WINDOW tokens."""
    vocab, times = llm.executor.info.vocab_size, []
    for length, count in ((PROMPT, 1), (PROMPT, DECODED), (WINDOW, 1)):
        asked = [prompt(length, vocab, seed)]
        begin = clock()
        llm.generate(asked, GREEDY, max_new_tokens=count)
        times.append(clock() - begin)
    return (times[1] - times[0]) / (DECODED - 1), times[2]


def compare(plain: LLM, quantised: LLM, tokens: list[int], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return all measurements.  The order within a pair alternates; the first pair is a warm-up."""
    (before, likeliest), (after, found) = score(plain, tokens), score(quantised, tokens)
    pairs = list(zip(answers(plain, tokens), answers(quantised, tokens), strict=True))
    figures = {
        "perplexity_plain": before,
        "perplexity": after,
        "agreement": statistics.fmean(a == b for a, b in zip(likeliest, found, strict=True)),
        "greedy_agreement": statistics.fmean(common(*pair) / ANSWER for pair in pairs),
    }
    say(", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    ratios: dict[str, list[float]] = {"decode": [], "prompt": []}
    for turn in range(rounds + 1):
        order = [plain, quantised] if turn % 2 else [quantised, plain]
        times = {id(llm): seconds(llm, clock, turn) for llm in order}
        decode, whole = (a / b for a, b in zip(times[id(plain)], times[id(quantised)], strict=True))
        say(f"pair {turn}: decode {decode:.2f}, prompt {whole:.2f}")
        if turn:
            ratios["decode"].append(decode)
            ratios["prompt"].append(whole)
    for name, values in ratios.items():
        named = {"": statistics.median(values), "_low": min(values), "_high": max(values)}
        figures |= {f"{name}_ratio{end}": value for end, value in named.items()}
    return figures


def main(argv: list[str]) -> int:
    """Return 2 with one line on stderr if the model can't be loaded or scored."""
    name = "python -m quire.loadtest.studies quantized"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--text-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    # Prompts are repeated, and must be computed each time.
    config = msgspec.structs.replace(config, prefix_cache=False, itl_stretch=0.0, step_target_s=0.0)
    try:
        base = msgspec.structs.replace(config, quantize="none", kv_dtype="auto")
        if config == base:
            raise ConfigError("--quantize none, --kv-dtype auto: nothing to compare with the plain model")
        tokens = load_tokenizer(str(hf.find(config.model))).encode(own.text.read_text(encoding="utf-8"))
        plain, quantised = (LLM.over(chosen, loading.load(chosen)) for chosen in (base, config))
        clock = time.process_time if own.cpu_time else time.perf_counter
        figures = compare(plain, quantised, tokens[: own.text_tokens], own.rounds, clock)
        plain.close()
        quantised.close()
        print(msgspec.json.encode(figures).decode())
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0
