"""Count the prompt tokens found in the prefix cache of a model with recurrent layers, by workload.

    python -m quire.loadtest.studies hybrid-hits        27 checkpoints, about what 1 GiB leaves of a 0.8B model
    python -m quire.loadtest.studies hybrid-hits --checkpoints 400

The scheduler is real; a scripted executor replaces the model, so a run takes seconds.  Prompts are random
token ids.  `found`: hit rate of the tokens that a prompt shares with the start of an earlier prompt, over all prompts
but the first.  `second`: this hit rate for the second prompt.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from typing import NamedTuple

from quire.engine.config import EngineConfig
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.llm import LLM
from quire.engine.wire.messages import FOREVER_MS, Generate, Sampling

VOCAB, LENGTH = 1000, 1 << 20
ANSWER = Sampling(temperature=0.0, ignore_eos=True)


class Prompt(NamedTuple):
    """One request of a workload."""

    ids: list[int]
    shared: int  # tokens at the start that an earlier request has, too
    output: int  # output tokens
    anchors: tuple[int, ...] = ()  # positions of the ends of turns


def ids(count: int, draw: random.Random) -> list[int]:
    return draw.choices(range(2, VOCAB), k=count)


def pairs(shared: int, own: int, count: int, output: int, draw: random.Random) -> Iterator[Prompt]:
    """Prompts that begin with the same tokens."""
    prefix = ids(shared, draw)
    for at in range(count):
        yield Prompt(prefix + ids(own, draw), shared if at else 0, output)


class Engine:
    """A scheduler and a scripted executor."""

    def __init__(self, checkpoints: int, *, cache: bool = True) -> None:
        config = EngineConfig(prefix_cache=cache)
        info = ModelInfo("hybrid", "hybrid", VOCAB, LENGTH, [0], 0, state_bytes=1, checkpoints=checkpoints)
        self.llm = LLM.over(config, ScriptedExecutor(info, 16_384))
        self.computed = 0  # prompt tokens computed in all slices
        self._count = 0

    def run(self, prompt: Prompt) -> tuple[int, list[int]]:
        """Answer one request.  Returns the prompt tokens found in the cache, and the answer."""
        core, executor = self.llm.engine.core, self.llm.executor
        before, answer = core.report.totals.cached_prompt_tokens, list[int]()
        self._count += 1
        request = Generate(
            f"r{self._count}", "g", prompt.ids, prompt.output, ANSWER, FOREVER_MS, anchors=list(prompt.anchors)
        )
        core.accept(request)
        while (plan := core.plan(0)) is not None:
            self.computed += sum(len(piece.token_ids) for piece in plan.slices)
            executor.submit(plan)
            core.commit(executor.collect())
            answer += [token for delta in core.outputs().deltas.get("g", ()) for token in delta.token_ids]
        return core.report.totals.cached_prompt_tokens - before, answer


def measure(prompts: Iterator[Prompt], checkpoints: int) -> dict[str, float]:
    """Run prompts one after another."""
    engine, found, shared, second = Engine(checkpoints), 0, 0, -1.0
    for prompt in prompts:
        hit, _ = engine.run(prompt)
        if prompt.shared:
            found += min(hit, prompt.shared)
            shared += prompt.shared
            if second < 0:
                second = min(hit, prompt.shared) / prompt.shared
    engine.llm.engine.core.auditor.whole()
    return {"found": round(found / shared, 4), "second": round(second, 4)}


def chat(checkpoints: int, draw: random.Random, *, turns: int = 12, system: int = 512) -> dict[str, float]:
    """One conversation: each turn's prompt is the previous prompt, its answer and a message of 60 tokens."""
    engine, found, shared, asked = Engine(checkpoints), 0, 0, ids(system, draw)
    known = 0  # tokens of the previous prompt and its answer
    for _ in range(turns):
        message = ids(60, draw)
        asked = asked + message
        prompt = Prompt([*asked, 2, 3, 4], known, 200, (len(asked),))  # three tokens begin the answer
        hit, answer = engine.run(prompt)
        found += hit
        shared += known
        asked = prompt.ids + answer
        known = len(asked)
    return {"found": round(found / shared, 4)}


def work(checkpoints: int, draw: random.Random) -> dict[str, float]:
    """2,000 prompts that share 369 tokens: prompt tokens computed without the cache, over those with it."""
    computed = []
    for cache in (True, False):
        engine = Engine(checkpoints, cache=cache)
        draw.seed(1)
        for prompt in pairs(369, 8, 2000, 10, draw):
            engine.run(prompt)
        computed.append(engine.computed)
    return {"computed_with": computed[0], "computed_without": computed[1], "ratio": round(computed[1] / computed[0], 2)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoints", type=int, default=27, help="maximum number of checkpoints of recurrent state")


def main(options: argparse.Namespace, command: str) -> int:
    draw = random.Random(0)
    places = options.checkpoints
    found = {
        "900 shared + 600 own, 20 prompts": measure(pairs(900, 600, 20, 16, draw), places),
        "1,600 shared + 600 own, 20 prompts": measure(pairs(1600, 600, 20, 16, draw), places),
        "1,500 shared + 700 own, 20 prompts": measure(pairs(1500, 700, 20, 16, draw), places),
        "12 turns on 512 tokens": chat(places, draw),
        "2,000 prompts, 369 shared + 8 own, 10 out": work(places, draw),
    }
    print(json.dumps({"command": command, "checkpoints": places, **found}, indent=2))
    return 0
