"""Admission as a pure function: it errs on the safe side, and its pauses are honest.

Most tests look at the on-time lane alone: nothing may wait in the late lane."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.wire.messages import EngineLoad
from quire.engine.wire.records import ANY_TOKENS, Fleet, LaneQueue, Place, TenantQueue
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery.admission import NEVER, Cost, Decision, ahead, decide, limits, wait_estimator
from tests.matrix import examples
from tests.pace import python_s
from tests.service.fakes import a_load

NOW = 1_000_000
CONFIG = GatewayConfig(ttft_target_s=12.5, late_wait_s=0.0)  # the on-time lane: waits of 10 s
BOTH = GatewayConfig(ttft_target_s=12.5, late_wait_s=60.0)


def cost(prompt_tokens: int = 100, timeout_s: float = 600.0, **more: object) -> Cost:
    return msgspec.structs.replace(Cost(prompt_tokens, timeout_s), **more)


def busy(**changes: object) -> EngineLoad:
    """A full engine of 100 blocks that frees 160 tokens per second, half of them of prompts: it starts 80 per
    second."""
    load = a_load(total_blocks=100, free_blocks=0, running=8, blocks_per_s=10.0, time_ms=NOW)
    return msgspec.structs.replace(load, **{"prompt_tokens": 5000, "generated_tokens": 5000, **changes})


def fleet(*engines: EngineLoad, queued: int = 0, room: int = 0, **tenants: TenantQueue) -> Fleet:
    """`queued`: prompt tokens of the nameless tenant."""
    if queued:
        tenants[""] = TenantQueue(queued, 0.0, 1.0)
    total, late = sum(t.queued_tokens for t in tenants.values()), sum(t.late_tokens for t in tenants.values())
    lanes = LaneQueue(len(tenants), total - late), LaneQueue(len(tenants) if late else 0, late)
    return Fleet(list(engines), len(tenants), total, NOW, room, tenants, on_time=lanes[0], late=lanes[1])


def decision(
    asked: Cost, view: Fleet, now: int = NOW, jitter: float = 0.0, config: GatewayConfig = CONFIG
) -> Decision | Refusal:
    try:
        return decide(asked, view, now, config, jitter)
    except Refusal as refusal:
        return refusal


def outcome(asked: Cost, view: Fleet, now: int = NOW, jitter: float = 0.0) -> int | Refusal:
    """The bound of the on-time lane, or the refusal."""
    found = decision(asked, view, now, jitter)
    return found if isinstance(found, Refusal) else found.bounds.on_time_excess


def late(asked: Cost, view: Fleet, config: GatewayConfig = BOTH) -> int:
    """The bound of the late lane of a request that cannot start in time."""
    found = decision(asked, view, config=config)
    assert isinstance(found, Decision), found
    assert view.on_time.tokens + asked.prompt_tokens > view.free_tokens + found.bounds.on_time_excess
    return found.bounds.late_excess


def refused(*args: object, **more: object) -> Refusal:
    refusal = decision(*args, **more)
    assert isinstance(refusal, Refusal), refusal
    return refusal


def test_no_engine_is_503_and_a_full_one_429() -> None:
    for view in (fleet(room=1000), fleet(busy(draining=True), room=1000)):
        none = outcome(cost(), view)
        assert isinstance(none, Refusal)
        assert (none.status, none.code) == (503, "no_engine")
    refusal = refused(cost(), fleet(busy(), queued=5000))
    assert (refusal.status, refusal.code, refusal.limit) == (429, "rate_limit_exceeded", 10.0)


def test_the_queue_may_grow_until_the_wait_is_the_limit() -> None:
    # 80 tokens per second for 10 s: 800 may be queued beyond the free capacity, whatever is queued now.
    for queued in (0, 300, 700):
        assert outcome(cost(100), fleet(busy(), queued=queued)) == 800
        assert outcome(cost(100), fleet(busy(waiting=2, waiting_tokens=60), queued=queued - 60 if queued else 0)) == 740
    refusal = refused(cost(101), fleet(busy(), queued=700))
    assert refusal.given == pytest.approx(10.0, abs=0.1)
    assert outcome(cost(101), fleet(busy(), queued=701, room=2)) == 800


def test_what_fits_the_room_is_let_in_at_any_pace() -> None:
    slow = busy(blocks_per_s=0.001, waiting=5, waiting_tokens=500)
    assert outcome(cost(100), fleet(slow, queued=50, room=150)) == 0
    assert refused(cost(100), fleet(slow, queued=50, room=149)).status == 429


def test_what_cannot_start_in_time_may_wait_in_the_late_lane() -> None:
    """80 tokens per second: 800 beyond the free capacity may be on time, and 4,800 in total, whatever waits now."""
    found = decision(cost(100), fleet(busy(), queued=700), config=BOTH)
    assert isinstance(found, Decision)
    assert (found.bounds.on_time_excess, found.bounds.late_excess) == (800, 4800)
    assert (found.on_time_wait_s, found.late_wait_s) == (10.0, 10.0)
    assert found.bounds.target_ms == 10_000
    for queued in (701, 3000, 4700):
        assert late(cost(100), fleet(busy(), queued=queued)) == 4800
    assert refused(cost(101), fleet(busy(), queued=4700), config=BOTH).limit == 60.0


def test_what_waits_late_is_not_ahead_of_the_on_time_lane_but_the_other_way_round() -> None:
    turns = {"": TenantQueue(1700, 0.0, 1.0, late_tokens=1000)}
    found = decision(cost(100), fleet(busy(), **turns), config=BOTH)
    assert isinstance(found, Decision)
    assert (found.bounds.on_time_excess, found.bounds.late_excess) == (800, 4800)
    assert (found.on_time_wait_s, found.late_wait_s) == (10.0, 22.5)  # at the full pace


def test_the_wait_that_a_client_allows_counts_if_it_is_shorter() -> None:
    view = fleet(busy(), queued=1500)
    assert late(cost(100, longest_wait_s=20.0), view) == 1600
    assert late(cost(100, longest_wait_s=600.0), view) == 4800
    refusal = refused(cost(101, longest_wait_s=20.0), view, config=BOTH)
    assert (refusal.status, refusal.param, refusal.limit) == (429, "x-max-queue-wait", 20.0)
    none = cost(100, longest_wait_s=0.0)  # only in time
    assert outcome(none, fleet(busy(), queued=700)) == 800
    assert refused(none, view, config=BOTH).param == "x-max-queue-wait"


def test_while_the_pace_is_unknown_any_number_may_be_late() -> None:
    idle = busy(blocks_per_s=0.0, prompt_tokens=0, generated_tokens=0)
    view = fleet(idle, queued=100_000)
    assert late(cost(100), view) > ANY_TOKENS / 2
    assert refused(cost(100, longest_wait_s=0.0), view, config=BOTH).retry_after_s == 1.0


def test_a_refused_client_is_told_when_the_lane_is_short_enough_and_a_crowd_at_different_times() -> None:
    """Of 68 s in the queue, 8 are too many."""
    view = fleet(busy(), queued=68 * 80 - 100)
    assert refused(cost(100), view, config=BOTH).retry_after_s == pytest.approx(8.0)
    assert refused(cost(100), view, config=BOTH, jitter=0.5).retry_after_s == pytest.approx(8.2)
    headers = refused(cost(100), view, config=BOTH, jitter=0.5).headers()
    assert (headers["Retry-After"], headers["retry-after-ms"]) == ("9", "8200")
    far = fleet(busy(), queued=80_000)
    assert [refused(cost(100), far, jitter=jitter).retry_after_s for jitter in (0.0, 1.0)] == pytest.approx(
        [60 / 1.05, 60]
    )
    nearly = fleet(busy(), queued=701)
    assert refused(cost(100), nearly).retry_after_s == 1.0


def test_the_estimate_at_a_place_counts_what_is_ahead() -> None:
    view = fleet(busy(), one=TenantQueue(1600, 0.0, 1.0, late_tokens=800))
    view = msgspec.structs.replace(view, on_time=LaneQueue(4, 800), late=LaneQueue(8, 800))
    wait_s = wait_estimator(view, NOW)
    waits = [wait_s(Place("late", ahead)) for ahead in (4, 7, 11)]
    assert waits == [11.25, 15.0, 20.0]
    assert wait_s(Place("on_time", 0)) == 2.5
    assert wait_estimator(fleet(a_load()), NOW)(Place("late", 0)) is None


def test_tenants_that_a_reading_does_not_name_count_together_and_never_as_more_than_they_are() -> None:
    """They are behind those that it names, so they weigh on a tenant that is further behind only."""
    named = {name: TenantQueue(100, 10.0, 1.0) for name in ("one", "two")}
    alone = msgspec.structs.replace(fleet(busy(), **named), on_time=LaneQueue(2, 200, 0, 2))
    crowded = msgspec.structs.replace(alone, on_time=LaneQueue(32, 3200, 0, 32))
    assert crowded.unnamed_tokens() == (3000, 0)
    next_one = cost(100, tenant="new")  # level with the smallest counter: it reaches 110, they may begin at 10
    assert ahead(next_one, alone)[0] == 200
    assert 200 <= ahead(next_one, crowded)[0] <= 200 + 3000
    far = {**named, "far": TenantQueue(500, 1e6, 1.0)}  # a submit of this gateway has named it
    known = msgspec.structs.replace(fleet(busy(), **far), on_time=LaneQueue(33, 3700, 0, 33))
    assert ahead(cost(100, tenant="far"), known)[0] == 3700


def test_a_deadline_nearer_than_the_limit_counts_instead() -> None:
    view = fleet(busy(), queued=300)
    assert outcome(cost(100, timeout_s=5.0), view) == 400
    refusal = refused(cost(101, timeout_s=5.0), view)
    assert (refusal.status, refusal.code, refusal.limit, refusal.param) == (429, "deadline_unreachable", 5.0, "timeout")
    assert refusal.retry_after_s == 1.0
    assert outcome(cost(100, timeout_s=0.001), fleet(busy(), room=100)) == 0  # there is free capacity now


def test_the_least_service_counts_against_the_deadline() -> None:
    view = fleet(busy(tokens_per_s=40.0, step_s=0.2))
    assert outcome(cost(100, timeout_s=5.0, min_output_tokens=15), view) == 160  # 3 s of it are service
    refusal = refused(cost(100, timeout_s=5.0, min_output_tokens=20), view)
    assert refusal.code == "deadline_unreachable"
    assert refusal.given == pytest.approx(5.25, abs=0.1)
    assert refused(cost(100, timeout_s=5.0, min_output_tokens=100), view).code == "deadline_unreachable"


def test_an_engine_just_out_of_idleness_is_not_taken_for_a_slow_one() -> None:
    """Its output rate is an average that has hardly begun to rise: 4 running at 1 token per second would be 4 s
    each."""
    view = fleet(busy(running=4, tokens_per_s=1.0, step_s=0.005), queued=700)
    assert outcome(cost(100, min_output_tokens=200), view) == 800
    assert refused(cost(101, min_output_tokens=200), view).code == "rate_limit_exceeded"


def test_a_silent_engine_or_reading_counts_as_full() -> None:
    old = a_load(time_ms=NOW - 3001)
    assert refused(cost(), fleet(old, room=1000)).status == 429
    late = msgspec.structs.replace(fleet(a_load(time_ms=NOW + 3001), room=1000), time_ms=NOW)
    assert isinstance(outcome(cost(), late, now=NOW + 3000), int)
    assert outcome(cost(), late, now=NOW + 3001) == 16_000  # throughput unknown: the pools' size beyond free capacity
    assert refused(cost(), msgspec.structs.replace(fleet(busy(), room=1000), time_ms=NOW), now=NOW + 3001).status == 429


def heard(age_ms: int, load: EngineLoad, **more: int) -> Fleet:
    """A reading of NOW of one engine, whose last sync was so long before."""
    return msgspec.structs.replace(fleet(load, **more), exchanged_ms={load.engine: NOW - age_ms})


def test_an_engine_in_a_long_step_is_alive_as_long_as_it_exchanges() -> None:
    """Its loop reported before the step, a minute ago; its free capacity is the one in Redis."""
    slow = busy(time_ms=NOW - 60_000)
    assert isinstance(outcome(cost(), heard(1000, slow, room=1000)), int)
    assert refused(cost(), heard(3001, slow, room=1000)).status == 429
    assert refused(cost(), heard(0, slow, room=59)).status == 429
    assert isinstance(outcome(cost(), heard(1000, slow, room=1000), now=NOW + 2000), int)
    assert refused(cost(), heard(1000, slow, room=1000), now=NOW + 2001).status == 429


@pytest.mark.parametrize(("age_s", "step_s", "pace"), [(3, 0, 80), (6, 0, 40), (6, 2, 80), (12, 2, 40), (300, 0, 0.8)])
def test_rates_fade_in_a_step_that_is_longer_than_the_steps_they_come_from(age_s: int, step_s: int, pace: int) -> None:
    late = busy(time_ms=NOW - 1000 * age_s, step_s=float(step_s))
    assert outcome(cost(int(10 * pace)), heard(0, late)) == int(10 * pace)  # as much as 10 s of that pace
    refusal = refused(cost(int(10 * pace) + 1), heard(0, late))
    assert refusal.given == pytest.approx((int(10 * pace) + 1) / pace, abs=0.1)


def test_without_a_known_pace_the_queue_holds_as_much_as_the_pool() -> None:
    fresh = busy(blocks_per_s=0.0, prompt_tokens=0, generated_tokens=0)
    assert outcome(cost(100), fleet(fresh, queued=1500)) == 1600
    assert refused(cost(101), fleet(fresh, queued=1500)).status == 429


def test_what_a_loud_tenant_piled_up_is_not_ahead_of_a_quiet_one() -> None:
    loud = TenantQueue(100_000, 5000.0, 1.0)
    assert ahead(cost(100, tenant="quiet"), fleet(busy(), loud=loud))[0] == 100
    assert ahead(cost(100, tenant="quiet", weight=4.0), fleet(busy(), loud=loud))[0] == 25
    assert ahead(cost(100, tenant="loud"), fleet(busy(), loud=loud))[0] == 100_000
    behind = TenantQueue(50, 4900.0, 1.0)  # it is 100 behind, so it goes first with all it has queued
    assert ahead(cost(100, tenant="loud"), fleet(busy(), loud=loud, quiet=behind))[0] == 100_050
    assert isinstance(outcome(cost(100, tenant="quiet"), fleet(busy(), loud=loud)), int)
    assert refused(cost(100, tenant="loud"), fleet(busy(), loud=loud)).status == 429


def test_a_tenant_below_its_share_is_not_refused_for_the_line_of_others() -> None:
    """The engine is full of the loud one, whose newest would yield; its own line counts, the others' does not."""
    full = busy(over_share=["loud"], preemptible_tokens=500, waiting=40, waiting_tokens=4000)
    line = {"loud": TenantQueue(20_000, 0.0, 1.0)}
    assert outcome(cost(100, tenant="quiet"), fleet(full, **line)) == 20_000 + 500
    assert outcome(cost(100, tenant="quiet"), fleet(full, **line, quiet=TenantQueue(400, 0.0, 1.0))) == 20_400 + 100
    for asked, more in (
        (cost(100, tenant="loud"), {}),
        (cost(501, tenant="quiet"), {}),
        (cost(100, tenant="quiet"), {"quiet": TenantQueue(401, 0.0, 1.0)}),
        (cost(100, tenant="quiet"), {"other": TenantQueue(401, 0.0, 1.0)}),
    ):
        assert refused(asked, fleet(full, **line, **more)).status == 429
    assert refused(cost(100, tenant="quiet"), fleet(full, **line), now=NOW + 10_000).status == 429  # an old reading
    leaving = fleet(busy(draining=True, preemptible_tokens=500), busy(waiting_tokens=4000), **line)
    assert refused(cost(100, tenant="quiet"), leaving).status == 429


