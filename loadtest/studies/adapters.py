"""Compare decode steps of three kinds: with LoRA adapters, with empty adapter slots, and without slots.

    python -m quire.loadtest.studies adapters MODEL [--rank 16] [--adapters 8] [--batches 1,32,256]
        [--new 64] [--rounds 5] [--cpu-time]

and any option of an engine.  Adapters are random, on all linear layers of attention and MLP.  Two engines are loaded:
one with `--lora-slots 0`, one with slots.  Sequences of 16 tokens decode at the same time:

    without    base rows of the engine without slots
    base       base rows of the engine with slots
    mixed      the adapters in turn: sequence i has adapter i modulo their number

Each round times the three in another order.  Prints one line of JSON.  For each batch size it has the ms per step,
and the ratios `base` / `without` and `mixed` / `without`: median, minimum and maximum over the rounds.  Then base
rows decode while a request needs an adapter that must be loaded: the longest step, in ms and in CPU time of the
loop's thread, and the TTFT of that request.

--cpu-time measures steps in CPU time of the loop's thread.  With --threads 1 this is the complete step on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.executor.models import hf
from quire.engine.llm import LLM, Adapter
from quire.engine.loop import ConfigError
from quire.engine.process.interpreter import tune_interpreter
from quire.engine.tools.bench import say
from quire.engine.wire.messages import Sampling
from quire.loadtest.studies.timing import prefill

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = 16  # tokens
STALL_BATCH, STALL_NEW = 32, 400  # sequences, and tokens of each, that decode while an adapter is loaded


class Known(Adapter, frozen=True):
    """An adapter whose files are read once for its id, not for each request."""

    def id(self) -> str:
        return _id_of(self.name, self.path)


@functools.cache
def _id_of(name: str, path: str) -> str:
    return Adapter(name, path).id()


def write_adapter(folder: Path, model: str, rank: int, seed: int = 0) -> None:
    """Write an adapter of random values for a model.  Raises ConfigError if the model has no layer of TARGETS."""
    config = AutoConfig.from_pretrained(hf.find(model))
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for path, module in base.named_modules():
        if isinstance(module, nn.Linear) and path.endswith(tuple(TARGETS)):
            for which, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                values = torch.randn(shape, generator=generator) * (0.05 / math.sqrt(shape[1]))
                tensors[f"base_model.model.{path}.lora_{which}.weight"] = values.bfloat16()
    if not tensors:
        raise ConfigError(f"{model}: no layer is called {', '.join(TARGETS)}")
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": TARGETS, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def decode(
    llm: LLM, batch: int, new: int, adapters: list[Adapter], clock: Callable[[], float]
) -> tuple[float, list[list[int]]]:
    """Return the seconds per decode step of `batch` sequences, and their tokens.  `adapters` empty: the base model."""
    vocab, rng = llm.executor.info.vocab_size, random.Random(batch)
    prompts = [[rng.randrange(3, vocab) for _ in range(PROMPT)] for _ in range(batch)]
    for at, prompt in enumerate(prompts):
        adapter = adapters[at % len(adapters)] if adapters else None
        llm.submit(prompt, GREEDY, max_new_tokens=new, adapter=adapter)
    completions = list(llm.unfinished.values())
    prefill(llm)
    core = llm.engine.core
    began, first = clock(), core.step
    while len(llm.unfinished) == batch:
        llm.step()
    seconds, steps = clock() - began, core.step - first
    while llm.unfinished:
        llm.step()
    return seconds / max(1, steps), [completion.outputs[0].token_ids for completion in completions]


def compare(
    engines: dict[str, LLM],
    batch: int,
    new: int,
    rounds: int,
    adapters: list[Adapter],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the measurements of one batch size.  Raises ConfigError if slots change a text of the base model."""
    runs = {"without": ("without", []), "base": ("with", []), "mixed": ("with", adapters)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-1, rounds):  # the first one warms up: it captures graphs
        texts = {}
        names = list(runs)
        for name in names[turn % 3 :] + names[: turn % 3]:
            engine, rows = runs[name]
            seconds, texts[name] = decode(engines[engine], batch, new, rows, clock)
            if turn >= 0:
                times[name].append(seconds)
        if texts["base"] != texts["without"]:
            raise ConfigError(f"batch {batch}: LoRA slots changed a text of the base model")
    figures = {f"{name}_ms": round(1e3 * statistics.median(found), 4) for name, found in times.items()}
    for name in ("base", "mixed"):
        ratios = [mine / other for mine, other in zip(times[name], times["without"], strict=True)]
        figures[f"{name}_over_without"] = round(statistics.median(ratios), 4)
        figures[f"{name}_minimum"], figures[f"{name}_maximum"] = round(min(ratios), 4), round(max(ratios), 4)
    return figures


