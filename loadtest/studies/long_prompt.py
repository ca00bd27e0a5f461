"""The time between tokens of 32 sequences while an engine computes a prompt of 32k tokens.

    python -m quire.loadtest.studies long-prompt DIR [--tokens 32768] [--steps 60] [--shape llama-8b] [--name NAME]

The 42M model with a context of CONTEXT tokens is made in DIR if the directory holds no model, or with --shape that
shape, which gets random weights.  The complete prompt takes minutes on a CPU.  So `--steps` steps are measured without
it, then as many at each quarter of the prompt.  The prompt tokens between these are computed as fast as possible.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec

from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.llm import LLM
from quire.engine.tools.bench import GREEDY, PROMPT, prompt, say
from quire.loadtest import machine, shapes
from quire.loadtest.checkpoint import make_llama_42m
from quire.loadtest.studies.timing import percentiles, timed

CONTEXT = 40_000  # context length of the model in tokens
GOAL = 2.0  # target: ITL p99 with the prompt / without it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="directory of the model; made there if empty")
    parser.add_argument("--tokens", type=int, default=32_768, help="length of the prompt; default 32768")
    parser.add_argument("--shape", choices=shapes.CONFIGS, help="shape with random weights; default: the 42M model")
    parser.add_argument("--name", type=machine.result_name, default="long_prompt_cpu", help="name of the result file")
    parser.add_argument("--steps", type=int, default=60, help="steps measured at each quarter; default 60")


def main(args: argparse.Namespace, command: str) -> int:
    if not (args.directory / "config.json").exists():
        if args.shape:
            shapes.write(args.shape, args.directory)
        else:
            make_llama_42m(args.directory, CONTEXT)
    config = EngineConfig(
        model=str(args.directory),
        kv_blocks=6000,
        max_model_len=CONTEXT,
        load="random" if args.shape else "safetensors",
    )
    found = stalls(config, args.tokens, args.steps)
    figures = {name: round(value, 3) for name, value in found.items()}
    print(json.dumps(figures, indent=1))
    print(f"p99 with the prompt: {figures['beside_p99_over_alone_p99']} times that without (target {GOAL})")
    path = machine.write(args.name, command.replace(str(args.directory), "DIRECTORY"), figures)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0


def stalls(config: EngineConfig, length: int, window: int, rows: int = 32) -> dict[str, float]:
    """Measure ITL, p50 and p99, of `rows` sequences while a prompt of `length` tokens is computed, as configured.

    Samples `window` steps at the beginning of each quarter of the prompt and at its end.  Before each sample, as many
    steps without the prompt are measured, since the sequences' own contexts grow, too.  Reports all samples together,
    and each position separately."""
    config = msgspec.structs.replace(config, prefix_cache=False, admission="threshold", admit_threshold=1.0)
    llm = LLM.over(config, loading.load(config))
    core, vocab = llm.engine.core, llm.executor.info.vocab_size
    configured = core.limits
    decode(llm, rows, seed=0)
    # The first prompt is a warm-up, from which the scheduler learns the time per prompt token.
    llm.submit(prompt(max(1, length // 8), vocab, seed=-1), GREEDY, max_new_tokens=1)
    while len(llm.unfinished) > rows:
        llm.step()
    answer = llm.submit(prompt(length, vocab, seed=-2), GREEDY, max_new_tokens=1).outputs[0]
    llm.step()
    joined = next(seq for seq in core.live() if seq.prompt_len == length)
    figures: dict[str, float] = {}
    all_alone: list[float] = []
    all_beside: list[float] = []
    for start in [*range(0, length, max(1, length // 4)), length - 8 * window]:
        core.limits = msgspec.structs.replace(configured, itl_stretch=0.0, step_target_s=0.0)
        while joined.computed < start and not answer.token_ids:
            llm.step()
        if answer.token_ids:  # the prompt is so short that it has ended
            break
        core.limits = msgspec.structs.replace(configured, chunk_tokens=0)
        alone = [timed(llm) for _ in range(window)]
        core.limits, at = configured, joined.computed
        beside = [timed(llm) for _ in range(window)]
        all_alone += alone
        all_beside += beside
        here = percentiles(alone, "alone") | percentiles(beside, "beside")
        here["prompt_tokens_a_step"] = (joined.computed - at) / window
        say(f"at {at}: " + ", ".join(f"{name} {value:.1f}" for name, value in here.items()))
        figures |= {f"at_{start}_{name}": value for name, value in here.items()}
    llm.cancel()
    llm.close()
    figures |= percentiles(all_alone, "alone") | percentiles(all_beside, "beside")
    return figures | {"beside_p99_over_alone_p99": figures["beside_p99_ms"] / figures["alone_p99_ms"]}


def decode(llm: LLM, rows: int, seed: int) -> None:
    """Submit `rows` sequences that decode up to the maximum length, and run 20 steps."""
    vocab, most = llm.executor.info.vocab_size, llm.executor.info.max_model_len - PROMPT
    for row in range(rows):
        llm.submit(prompt(PROMPT, vocab, seed=seed * 1000 + row), GREEDY, max_new_tokens=most)
    for _ in range(20):
        llm.step()
