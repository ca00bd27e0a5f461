"""A burst on a virtual clock: the gateway's decisions before the engine's real scheduler.  Only the model and Redis
(`tests.wire.promises`) are made up.  Clients obey Retry-After."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque

import msgspec
import pytest

from engine.core.blocks import BlockPool
from engine.core.scheduler import Scheduler
from engine.executor.base import ModelInfo, ScriptedExecutor
from engine.load_report import Pace, Rate
from engine.tools.simulate import FAR, SLO_TTFT_S, StepTime, engine_limits
from engine.tools.trace import VOCAB, Job, burst
from engine.wire.messages import Generate, Sampling
from engine.wire.records import Fleet, TenantQueue
from service.admission import Cost, Overloaded, decide
from service.config import GatewayConfig
from tests.service.fakes import a_load
from tests.wire.promises import Book

BLOCKS = 512
STEP = StepTime(fixed=0.003, row=0.00075, prompt_token=0.0002)  # the 42M model on two cores


class Burst:
    """One engine, one gateway, a crowd.  Time in seconds since the run began."""

    def __init__(self, jobs: list[Job], seed: int) -> None:
        self.jobs = jobs
        self.config, self.dice, self.book = GatewayConfig(), random.Random(seed), Book()
        self.core = Scheduler(BlockPool(BLOCKS, 16), engine_limits("forecast"))
        self.executor = ScriptedExecutor(ModelInfo("sim", "sim", VOCAB, FAR, [], 0), BLOCKS)
        self.tokens, self.blocks, self.pace = Rate(), Rate(), Pace()
        self.now = 0.0
        self.queue: deque[int] = deque()
        self.coming = [(job.at_s, number) for number, job in enumerate(jobs)]
        heapq.heapify(self.coming)
        self.tries: Counter[int] = Counter()
        self.told_s = 0.0  # all pauses together
        self.begun: dict[int, float] = {}  # job -> when its first token came
        self.ended = 0

    def run(self) -> None:
        while self.ended < len(self.jobs):
            self.report()
            self.answer()
            self.claim()
            if (plan := self.core.plan(0)) is None:
                self.pace.pause()
                self.now = max(self.now, self.coming[0][0])
                continue
            self.executor.submit(plan)
            result = self.executor.collect()
            self.now += STEP(len(result.slots), sum(len(piece.token_ids) for piece in plan.slices))
            self.core.commit(result)
            self.pace.step(self.now)
            for delta in self.core.outputs().deltas.get("", ()):
                self.begun.setdefault(int(delta.id), self.now)
                self.ended += delta.finish is not None

    @property
    def got_in_when_told(self) -> float:
        """Of those that were refused, the fraction let in at the second attempt."""
        refused = [tries for tries in self.tries.values() if tries > 1]
        return refused.count(2) / len(refused)

    @property
    def in_time(self) -> int:
        return sum(self.begun[number] - job.at_s <= SLO_TTFT_S for number, job in enumerate(self.jobs))

    def report(self) -> None:
        totals = self.core.report.totals
        self.room_tokens, self.seats = self.core.room()
        self.load = a_load(
            total_blocks=BLOCKS,
            running=self.core.running,
            waiting_tokens=self.core.waiting.tokens,
            tokens_per_s=self.tokens.update(totals.generated_tokens, self.now),
            blocks_per_s=self.blocks.update(totals.released_blocks, self.now),
            prompt_tokens=totals.prompt_tokens,
            generated_tokens=totals.generated_tokens,
            step_s=self.pace.value,
        )

    def answer(self) -> None:
        """Who has come since the last step is let in or told when to come again."""
        while self.coming and self.coming[0][0] <= self.now:
            at, number = heapq.heappop(self.coming)
            self.tries[number] += 1
            if (pause_s := self.ask(number, int(at * 1000))) is None:
                self.queue.append(number)
            else:
                self.told_s += pause_s
                heapq.heappush(self.coming, (at + pause_s, number))

    def ask(self, number: int, now_ms: int) -> float | None:
        queued = sum(self.jobs[other].prompt_len for other in self.queue)
        turns = {"": TenantQueue(queued, 0.0, 1.0)} if self.queue else {}
        load = msgspec.structs.replace(self.load, time_ms=now_ms)
        fleet = Fleet([load], len(self.queue), queued, now_ms, self.room_tokens, turns)
        tokens = self.jobs[number].prompt_len
        for returning in (False, True):
            try:
                decide(Cost(tokens, 600.0), fleet, now_ms, self.config, self.dice.random(), returning=returning)
            except Overloaded as refusal:
                terms, unpromised_s = refusal.retry_terms, refusal.retry_after_s
            else:
                self.book.submit(str(number), tokens, now_ms)
                return None
            pause_ms = -1
            if terms is not None:
                pause_ms = self.book.promise(str(number), tokens, terms, now_ms, broken=returning)
            if pause_ms:
                return pause_ms / 1000 if pause_ms > 0 else unpromised_s
        raise AssertionError("told twice to come now")

    def claim(self) -> None:
        while self.queue and self.seats > 0 and self.jobs[self.queue[0]].prompt_len <= self.room_tokens:
            number = self.queue.popleft()
            job = self.jobs[number]
            self.room_tokens -= job.prompt_len
            self.seats -= 1
            prompt = [2 + (number * 7919 + i) % (VOCAB - 2) for i in range(job.prompt_len)]
            self.core.accept(Generate(str(number), "", prompt, job.output_len, Sampling(ignore_eos=True), FAR))


@pytest.mark.parametrize("seed", range(2))
def test_who_returns_when_told_gets_in_and_who_is_let_in_at_once_is_served_in_time(seed: int) -> None:
    """Three times the load for 30 s."""
    run = Burst(burst(seed, ends_known=True), seed)
    run.run()
    assert run.core.report.totals.preemptions == 0
    assert sum(tries > 1 for tries in run.tries.values()) > 100, "hardly anybody was refused, so nothing was tested"
    assert run.got_in_when_told >= 0.9
    at_once = [run.begun[number] - job.at_s for number, job in enumerate(run.jobs) if run.tries[number] == 1]
    assert sum(waited <= SLO_TTFT_S for waited in at_once) >= 0.9 * len(at_once)


class Cautious(Book):
    """Always expects more newcomers than the engines can serve."""

    def newcomers(self, now: int) -> float:
        return math.inf


def test_a_crowd_that_comes_once_is_not_told_to_wait_for_newcomers_who_never_come() -> None:
    """140 within 140 ms on a server that is a quarter busy."""
    runs, cautious = [], []
    for seed in range(3):
        usual = burst(seed, base=2.0, peak=2.0, peak_s=5.0, rest_s=20.0, ends_known=True)
        crowd = burst(seed + 10, base=20.0, ends_known=True)[:140]
        crowd = [msgspec.structs.replace(job, at_s=25.0 + i / 1000) for i, job in enumerate(crowd)]
        jobs = sorted(usual + crowd, key=lambda job: job.at_s)
        runs.append(Burst(jobs, seed))
        cautious.append(Burst(jobs, seed))
        cautious[-1].book = Cautious()
    for run in runs + cautious:
        run.run()
    assert sum(run.got_in_when_told for run in runs) >= 0.9 * len(runs)
    assert sum(run.in_time for run in runs) >= sum(run.in_time for run in cautious)
    assert sum(run.told_s for run in runs) <= 0.85 * sum(run.told_s for run in cautious)