def test_what_several_engines_would_yield_adds_up() -> None:
    one, two = (
        busy(over_share=crowd, preemptible_tokens=300, waiting_tokens=4000) for crowd in (["loud"], ["loud", "quiet"])
    )
    line = {"loud": TenantQueue(20_000, 0.0, 1.0)}
    assert outcome(cost(400, tenant="new"), fleet(one, two, **line)) == 20_000 + 600
    assert refused(cost(400, tenant="quiet"), fleet(one, two, **line)).status == 429


def test_limits_are_the_smallest_of_the_fleet() -> None:
    got = limits(fleet(busy(max_model_len=64), busy(total_blocks=50, vocab_size=9)))
    assert (got.max_model_len, got.vocab_size, got.total_blocks) == (64, 9, 50)


def test_a_decision_takes_the_time_of_a_thousand_turns_of_a_plain_loop() -> None:
    """Some 50 us of CPU time."""
    turns = {f"t{i}": TenantQueue(100 + i, 10.0 * i, 1.0) for i in range(20)}
    view = fleet(*[busy(engine=f"e{i}", tokens_per_s=5.0) for i in range(4)], **turns)
    best = 1.0
    for _ in range(20):
        began = time.process_time()
        for _ in range(100):
            outcome(cost(100, tenant="t7"), view)
        best = min(best, (time.process_time() - began) / 100)
    assert best < python_s() / 10


