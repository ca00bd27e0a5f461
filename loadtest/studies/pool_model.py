"""A small model of an engine's block pool and of admission policies: thousands of requests in a tenth of a second.

    arrivals ──> policy: which waiting request starts now? ──> Pool: does it fit until its end? ──> a step of the clock

Every output length is known, and every running sequence gets a token in each step.  So the blocks that a sequence will
hold are known when it starts, and a start that fits now fits until its end: nothing is ever preempted.  The real
scheduler (`engine.tools simulate`) decides the same in mode "forecast" with known lengths, but takes a hundred times as
long.  Not modelled: chunked prefill (a prompt is computed in one step), shared prefixes, Redis and the network.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.engine.tools.step_time import StepTime

Array = npt.NDArray[np.int64]


class Request(msgspec.Struct, frozen=True):
    """One arrival.  Lengths in tokens; `at_s` in seconds since the run began."""

    at_s: float
    prompt_len: int
    output_len: int
    phase: str = ""


class Capacity(msgspec.Struct, frozen=True):
    """Resources and step times of an engine."""

    blocks: int
    block_size: int  # tokens
    step: StepTime
    max_seqs: int = 256
    step_tokens: int = 8192  # prompt tokens of one step; a longer prompt is computed in a step of its own


class Goal(msgspec.Struct, frozen=True):
    """Definition of on time: the j-th token (0, 1, ...) is generated at most ttft_s + j * pace_s after the arrival."""

    ttft_s: float = 2.0
    pace_s: float = 0.1


class Work:
    """The requests of a run, their block needs and their costs."""

    def __init__(self, requests: Sequence[Request], capacity: Capacity) -> None:
        """Raises ValueError for a request that is larger than the pool."""
        self.requests, self.capacity = sorted(requests, key=lambda request: request.at_s), capacity
        size = capacity.block_size
        # In its j-th step (0, 1, ...) a sequence holds the prompt and j tokens of its output.
        self.needs: list[Array] = [-(-(r.prompt_len + np.arange(r.output_len)) // size) for r in self.requests]
        for request, need in zip(self.requests, self.needs, strict=True):
            if need[-1] > capacity.blocks:
                tokens = f"{request.prompt_len} and {request.output_len} tokens"
                raise ValueError(f"a request of {tokens} takes {need[-1]} blocks; the pool has {capacity.blocks}")

    @cached_property
    def costs(self) -> list[float]:
        """The minimum engine seconds of each request (`token_costs`)."""
        return [float(self.token_costs(number).sum()) for number in range(len(self.requests))]

    def token_costs(self, number: int) -> npt.NDArray[np.float64]:
        """Return the minimum engine seconds of each token of a request.

        A step with rows R that hold b_i blocks each takes fixed + row * |R| + prompt_token * prompts.  As the b_i add
        up to `blocks` at most, fixed >= fixed * sum(b_i) / blocks.  So a step takes at least the sum over its rows of
        fixed * b_i / blocks + row, and of prompt_token * prompt where a row starts."""
        step = self.capacity.step
        costs = step.fixed * self.needs[number] / self.capacity.blocks + step.row
        costs[0] += step.prompt_token * self.requests[number].prompt_len
        return costs


class Pool:
    """The blocks that all started sequences will hold in every later step."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._usage: Array = np.zeros(1 << 14, dtype=np.int64)  # blocks held in each step
        self._ends: list[int] = []  # heap with the end step of each running sequence
        self._retry: dict[int, int] = {}  # request -> first step that may have free blocks for it
        self.step = 0
        self.started: list[int] = []  # requests started in this step
        self.prompt_tokens = 0  # prompt tokens started in this step

    @property
    def running(self) -> int:
        """Sequences in this step, including those that start in it."""
        return len(self._ends)

    @property
    def held(self) -> int:
        """Blocks held in this step."""
        return int(self._usage[self.step])

    def step_s(self, more_prompt: int = 0) -> float:
        """Seconds of this step, with a further prompt of `more_prompt` tokens."""
        return self._work.capacity.step(self.running + bool(more_prompt), self.prompt_tokens + more_prompt)

    def start(self, number: int) -> bool:
        """Start a request in this step if it fits until its end; return whether it did."""
        capacity, request = self._work.capacity, self._work.requests[number]
        if self._retry.get(number, 0) > self.step or self.running >= capacity.max_seqs:
            return False
        others = self.running > 0
        if others and self.prompt_tokens + request.prompt_len > capacity.step_tokens:
            return False
        need, begin, end = self._work.needs[number], self.step, self.step + request.output_len
        while end >= len(self._usage):
            self._usage = np.concatenate([self._usage, np.zeros_like(self._usage)])
        over = np.flatnonzero(self._usage[begin:end] + need > capacity.blocks)
        if len(over):
            self._retry[number] = self._earliest(request, over + begin)
            return False
        self._usage[begin:end] += need
        heapq.heappush(self._ends, end)
        self.started.append(number)
        self.prompt_tokens += request.prompt_len
        return True

    def _earliest(self, request: Request, full: Array) -> int:
        """Return the first step in which a request might start.  `full`: the steps with too few free blocks for it.

        The blocks held in a given step never become fewer, since starts only add to them.  So in each full step the
        request must have ended, not have started yet, or be short enough to fit."""
        capacity = self._work.capacity
        free = capacity.blocks - self._usage[full]
        return int(np.minimum(full + 1, request.prompt_len + full - free * capacity.block_size).max())

    def advance(self) -> None:
        """End the step."""
        self.step += 1
        self.started, self.prompt_tokens = [], 0
        while self._ends and self._ends[0] <= self.step:
            heapq.heappop(self._ends)


