"""What the canary of an idle engine costs, and whether its runs are equal.

    python -m quire.loadtest canary DIR [--runs 20] [--options "--dtype bfloat16"]

The 42M model is made in DIR if the directory holds no model.  `engine.tools canary` loads it and runs the canary, with
a request before each run.  Writes loadtest/results/canary_<device>.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from quire.loadtest import command_line, machine
from quire.loadtest.checkpoint import make_llama_42m


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="directory of the model; the 42M model is made there if empty")
    parser.add_argument("--runs", type=int, default=20, help="of the canary, after the first one; default 20")
    parser.add_argument("--options", default="", help="more options of the engine, in one string")


def main(args: argparse.Namespace, command: str) -> int:
    if not (args.directory / "config.json").exists():
        make_llama_42m(args.directory)
    tool = [sys.executable, "-m", "quire.engine.tools", "canary", str(args.directory), "--runs", str(args.runs)]
    done = subprocess.run(
        [*tool, *args.options.split()], cwd=machine.ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    figures = {name: round(value, 6) for name, value in json.loads(done.stdout).items()}
    print(json.dumps(figures, indent=1))
    command = command.replace(str(args.directory), "DIRECTORY")
    path = machine.write(f"canary_{machine.device()}", command, figures)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run("canary", __doc__, add_arguments, main))
