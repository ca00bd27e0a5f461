"""Percentiles, goals, refusals, a server's gauges."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.loadtest.clients import ClientProfile
from quire.loadtest.stats import (
    Attempt,
    Record,
    Sample,
    Slo,
    needed_pauses,
    percentile,
    recovery,
    refusals,
    series,
    server,
    spread,
    summarise,
)

DEAF = ClientProfile(retry="ignore")


def record(due: float, ttft: float = 0.1, gap: float = 0.05, tokens: int = 5, **fields: Any) -> Record:
    """A request that was answered: a token at due + ttft, and one every gap."""
    times = [due + ttft + i * gap for i in range(tokens)]
    made = Record(due, "x", 10, tokens, 0.0, [Attempt(due, 200)], times, times[-1], tokens, "ok")
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def refused(due: float, *attempts: Attempt, prompt_len: int = 10) -> Record:
    return Record(due, "x", prompt_len, 5, 0.0, list(attempts), [], attempts[-1].sent_s, 0, "refused")


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    ordered = sorted(values)
    cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert percentile(ordered, percent) == pytest.approx(cuts[percent - 1], abs=1e-6)
    assert (percentile(ordered, 0), percentile(ordered, 100)) == (ordered[0], ordered[-1])


def test_of_one_value_and_of_none() -> None:
    assert spread([2.0]) == {"p50": 2.0, "p90": 2.0, "p99": 2.0, "mean": 2.0, "max": 2.0}
    assert spread([]) is None


@pytest.mark.parametrize(
    ("made", "met"),
    [
        (record(1.0), True),
        (record(1.0, ttft=2.0), True),
        (record(1.0, ttft=2.01), False),
        (record(1.0, gap=0.21), False),
        (record(1.0, ttft=1.0, tokens=1), True),
        (record(1.0, outcome="error"), False),
        (refused(1.0, Attempt(1.0, 429)), False),
    ],
)
def test_goal(made: Record, met: bool) -> None:
    assert Slo(2.0, 0.2).met(made) is met


def test_tokens_that_share_an_event_count_in_the_mean() -> None:
    """Ten tokens in two events, a second apart: 1 / 9 s per token, not 1 s."""
    shared = record(0.0, gap=1.0, tokens=2)
    shared.tokens = 10
    assert shared.mean_itl_s == pytest.approx(1 / 9)


def test_latencies_count_from_when_a_request_was_due() -> None:
    """Pauses between attempts and the client's own lag included."""
    late = record(3.0, attempts=[Attempt(3.5, 429, 1.0), Attempt(4.5, 200)], lag_s=0.5)
    late.times = [5.0, 5.1]
    late.end_s = 5.1
    figures = summarise([late], [], Slo(), {"all": (0.0, 10.0)})
    assert figures["ttft_s"]["p50"] == 2.0
    assert figures["e2e_s"]["p50"] == pytest.approx(2.1)
    assert figures["send_lag_s"]["p50"] == 0.5


def test_phases_take_gaps_by_when_they_end() -> None:
    windows = {"base": (0.0, 1.0), "burst": (1.0, 2.0), "after": (2.0, 3.0)}
    figures = summarise([record(0.0, ttft=0.5, gap=0.4, tokens=4)], [], Slo(), windows)  # 0.5, 0.9, 1.3, 1.7
    base, burst, after = (figures["phases"][name] for name in windows)
    assert (base["requests"], burst["requests"]) == (1, 0)
    assert base["itl_s"]["max"] == burst["itl_s"]["max"] == pytest.approx(0.4)
    assert after["itl_s"] is None
    assert burst["goodput_fraction"] is None


def test_phases_share_out_all_preemptions() -> None:
    """Those between two samples, too, when a phase begins there."""
    samples = [Sample(at, preemptions=at * 10) for at in (-0.1, 0.4, 0.9, 1.4, 1.9, 2.4)]
    windows = {"base": (0.0, 1.0), "burst": (1.0, 3.0)}
    figures = summarise([], samples, Slo(), windows)
    assert [figures["phases"][name]["server"]["preemptions"] for name in windows] == pytest.approx([10, 15])
    assert figures["server"]["preemptions"] == pytest.approx(25)


def test_refusals_and_how_true_the_announced_pause_was() -> None:
    records = [
        record(0.0, attempts=[Attempt(0.0, 429, 4.0), Attempt(4.0, 200)]),  # first in line, and first let in: 4
        record(1.0, attempts=[Attempt(1.0, 429, 6.0), Attempt(7.0, 429, 2.0), Attempt(9.0, 200)]),  # second: 8, then 2
        refused(8.5, Attempt(8.5, 503)),
        refused(9.6, Attempt(9.6, 429, 1.0)),  # no request was admitted afterwards
        record(2.0, attempts=[Attempt(2.0, 429, 0.5), Attempt(2.5, 429, 0.5), Attempt(9.1, 200)], client=DEAF),
    ]
    figures = refusals(records, [])
    assert figures["by_status"] == {"429": 6, "503": 1}
    assert (figures["requests_refused"], figures["retried"], figures["first_retry_success"]) == (5, 2, 0.5)
    assert figures["attempts_per_success"] == pytest.approx(10 / 3, abs=1e-3)
    errors = figures["retry_after_error"]
    assert (errors["p50"], errors["max"]) == (
        0.0,
        0.25,
    )


def test_the_line_of_refused_clients_is_served_in_the_order_in_which_they_first_asked() -> None:
    """Later requests that were admitted before them used capacity that the waiting requests needed."""
    line = [record(i / 10, attempts=[Attempt(i / 10, 429, 9.0), Attempt(9.0 + i, 200)]) for i in range(3)]
    newcomers = [record(float(at)) for at in (2, 4, 6)]
    pauses = needed_pauses([*newcomers, *line], [])
    assert pauses == {(3, 0): pytest.approx(2.0), (4, 0): pytest.approx(3.9), (5, 0): pytest.approx(5.8)}


