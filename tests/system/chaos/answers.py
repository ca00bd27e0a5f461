"""Hostile answers: random ones in every notation, asked for in every way, at a gateway whose turns are measured.

    python -m tests.system.chaos answers [--cases 500] [--seed 1] [--chars 20000] [--result NAME]

What must hold (see tests/service/output/hostile_answers.py): no turn of the gateway's event loop computes for more than
50 ms, scaled by the machine's speed; no status of 500 and up; streamed, complete, repeated and resumed answers have one
text.
Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shlex
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.loadtest import machine
from tests.pace import python_s
from tests.service.output.hostile_answers import Case, World, cases


async def answers(
    folder: Path, url: str, *, count: int, seed: int, chars: int, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Ask for `count` answers; return the longest turns and what was wrong.  `say` hears of each notation and fault."""
    by_notation: dict[str, list[Case]] = {}
    for case in itertools.islice(cases(seed, chars), count):
        by_notation.setdefault(case.notation, []).append(case)
    turns: list[tuple[float, str]] = []
    failures: list[str] = []
    for notation, chosen in sorted(by_notation.items()):
        async with World(folder, url, notation) as world:
            for case in chosen:
                found = await world.ask(case)
                limit_s = 100 * python_s()
                turns.append((round(found.turn_s * 1000, 1), str(case)))
                wrong = [f"{case}: {one}" for one in found.wrong]
                if found.turn_s > limit_s:
                    wrong.append(f"{case}: a turn computed for {1000 * found.turn_s:.0f} of {1000 * limit_s:.0f} ms")
                failures += wrong
                for one in wrong:
                    say(one)
        say(f"{len(turns)} of {count} answers, {len(failures)} failures: {notation} is done")
    turns.sort(reverse=True)
    return {"answers": len(turns), "failures": failures, "longest turns, ms": turns[:20]}


def main(words: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="answers", description=__doc__)
    for option, default in (("--cases", 500), ("--seed", 1), ("--chars", 20_000)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--result", help="write the figures to loadtest/results/NAME.json")
    asked = parser.parse_args(words)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        figures = {"count": asked.cases, "seed": asked.seed, "chars": asked.chars}
        found = asyncio.run(answers(Path(folder), server.url, say=partial(print, flush=True), **figures))
    for turn_ms, case in found["longest turns, ms"]:
        print(f"{turn_ms:7.1f} ms  {case}")
    failures = found["failures"]
    print(
        f"{found['answers']} answers in {time.monotonic() - began:.0f} s, {len(failures)} failures",
        *failures[:30],
        sep="\n",
    )
    if asked.result:
        machine.write(asked.result, shlex.join(["python", "-m", "tests.system.chaos", "answers", *words]), found)
    return 1 if failures else 0
