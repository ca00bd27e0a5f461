"""Measure Quire, or any OpenAI-compatible server: `python -m quire.loadtest NAME --help` describes one command."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys

from quire.loadtest import command_line

# name -> (module, what it measures)
COMMANDS: dict[str, tuple[str, str]] = {
    "replay": ("replay", "send requests at given times to a running server and record latencies, goodput, refusals"),
    "report": ("report", "draw one result of replay, or compare two (exit status 1: the second is worse)"),
    "burst": ("burst", "replay a threefold burst against two lanes, one queue, other modes and vLLM"),
    "recovery": ("recovery", "kill the engine under load and time how long streams pause"),
    "throughput": ("throughput", "compare offline throughput and latency with transformers and vLLM"),
    "figures": ("figures", "write the pages' measured values from result files, or compare them (--check)"),
    "remeasure": ("remeasure", "measure again what the pages show, before a release"),
    "kernels": ("kernels", "time single operators against the memory's and the matrix units' ceilings"),
}


def main(words: list[str]) -> int:
    listing = "\n".join(f"  {name:14}{text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m quire.loadtest",
        usage="python -m quire.loadtest NAME [options]",
        description=__doc__,
        epilog=f"commands:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=COMMANDS, help="a command of the list below")
    name = parser.parse_args(words[:1]).name
    module_name = f"quire.loadtest.{COMMANDS[name][0]}"
    if name == "kernels":  # a package with a __main__ of its own
        sys.argv = ["python -m quire.loadtest kernels", *words[1:]]
        runpy.run_module(module_name, run_name="__main__")
        return 0
    module = importlib.import_module(module_name)  # only now: some commands need torch
    return command_line.run(name, module.__doc__, module.add_arguments, module.main, words[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
