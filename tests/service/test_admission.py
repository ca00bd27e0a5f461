"""Admission as a pure function: it errs on the safe side, and its pauses are honest."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.bus import Fleet
from engine.wire.messages import EngineLoad
from service.admission import Cost, decide, limits
from service.api import Refusal
from service.config import GatewayConfig
from tests.service.fakes import a_load

NOW = 1_000_000
CONFIG = GatewayConfig(queue_wait_s=10.0, admit_threshold=0.9, stale_s=3.0)


def busy(**changes: object) -> EngineLoad:
    """A full engine of 100 blocks that gives back 10 a second."""
    load = a_load(total_blocks=100, free_blocks=10, running=8, blocks_per_s=10.0, time_ms=NOW)
    return msgspec.structs.replace(load, **changes)


def fleet(*engines: EngineLoad, queued: int = 0, queued_tokens: int = 0) -> Fleet:
    return Fleet(engines=list(engines), queued=queued, queued_tokens=queued_tokens, time_ms=NOW)


def outcome(cost: Cost, view: Fleet, now: int = NOW, jitter: float = 0.0) -> float | Refusal:
    try:
        return decide(cost, view, now, CONFIG, jitter)
    except Refusal as refusal:
        return refusal


def test_no_engine_is_503_and_a_full_one_429() -> None:
    cost = Cost(160, 1)
    for view in (fleet(), fleet(busy(draining=True))):
        refusal = outcome(cost, view)
        assert isinstance(refusal, Refusal)
        assert (refusal.status, refusal.code) == (503, "no_engine")
    refusal = outcome(cost, fleet(busy(), queued=5, queued_tokens=5000))
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code, refusal.limit) == (429, "rate_limit_exceeded", 10.0)


def test_below_the_threshold_nobody_waits() -> None:
    assert outcome(Cost(160, 1), fleet(busy(free_blocks=21))) == 0.0  # 11 blocks wanted, 11 free below 90
    waited = outcome(Cost(160, 1), fleet(busy(free_blocks=20)))
    assert waited == pytest.approx(0.1)  # one block short, ten a second come back


def test_the_wait_counts_everybody_ahead() -> None:
    view = fleet(busy(waiting=2, waiting_tokens=160), queued=3, queued_tokens=320)
    # engine: 10 blocks and 2 for their outputs; queue: 20 and 3; ours: 1 and 1; nothing free below the threshold
    assert outcome(Cost(16, 1), view) == pytest.approx(3.7)


def test_a_silent_engine_counts_as_full() -> None:
    idle = a_load(time_ms=NOW - 3001)
    refusal = outcome(Cost(16, 1), fleet(idle))
    assert isinstance(refusal, Refusal)
    assert refusal.status == 429


def test_an_idle_engine_takes_whatever_fits_it_at_all() -> None:
    idle = a_load(total_blocks=100, free_blocks=100, time_ms=NOW)
    assert outcome(Cost(99 * 16, 1), fleet(idle)) == 0.0


def test_without_a_known_pace_the_queue_holds_as_much_as_the_pool() -> None:
    fresh = busy(blocks_per_s=0.0)
    assert outcome(Cost(16, 1), fleet(fresh, queued=1, queued_tokens=97 * 16)) == CONFIG.queue_wait_s
    assert isinstance(outcome(Cost(16, 1), fleet(fresh, queued=1, queued_tokens=98 * 16)), Refusal)


def test_limits_are_the_smallest_of_the_fleet() -> None:
    got = limits(fleet(busy(max_model_len=64), busy(total_blocks=50, vocab_size=9)))
    assert (got.max_model_len, got.vocab_size, got.total_blocks) == (64, 9, 50)


LOADS = st.builds(
    lambda total, used, running, waiting, tokens, rate, pace, age, draining: busy(
        total_blocks=total,
        free_blocks=total - min(used, total),
        running=running,
        waiting=waiting,
        waiting_tokens=tokens,
        blocks_per_s=rate,
        tokens_per_s=pace,
        time_ms=NOW - age,
        draining=draining,
    ),
    st.integers(1, 5000),
    st.integers(0, 5000),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 100_000),
    st.floats(0, 1000),
    st.floats(0, 1000),
    st.integers(0, 6000),
    st.booleans(),
)
FLEETS = st.builds(
    lambda engines, queued, tokens: fleet(*engines, queued=queued, queued_tokens=tokens),
    st.lists(LOADS, max_size=4),
    st.integers(0, 500),
    st.integers(0, 100_000),
)
COSTS = st.builds(Cost, st.integers(1, 100_000), st.integers(1, 64))
JITTER = st.floats(0, 1, exclude_max=True)


@given(COSTS, FLEETS, JITTER)
def test_every_outcome_is_a_bounded_wait_or_an_honest_pause(cost: Cost, view: Fleet, jitter: float) -> None:
    got = outcome(cost, view, jitter=jitter)
    if isinstance(got, Refusal):
        assert got.status == (429 if any(not load.draining for load in view.engines) else 503)
        assert got.retry_after_s is not None
        assert 1 <= got.retry_after_s <= 60
        assert 1 <= int(got.headers()["Retry-After"]) <= 60
    else:
        assert 0 <= got <= CONFIG.queue_wait_s


def rank(got: float | Refusal) -> float:
    """Smaller is better for the client."""
    return 1000.0 + (got.given if isinstance(got.given, int | float) else 0.0) if isinstance(got, Refusal) else got


@given(COSTS, FLEETS, st.integers(0, 100), st.integers(0, 10_000))
def test_more_ahead_never_helps(cost: Cost, view: Fleet, queued: int, tokens: int) -> None:
    more = msgspec.structs.replace(view, queued=view.queued + queued, queued_tokens=view.queued_tokens + tokens)
    assert rank(outcome(cost, more)) >= rank(outcome(cost, view))


@settings(max_examples=1000)
@given(COSTS, FLEETS, st.integers(0, 10_000))
def test_an_older_view_never_helps(cost: Cost, view: Fleet, later: int) -> None:
    now, then = outcome(cost, view), outcome(cost, view, NOW + later)
    if not isinstance(then, Refusal):
        assert not isinstance(now, Refusal)
        assert then >= now
