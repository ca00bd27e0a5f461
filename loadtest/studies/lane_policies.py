"""Policies for a burst that `python -m quire.loadtest.studies oracle --policies` compares: one queue, two lanes.

arrival ──> estimated wait <= ttft_s? ──yes──> on-time lane ──> start, in the order of the lane
                      │                            │ too late to be on time: moves
                      └──────────no──────────> late lane ──> start with the remaining capacity, oldest first
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from quire.loadtest.studies.pool_model import Goal, Policy, Pool, Work

PACE_S = 5.0  # seconds over which the rate of starts, in prompt tokens per second, is measured


class OneQueue:
    """Starts requests strictly in the order of arrival."""

    def __init__(self, work: Work, goal: Goal) -> None:
        self._queue: deque[int] = deque()

    def arrive(self, number: int, now_s: float) -> None:
        self._queue.append(number)

    def start(self, pool: Pool, now_s: float) -> None:
        while self._queue and pool.start(self._queue[0]):
            self._queue.popleft()

    def waiting(self) -> int:
        return len(self._queue)


Order = Literal["oldest", "newest", "smallest prompt", "fewest tokens", "token class", "least work"]


class TwoLanes:
    """Simulate the gateway's two lanes in front of one engine.

    order, late_order: order of starts in a lane.  "fewest tokens" counts prompt and output; "token class" does so in
    powers of two, oldest first within a class; "least work" counts engine seconds (`Work.costs`).  All three need the
    output lengths.
    late_share: fraction of the started prompt tokens for the late lane while both lanes have requests.
    estimate: move a request to the late lane at arrival, by its estimated wait; otherwise once it has waited too long.
    """

    def __init__(
        self,
        work: Work,
        goal: Goal,
        *,
        order: Order = "oldest",
        late_order: Order = "oldest",
        late_share: float = 0.1,
        estimate: bool = True,
    ) -> None:
        self._work, self._goal, self._late_share, self._estimate = work, goal, late_share, estimate
        self._key, self._late_key = self._key_of(order), self._key_of(late_order)
        self._on_time: list[int] = []
        self._late: list[int] = []
        self._recent: deque[tuple[float, int]] = deque()  # (time in s, prompt tokens) of recent starts
        self._prompts = [0, 0]  # prompt tokens started from the on-time and the late lane while both had requests

    def _key_of(self, order: Order) -> Callable[[int], tuple[float, float]]:
        requests, work = self._work.requests, self._work
        lengths = [request.prompt_len + request.output_len for request in requests]
        first: dict[Order, Callable[[int], float]] = {
            "oldest": lambda number: 0.0,
            "newest": lambda number: -requests[number].at_s,
            "smallest prompt": lambda number: requests[number].prompt_len,
            "fewest tokens": lambda number: lengths[number],
            "token class": lambda number: lengths[number].bit_length(),
            "least work": lambda number: work.costs[number],
        }
        return lambda number: (first[order](number), requests[number].at_s)

    def arrive(self, number: int, now_s: float) -> None:
        late = self._wait(number, now_s) > self._goal.ttft_s
        (self._late if late else self._on_time).append(number)

    def _wait(self, number: int, now_s: float) -> float:
        """Return the estimated seconds until a request starts: prompt tokens ahead / prompt tokens/s started."""
        while self._recent and self._recent[0][0] < now_s - PACE_S:
            self._recent.popleft()
        started = sum(tokens for _, tokens in self._recent)
        if not self._estimate or not self._on_time or not started:
            return 0.0
        requests = self._work.requests
        ahead = [other for other in self._on_time if self._key(other) <= self._key(number)]
        tokens = sum(requests[other].prompt_len for other in ahead) + requests[number].prompt_len
        return tokens * min(PACE_S, max(now_s, 0.1)) / started

    def start(self, pool: Pool, now_s: float) -> None:
        requests, limit = self._work.requests, now_s - self._goal.ttft_s
        expired = [number for number in self._on_time if requests[number].at_s < limit]
        if expired:
            self._late += expired
            self._on_time = [number for number in self._on_time if requests[number].at_s >= limit]
        self._on_time.sort(key=self._key)
        self._late.sort(key=self._late_key)
        if self._on_time and self._late and self._prompts[1] < self._late_share * sum(self._prompts):
            self._take(self._late, pool, now_s, 1, most=1)
        self._take(self._on_time, pool, now_s, 0)
        if not self._on_time:
            self._take(self._late, pool, now_s, 1)

    def _take(self, lane: list[int], pool: Pool, now_s: float, which: int, most: int = 1 << 30) -> None:
        """Start at most `most` requests of a lane, until one does not fit."""
        both = bool(self._on_time and self._late)
        started = 0
        for number in lane[:most]:
            if not pool.start(number):
                break
            started += 1
            tokens = self._work.requests[number].prompt_len
            self._recent.append((now_s, tokens))
            self._prompts[which] += tokens if both else 0
        del lane[:started]

    def waiting(self) -> int:
        return len(self._on_time) + len(self._late)


def _lanes(**options: Any) -> Callable[[Work, Goal], Policy]:
    return lambda work, goal: TwoLanes(work, goal, **options)


POLICIES: dict[str, Callable[[Work, Goal], Policy]] = {
    "one queue": OneQueue,
    "lanes": _lanes(),
    "lanes, nothing guaranteed": _lanes(late_share=0.0),
    "lanes without estimate": _lanes(estimate=False),
    "lanes, newest first": _lanes(order="newest"),
    "lanes, smallest prompt first": _lanes(order="smallest prompt"),
    "lanes, fewest tokens first": _lanes(order="fewest tokens"),
    "lanes, lowest token class first": _lanes(order="token class"),
    "lanes, least work first": _lanes(order="least work"),
    "lanes, least work, late too": _lanes(order="least work", late_order="least work"),
}
# Policies that need no output length.
WITHOUT_LENGTHS = (
    "one queue",
    "lanes",
    "lanes, nothing guaranteed",
    "lanes without estimate",
    "lanes, newest first",
    "lanes, smallest prompt first",
)
