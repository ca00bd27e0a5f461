"""The oracle of a burst: never above the best schedule of tiny instances, its bound never below it."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.tools.simulate import engine_limits, simulate
from quire.engine.tools.step_time import StepTime
from quire.engine.tools.trace import Job, burst
from quire.loadtest.studies import __main__ as studies
from quire.loadtest.studies.lane_policies import OneQueue, TwoLanes
from quire.loadtest.studies.oracle import Clairvoyant, bound, clairvoyant, main, shares
from quire.loadtest.studies.pool_model import Capacity, Goal, Pool, Request, Work, run
from tests.matrix import examples

STEP = StepTime(fixed=1.0, row=0.25, prompt_token=0.125)


def brute_force(work: Work, goal: Goal) -> int:
    """Return the maximum number of on-time requests of any schedule.

    Each step computes any set of requests that fits; the others are swapped out at no cost.  Before each step it may
    wait for the next arrival.  A request that missed a token's time is dropped: it counts no more."""
    requests, step = work.requests, work.capacity.step

    def in_time(number: int, token: int, now: float) -> bool:
        return now <= requests[number].at_s + goal.ttft_s + token * goal.pace_s + 1e-9

    @cache
    def best(now: float, done: tuple[int, ...]) -> int:
        left = [n for n, tokens in enumerate(done) if tokens < requests[n].output_len and in_time(n, tokens, now)]
        found = sum(tokens == request.output_len for tokens, request in zip(done, requests, strict=True))
        later = [requests[n].at_s for n in left if requests[n].at_s > now]
        options = [best(min(later), done)] if later else []
        ready = [n for n in left if requests[n].at_s <= now]
        for size in range(1, len(ready) + 1):
            for chosen in itertools.combinations(ready, size):
                if sum(int(work.needs[n][done[n]]) for n in chosen) > work.capacity.blocks:
                    continue
                prompts = sum(requests[n].prompt_len for n in chosen if not done[n])
                after = now + step(size, prompts)
                if all(in_time(n, done[n], after) for n in chosen):
                    options.append(best(after, tuple(t + (n in chosen) for n, t in enumerate(done))))
        return max(options, default=found)

    return best(0.0, (0,) * len(requests))


tiny = st.lists(
    st.builds(
        Request,
        at_s=st.integers(0, 6).map(float),
        prompt_len=st.integers(1, 6),
        output_len=st.integers(1, 3),
    ),
    min_size=1,
    max_size=4,
)


@given(tiny, st.integers(4, 8), st.sampled_from([2.0, 4.0, 6.0]), st.sampled_from([1.5, 3.0]))
@settings(max_examples=examples(150), deadline=None)
def test_the_best_schedule_lies_between_the_simulated_one_and_the_bound(
    requests: list[Request], blocks: int, ttft_s: float, pace_s: float
) -> None:
    work, goal = Work(requests, Capacity(blocks, 2, STEP)), Goal(ttft_s, pace_s)
    counted = [True] * len(requests)
    best = brute_force(work, goal)
    assert sum(clairvoyant(work, goal, counted, rounds=5)) <= best <= bound(work, goal, counted)


def test_both_are_exact_where_the_pool_serves_one_request_at_a_time() -> None:
    """Four requests at once that fill the pool, a step of 1 s each, and a limit of 2.5 s: two are on time."""
    step = StepTime(fixed=1.0, row=0.0, prompt_token=0.0)
    work, goal = Work([Request(0.0, 4, 1)] * 4, Capacity(2, 2, step)), Goal(2.5, 0.1)
    assert brute_force(work, goal) == 2
    assert sum(clairvoyant(work, goal, [True] * 4, rounds=0)) == 2
    # Intervals end at full seconds: three requests fit those that end at 3 s.
    assert bound(work, goal, [True] * 4) == 3


def test_knowledge_of_the_future_pays() -> None:
    """A request of the size of the pool arrives before three small ones: the oracle leaves it out, one queue does
    not."""
    small = [Request(0.5 + 0.1 * i, 2, 20) for i in range(3)]
    step = StepTime(fixed=0.1, row=0.0, prompt_token=0.0)
    work, goal = Work([Request(0.0, 96, 30), *small], Capacity(63, 2, step)), Goal(1.0, 1.0)
    served = clairvoyant(work, goal, [True] * 4, rounds=20)
    assert served == [False, True, True, True]
    assert run(work, OneQueue(work, goal), goal).on_time == [True, False, False, False]


def test_what_is_not_counted_may_be_left_out_for_what_is() -> None:
    requests = [Request(0.0, 8, 1, "base"), Request(0.0, 8, 1, "burst")]
    work, goal = Work(requests, Capacity(4, 2, STEP)), Goal(2.5, 1.0)
    found = shares(work, goal, rounds=5)
    assert found["burst"] == {"requests": 1.0, "simulated": 1.0, "bound": 1.0, "without_lengths": 0.0}
    assert found["all"]["simulated"] == 0.5


