"""What `quire top` shows: percentiles of buckets, growth between two readings, merged gateways, sorted rows."""

from __future__ import annotations

import io
import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from quire.engine.common.histograms import Tally
from quire.engine.observers.metrics import Telemetry as EngineTelemetry
from quire.engine.wire.records import Fleet, LaneQueue, TenantQueue
from quire.service.common import metrics
from quire.service.common.metrics import Telemetry
from quire.service.terminal import top
from quire.service.terminal.readings import Figures, NotQuire, Reading, figures, merge, quantile, read, sort_rows
from tests.service.fakes import a_load

BOUNDS = (0.1, 0.5, 1.0, 5.0)


def buckets(values: list[float]) -> dict[float, float]:
    tally = Tally(BOUNDS)
    for value in values:
        tally.add(value)
    return {float(bound): count for bound, count in tally.buckets()}


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_value_that_it_estimates(values: list[float], q: float) -> None:
    found = quantile(buckets(values), q)
    assert found is not None
    exact = sorted(values)[max(0, math.ceil(q * len(values) - 1e-9) - 1)]
    at = bisect_left(BOUNDS, exact)
    assert found.beyond == (at == len(BOUNDS))
    low, high = (0.0, *BOUNDS)[at], (*BOUNDS, BOUNDS[-1])[at]
    assert low <= found.seconds <= high


def test_a_quantile_is_interpolated_within_its_bucket() -> None:
    for values, q, expected in (([0.3] * 4, 0.5, 0.3), ([0.05] * 9 + [3.0], 0.9, 0.1)):
        found = quantile(buckets(values), q)
        assert found is not None
        assert found.seconds == pytest.approx(expected)
        assert not found.beyond
    assert quantile(buckets([9.0]), 0.5) == (5.0, True)
    assert quantile(buckets([]), 0.5) is None
    assert quantile({}, 0.5) is None