def test_a_pause_ends_at_the_latest_when_nobody_waits() -> None:
    """Every client gets "a minute" and retries after a minute: that does not make it true."""
    told = [record(i / 10, attempts=[Attempt(i / 10, 429, 60.0), Attempt(60.0 + i / 10, 200)]) for i in range(3)]
    assert refusals(told, [])["retry_after_error"]["max"] == pytest.approx(0.0, abs=0.01)
    waiting = [3.0, 0.0, 3.0, 0.0, 0.0, 0.0]  # the first 0 is alone: a gauge read between two steps
    samples = [Sample(float(at), waiting=count) for at, count in enumerate(waiting)]
    assert needed_pauses(told, samples)[0, 0] == 4.0
    assert refusals(told, samples)["retry_after_error"]["p50"] == pytest.approx(60 / 3.9 - 1)


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 20), st.booleans()), max_size=20))
def test_clients_that_come_when_it_is_their_turn_prove_the_server_right(asked: list[tuple[float, float, bool]]) -> None:
    """Served strictly in the order of arrival, with no other request admitted: the announced pause is the needed
    one."""
    asked.sort()
    free, records = 0.0, []
    for at, takes, refused_first in asked:
        free = max(free, at)
        if refused_first and free > at:
            records.append(record(at, attempts=[Attempt(at, 429, free - at), Attempt(free, 200)]))
        else:
            records.append(record(at, attempts=[Attempt(free, 200)]))
        free += takes
    for (i, j), pause in needed_pauses(records, []).items():
        announced_s = records[i].attempts[j].announced_s
        assert announced_s is not None
        assert pause <= announced_s + 1e-6


def test_a_pause_below_the_smallest_there_is_is_no_error() -> None:
    records = [record(0.0, attempts=[Attempt(0.0, 429, 1.0), Attempt(1.0, 200)]), record(0.2)]
    assert refusals(records, [])["retry_after_error"]["max"] == 0.0


def test_groups() -> None:
    """Only of fields in which requests differ."""
    loud, quiet = ClientProfile("loud", "low"), ClientProfile("quiet", "low", 5.0)
    late = record(0.0, client=quiet, outcome="expired")
    records = [record(0.0, client=loud), record(1.0, client=loud, cached=5), record(2.0, ttft=3.0, client=quiet), late]
    figures = summarise(records, [], Slo(), {"all": (0.0, 10.0)})
    assert set(figures["groups"]) == {"tenant", "timeout_s"}
    tenants = figures["groups"]["tenant"]
    assert (tenants["loud"]["completed"], tenants["loud"]["goodput_fraction"]) == (2, 1.0)
    assert (tenants["quiet"]["completed"], tenants["quiet"]["expired"], tenants["quiet"]["failed"]) == (1, 1, 0)
    assert tenants["quiet"]["goodput_fraction"] == 0.0
    assert set(figures["groups"]["timeout_s"]) == {"none", "5.0"}
    assert tenants["loud"]["prefix_hits"] == {"prompt_tokens": 10, "cached_tokens": 5, "rate": 0.5}
    assert tenants["quiet"]["prefix_hits"] is None
    assert (figures["completed"], figures["expired"], figures["failed"]) == (3, 1, 0)


def test_recovery() -> None:
    base = [record(float(i), ttft=0.1) for i in range(10)]
    slow = [record(20.0 + i, ttft=5.0) for i in range(3)]
    quick = [record(23.0 + i, ttft=0.1) for i in range(6)]
    assert recovery([*base, *slow, *quick], (0, 10), (20, 30)) == 1.0  # two slow ones among five don't move the median
    assert recovery([*base, *slow], (0, 10), (20, 30)) is None
    assert recovery(quick, (0, 10), (20, 30)) is None


def test_a_servers_counters_survive_its_restart() -> None:
    samples = [
        Sample(0.0, kv=0.2, waiting=0.0, preemptions=5.0),
        Sample(1.0, kv=0.9, waiting=3.0, preemptions=8.0),
        Sample(2.0, kv=0.7, waiting=1.0, preemptions=0.0),
        Sample(3.0, preemptions=2.0),
    ]
    figures = server(samples)
    assert figures["preemptions"] == 5.0
    assert (figures["kv_mean"], figures["kv_max"], figures["kv_mean_while_queueing"]) == (0.6, 0.9, 0.8)
    assert server([])["preemptions"] is server([])["kv_mean"] is None


outcomes = st.builds(
    lambda due, ttft, gap, tokens, kind: (
        record(due, ttft, gap, tokens) if kind == "ok" else refused(due, Attempt(due, 429, 1.0))
    ),
    st.floats(0, 700),
    st.floats(0, 50),
    st.floats(0, 5),
    st.integers(1, 20),
    st.sampled_from(["ok", "refused"]),
)


@given(st.lists(outcomes, max_size=30))
def test_a_series_holds_every_request_once(records: list[Record]) -> None:
    made = series(records, [], Slo())
    assert sum(sum(made[name]) for name in ("good", "late", "refused", "failed")) == len(records)
    assert len(made["t"]) <= 241
    assert {len(made[name]) for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")} == {len(made["t"])}
    figures = summarise(records, [], Slo(), {"all": (0.0, 1000.0)})
    assert figures["completed"] + figures["refused_for_good"] + figures["failed"] == len(records)
    assert figures["goodput"]["good"] == sum(made["good"])
