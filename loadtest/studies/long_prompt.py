"""The time between tokens of 32 sequences while an engine computes a prompt of 32k tokens.

    python -m quire.loadtest.studies long-prompt DIR [--tokens 32768] [--steps 60]

The 42M model with a context of CONTEXT tokens is made in DIR if the directory holds no model.  The complete prompt
takes minutes on a CPU.  So `--steps` steps are measured without it, then as many at each quarter of the prompt.  The
prompt tokens between these are computed as fast as possible.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from quire.loadtest import machine
from quire.loadtest.checkpoint import make_llama_42m

CONTEXT = 40_000  # context length of the model in tokens
GOAL = 2.0  # target: ITL p99 with the prompt / without it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="directory of the model; made there if empty")
    parser.add_argument("--tokens", type=int, default=32_768, help="length of the prompt; default 32768")
    parser.add_argument("--steps", type=int, default=60, help="steps measured at each quarter; default 60")


def main(args: argparse.Namespace, command: str) -> int:
    if not (args.directory / "config.json").exists():
        make_llama_42m(args.directory, CONTEXT)
    words = ["--long-prompt", str(args.tokens), "--long-prompt-steps", str(args.steps), "--kv-blocks", "6000"]
    bench = [sys.executable, "-m", "quire.engine.tools", "bench", str(args.directory), *words]
    output = subprocess.run(bench, cwd=machine.ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    figures = {name: round(value, 3) for name, value in json.loads(output).items() if name != "first_token_at"}
    print(json.dumps(figures, indent=1))
    print(f"p99 with the prompt: {figures['beside_p99_over_alone_p99']} times that without (target {GOAL})")
    path = machine.write("long_prompt_cpu", command.replace(str(args.directory), "DIRECTORY"), figures)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