class Policy(Protocol):
    """Decides which waiting requests start."""

    def arrive(self, number: int, now_s: float) -> None:
        """Take a request, which may start from now on."""

    def start(self, pool: Pool, now_s: float) -> None:
        """Call `pool.start` for requests in the order of this policy."""

    def waiting(self) -> int:
        """Number of requests that have not started and still may start."""


class Outcome(msgspec.Struct):
    """First-token times of all requests, and the pool's utilisation.  Times are seconds since the run began."""

    first_s: list[float]  # infinity: never started
    on_time: list[bool]  # whether the request met the goal
    waiting_s: float  # seconds in which requests waited
    used: float  # mean utilisation of the pool in that time


def run(work: Work, policy: Policy, goal: Goal) -> Outcome:
    """Run all requests.  Raises RuntimeError if the policy leaves requests waiting next to an empty pool."""
    pool, arrivals = Pool(work), work.requests
    begun = [-1] * len(arrivals)  # the step in which each starts
    out_s: list[float] = []  # second at which each step ends
    now = waiting_s = held_s = 0.0
    coming = 0
    while True:
        while coming < len(arrivals) and arrivals[coming].at_s <= now:
            policy.arrive(coming, arrivals[coming].at_s)
            coming += 1
        policy.start(pool, now)
        if not pool.running:
            if coming == len(arrivals):
                break
            now = max(now, arrivals[coming].at_s)
            continue
        seconds = pool.step_s()
        if policy.waiting():
            waiting_s += seconds
            held_s += seconds * pool.held
        now += seconds
        out_s.append(now)
        for number in pool.started:
            begun[number] = pool.step
        pool.advance()
    if policy.waiting():
        raise RuntimeError(f"{policy.waiting()} requests wait and nothing runs")
    times = np.array(out_s)
    return Outcome(
        [out_s[step] if step >= 0 else float("inf") for step in begun],
        [step >= 0 and _on_time(times[step:], r, goal) for step, r in zip(begun, arrivals, strict=True)],
        waiting_s,
        held_s / waiting_s / work.capacity.blocks if waiting_s else 0.0,
    )


def _on_time(out_s: npt.NDArray[np.float64], request: Request, goal: Goal) -> bool:
    """Return whether a request is on time.  `out_s`: end of each step, from the request's first step on."""
    delays = out_s[: request.output_len] - goal.pace_s * np.arange(request.output_len)
    return bool(delays.max() <= request.at_s + goal.ttft_s)
