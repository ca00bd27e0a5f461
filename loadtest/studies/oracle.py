"""The maximum share of on-time requests of a burst for any scheduler: `python -m quire.loadtest.studies oracle FILE`.

`python -m quire.loadtest burst` writes ARRIVALS.json: the arrivals of a run, the pool, and the step times that were
measured.  Three shares of on-time requests, among those due in the burst and among all:

    simulated         with perfect knowledge of lengths and arrivals, on a virtual clock
    bound             a share that no schedule can exceed; the best possible one lies between these two
    without_lengths   with the best policy of lane_policies.py that knows neither output lengths nor the future

`--policies` prints every policy of lane_policies.py.

A request is on time if its j-th token (0, 1, ...) is generated at most ttft_s + j * pace_s after its arrival.

The bound.  (1) `Work.token_costs`: a step of an engine takes at least the sum of a cost for each token in it, whatever
runs with it.  Costs add up, so an engine can do at most e - s seconds of them from s to e.  (2) The step of a request's
j-th token begins at least j shortest steps after its arrival.  So the tokens of an on-time request with

    arrival + j * shortest >= s   and   arrival + ttft_s + j * pace_s <= e

are computed between s and e, whatever the schedule.  (3) Let w_i be the cost of those tokens of request i.  The
requests that are on time satisfy sum(w_i) <= e - s.  Choosing the requests with the fewest seconds maximises their
number.  That is a bound for every pair (s, e); the smallest is used.  It also covers schedules that preempt, swap or
idle.  It does not cover requests that share a prefix.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.engine.tools.step_time import StepTime
from quire.loadtest.studies.lane_policies import POLICIES, WITHOUT_LENGTHS
from quire.loadtest.studies.pool_model import Capacity, Goal, Outcome, Pool, Request, Work, run

GRID_S = 1.0  # ends of the intervals of the bound
# Fractions of the requests that may start, those with the lowest cost first.
SHARES = (0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0)
# Rounding errors may put a token inside an interval that it just misses; the interval is longer by more than that.
ROUNDING, SLACK_S = 1e-9, 1e-6


class Arrivals(msgspec.Struct, forbid_unknown_fields=True):
    """The file that `python -m quire.loadtest burst` writes."""

    requests: list[Request]
    blocks: int
    block_size: int
    step: StepTime
    max_seqs: int = 256
    ttft_s: float = 2.0
    pace_s: float = 0.1

    @property
    def work(self) -> Work:
        return Work(self.requests, Capacity(self.blocks, self.block_size, self.step, self.max_seqs))

    @property
    def goal(self) -> Goal:
        return Goal(self.ttft_s, self.pace_s)


# ------------------------------------------------------------------------------------------------------------- bound


def bound(work: Work, goal: Goal, counted: Sequence[bool]) -> int:
    """Return an upper bound on the on-time requests of any schedule among `counted`; see the module's docstring."""
    chosen = [number for number, is_counted in enumerate(counted) if is_counted]
    if not chosen:
        return 0
    costs = [np.concatenate([[0.0], np.cumsum(work.token_costs(number))]) for number in chosen]
    starts = np.cumsum([0, *(len(each) for each in costs)])[:-1]
    sums = np.concatenate(costs)
    at = np.array([work.requests[number].at_s for number in chosen])
    length = np.array([work.requests[number].output_len for number in chosen])
    step = work.capacity.step
    shortest = step.fixed + step.row
    best = len(chosen)
    for begin in np.arange(np.floor(at.min()), at.max() + GRID_S, GRID_S):
        first = np.ceil((begin - at) / shortest - ROUNDING).clip(0, length).astype(np.int64)
        ends = begin + GRID_S * np.arange(1, int((at.max() + goal.ttft_s - begin) / GRID_S) + 30)
        for end in ends:
            last = np.floor((end - at - goal.ttft_s) / goal.pace_s + ROUNDING).clip(-1, length - 1).astype(np.int64) + 1
            inside = last > first
            weights = np.sort((sums[starts + last] - sums[starts + first])[inside])
            fit = int(np.searchsorted(np.cumsum(weights), end - begin + SLACK_S, side="right"))
            best = min(best, len(chosen) - len(weights) + fit)
    return best


# ----------------------------------------------------------------------------------------------- perfect knowledge


class Clairvoyant:
    """Starts the chosen requests in the order of `keys` while they can be on time, and drops the others.

    Dropped requests can run after the last arrival, where they delay no request that is on time.
    skip: a request may start before an earlier one that does not fit."""

    def __init__(self, work: Work, goal: Goal, chosen: Sequence[bool], keys: Sequence[float], skip: bool) -> None:
        self._work, self._goal, self._chosen, self._keys, self._skip = work, goal, chosen, keys, skip
        self._queue: list[int] = []

    def arrive(self, number: int, now_s: float) -> None:
        if self._chosen[number]:
            self._queue.append(number)
            self._queue.sort(key=self._keys.__getitem__)

    def start(self, pool: Pool, now_s: float) -> None:
        left, blocked = [], False
        for number in self._queue:
            request = self._work.requests[number]
            if now_s + pool.step_s(request.prompt_len) > request.at_s + self._goal.ttft_s:
                continue
            if blocked or not pool.start(number):
                left.append(number)
                blocked = not self._skip
        self._queue = left

    def waiting(self) -> int:
        return len(self._queue)


