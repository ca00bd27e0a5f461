"""A million operations on the scheduler, with the block accounting checked after each.

    python -m tests.system.chaos soak [--operations 1000000] [--seed 1] [--result NAME]

Episodes of some hundred operations drive the state machine of tests/core/machine.py: requests with shared
prefixes, siblings, salts, tenants and deadlines arrive and leave, steps run and fail, engines crash.  Each episode has
its own seed and settings, and ends with every request finished and every token compared with the reference.  The first
error ends the run with status 1, and prints the command that repeats its episode.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shlex
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from quire.engine.core.swapping import Preempt
from quire.loadtest import machine
from quire.loadtest.studies.baselines import MODES
from tests.core.machine import PREFIXES, SchedulerMachine
from tests.core.oracle import FORCED, VOCAB
from tests.core.rig import BAD_SEED, FAR

EPISODE = (50, 600)  # operations, minimum and maximum
SAY_S = 10.0  # between two lines of progress


@dataclass
class Soaked:
    """What a run did."""

    operations: Counter[str] = field(default_factory=Counter)
    episodes: int = 0
    requests: int = 0
    tokens: int = 0  # compared with the reference
    audits: int = 0
    seconds: float = 0.0

    @property
    def count(self) -> int:
        return self.operations.total()


class Episode:
    """One scheduler from its start to its last request."""

    def __init__(self, seed: str, operations: Counter[str]) -> None:
        """`operations` counts what is done."""
        self._operations = operations
        self.dice = random.Random(seed)
        self.machine = SchedulerMachine()
        found = self.machine.invariants  # a method in some versions of hypothesis, a list in others
        self._checks = [one.function for one in (found() if callable(found) else found)]
        self.length = self.dice.randint(*EPISODE)
        self._weights = {name: self.dice.random() ** 2 + 0.01 for name in self._actions()}
        self._weights["crash"] *= 0.05  # or little gets done between two of them
        self._weights["executor_fails"] *= 0.1
        self._weights["add"] += 0.2
        self._weights["steps"] += 0.3

    def _actions(self) -> dict[str, Callable[[], None]]:
        return {
            "add": self._add,
            "submit": self._submit,
            "commit": self._commit,
            "steps": self._steps,
            "abort": self._abort,
            "reset": self._reset,
            "measured": self._measure,
            "crash": self._crash,
            "executor_fails": self._fail,
        }

    def run(self, soaked: Soaked) -> None:
        """Raises whatever a check finds."""
        dice, machine = self.dice, self.machine
        machine.choose(
            admission=dice.choice(MODES),
            preempt=dice.choice(get_args(Preempt)),
            host_blocks=dice.choice([0, 6, 40]),
            caching=dice.random() < 0.7,
        )
        actions = self._actions()
        names, weights = list(actions), [self._weights[name] for name in actions]
        for name in dice.choices(names, weights, k=self.length):
            actions[name]()
            for check in self._checks:
                check(machine)
        machine.teardown()
        rig = machine.rig
        soaked.episodes += 1
        soaked.requests += len(rig.requests)
        soaked.tokens += sum(map(len, rig.answers.values()))
        soaked.audits += rig.core.report.totals.audits

    def _add(self) -> None:
        dice = self.dice
        self._operations["accept"] += 1
        self.machine.add(
            prefix=dice.choice(PREFIXES),
            tail=[dice.randint(1, VOCAB - 1) for _ in range(dice.randint(0, 12))],
            new=dice.randint(1, 30),
            n=dice.randint(1, 3),
            seed=dice.choice([0, 1, 2, 3] * 4 + [BAD_SEED]),
            salt=dice.choice(["", "tenant"]),
            ignore_eos=dice.random() < 0.5,
            life=dice.choice([FAR, FAR, 40]),
            priority=dice.choice([0, 0, 5]),
            tenant=dice.choice([("", 1.0), ("", 1.0), ("light", 0.5), ("heavy", 3.0)]),
            prompt_logprobs=dice.choice([-1, -1, 0]),
            grammar=dice.choice(["", "", FORCED]),
        )

    def _submit(self) -> None:
        if len(self.machine.rig.executor.plans) < 2:
            before = len(self.machine.rig.executor.plans)
            self.machine.submit()
            self._operations["plan" if len(self.machine.rig.executor.plans) > before else "plan of nothing"] += 1

    def _commit(self) -> None:
        if self.machine.rig.executor.plans:
            self._operations["commit"] += 1
            self.machine.commit()

    def _steps(self) -> None:
        """As the engine's loop does it, two steps in flight."""
        for _ in range(self.dice.randint(1, 12)):
            before = len(self.machine.rig.executor.plans)
            self._submit()
            after = len(self.machine.rig.executor.plans)
            if after and (after == before or after == 2):
                self._commit()

    def _abort(self) -> None:
        if self.machine.rig.requests:
            self._operations["abort"] += 1
            self.machine.rig.core.abort(self.dice.choice(list(self.machine.rig.requests)), self.dice.randint(-1, 2))
            self.machine.rig.collect_outputs()

    def _reset(self) -> None:
        self._operations["reset of the prefix cache"] += 1
        self.machine.reset_prefix_cache()

    def _measure(self) -> None:
        """What a copy to the host costs, for the mode that chooses."""
        self.machine.measured(bytes_per_s=self.dice.choice([1.0, 64e3, 64e6]), prompt_tokens=self.dice.randint(0, 16))

    def _crash(self) -> None:
        self._operations["crash"] += 1
        self.machine.crash()

    def _fail(self) -> None:
        if self.machine.rig.executor.plans:
            self._operations["failed step"] += 1
            self.machine.executor_fails()