@given(tiny, st.integers(4, 8))
@settings(max_examples=examples(60), deadline=None)
def test_no_step_holds_more_than_the_pool_and_every_request_of_a_queue_runs(
    requests: list[Request], blocks: int
) -> None:
    work, goal = Work(requests, Capacity(blocks, 2, STEP)), Goal()
    for policy in (OneQueue(work, goal), TwoLanes(work, goal), TwoLanes(work, goal, order="least work")):
        pool_held: list[int] = []

        class Watched(Pool):
            def advance(self, held: list[int] = pool_held) -> None:
                held.append(self.held)
                super().advance()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quire.loadtest.studies.pool_model.Pool", Watched)
            outcome = run(work, policy, goal)
        assert max(pool_held) <= blocks
        assert all(first < float("inf") for first in outcome.first_s)


def test_a_start_is_refused_only_while_it_does_not_fit() -> None:
    """The step before which a request is not tried again is a lower bound: one that tries in each step agrees."""
    jobs = burst(3, base=8, peak=24, peak_s=4, rest_s=4, ends_known=True)
    work = Work([Request(j.at_s, j.prompt_len, j.output_len) for j in jobs], Capacity(200, 16, StepTime()))
    goal = Goal()
    usual = run(work, OneQueue(work, goal), goal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "_earliest", lambda self, request, full: 0)
        assert run(work, OneQueue(work, goal), goal).first_s == usual.first_s


def test_the_model_agrees_with_the_real_scheduler() -> None:
    """One queue, lengths known: the same requests on the scheduler of `engine.tools simulate`."""
    jobs: list[Job] = burst(1, peak_s=10, rest_s=10, ends_known=True)
    real = simulate(jobs, engine_limits("forecast"), 256)
    work = Work([Request(job.at_s, job.prompt_len, job.output_len) for job in jobs], Capacity(256, 16, StepTime()))
    goal = Goal(2.0, 0.2)
    outcome = run(work, OneQueue(work, goal), goal)
    assert sum(outcome.on_time) / len(jobs) == pytest.approx(real.goodput, abs=0.05)
    assert outcome.used == pytest.approx(real.utilisation, abs=0.06)
    waits = sorted(first - request.at_s for first, request in zip(outcome.first_s, work.requests, strict=True))
    assert waits[len(waits) // 2] == pytest.approx(real.ttft[0], rel=0.15)


def test_late_requests_start_when_no_other_waits() -> None:
    """The pool holds one request; the first expires in its lane, and the one that is on time overtakes it."""
    step = StepTime(fixed=1.0, row=0.0, prompt_token=0.0)
    requests = [Request(0.0, 5, 4), Request(0.5, 5, 1), Request(3.5, 5, 1)]
    work, goal = Work(requests, Capacity(4, 2, step)), Goal(1.0, 9.0)
    outcome = run(work, TwoLanes(work, goal, late_share=0.0), goal)
    assert outcome.first_s == [1.0, 6.0, 5.0]
    assert outcome.on_time == [True, False, False]
    assert run(work, OneQueue(work, goal), goal).first_s == [1.0, 5.0, 6.0]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "arrivals.json"
    page = {
        "blocks": 8,
        "block_size": 2,
        "pace_s": 2.0,
        "step": {"fixed": 1.0, "row": 0.25, "prompt_token": 0.0},
        "requests": [{"at_s": 0.0, "prompt_len": 4, "output_len": 2, "phase": "burst"}],
    }
    path.write_text(json.dumps(page))
    assert studies.main(["oracle", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["burst"]
        == found["all"]
        == {"requests": 1.0} | dict.fromkeys(("simulated", "bound", "without_lengths"), 1.0)
    )
    assert main([str(path), "--policies"]) == 0
    printed = capsys.readouterr().out
    assert "bound 100.0%" in printed
    assert "one queue" in printed
    for change, complaint in (
        ({"blocks": 0}, "blocks is 0; it must be > 0"),
        ({"blocks": 1}, "a request of 4 and 2 tokens takes 3 blocks; the pool has 1"),
        ({"strange": 1}, "strange"),
        ({"requests": [{"at_s": 0.0, "prompt_len": 0, "output_len": 2}]}, "prompt_len is 0; it must be at least 1"),
        ({"step": {"fixed": 0.0, "row": 0.0, "prompt_token": 0.0}}, "a step must take time"),
    ):
        path.write_text(json.dumps(page | change))
        assert main([str(path)]) == 2
        error = capsys.readouterr().err
        assert complaint in error
        assert error.count("\n") == 1


def test_a_dropped_request_is_no_reason_to_wait() -> None:
    work, goal = Work([Request(0.0, 2, 9), Request(0.0, 2, 9)], Capacity(6, 2, STEP)), Goal(1.5, 1.0)
    policy = Clairvoyant(work, goal, [True, True], work.costs, skip=True)
    outcome = run(work, policy, goal)
    assert policy.waiting() == 0
    assert sum(first < float("inf") for first in outcome.first_s) == 1