def clairvoyant(work: Work, goal: Goal, counted: Sequence[bool], rounds: int) -> list[bool]:
    """Return which requests are on time in the best schedule found for those that are `counted`.

    First tries the requests of lowest cost, for each share of SHARES, in the order of cost or arrival, with and without
    skipping.  Then a local search of `rounds` steps: forbid a few on-time requests of high cost, allow a few late ones
    of low cost, and keep improvements."""
    costs = work.costs
    arrivals = [request.at_s for request in work.requests]
    ranked = sorted((number for number, is_counted in enumerate(counted) if is_counted), key=costs.__getitem__)

    def tried(chosen: Sequence[bool], keys: Sequence[float], skip: bool) -> list[bool]:
        outcome = run(work, Clairvoyant(work, goal, chosen, keys, skip), goal)
        return [a and b for a, b in zip(outcome.on_time, counted, strict=True)]

    keys: Sequence[float]
    best: tuple[int, list[bool], list[bool], Sequence[float], bool] = (-1, [], [], costs, True)
    for share in SHARES:
        allowed = set(ranked[: round(share * len(ranked))])
        chosen = [number in allowed for number in range(len(costs))]
        for keys, skip in itertools.product((costs, arrivals), (True, False)):
            served = tried(chosen, keys, skip)
            if sum(served) > best[0]:
                best = (sum(served), served, chosen, keys, skip)
    rng = random.Random(0)
    for _ in range(rounds if ranked else 0):
        count, served, chosen, keys, skip = best
        changed = list(chosen)
        inside = [number for number in ranked if served[number]]
        outside = [number for number in ranked if not served[number]]
        for number in rng.sample(inside[len(inside) // 2 :], min(3, len(inside) - len(inside) // 2)):
            changed[number] = False
        for number in rng.sample(outside[: len(outside) // 2 + 1], min(6, len(outside) // 2)):
            changed[number] = True
        found = tried(changed, keys, skip)
        if sum(found) >= count:
            best = (sum(found), found, changed, keys, skip)
    return best[1]


# -------------------------------------------------------------------------------------------------------------- report


def shares(work: Work, goal: Goal, rounds: int) -> dict[str, dict[str, float]]:
    """Return for "burst" and "all": requests, and the shares `simulated`, `bound` and `without_lengths`.

    Each share is maximised separately: to serve more of the burst, a schedule may refuse requests outside it.  Without
    a phase "burst" that entry has no requests and shares of 0."""
    found = {}
    rows = {row["policy"]: row for row in policies(work, goal)}
    for name in ("burst", "all"):
        counted = [name == "all" or request.phase == name for request in work.requests]
        total = sum(counted)
        most = bound(work, goal, counted)
        served = sum(clairvoyant(work, goal, counted, rounds)) if total else 0
        found[name] = {
            "requests": float(total),
            "simulated": round(served / total, 4) if total else 0.0,
            "bound": round(most / total, 4) if total else 0.0,
            "without_lengths": round(max(rows[policy][name] for policy in WITHOUT_LENGTHS), 4),
        }
    return found


def policies(work: Work, goal: Goal) -> Iterable[dict[str, Any]]:
    """Yield a row for each of POLICIES: on-time shares, the last first token, utilisation while requests wait.

    Only first tokens count.  An engine computes long prompts in chunks, so that they make no long gaps; this model
    computes them at once."""
    in_burst = [request.phase == "burst" for request in work.requests]
    for name, make in POLICIES.items():
        outcome: Outcome = run(work, make(work, goal), goal)
        rows = zip(work.requests, outcome.first_s, strict=True)
        served = [first <= request.at_s + goal.ttft_s for request, first in rows]
        yield {
            "policy": name,
            "burst": sum(a and b for a, b in zip(served, in_burst, strict=True)) / max(1, sum(in_burst)),
            "all": sum(served) / max(1, len(served)),
            "last_first_token_s": max(outcome.first_s, default=0.0),
            "used_while_waiting": outcome.used,
        }


def read(path: Path) -> Arrivals:
    """Read ARRIVALS.json.  Raises OSError and ValueError, which names the field."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Arrivals)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, value in (("blocks", found.blocks), ("block_size", found.block_size), ("ttft_s", found.ttft_s)):
        if value <= 0:
            raise ValueError(f"{path}: {name} is {value}; it must be > 0")
    for field in ("prompt_len", "output_len"):
        if bad := [getattr(request, field) for request in found.requests if getattr(request, field) < 1]:
            raise ValueError(f"{path}: {field} is {bad[0]}; it must be at least 1")
    if found.step.fixed + found.step.row <= 0:
        raise ValueError(f"{path}: step: fixed and row are 0; a step must take time")
    return found


def options() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m quire.loadtest.studies oracle", description=__doc__, formatter_class=raw
    )
    parser.add_argument("arrivals", type=Path, help="file that `python -m quire.loadtest burst` writes")
    parser.add_argument(
        "--rounds",
        type=int,
        default=100,
        help="steps of the local search; default 100; more steps give a better result",
    )
    parser.add_argument("--policies", action="store_true", help="also simulate policies without perfect knowledge")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def main(argv: list[str]) -> int:
    """Print the shares of requests on time.  Returns 2, with one line on stderr, for an invalid file."""
    args = options().parse_args(argv)
    try:
        arrivals = read(args.arrivals)
        work = arrivals.work
    except (OSError, ValueError) as error:
        print(f"oracle: {error}", file=sys.stderr)
        return 2
    found: dict[str, Any] = dict(shares(work, arrivals.goal, args.rounds))
    rows = list(policies(work, arrivals.goal)) if args.policies else []
    if args.json:
        print(json.dumps(found | ({"policies": rows} if rows else {})))
        return 0
    for name, each in found.items():
        print(
            f"{name:6} {each['requests']:5.0f} requests: simulated {each['simulated']:.1%}, bound {each['bound']:.1%}"
        )
    for row in rows:
        print(
            f"{row['policy']:32} burst {row['burst']:6.1%}  all {row['all']:6.1%}  "
            f"last first token {row['last_first_token_s']:6.1f} s  pool {row['used_while_waiting']:6.1%}"
        )
    return 0
