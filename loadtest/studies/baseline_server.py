"""A server, an engine or the simulator with the admission modes of `baselines.py`, which Quire itself lacks.

    python -m quire.loadtest.studies baselines serve DIR --admission static --no-prefix-cache
    python -m quire.loadtest.studies baselines simulate --burst --mode reserve

    watermark   5 % of the pool stays free after a start
    reserve     all running sequences, and the new one, fit at their maximum length
    none        the prompt fits
    static      a sequence takes one contiguous run for its maximum length when it starts, and shares no block

`serve` and `engine` take all options of Quire.  A server keeps no spare engine.
"""

from __future__ import annotations

import sys

from quire.engine import __main__ as engine
from quire.engine.process.fork_server import ENGINE_NAME, name_process
from quire.engine.tools import simulate
from quire.loadtest.studies.baselines import BaselineConfig
from quire.service import cli

COMMAND = ("-m", "quire.loadtest.studies", "baselines")


def run_engine(words: list[str]) -> int:
    """Run one engine that knows the baselines; return its exit status."""
    name_process(ENGINE_NAME)  # by which the load test finds engines
    return engine.main(words, BaselineConfig)


def main(words: list[str]) -> int:
    """Run Quire's `serve`, `engine` or `simulate` with the baselines; return its exit status."""
    command, *rest = [*words, ""]
    rest = rest[:-1]
    if command == "serve":
        own = cli.EngineProgram((*COMMAND, "engine"), spare=(), options=BaselineConfig)
        return cli.main(["serve", *rest], own)
    if command == "engine":
        return run_engine(rest)
    if command == "simulate":
        return simulate.main(rest)
    asked = command in ("-h", "--help")
    print(__doc__, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
