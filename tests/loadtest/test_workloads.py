"""Arrivals, lengths and traces."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.loadtest.clients import (
    ClientProfile,
    Mix,
    ProfileError,
    count_profiles,
    parse_deadline,
    parse_priority,
    parse_retry,
    parse_shares,
    parse_tenant,
    read_keys,
)
from quire.loadtest.trace import TraceError, read_trace
from quire.loadtest.workloads import (
    MEANS,
    SYSTEM,
    TALKS,
    TURN,
    TURNS,
    WORKLOADS,
    Arrival,
    Phase,
    arrival_times,
    assign_clients,
    clip,
    from_trace,
    gaps,
    jobs,
    phases,
    synthetic,
    users_at,
)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_they_are_asked_for(burstiness: float) -> None:
    drawn = list(islice(gaps(5.0, burstiness, random.Random(1)), 40_000))
    mean = statistics.fmean(drawn)
    assert mean == pytest.approx(0.2, rel=0.03)
    assert statistics.pvariance(drawn) / mean**2 == pytest.approx(1 / burstiness, rel=0.08)


@given(
    plan=st.lists(
        st.builds(Phase, st.sampled_from("abc"), st.floats(0.1, 50), st.floats(0.1, 20)), min_size=1, max_size=4
    ),
    burstiness=st.floats(0.1, 10),
    seed=st.integers(0, 2**32),
)
def test_arrivals_come_in_order_inside_their_phase_and_again_the_same(
    plan: list[Phase], burstiness: float, seed: int
) -> None:
    times = arrival_times(plan, burstiness, seed)
    assert times == arrival_times(plan, burstiness, seed)
    assert all(a <= b for (a, _), (b, _) in pairwise(times))
    ends, start = [], 0.0
    for phase in plan:
        ends.append((start, start + phase.seconds, phase.name))
        start += phase.seconds
    assert all(any(low <= at <= high and name == phase for low, high, name in ends) for at, phase in times)


def test_a_burst_is_three_times_as_dense() -> None:
    plan = phases(5, 300, 15, 300)
    assert [phase.name for phase in plan] == ["base", "burst", "after"]
    times = arrival_times(plan, 1.0, 7)
    counts = [sum(name == phase.name for _, name in times) for phase in plan]
    assert counts == [pytest.approx(n, rel=0.08) for n in (1500, 4500, 1500)]
    assert [phase.seconds for phase in phases(5, 8, 15, 30, 20)] == [8, 30, 20]
    assert phases(5, 60, None, 30) == [Phase("steady", 5, 60)]


def test_seeds_differ_and_requests_do_not_depend_on_the_rate() -> None:
    slow, fast = (synthetic("sharegpt", [Phase("x", rate, 20)], 1.0, 3) for rate in (2.0, 20.0))
    assert [a.job for a in slow] == [a.job for a in fast[: len(slow)]]
    other = synthetic("sharegpt", [Phase("x", 2.0, 20)], 1.0, 4)
    assert [a.at_s for a in slow] != [a.at_s for a in other]
    assert [a.job for a in slow] != [a.job for a in other]


@pytest.mark.parametrize("workload", MEANS)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_lengths_have_the_published_means(workload: str, scale: float) -> None:
    """Long tails are cut at 8x the mean, which takes a few per cent."""
    work = jobs(workload, 20_000, 5, scale)
    prompt, output = MEANS[workload]
    assert statistics.fmean(job.prompt_len for job in work) == pytest.approx(prompt * scale, rel=0.06)
    assert statistics.fmean(job.output_len for job in work) == pytest.approx(output * scale, rel=0.06)


@pytest.mark.parametrize(
    ("workload", "prefix", "groups"), [("chat", 300, 1), ("rag", 2000, 8), ("translation", 341, 1)]
)
def test_prompts_that_begin_alike(workload: str, prefix: int, groups: int) -> None:
    prompts = [tuple(job.prompt(500)) for job in jobs(workload, 40, 1)]
    assert len({prompt[:prefix] for prompt in prompts}) == groups
    assert len({prompt[prefix:] for prompt in prompts}) == len(prompts)


def test_a_turn_begins_with_the_turn_before() -> None:
    made = jobs("agents", 2 * TALKS * TURNS, 1)
    for i, job in enumerate(made):
        before = made[i - TALKS] if i % (TALKS * TURNS) >= TALKS else None
        prompt = job.prompt(500)
        if before is not None:
            assert prompt[: before.prompt_len] == before.prompt(500)
            assert job.prompt_len == before.prompt_len + TURN
        assert prompt[:SYSTEM] == made[0].prompt(500)[:SYSTEM]
    assert len({tuple(job.prompt(500)[: SYSTEM + 50]) for job in made}) == 2 * TALKS


def test_uniform_and_shared_prefix() -> None:
    assert {(job.prompt_len, job.output_len) for job in jobs("uniform-50", 20, 1)} == {(50, 50)}
    prompts = [job.prompt(500) for job in jobs("shared-prefix", 40, 1)]
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 4
    assert len({tuple(prompt) for prompt in prompts}) == 40
    assert all(len(prompt) == job.prompt_len for prompt, job in zip(prompts, jobs("shared-prefix", 40, 1), strict=True))
    with pytest.raises(ValueError, match="workload is 'x'; must be one of sharegpt, alpaca"):
        jobs("x", 1, 1)


GOOD = {"prompt_len": 5, "output_len": 7}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([GOOD, "{"], "t.jsonl, line 2: not JSON"),
        ([GOOD, []], "line 2: must be an object"),
        ([{"prompt_len": 5}], "line 1: output_len is missing"),
        ([{**GOOD, "output_len": -3}], "line 1: output_len is -3; must be a whole number, >= 1"),
        ([{**GOOD, "prompt_len": 1.5}], "line 1: prompt_len is 1.5; must be a whole number"),
        ([{**GOOD, "prompt_len": True}], "line 1: prompt_len is True"),
        (
            [{**GOOD, "prompt_len": 10**9}],
            "line 1: prompt_len is 1000000000; must be a whole number, >= 1, <= 10000000",
        ),
        ([GOOD, {**GOOD, "outputlen": 3}], "line 2: outputlen is not a field"),
        ([{**GOOD, "prefix_len": 6}], "line 1: prefix_len is 6; must be <= prompt_len, 5"),
        ([GOOD, {**GOOD, "at_s": 1}], "line 2: at_s is there, but the lines above differ"),
        ([{**GOOD, "at_s": 1}, GOOD], "line 2: at_s is missing, but the lines above differ"),
        ([{**GOOD, "at_s": 4}, {**GOOD, "at_s": 3}], "line 2: at_s is 3; must not be before the line above, 4"),
        ([{**GOOD, "at_s": "soon"}], "line 1: at_s is 'soon'; must be a number"),
        (["NaN"], "line 1: must be an object"),
        ([{**GOOD, "at_s": float("inf")}], "line 1: at_s is inf"),
        ([{**GOOD, "tenant": ""}], "line 1: tenant is ''; must have a name"),
        ([{**GOOD, "tenant": 5}], "line 1: tenant is 5; must be a name"),
        ([GOOD, {**GOOD, "priority": "urgent"}], "line 2: priority is 'urgent'; must be high, normal, low or a whole"),
        ([{**GOOD, "priority": 101}], "line 1: priority is '101'; must be"),
        ([{**GOOD, "priority": True}], "line 1: priority is True; must be a name or a whole number"),
        ([{**GOOD, "timeout_s": -1}], "line 1: timeout_s is '-1'; must be a number of seconds > 0"),
        ([{**GOOD, "timeout_s": float("nan")}], "line 1: timeout_s is 'nan'; must be a number of seconds > 0"),
        ([{**GOOD, "timeout_s": "5"}], "line 1: timeout_s is '5'; must be a number of seconds > 0"),
        ([], "t.jsonl: no requests in it"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, lines: list[object], says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert says in str(error.value)


def test_traces_with_times_keep_them_and_others_get_them(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({**GOOD, "at_s": at, "id": at}) for at in (0, 0.5, 0.5)) + "\n\n")
    plan = [Phase("steady", 2.0, 30.0)]
    assert [(a.at_s, a.phase) for a in from_trace(path, plan, 1, 1)] == [(0, "trace"), (0.5, "trace"), (0.5, "trace")]
    path.write_text("\n".join(json.dumps({**GOOD, "prefix_len": 3, "prefix_seed": 9}) for _ in range(4)))
    arrivals = from_trace(path, plan, 1, 1)
    assert [a.at_s for a in arrivals] == [at for at, _ in arrival_times(plan, 1, 1)[:4]]
    starts, ends = zip(*((a.job.prompt(500)[:3], a.job.prompt(500)[3:]) for a in arrivals), strict=True)
    assert all(start == starts[0] for start in starts)
    assert len({tuple(end) for end in ends}) == 4


def test_a_trace_says_who_asks_and_a_mix_fills_in_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    named = {**GOOD, "tenant": "acme", "priority": -3, "timeout_s": 2}
    path.write_text("\n".join(map(json.dumps, (named, GOOD, {**GOOD, "priority": "low"}))))
    arrivals = from_trace(path, [Phase("steady", 5.0, 30.0)], 1, 1)
    assert [a.client for a in arrivals] == [
        ClientProfile("acme", -3, 2.0),
        ClientProfile(),
        ClientProfile(priority="low"),
    ]
    mix = Mix({"other": 1.0}, {"high": 1.0}, {9.0: 1.0}, {"never": 1.0})
    assert [a.client for a in assign_clients(arrivals, mix, 1)] == [
        ClientProfile("acme", -3, 2.0, "never"),
        ClientProfile("other", "high", 9.0, "never"),
        ClientProfile("other", "low", 9.0, "never"),
    ]


def test_tenants_alone_ask_what_they_ask_beside_others() -> None:
    arrivals = synthetic("alpaca", [Phase("x", 50.0, 100.0)], 1.0, 3)
    mix = Mix({"loud": 10.0, "quiet": 1.0}, {}, {}, {})
    both = assign_clients(arrivals, mix, 3)
    alone = assign_clients(arrivals, mix, 3, only="quiet")
    assert alone == [a for a in both if a.client.tenant == "quiet"]
    assert len(alone) == pytest.approx(len(both) / 11, rel=0.15)
    assert [(a.at_s, a.job) for a in both] == [(a.at_s, a.job) for a in arrivals]
    prioritised = assign_clients(arrivals, Mix({"loud": 10.0, "quiet": 1.0}, {"high": 1.0, "low": 1.0}, {}, {}), 3)
    assert [a.client.tenant for a in prioritised] == [a.client.tenant for a in both]
    assert count_profiles([a.client for a in alone]) == {"tenant": {"quiet": len(alone)}, "retry": {"obey": len(alone)}}


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("loud=10,quiet=1", parse_tenant, {"loud": 10.0, "quiet": 1.0}),
        ("obey", parse_retry, {"obey": 1.0}),
        ("high=1, -5=2", parse_priority, {"high": 1.0, -5: 2.0}),
        ("2.5=1,none=3", parse_deadline, {2.5: 1.0, None: 3.0}),
        ("a=0", parse_tenant, "'a=0'; its share must be a number > 0"),
        ("a=x", parse_tenant, "'a=x'; its share must be a number > 0"),
        ("a=1,a=2", parse_tenant, "'a=1,a=2'; must not name a twice"),
        ("a,,b", parse_tenant, "''; must have a name"),
        ("urgent", parse_priority, "'urgent'; must be high, normal, low or a whole number from -100 to 100"),
        ("-1", parse_deadline, "'-1'; must be a number of seconds > 0, or none"),
        ("sulk", parse_retry, "'sulk'; must be obey, ignore, never"),
    ],
)
def test_shares(text: str, value: Callable[[str], Any], expected: object) -> None:
    if isinstance(expected, str):
        with pytest.raises(ProfileError) as error:
            parse_shares(text, value)
        assert str(error.value) == expected
    else:
        assert parse_shares(text, value) == expected


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('loud = "a"\nquiet = "b"\n')
    assert read_keys(path) == {"loud": "a", "quiet": "b"}
    for text, says in (("loud = 5", "loud must be a key"), ("loud", "keys.toml: ")):
        path.write_text(text)
        with pytest.raises(ProfileError, match=says):
            read_keys(path)


@given(st.sampled_from(WORKLOADS), st.integers(2, 3000))
def test_clipped_jobs_fit(workload: str, context: int) -> None:
    whole = [Arrival(0.0, "x", job) for job in jobs(workload, 20, 1)]
    for before, after in zip(whole, clip(whole, context), strict=True):
        job = after.job
        assert 1 <= job.prompt_len <= before.job.prompt_len
        assert 1 <= job.output_len <= before.job.output_len
        assert job.prompt_len + job.output_len <= context
        assert len(job.prompt(500)) == job.prompt_len
        if before.job.prompt_len + before.job.output_len <= context and before.job.prompt_len <= context // 2:
            assert after == before


def test_users() -> None:
    assert [users_at("ramp", t, 10, 20) for t in (0, 1, 10, 20, 99)] == [1, 1, 5, 10, 10]
    assert [users_at("burst", t, 10, 20) for t in (0, 19.9, 20, 49.9, 50)] == [10, 10, 30, 30, 10]
    assert users_at("steady", 5, 10, 20) == users_at("soak", 5e5, 10, 20) == 10
