"""Hostile answers inside mixed faults, in one run: is anything lost, repeated or leaked, does a gateway stall?

    python -m tests.system.chaos mixed [--minutes 10] [--seed 1] [--streams 24] [--hostile 12] [--tokens 400]
                                       [--cases 48] [--notation hermes] [--kinds 'kill engine,...'] [--result NAME]

Two `quire serve` with a tiny checkpoint.  The clients of run.py check every token of their streams, those of hostile.py
every text of their hostile answers, during the faults of faults.py.  These also must hold:

- no turn of a gateway's event loop computes for more than --stall-ms;
- at the end nothing runs or waits, all blocks are free or cached, and Redis has no key of a request and no more memory.

Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import re
import shlex
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import redis

from quire.loadtest import machine
from tests.pace import Patience
from tests.service.output.hostile_answers import NOTATIONS
from tests.system.chaos import hostile, run
from tests.system.chaos.faults import KINDS, Fault, schedule
from tests.system.chaos.world import LIMIT_S, Machine, World
from tests.system.ending import stalls

LOOK_S = 0.25  # seconds between two looks at the event loops
RETAIN_S = 120  # longer than any pause of a client that reads a log
MAX_LEN = 4096  # tokens of a sequence
SLACK_BYTES = 8 * 2**20  # more memory of Redis than this is a leak
# Keys that no request leaves behind once its log has expired: see engine/wire/redis/KEYS.md.
OF_REQUESTS = re.compile(
    r"{quire}:((req|log|open|once|held|tail|ages|queue|turns):|(orphans|waiting|due|prefixes|passed)$)"
)


class Loops:
    """How long turns of the gateways' event loops computed.  Turns before a gateway's first look are not counted."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = machines
        self._last: dict[tuple[str, int], dict[str, dict[float, float]]] = {}  # (machine, pid) -> its histograms
        self.longest_s = 0.0  # upper bound of the highest bucket that has grown
        self.looks = 0

    async def watch(self) -> None:
        """Look for ever."""
        while True:
            for one in self._machines:
                await asyncio.to_thread(self._look, one)
            await asyncio.sleep(LOOK_S)

    def _look(self, one: Machine) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError, psutil.Error):  # the gateway ends or starts
            before = [child.pid for child in one.children("quire.service.app")]
            found = stalls(one.port)
            if before != [child.pid for child in one.children("quire.service.app")] or len(before) != 1:
                return
            known_counts = self._last.get((one.name, before[0]), found)["busy"]
            for border, count in found["busy"].items():
                if count > known_counts[border]:
                    self.longest_s = max(self.longest_s, border)
            self._last[one.name, before[0]] = found
            self.looks += 1


class Mixed:
    """Hostile clients, and the checks of event loops and of Redis."""

    def __init__(self, work: Sequence[hostile.Ask], clients: int, seed: int, say: Callable[[str], None]) -> None:
        self._work, self._clients, self._seed, self._say = work, clients, seed, say
        self.tally = hostile.Tally()
        self.wrong: list[str] = []  # what the undisturbed answers, and the state at the end, are wrong about
        self.longest_turn_s = 0.0
        self.looks = 0
        self.redis_mib: list[float] = []  # before and after
        self.known = 0  # hostile answers in use

    @contextlib.asynccontextmanager
    async def beside(self, stage: World, session: aiohttp.ClientSession) -> AsyncIterator[None]:
        """Ask for hostile answers, and look at the gateways, until the end of the block."""
        answers, self.wrong = await hostile.undisturbed(session, stage.doors, self._work)
        self.known = len(answers)
        self._say(f"{len(answers)} of {len(self._work)} hostile answers are known, {len(self.wrong)} differ")
        crowd, loops = hostile.Crowd(session, stage.doors, answers), Loops(stage.machines)
        self.tally = crowd.tally
        memory = (await stage.redis.info("memory"))["used_memory"]
        watching = asyncio.create_task(loops.watch())
        crowd.start(self._clients, self._seed)
        try:
            yield
            await crowd.finish()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        self.longest_turn_s, self.looks = loops.longest_s, loops.looks
        self.wrong += await self._no_keys_left(stage)
        after = (await stage.redis.info("memory"))["used_memory"]
        self.redis_mib = [round(one / 2**20, 1) for one in (memory, after)]
        if after > memory + SLACK_BYTES:
            self.wrong.append(f"Redis has grown from {memory} to {after} bytes")

    async def _no_keys_left(self, stage: World) -> list[str]:
        """Wait until Redis has no key of a request; return the keys that stay."""

        def left() -> list[str]:
            with redis.Redis.from_url(stage.redis.url) as client:
                return [key for one in client.scan_iter(count=1000) if OF_REQUESTS.match(key := one.decode())]

        bound = Patience(LIMIT_S + RETAIN_S)
        while keys := await asyncio.to_thread(left):
            if not bound.lasts():
                return [f"Redis keeps {len(keys)} keys: {keys[:5]}"]
            await asyncio.sleep(LOOK_S)
        return []


