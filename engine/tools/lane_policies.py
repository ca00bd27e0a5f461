"""Policies for a burst that `python -m engine.tools oracle --policies` compares: one queue, and two lanes.

arrival ──> estimated wait <= ttft_s? ──yes──> on-time lane ──> start, in the order of the lane
                      │                            │ too late to be on time: moves
                      └──────────no──────────> late lane ──> start with what room is left, oldest first
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from engine.tools.pool_model import Goal, Policy, Pool, Work

PACE_S = 5.0  # the pace is that of the last seconds


class OneQueue:
    """Starts requests in the order of arrival, and none before the head of the queue."""

    def __init__(self, work: Work, goal: Goal) -> None:
        self._queue: deque[int] = deque()

    def arrive(self, number: int, now_s: float) -> None:
        self._queue.append(number)

    def start(self, pool: Pool, now_s: float) -> None:
        while self._queue and pool.start(self._queue[0]):
            self._queue.popleft()

    def waiting(self) -> int:
        return len(self._queue)


Order = Literal["oldest", "newest", "smallest prompt", "least work"]


class TwoLanes:
    """The gateway's two lanes before one engine, with lengths known to the engine alone or to both.

    order, late_order: which of a lane starts first.  "least work" needs to know output lengths.
    late_share: fraction of the started prompt tokens that the late lane gets while both lanes have requests.
    skip: whether a request may start before one of its lane that does not fit.
    largest: fraction of the requests, those with the most work, that go to the late lane while any request waits."""

    def __init__(
        self,
        work: Work,
        goal: Goal,
        *,
        order: Order = "oldest",
        late_order: Order = "oldest",
        late_share: float = 0.1,
        skip: bool = False,
        largest: float = 0.0,
        estimate: bool = True,
    ) -> None:
        self._work, self._goal, self._late_share = work, goal, late_share
        self._skip, self._estimate = skip, estimate
        self._key, self._late_key = self._key_of(order), self._key_of(late_order)
        self._on_time: list[int] = []
        self._late: list[int] = []
        self._recent: deque[tuple[float, int]] = deque()  # (when, prompt tokens) of starts
        self._prompts = [0, 0]  # prompt tokens started from the on-time and the late lane while both had requests
        ranked = sorted(work.costs)
        self._most = ranked[int((1 - largest) * (len(ranked) - 1))] if largest else float("inf")

    def _key_of(self, order: Order) -> Callable[[int], float]:
        requests = self._work.requests
        return {
            "oldest": lambda number: requests[number].at_s,
            "newest": lambda number: -requests[number].at_s,
            "smallest prompt": lambda number: float(requests[number].prompt_len),
            "least work": lambda number: self._work.costs[number],
        }[order]

    def arrive(self, number: int, now_s: float) -> None:
        crowded = bool(self._on_time or self._late)
        if (crowded and self._work.costs[number] > self._most) or self._wait(number, now_s) > self._goal.ttft_s:
            self._late.append(number)
        else:
            self._on_time.append(number)

    def _wait(self, number: int, now_s: float) -> float:
        """Return the estimated seconds until a request starts: prompt tokens ahead of it over the pace of starts."""
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
        """Start requests of a lane, `most` at most, until one does not fit; with `skip` also those after it."""
        both = bool(self._on_time and self._late)
        started = set()
        for number in lane:
            if len(started) == most:
                break
            if pool.start(number):
                started.add(number)
                tokens = self._work.requests[number].prompt_len
                self._recent.append((now_s, tokens))
                self._prompts[which] += tokens if both else 0
            elif not self._skip:
                break
        lane[:] = [number for number in lane if number not in started]

    def waiting(self) -> int:
        return len(self._on_time) + len(self._late)


POLICIES: dict[str, Callable[[Work, Goal], Policy]] = {
    "one queue": OneQueue,
    "two lanes": TwoLanes,
    "two lanes, nothing guaranteed": lambda work, goal: TwoLanes(work, goal, late_share=0.0),
    "no estimate": lambda work, goal: TwoLanes(work, goal, estimate=False),
    "no estimate, newest first": lambda work, goal: TwoLanes(work, goal, estimate=False, order="newest"),
    "no estimate, smallest prompt": lambda work, goal: TwoLanes(work, goal, estimate=False, order="smallest prompt"),
    "largest 10 % late": lambda work, goal: TwoLanes(work, goal, largest=0.1),
    "largest 20 % late": lambda work, goal: TwoLanes(work, goal, largest=0.2),
    "largest 30 % late": lambda work, goal: TwoLanes(work, goal, largest=0.3),
    "largest 40 % late": lambda work, goal: TwoLanes(work, goal, largest=0.4),
    "least work first": lambda work, goal: TwoLanes(work, goal, estimate=False, order="least work"),
    "least work first, skipping": lambda w, g: TwoLanes(w, g, estimate=False, order="least work", skip=True),
    "least work, late too": lambda w, g: TwoLanes(w, g, estimate=False, order="least work", late_order="least work"),
}