class Gateway:
    """A gateway's metrics, and readings of its page."""

    def __init__(self, name: str) -> None:
        self.telemetry = Telemetry(name)

    def fleet(
        self,
        generated: int,
        *,
        waiting: int = 0,
        tenants: dict[str, TenantQueue] | None = None,
        drafts: bool = False,
    ) -> None:
        loads = [
            a_load(
                engine,
                running=2,
                waiting=waiting,
                free_blocks=400,
                cached_blocks=100,
                generated_tokens=generated * factor,
                prompt_tokens=generated,
                cached_prompt_tokens=generated // 4,
                preemptions=generated // 100,
                drafts={"own": (generated // 2, generated // 5), "tenant": (generated // 10, 0)} if drafts else {},
                refused_drafts=generated // 50 if drafts else 0,
                jumped_tokens=generated // 10 if drafts else 0,
            )
            for factor, engine in enumerate(("e0", "e1"), 1)
        ]
        late = LaneQueue(requests=3, tokens=90, oldest_ms=2500)
        self.telemetry.record_fleet(Fleet(loads, 3, 90, 0, tenants=tenants or {}, late=late))

    def read(self, at_s: float) -> Reading:
        return read(self.telemetry.expose().decode(), at_s)


def test_rates_and_percentiles_are_those_between_two_readings() -> None:
    gateway = Gateway("g")
    gateway.fleet(1000)
    gateway.telemetry.observe_first_token(30.0)
    gateway.telemetry.count(metrics.REFUSALS, 5, "too_many")
    before = gateway.read(100.0)
    gateway.fleet(1400)
    for _ in range(10):
        gateway.telemetry.observe_first_token(0.07)
    gateway.telemetry.observe(metrics.INTER_TOKEN, 0.004, times=50)
    gateway.telemetry.count(metrics.REFUSALS, 2, "rate_limit_exceeded")
    gateway.telemetry.count(metrics.REQUESTS, 6, "/v1/completions", "200")
    gateway.telemetry.count(metrics.REQUESTS, 6, "/metrics", "200")
    found = figures(gateway.read(104.0), before)
    assert (found.seconds, found.tokens_per_s, found.requests_per_s) == (4.0, 300.0, 1.5)
    assert found.hit_rate == pytest.approx(0.25)
    assert found.first_token.p99 is not None
    assert 0.06 <= found.first_token.p99.seconds <= 0.08  # the 30 s were before
    assert found.inter_token.p50 is not None
    assert 0.0025 <= found.inter_token.p50.seconds <= 0.005
    assert found.refusals == {"rate_limit_exceeded": 2.0}
    assert (found.preemptions, found.preempted) == (28.0, 8.0)
    assert found.lanes["late"].requests == 3
    assert found.lanes["late"].oldest_s == 2.5
    [first, second] = found.engines
    assert (first.name, first.tokens_per_s, second.tokens_per_s) == ("e0", 100.0, 200.0)
    assert first.used == pytest.approx(0.6)
    assert first.cached == pytest.approx(0.1)
    assert first.running == 2.0


def test_without_an_earlier_reading_rates_are_unknown() -> None:
    gateway = Gateway("g")
    gateway.fleet(1000)
    gateway.telemetry.count(metrics.REFUSALS, 5, "too_many")
    found = figures(gateway.read(1.0), None)
    assert (found.seconds, found.tokens_per_s, found.hit_rate) == (None, None, None)
    assert found.refusals == {"too_many": 5.0}
    assert "no request was answered yet" in shown(found)


def test_percentiles_are_those_since_the_start_where_the_window_has_none() -> None:
    gateway = Gateway("g")
    gateway.telemetry.observe_first_token(0.07)
    for before in (None, gateway.read(0.0)):
        found = figures(gateway.read(1.0), before)
        assert found.first_token.p50 is not None
        assert not found.first_token.recent
        assert "(since the start)" in shown(found)


def test_gauges_of_several_gateways_count_once_and_counters_add_up() -> None:
    gateways = [Gateway("a"), Gateway("b")]
    for at, gateway in enumerate(gateways):
        gateway.fleet(1000 + at)  # b read the fleet a moment later
        gateway.telemetry.count(metrics.REQUESTS, 1, "/v1/completions", "200")
    before = merge([gateway.read(0.0) for gateway in gateways])
    for gateway in gateways:
        gateway.fleet(2001)
        gateway.telemetry.count(metrics.REQUESTS, 4, "/v1/completions", "200")
    found = figures(merge([gateway.read(2.0) for gateway in gateways]), before)
    assert found.gateways == 2
    assert found.requests_per_s == 4.0
    assert found.tokens_per_s == pytest.approx((1000 + 2000) / 2)
    assert sum(row.running for row in found.engines) == 4
    assert found.lanes["late"].requests == 3


def test_a_restarted_gateway_or_engine_never_makes_a_rate_negative_or_huge() -> None:
    old, new, other = Gateway("g"), Gateway("g"), Gateway("h")
    old.fleet(100_000)
    old.telemetry.count(metrics.REQUESTS, 1000, "/v1/completions", "200")
    new.fleet(10)
    new.telemetry.count(metrics.REQUESTS, 4, "/v1/completions", "200")
    other.telemetry.count(metrics.REQUESTS, 7000, "/v1/completions", "200")
    found = figures(merge([new.read(2.0), other.read(2.0)]), old.read(0.0))
    assert found.requests_per_s == 2.0  # g's since its restart; the age of h's counts is unknown
    assert found.tokens_per_s == (10 + 20) / 2
    assert figures(other.read(2.0), old.read(0.0)).seconds is None


def test_drafts_are_those_of_all_engines_between_two_readings() -> None:
    """Of two engines: one has twice the tokens of the other, and as many drafts."""
    gateways = [Gateway("a"), Gateway("b")]
    for gateway in gateways:
        gateway.fleet(1000, drafts=True)
    before = merge([gateway.read(0.0) for gateway in gateways])
    for gateway in gateways:
        gateway.fleet(2000, drafts=True)
    found = figures(merge([gateway.read(2.0) for gateway in gateways]), before)
    assert found.drafts is not None
    assert found.drafts.sources == {"own": (1000, 400), "tenant": (200, 0)}
    assert found.drafts.refused == 40
    assert found.tokens_per_step == pytest.approx(3000 / (3000 - 200 - 400))
    assert [row.tokens_per_step for row in found.engines] == pytest.approx([1000 / 700, 2000 / 1700])
    line = next(line for line in shown(found).splitlines() if line.startswith("drafts"))
    assert "1.25 tokens per step, accepted: own 40% of 1,000, tenant 0% of 200, 40 would not have paid" in line


def test_drafts_are_off_where_no_engine_drafts_and_counted_since_the_start_at_first() -> None:
    gateway = Gateway("g")
    gateway.fleet(1000)
    assert "drafts     off" in shown(figures(gateway.read(0.0), None))
    gateway.fleet(1000, drafts=True)
    first = figures(gateway.read(0.0), None)
    assert first.drafts is not None
    assert first.drafts.sources == {"own": (1000, 400), "tenant": (200, 0)}
    assert first.tokens_per_step is None


def test_tenants_are_joined_from_queue_and_counters() -> None:
    gateway = Gateway("g")
    gateway.fleet(0)
    before = gateway.read(0.0)
    gateway.fleet(0, tenants={"loud": TenantQueue(counter=70, queued_tokens=900, weight=1.0)})
    for tenant, outcome in (("loud", "ok"), ("loud", "refused"), ("quiet", "ok")):
        gateway.telemetry.count(metrics.TENANT_REQUESTS, 2, tenant, outcome)
    gateway.telemetry.count(metrics.TENANT_TOKENS, 50, "quiet", "output")
    rows = {row.name: row for row in figures(gateway.read(1.0), before).tenants}
    loud, quiet = rows["loud"], rows["quiet"]
    assert sorted(rows) == ["loud", "other", "quiet"]
    assert rows["other"].queued_tokens == 90  # the late lane's: the reading names no tenant there
    assert (loud.name, loud.queued_tokens, loud.service, loud.refused, loud.requests_per_s) == ("loud", 900, 70, 2, 4)
    assert (quiet.name, quiet.service, quiet.tokens_per_s, quiet.refused) == ("quiet", None, 50.0, 0)


def test_rows_are_sorted_by_the_chosen_column() -> None:
    gateway = Gateway("g")
    gateway.fleet(1000)
    before = gateway.read(0.0)
    gateway.fleet(2000)
    found = figures(gateway.read(1.0), before)

    def names(key: str, reverse: bool) -> list[str]:
        return [row.name for row in sort_rows(found, key, reverse=reverse).engines]

    assert names("n", False) == names("t", True) == ["e0", "e1"]
    assert names("n", True) == names("t", False) == ["e1", "e0"]
    assert names("k", False) == ["e0", "e1"]  # equal: by name


def test_keys_choose_and_reverse_the_order_and_leave() -> None:
    screen = top.Screen(10.0, ["http://x"])
    presses = [("t", False), ("t", True), ("t", False), ("?", False), ("n", False)]
    for key, reverse in presses:
        screen.press(key)
        assert (screen.sort, screen.reverse) == ("n" if key == "n" else "t", reverse)
    assert not screen.leaving
    screen.press("q")
    assert screen.leaving


def test_the_screen_compares_with_the_reading_at_the_windows_begin() -> None:
    screen, gateway = top.Screen(3.0, ["http://x"]), Gateway("g")
    for second in range(10):
        gateway.fleet(100 * second * second)
        screen.add(gateway.read(float(second)))
    assert [reading.at_s for reading in screen._readings] == [6.0, 7.0, 8.0, 9.0]
    assert "last 3 s" in text_of(screen.render())
    screen.trouble = "cannot reach it"
    assert "cannot reach it; retrying" in text_of(screen.render())


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("", "no metrics of a Quire gateway"),
        ("<html>hello</html>", "no page of metrics of a Quire gateway"),
        ('vllm:num_requests_running{engine="0"} 1.0\n', "no metrics of a Quire gateway"),
        ("a{b 1\n", "no page of metrics of a Quire gateway"),
    ],
)
def test_other_pages_are_refused(page: str, why: str) -> None:
    with pytest.raises(NotQuire, match=why):
        read(page, 0.0)


def test_the_page_of_an_engine_is_refused_by_name() -> None:
    from prometheus_client import generate_latest

    page = generate_latest(EngineTelemetry("e0").registry).decode()
    with pytest.raises(NotQuire, match="page of an engine"):
        read(page, 0.0)


def test_names_cannot_write_to_the_terminal() -> None:
    gateway = Gateway("g")
    evil = "\x1b]0;title\x07[red]x\u202e"
    gateway.telemetry.record_fleet(Fleet([a_load(evil, model=evil)], 0, 0, 0))
    gateway.telemetry.count(metrics.TENANT_REQUESTS, 1, evil, "ok")
    gateway.telemetry.count(metrics.REFUSALS, 1, evil)
    text = shown(figures(gateway.read(0.0), None))
    assert not set(text) & set("\x1b\x07\u202e")
    assert text.count("[red]x") == 4


def shown(found: Figures) -> str:
    return text_of(top.render(found, ["http://x"]))


def text_of(rendered: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(rendered)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