async def mixed(
    folder: Path,
    setting: run.Setting,
    rounds: Iterator[list[Fault]],
    found: Mixed,
    *,
    notation: str,
    stall_s: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run it; return the figures."""
    checkpoint = hostile.write_checkpoint(folder, notation, MAX_LEN)
    report = await run.run(setting, rounds, folder, say=say, checkpoint=checkpoint, beside=found.beside)
    if found.longest_turn_s > stall_s:
        found.wrong.append(f"a gateway computed for up to {found.longest_turn_s} s in one turn of its loop")
    figures = run.figures(report)
    return {
        **figures,
        "notation": notation,
        "hostile": hostile.figures(found.tally),
        "hostile_known": found.known,
        "longest_turn_s": found.longest_turn_s,
        "looks_at_event_loops": found.looks,
        "redis_mib": found.redis_mib,
        "wrong": found.wrong[:20],
        "clean": report.clean and not found.wrong and not found.tally.failures,
    }


def table(figures: dict[str, Any]) -> str:
    """Figures, for people."""
    before, after = figures["redis_mib"]
    return "\n".join(
        [
            run.table(figures),
            "",
            hostile.table(figures["hostile"]),
            f"computed at most, in one turn of a gateway's loop: {figures['longest_turn_s']:g} s "
            f"({figures['looks_at_event_loops']} looks); Redis {before:g} -> {after:g} MiB",
            *figures["wrong"],
            "clean" if figures["clean"] else "NOT CLEAN",
        ]
    )


def setting_of(streams: int, seed: int, retain_s: int = RETAIN_S) -> run.Setting:
    """Return the setting of a mixed run.  `retain_s`: seconds that token logs stay."""
    more = (f"--max-model-len={MAX_LEN}", "--kv-blocks=12000", f"--retain-s={retain_s}")
    return run.Setting("tiny", 2, streams, (100, 800), seed, options=more)


def main(words: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="mixed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults, at most")
    for option, default, what in (
        ("--seed", 1, "of requests, answers and faults"),
        ("--streams", 24, "that check tokens, live at any time"),
        ("--hostile", 12, "clients with hostile answers"),
        ("--tokens", 400, "of a hostile answer"),
        ("--cases", 48, "different requests for them"),
    ):
        parser.add_argument(option, type=int, default=default, help=what)
    parser.add_argument("--notation", choices=NOTATIONS, default="hermes", help="of tool calls")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of faults, with commas between them")
    parser.add_argument("--stall-ms", type=float, default=50.0)
    parser.add_argument("--result", help="write the figures to loadtest/results/NAME.json")
    asked = parser.parse_args(words)
    faults = schedule(asked.kinds.split(","), asked.seed, 2)

    def rounds() -> Iterator[list[Fault]]:
        end = time.monotonic() + 60 * asked.minutes
        yield from itertools.takewhile(lambda _: time.monotonic() < end, faults)

    def say(line: str) -> None:
        print(line, flush=True)

    work = hostile.asks(asked.seed, asked.cases, asked.tokens)
    found = Mixed(work, asked.hostile, asked.seed, say)
    setting = setting_of(asked.streams, asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        running = mixed(
            Path(folder), setting, rounds(), found, notation=asked.notation, stall_s=asked.stall_ms / 1000, say=say
        )
        figures = asyncio.run(running)
    print(table(figures))
    if asked.result:
        machine.write(asked.result, shlex.join(["python", "-m", "tests.system.chaos", "mixed", *words]), figures)
    return 0 if figures["clean"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
