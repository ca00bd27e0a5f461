"""Share of KV blocks saved by sharing in parallel sampling and beam search, as counted in the PagedAttention paper.

    python -m quire.loadtest.studies sharing MODEL --text FILE [--lengths alpaca|sharegpt]
                                             [--requests 20] [--ways 2,4,6]

and any option of an engine.  MODEL needs a tokenizer: prompts are excerpts of FILE, because beams of random prompts
would diverge at once.  The prefix cache is off, so that requests share no blocks with each other.  Lengths of prompts
and outputs are drawn from exponential distributions with the means of two sets of the paper: Alpaca 19 and 58 tokens,
ShareGPT 161 and 338.  Prints one line of JSON:

    sampling_2, beams_2, ...   1 - blocks held / entries of all block tables, summed over all steps

Source: section 6.3 and figure 15 of Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
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
from quire.engine.tools.bench import say
from quire.engine.wire.messages import Beams, Sampling

MEANS = {"alpaca": (19.31, 58.45), "sharegpt": (161.31, 337.99)}  # tokens of a prompt and of an output
SEED = 20231023


class Job(msgspec.Struct):
    """A prompt and its number of output tokens."""

    prompt: list[int]
    output: int


def draw_jobs(text: list[int], means: tuple[float, float], count: int, most: int) -> list[Job]:
    """Return excerpts of a text; prompt and output have at least a token each and together at most `most`."""
    rng = random.Random(SEED)
    jobs: list[Job] = []
    while len(jobs) < count:
        prompt, output = (1 + int(rng.expovariate(1 / (mean - 0.5))) for mean in means)
        if prompt + output <= most and prompt <= len(text):
            at = rng.randrange(len(text) - prompt + 1)
            jobs.append(Job(text[at : at + prompt], output))
    return jobs


def shared(llm: LLM, jobs: list[Job], ways: int, *, beams: bool) -> float:
    """Return the share of blocks saved by sharing while these jobs run, each with `ways` answers."""
    for seed, job in enumerate(jobs):
        sampling = Sampling(temperature=0.0 if beams else 1.0, seed=seed, ignore_eos=True)
        search = Beams(ways) if beams else None
        llm.submit(job.prompt, sampling, max_new_tokens=job.output, n=ways, beams=search)
    held, entries, core = 0, 0, llm.engine.core
    while llm.unfinished or not core.idle:
        llm.step()
        held += core.pool.total - core.pool.available
        entries += sum(len(seq.table) for seq in core.live())
    return 1 - held / entries


def main(argv: list[str]) -> int:
    """Return 2 with one line on stderr if the model can't be loaded or the text is too short."""
    name = "python -m quire.loadtest.studies sharing"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--lengths", choices=sorted(MEANS), default="alpaca")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--ways", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4, 6])
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    config = msgspec.structs.replace(config, prefix_cache=False)
    try:
        tokens = load_tokenizer(str(hf.find(config.model))).encode(own.text.read_text(encoding="utf-8"))
        if len(tokens) < 4 * MEANS[own.lengths][0]:
            raise ConfigError(f"{own.text}: {len(tokens)} tokens; prompts of {MEANS[own.lengths][0]:.0f} need more")
        llm = LLM.over(config, loading.load(config))
        jobs = draw_jobs(tokens, MEANS[own.lengths], own.requests, llm.executor.info.max_model_len)
        figures = {}
        for ways in own.ways:
            for kind in ("sampling", "beams"):
                figures[f"{kind}_{ways}"] = shared(llm, jobs, ways, beams=kind == "beams")
                say(f"{kind}, {ways} answers: {figures[f'{kind}_{ways}']:.1%} of the blocks saved")
        llm.close()
        print(msgspec.json.encode(figures).decode())
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0