LOADS = st.builds(
    lambda total, running, waiting, tokens, rate, pace, mix, age, draining: busy(
        total_blocks=total,
        running=running,
        waiting=waiting,
        waiting_tokens=tokens,
        blocks_per_s=rate,
        tokens_per_s=pace,
        prompt_tokens=mix,
        time_ms=NOW - age,
        draining=draining,
    ),
    st.integers(1, 5000),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 100_000),
    st.floats(0, 1000),
    st.floats(0, 1000),
    st.integers(0, 20_000),
    st.integers(0, 6000),
    st.booleans(),
)
TURNS = st.builds(
    lambda tokens, counter, weight, late: TenantQueue(tokens, counter, weight, int(tokens * late)),
    st.integers(1, 50_000),
    st.floats(0, 1e6),
    st.sampled_from((0.5, 1.0, 4.0)),
    st.sampled_from((0.0, 0.3, 1.0)),
)
FLEETS = st.builds(
    lambda engines, queued, room, tenants: fleet(*engines, queued=queued, room=room, **tenants),
    st.lists(LOADS, max_size=4),
    st.integers(0, 100_000),
    st.integers(0, 100_000),
    st.dictionaries(st.sampled_from("abc"), TURNS),
)
COSTS = st.builds(
    Cost,
    st.integers(1, 100_000),
    st.floats(0.001, 3600),
    st.integers(1, 4096),
    st.sampled_from(("", "a", "b")),
    st.sampled_from((0.5, 1.0, 4.0)),
)
JITTER = st.floats(0, 1, exclude_max=True)


