"""`make chaos`: minutes of load and faults, and a table of what came of it.

    python -m tests.system.chaos [--minutes 5] [--seed 1] [--model scripted|tiny] [--machines 2] [--streams 64]
                                 [--kinds 'kill engine,...'] [--rounds 100] [--between 3 5] [--redis PATH]
                                 [--result NAME]
    python -m tests.system.chaos mixed [--minutes 10] [--seed 1]            hostile answers inside faults: see mixed.py
    python -m tests.system.chaos soak [--operations 1000000] [--seed 1]     the scheduler alone: see soak.py
    python -m tests.system.chaos fuzz [--requests 100000] [--seed 1]        hostile clients: see fuzz.py
    python -m tests.system.chaos requests [--requests 100000] [--seed 1]    mutated requests, a gateway in this process
    python -m tests.system.chaos answers [--cases 500] [--seed 1]           hostile answers: does a gateway stall?
    python -m tests.system.chaos histories [--requests 100000] [--seed 1]   histories on many chat templates
    python -m tests.system.chaos returned [--answers 20000] [--seed 1]      answers, sent back as histories
    python -m tests.system.chaos near-calls [--answers 50000] [--seed 1]    calls almost in the notation of a family
    python -m tests.system.chaos same-tokens [--requests 500] [--kills 3]   one digest of all tokens: see same_tokens.py
    python -m tests.system.chaos schemas [--draws 2000] [--seed 1]          structured output: see schemas.py
    python -m tests.system.chaos kills [--kills 100] [--model demo]         a computing engine, killed: see kills.py
    python -m tests.system.chaos adapter-cycles [--cycles 1000]             LoRA adapters come and go under traffic
    python -m tests.system.chaos rolling [--streams 200] [--tokens 4000]    every process replaced: see rolling.py

Exit status 1 when a token was lost, repeated or wrong, a request failed or a stream did not continue.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.loadtest import machine
from tests.system.chaos import (
    adapter_cycles,
    answers,
    fuzz,
    histories,
    kills,
    mixed,
    near_calls,
    requests,
    returned,
    rolling,
    same_tokens,
    schemas,
    soak,
)
from tests.system.chaos.faults import KINDS, Fault, schedule
from tests.system.chaos.run import Setting, figures, run, table

OTHERS: dict[str, Any] = {
    "mixed": mixed,
    "soak": soak,
    "fuzz": fuzz,
    "requests": requests,
    "answers": answers,
    "histories": histories,
    "returned": returned,
    "near-calls": near_calls,
    "same-tokens": same_tokens,
    "schemas": schemas,
    "kills": kills,
    "rolling": rolling,
    "adapter-cycles": adapter_cycles,
}


def main() -> int:
    if sys.argv[1:2] and (other := OTHERS.get(sys.argv[1])):
        return other.main(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of faults, at most")
    parser.add_argument("--rounds", type=int, help="of faults, at most; any number without")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", choices=("scripted", "tiny"), default="scripted")
    parser.add_argument("--machines", type=int, choices=(1, 2), default=2, help="each with an engine")
    parser.add_argument("--streams", type=int, default=64, help="live at any time")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of faults, with commas between them")
    parser.add_argument(
        "--between", type=float, nargs=2, default=(0.1, 1.0), help="seconds of peace, least and most, after a round"
    )
    parser.add_argument("--redis", type=Path, help="program of the Redis server; without: the first that is found")
    parser.add_argument("--result", help="write the figures to loadtest/results/NAME.json")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    tokens = (100, 1500) if options.model == "scripted" else (100, 800)
    between_s = tuple(options.between)
    setting = Setting(options.model, options.machines, options.streams, tokens, options.seed, between_s=between_s)

    def rounds() -> Iterator[list[Fault]]:
        end = time.monotonic() + 60 * options.minutes
        every = itertools.islice(schedule(kinds, options.seed, options.machines), options.rounds)
        return itertools.takewhile(lambda _: time.monotonic() < end, every)

    with tempfile.TemporaryDirectory() as folder:
        found = figures(asyncio.run(run(setting, rounds(), Path(folder), say=print, binary=options.redis)))
    print(table(found))
    if options.result:
        machine.write(options.result, shlex.join(["python", "-m", "tests.system.chaos", *sys.argv[1:]]), found)
    return 0 if found["clean"] else 1


if __name__ == "__main__":
    sys.exit(main())
