"""Record which drafts the drafter finds in a model's answers to real texts, and how many of their tokens are right.

    python -m quire.loadtest.studies draft-traces MODEL --text FILE --name NAME [--kinds rewrite,agent,rag,quote,prose]
                                                  [--count 16] [--new 128] [--part 800]

and any option of an engine.  The texts and the kinds of requests are those of the study `drafting`.  The model answers
without drafts; then the drafter follows each answer token by token, with drafts from the request's own prompt and
answer only.  `scripted-drafts --traces NAME` replays the traces on any model shape, so that drafts on random weights
are found and accepted as in these answers.

Writes loadtest/results/NAME.json: by kind, one text per answer with a word per output position: `-` for no draft, or
MATCH/TOKENS/RIGHT, the length of the match, of the draft, and of its right part, in tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.executor.drafter import SuffixDrafter
from quire.engine.executor.models import hf
from quire.engine.llm import LLM
from quire.engine.tokenizers.files import load_tokenizer
from quire.engine.wire.messages import Sampling
from quire.loadtest import machine
from quire.loadtest.studies.drafting import KV_GIB, TEXTS, parts_of

MIN_MATCH = 2  # tokens; the drafter finds no shorter match


def trace(prompt: list[int], answer: list[int]) -> str:
    """Return the trace of one answer, as the module's docstring defines it."""
    drafter, words = SuffixDrafter(1), ["-"]  # the engine searches after the first token of an answer
    drafter.begin(0, "", prompt, len(prompt), [])
    for at in range(1, len(answer)):
        found = drafter.find([0], [answer[at - 1]], MIN_MATCH)
        words.append(word(found[0].match, found[0].tokens, answer[at:]) if found else "-")
    drafter.close()
    return " ".join(words)


def word(match: int, tokens: Sequence[int], following: Sequence[int]) -> str:
    tokens = tokens[: len(following)]
    right = next((at for at, token in enumerate(tokens) if token != following[at]), len(tokens))
    return f"{match}/{len(tokens)}/{right}"


def read_trace(text: str) -> list[tuple[int, int, int]]:
    """Parse a trace: (match, tokens, right tokens) by output position; zeros for no draft."""
    return [
        (0, 0, 0) if word == "-" else (int(fields[0]), int(fields[1]), int(fields[2]))
        for word, fields in ((word, word.split("/")) for word in text.split())
    ]


def main(argv: list[str]) -> int:
    """Return 2 with one line on stderr if the model can't be loaded or the text is too short."""
    name = "python -m quire.loadtest.studies draft-traces"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--text", type=Path, required=True, action="append")
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=[kind for kind in TEXTS if kind != "ramp"]
    )
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--part", type=int, default=800)
    parser.add_argument("--name", type=machine.result_name, required=True)
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    if not config.kv_blocks and not config.kv_memory_gib:
        config = msgspec.structs.replace(config, kv_memory_gib=KV_GIB)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in own.text)
    traces: dict[str, list[str]] = {}
    try:
        llm, encode = LLM.over(config, loading.load(config)), load_tokenizer(str(hf.find(config.model))).encode
        for kind in own.kinds:
            prompt_of, temperature = TEXTS[kind]
            prompts = [encode(prompt_of(part)) for part in parts_of(text, own.part, own.count)]
            answers = [
                llm.submit(ids, Sampling(temperature=temperature, seed=seed, ignore_eos=True), max_new_tokens=own.new)
                for seed, ids in enumerate(prompts)
            ]
            while llm.unfinished:
                llm.step()
            traces[kind] = [trace(one.prompt_token_ids, one.outputs[0].token_ids) for one in answers]
        llm.close()
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    machine.write(own.name, " ".join([name, *argv]), {"model": config.model, "traces": traces})
    return 0