CONFIGS = st.sampled_from((CONFIG, BOTH, GatewayConfig()))


@settings(max_examples=examples(500))
@given(COSTS, FLEETS, JITTER, CONFIGS)
def test_every_outcome_is_a_bound_it_keeps_or_an_honest_pause(
    asked: Cost, view: Fleet, jitter: float, config: GatewayConfig
) -> None:
    got = decision(asked, view, jitter=jitter, config=config)
    if isinstance(got, Refusal):
        assert got.status == (429 if any(not load.draining for load in view.engines) else 503)
        assert got.retry_after_s is not None
        assert 1 <= got.retry_after_s <= 60
        assert 1 <= int(got.headers()["Retry-After"]) <= 60
        return
    on_time = view.on_time.tokens + asked.prompt_tokens <= view.free_tokens + got.bounds.on_time_excess
    in_all = view.queued_tokens + asked.prompt_tokens <= view.free_tokens + got.bounds.late_excess
    assert on_time or in_all
    assert not on_time or got.bounds.on_time_excess != NEVER
    assert in_all == (got.bounds.late_excess != NEVER)


@settings(max_examples=examples(500))
@given(COSTS, FLEETS, st.integers(0, 10_000))
def test_the_excess_is_how_far_its_own_queue_may_grow(asked: Cost, view: Fleet, more: int) -> None:
    """A request alone in the queue, where what is ahead is the queue: Redis compares longer queues.

    The engines' throughput is unknown: the minimum service time counts only if the request has to wait."""
    asked = msgspec.structs.replace(asked, tenant="")
    engines = [msgspec.structs.replace(load, tokens_per_s=0.0) for load in view.engines]
    queued = view.tenants[""].queued_tokens if "" in view.tenants else 1
    got = outcome(asked, fleet(*engines, queued=queued, room=view.free_tokens))
    if not isinstance(got, Refusal):
        again = outcome(asked, fleet(*engines, queued=queued + more, room=view.free_tokens))
        room = view.free_tokens
        assert isinstance(again, Refusal) == (queued + more + asked.prompt_tokens > room + got)


@given(COSTS, FLEETS, st.integers(0, 10_000))
def test_more_ahead_never_helps(asked: Cost, view: Fleet, tokens: int) -> None:
    if not isinstance(outcome(asked, view), Refusal) or asked.tenant not in view.tenants:
        return
    turn = view.tenants[asked.tenant]
    more = {**view.tenants, asked.tenant: msgspec.structs.replace(turn, queued_tokens=turn.queued_tokens + tokens)}
    longer = msgspec.structs.replace(view, queued_tokens=view.queued_tokens + tokens, tenants=more)
    assert isinstance(outcome(asked, longer), Refusal)


@settings(max_examples=examples(1000))
@given(COSTS, FLEETS, st.integers(0, 10_000))
def test_an_older_view_never_helps(asked: Cost, view: Fleet, later: int) -> None:
    """But for the case where nothing is known of the pace: then pools are what counts, and those stay."""
    now, then = outcome(asked, view), outcome(asked, view, NOW + later)
    if not isinstance(then, Refusal):
        assert not isinstance(now, Refusal)