def soak(
    operations: int, seed: int, *, first: int = 0, say: Callable[[str], None] = lambda line: None
) -> tuple[Soaked, str]:
    """Episodes from the number `first` on.  Returns what was done, and the first error with what repeats it, or ''."""
    soaked, began = Soaked(), time.monotonic()
    said = began
    for number in itertools.count(first):
        try:
            Episode(f"{seed}/{number}", soaked.operations).run(soaked)
        except Exception:
            again = shlex.join(["python", "-m", "tests.system.chaos", "soak", "--operations=1"])
            return soaked, f"{traceback.format_exc()}\n{again} --seed={seed} --episode={number}"
        soaked.seconds = time.monotonic() - began
        if soaked.count >= operations:
            return soaked, ""
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            say(f"{soaked.count} operations, {soaked.count / soaked.seconds:.0f} a second")
    raise AssertionError


def figures(soaked: Soaked, error: str) -> dict[str, Any]:
    """Return what a result file has."""
    return {
        "clean": not error,
        "operations": dict(soaked.operations),
        "schedulers": soaked.episodes,
        "requests": soaked.requests,
        "tokens": soaked.tokens,
        "audits": soaked.audits,
        "seconds": round(soaked.seconds, 1),
    }


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000, help="at least; the last episode runs to its end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--episode", type=int, default=0, help="number of the first episode")
    parser.add_argument("--result", help="write the figures to loadtest/results/NAME.json")
    options = parser.parse_args(words)
    soaked, error = soak(
        options.operations, options.seed, first=options.episode, say=lambda line: print(line, flush=True)
    )
    pace = soaked.count / max(soaked.seconds, 1e-9)
    print(
        f"{soaked.count} operations in {soaked.seconds:.0f} s, {pace:.0f} a second: "
        + ", ".join(f"{count} {name}" for name, count in soaked.operations.most_common())
    )
    print(
        f"{soaked.episodes} schedulers, {soaked.requests} requests, each ended once; {soaked.tokens} tokens equal to "
        "the reference, none lost or repeated; reference counts, tables and the free list balanced after each operation"
    )
    if error:
        print(error, file=sys.stderr)
    if options.result:
        machine.write(
            options.result, shlex.join(["python", "-m", "tests.system.chaos", "soak", *words]), figures(soaked, error)
        )
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