def stall(llm: LLM, adapter: Adapter) -> dict[str, float]:
    """Return the longest step of base rows while an adapter is loaded, and the wait of its request."""
    rng, vocab = random.Random(1), llm.executor.info.vocab_size
    for _ in range(STALL_BATCH):
        llm.submit([rng.randrange(3, vocab) for _ in range(PROMPT)], GREEDY, max_new_tokens=STALL_NEW)
    prefill(llm)
    for _ in range(20):
        llm.step()

    def steps(until: Iterator[bool]) -> tuple[list[float], list[float]]:
        found: tuple[list[float], list[float]] = [], []
        while next(until):
            began, began_cpu = time.perf_counter(), time.thread_time()
            llm.step()
            found[0].append(1e3 * (time.perf_counter() - began))
            found[1].append(1e3 * (time.thread_time() - began_cpu))
        return found

    before, before_cpu = steps(iter([True] * 50 + [False]))
    began = time.perf_counter()
    late = llm.submit([5] * PROMPT, GREEDY, max_new_tokens=4, adapter=adapter)
    during, during_cpu = steps(iter(lambda: not late.outputs[0].token_ids and len(llm.unfinished) > 1, None))
    waited = 1e3 * (time.perf_counter() - began)
    while llm.unfinished:
        llm.step()
    return {
        "step_before_ms": round(statistics.median(before), 3),
        "longest_step_before_ms": round(max(before), 3),
        "longest_step_during_ms": round(max(during), 3),
        "longest_step_before_cpu_ms": round(max(before_cpu), 3),
        "longest_step_during_cpu_ms": round(max(during_cpu), 3),
        "steps_during": len(during),
        "first_token_ms": round(waited, 1),
    }


def main(argv: list[str]) -> int:
    """Return 2 with one line on stderr if the model can't be loaded, or slots change a text."""
    name = "python -m quire.loadtest.studies adapters"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 32, 256])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    slots = max(config.lora_slots, own.adapters)
    # Measured times must not decide the chunks of prompts: the order of sums, and with it the text, would depend on
    # them.
    same_steps: dict[str, Any] = {"prefix_cache": False, "itl_stretch": 0.0, "step_target_s": 0.0}
    config = msgspec.structs.replace(config, lora_slots=slots, **same_steps)
    found: dict[str, dict[str, float]] = {}
    clock = time.thread_time if own.cpu_time else time.perf_counter
    tune_interpreter()
    try:
        with tempfile.TemporaryDirectory() as root:
            write_adapter(folder := Path(root) / "adapter", config.model, own.rank)
            adapters: list[Adapter] = [Known(f"adapter-{number}", str(folder)) for number in range(own.adapters + 1)]
            engines = {
                which: LLM.over(one, loading.load(one))
                for which, one in (("without", msgspec.structs.replace(config, lora_slots=0)), ("with", config))
            }
            engines["with"].generate([[5] * PROMPT] * own.adapters, GREEDY, max_new_tokens=1, adapters=adapters[:-1])
            for batch in own.batches:
                found[str(batch)] = compare(engines, batch, own.new, own.rounds, adapters[:-1], clock)
                say(f"batch {batch}: {found[str(batch)]}")
            found["load"] = stall(engines["with"], adapters[-1])
            for llm in engines.values():
                llm.close()
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    facts = {"model": config.model, "rank": own.rank, "adapters": own.adapters, "cpus": os.cpu_count()}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    print(msgspec.json.encode(facts | {"batches": found}).decode())
    return 0
