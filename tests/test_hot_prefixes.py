"""Hot prefixes over the real loop and scripted executors: what is counted, what is stored, what is computed ahead."""

from __future__ import annotations

import itertools
import logging
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Final, cast
from wsgiref.simple_server import WSGIServer

import msgspec
import pytest

from quire.engine.bus_thread import BusThread
from quire.engine.commands import LocalBox, Report
from quire.engine.config import EngineConfig
from quire.engine.core.limits import Event, Outputs
from quire.engine.core.plan import StepPlan, StepResult
from quire.engine.executor.base import ModelInfo, ScriptedExecutor, StepError
from quire.engine.loop import Engine
from quire.engine.observers.measurements import STALLED_S
from quire.engine.observers.metrics import Telemetry
from quire.engine.observers.metrics_page import Page
from quire.engine.process.hot_prefixes import MAX_TOKENS, WRITE_S, PrefixCounts, warm
from quire.engine.wire.hot_prefix_store import MAX_BYTES, MAX_PREFIXES
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import Generate, HotPrefix, Sampling
from tests.ports import free_port

INFO = ModelInfo("scripted", "f00d", 1000, 512, [0], 64)
SIZE: Final = 16
CONFIG = EngineConfig(
    max_seqs=8, step_tokens=64, check_accounting=True, block_size=SIZE, admission="threshold", admit_threshold=1.0
)


def prefix(token_ids: Sequence[int], salt: str = "") -> HotPrefix:
    return HotPrefix(struct.pack(f"<{len(token_ids)}I", *token_ids), salt)


def tokens(one: HotPrefix) -> list[int]:
    return list(struct.unpack(f"<{len(one.tokens) // 4}I", one.tokens))


def text(seed: int, blocks: int) -> list[int]:
    return [2 + (seed * 131 + i) % 997 for i in range(blocks * SIZE)]


class Store:
    """The store in memory, and a queue in which requests may wait after some questions."""

    def __init__(self, *prefixes: HotPrefix, wait_at: int = 2**60, error: Exception | None = None) -> None:
        self.stored = {"f00d": list(prefixes)}
        self.wait_at, self.error = wait_at, error
        self.asked = self.writes = 0

    def requests_wait(self) -> bool:
        self.asked += 1
        return self.asked > self.wait_at

    def take_hot_prefixes(self, fingerprint: str) -> list[HotPrefix]:
        if self.error is not None:
            raise self.error
        return self.stored.pop(fingerprint, [])

    def write_hot_prefixes(self, fingerprint: str, prefixes: Sequence[HotPrefix]) -> None:
        self.writes += 1
        self.stored[fingerprint] = list(prefixes)


class Ends(LocalBox):
    """Keeps how each request ended, and what it found in the cache."""

    def __init__(self) -> None:
        super().__init__(lambda delta: None)
        self.ends: dict[str, str] = {}
        self.cached: dict[str, int] = {}

    def put(self, outputs: Outputs, report: Report) -> None:
        for delta in itertools.chain.from_iterable(outputs.deltas.values()):
            if delta.first == 0:
                self.cached[delta.id] = delta.cached_tokens
            if delta.finish:
                self.ends[delta.id] = delta.finish.reason


class Counted(ScriptedExecutor):
    """Records the computed tokens, and loses the chosen steps."""

    def __init__(self, blocks: int = 64, lost: frozenset[int] = frozenset()) -> None:
        super().__init__(INFO, blocks)
        self.lost = lost
        self.tokens: list[int] = []  # prompt tokens, step by step

    def submit(self, plan: StepPlan) -> None:
        self.tokens.append(sum(len(piece.token_ids) for piece in plan.slices))
        super().submit(plan)

    def collect(self) -> StepResult:
        if self._plans[0].step in self.lost:
            self._plans.clear()
            self._decoding.clear()
            raise StepError("out of memory")
        return super().collect()


class Bench:
    """An engine, warmed from a store, and its clients."""

    def __init__(
        self, store: Any = None, executor: ScriptedExecutor | None = None, config: EngineConfig = CONFIG, **how: Any
    ) -> None:
        self.box, self.store = Ends(), store or Store()
        self.executor = executor or Counted()
        self.telemetry = Telemetry("e")
        self.engine = Engine(config, self.executor, self.box, self.box, observers=[self.telemetry])
        self.names = itertools.count()
        warm(self.engine, cast(BusThread, self.store), self.telemetry, **how)

    def ask(self, token_ids: list[int], *, salt: str = "", n: int = 1) -> str:
        name = f"r{next(self.names)}"
        sampling = Sampling(ignore_eos=True, seed=3)
        self.box.commands.append(Generate(name, "g", token_ids, 2, sampling, 2**60, cache_salt=salt, n=n))
        while self.box.commands or not self.engine.core.idle:
            self.engine.turn()
        return name

    def drain(self) -> list[HotPrefix]:
        """Let the engine write what it has counted; the store's content."""
        self.engine.draining = True
        self.engine.turn()
        stored: list[HotPrefix] = self.store.stored.get("f00d", [])
        return stored


def started(of: list[int], blocks: int) -> Event:
    """A request found `blocks` blocks of these tokens, repeated."""
    digests = [msgspec.msgpack.encode((of, block)) for block in range(blocks)]
    request = Generate("r", "g", of * (blocks * SIZE // len(of)), 1, Sampling(), 2**60)
    return Event("started", request, 0, blocks * SIZE, digests=digests)


def counts(store: Any) -> PrefixCounts:
    return PrefixCounts(store, "f00d", SIZE)


def test_only_what_a_request_found_at_its_start_is_counted() -> None:
    bench = Bench()
    system, document = text(1, 3), text(1, 3) + text(2, 4)
    bench.ask(document + [7] * 5, n=3)  # computed: its choices share the prefill, which is no hit
    bench.ask([*document, 10], n=2)
    for i in range(4):
        bench.ask([*system, 8, i])
    bench.ask([*document, 9], salt="another tenant")
    assert bench.drain() == [prefix(system), prefix(document)]  # four hits, one hit


def test_one_option_switches_it_off() -> None:
    store = Store(prefix(text(1, 4)))
    bench = Bench(store, config=msgspec.structs.replace(CONFIG, warm_seconds=0))
    for i in range(3):
        bench.ask([*text(1, 3), i])
    assert bench.drain() == [prefix(text(1, 4))]
    assert (store.asked, store.writes) == (0, 0)


def test_writes_come_every_few_seconds_and_only_after_hits() -> None:
    store = Store()
    bench = Bench(store)
    counted = bench.engine.observers[-1]
    assert isinstance(counted, PrefixCounts)
    bench.ask([*text(1, 3), 1])
    bench.ask([*text(1, 3), 2])
    assert store.writes == 0
    counted._written -= WRITE_S
    bench.engine.turn()
    assert store.writes == 1
    counted._written -= WRITE_S
    bench.engine.turn()
    assert store.writes == 1  # no hit since


def test_what_is_stored_is_bounded_and_the_coldest_leave() -> None:
    store = Store()
    counted = counts(store)
    for i in range(8 * MAX_PREFIXES):
        counted.count(started([i], 1))
        counted.count(started([997], 1))
    assert len(counted._hot) == 4 * MAX_PREFIXES
    counted.write(0.0)
    assert len(store.stored["f00d"]) == MAX_PREFIXES
    assert store.stored["f00d"][0] == prefix([997] * SIZE)
    big = MAX_BYTES // 4 // 4 // SIZE  # blocks in a quarter of it
    for i in range(3 * 4 * 4):
        for _ in range(2):
            counted.count(started([1000 + i], big))
    counted.write(0.0)
    assert sum(len(one.tokens) for one in store.stored["f00d"]) <= MAX_BYTES
    assert len(store.stored["f00d"]) == len(counted._hot) == 8


def test_of_a_long_prefix_the_beginning_is_kept() -> None:
    store = Store()
    counted = counts(store)
    counted.count(started([5], MAX_TOKENS // SIZE + 9))
    counted.write(0.0)
    assert len(tokens(store.stored["f00d"][0])) == MAX_TOKENS


def test_hits_fade() -> None:
    store = Store()
    counted = counts(store)
    for _ in range(3):
        counted.count(started([1], 1))
    counted.count(started([2], 1))
    for _ in range(68):
        counted.write(0.0)
    assert store.stored["f00d"] == [prefix([1] * SIZE), prefix([2] * SIZE)]
    counted.write(0.0)
    assert store.stored["f00d"] == [prefix([1] * SIZE)]
    for _ in range(2):
        counted.count(started([3], 1))
    counted.write(0.0)
    assert store.stored["f00d"] == [prefix([3] * SIZE), prefix([1] * SIZE)]


@pytest.mark.perf
def test_counting_costs_a_few_microseconds_a_request() -> None:
    """On this thread's own clock, so that a busy machine does not matter: each finds another prefix, of 512 tokens."""
    events = [started([i], 512 // SIZE) for i in range(4 * MAX_PREFIXES)]
    best = float("inf")
    for _ in range(5):
        counted = counts(Store())
        began = time.thread_time()
        for event in events:
            counted.count(event)
        counted.write(time.monotonic())
        best = min(best, (time.thread_time() - began) / len(events))
    print(f"counting a request, its part of a write included: {best * 1e6:.2f} us")
    assert best < 50e-6


# ------------------------------------------------------------------------------------------------------------ warming


def test_what_was_hot_is_found_again_after_a_restart() -> None:
    """A workload of shared prefixes, before and after: the new engine's hit rate is that of the old one, no figure
    counts the warm-up, and a second restart that follows at once is as warm."""

    def workload(bench: Bench, round_: int) -> tuple[int, int]:
        before = msgspec.structs.replace(bench.engine.core.report.totals)
        for i in range(40):
            document = text(1, 3) + text(10 + i % 4, 4)
            bench.ask([*document, 900, round_, i], salt=["", "acme"][i % 2])
        totals = bench.engine.core.report.totals
        return (
            totals.cached_prompt_tokens - before.cached_prompt_tokens,
            totals.prompt_tokens - before.prompt_tokens,
        )

    old = Bench()
    workload(old, 0)
    hits, prompt = workload(old, 1)
    assert hits > 0.8 * prompt
    old.drain()
    new = Bench(old.store)
    core = new.engine.core
    assert core.report.totals.prompt_tokens == core.report.totals.generated_tokens == new.engine._accepted == 0
    assert core.pool.available == core.pool.total
    assert new.telemetry.warm.tokens == core.pool.idle * SIZE > 0
    assert old.store.stored == {}  # read once
    third = Bench(Store(*new.drain()))
    new.engine.draining = False
    assert workload(new, 2) == workload(third, 2) == (hits, prompt)
    assert new.box.ends.keys() == {f"r{i}" for i in range(40)}
    core.pool.check([])


def test_the_share_of_the_pool_is_not_passed() -> None:
    bench = Bench(
        Store(*(prefix(text(i, 5)) for i in range(20))), config=msgspec.structs.replace(CONFIG, warm_share=0.5)
    )
    pool = bench.engine.core.pool
    assert (pool.idle, pool.available) == (32, 64)
    found = [bench.box.cached[bench.ask([*text(i, 5), 7])] // SIZE for i in range(6)]
    assert found == [5, 5, 5, 5, 5, 5]


def test_nothing_stored_costs_no_step_and_other_weights_warm_nothing() -> None:
    store = Store()
    store.stored = {"other weights": [prefix(text(1, 4))]}
    executor = Counted()
    bench = Bench(store, executor)
    assert executor.tokens == []
    assert bench.engine.core.step == 0
    assert list(store.stored) == ["other weights"]


def test_time_is_bounded() -> None:
    """By a clock that only moves when it is looked at."""
    executor, ticks = Counted(), itertools.count()
    store, config = Store(*(prefix(text(i, 4)) for i in range(8))), msgspec.structs.replace(CONFIG, warm_seconds=6.0)
    bench = Bench(store, executor, config, clock=lambda: float(next(ticks)))
    assert bench.engine.core.idle
    assert 0 < sum(executor.tokens) < 8 * 4 * SIZE
    assert 0 < bench.engine.core.pool.idle < 32
    bench.engine.core.pool.check([])


@pytest.mark.parametrize("at", [0, 1, 3])
def test_requests_in_the_queue_come_first(at: int, caplog: pytest.LogCaptureFixture) -> None:
    """As after a crash: what the dead engine had is in the queue when the next one starts, or a little later."""
    caplog.set_level(logging.INFO, "quire.warming")
    executor = Counted()
    store = Store(*(prefix(text(i, 4)) for i in range(8)), wait_at=at)
    bench = Bench(store, executor)
    # A step is in flight when the question is asked; none begins after the answer.
    assert len(executor.tokens) <= at + 1
    assert sum(executor.tokens) < 8 * 4 * SIZE
    assert ("f00d" in store.stored) == (at == 0)
    assert "requests are already queued" in caplog.text
    assert bench.engine.core.idle
    bench.ask([5] * 40)
    assert bench.box.ends == {"r0": "length"}


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        (Store(prefix(text(1, 4)), prefix(text(2, 4))), "the engine failed on this request"),
        (Store(error=BusDown("Redis is away")), "Redis is away"),
        (Store(error=ValueError("unreadable hot prefixes in Redis")), "unreadable"),
    ],
)
def test_a_failure_is_logged_and_the_engine_serves(store: Store, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.warming")
    bench = Bench(store, Counted(lost=frozenset() if store.error else frozenset({1, 2})))
    assert reason in caplog.text
    bench.ask([5] * 40)
    assert bench.box.ends == {"r0": "length"}
    assert bench.engine.core.pool.available == 64


def test_what_makes_no_sense_is_left_out() -> None:
    bench = Bench(Store(prefix([10_000] * 64), HotPrefix(b"12345"), HotPrefix(b""), prefix(text(1, 4)[:-3])))
    assert bench.engine.core.pool.idle == 3
    assert bench.box.cached[bench.ask([*text(1, 4), 5])] == 3 * SIZE


def test_another_salt_finds_nothing() -> None:
    bench = Bench(Store(prefix(text(1, 4), "acme")))
    asked = [bench.ask([*text(1, 4), 5], salt=salt) for salt in ("", "other", "acme")]
    assert [bench.box.cached[name] for name in asked] == [0, 0, 4 * SIZE]


def test_an_engine_is_not_healthy_before_it_is_warm() -> None:
    telemetry, port = Telemetry("e"), free_port()
    page = Page(telemetry, "127.0.0.1", port)

    def health() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    class Looks(Store):
        def requests_wait(self) -> bool:
            seen.append(health())
            return super().requests_wait()

    seen: list[tuple[int, bytes]] = []
    try:
        box, store = LocalBox(lambda delta: None), Looks(prefix(text(1, 8)))
        telemetry.describe_model(INFO, CONFIG)
        engine = Engine(CONFIG, Counted(), box, box, observers=[telemetry])
        warm(engine, store, telemetry)  # type: ignore[arg-type]
        assert seen[0][0] == 200
        assert seen[1:] == [(503, b'{"status":"warming"}')] * len(seen[1:])
        assert len(seen) > 2
        engine.turn()
        assert health() == (200, b'{"status":"ok"}')
        assert b'quire_warmed_tokens{engine="e",model_name="scripted"} 128.0' in telemetry.expose()
    finally:
        page.close()


def test_a_page_answers_nothing_before_its_own_paths_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's application answers /health with the metrics, and a probe took that for a started engine."""
    apps: list[object] = []
    serve_forever = WSGIServer.serve_forever

    def serve(server: WSGIServer, poll_s: float = 0.5) -> None:
        apps.append(server.get_app())
        serve_forever(server, poll_s)

    monkeypatch.setattr(WSGIServer, "serve_forever", serve)
    page = Page(Telemetry("e"), "127.0.0.1", free_port())
    page.close()
    assert apps == [page._answer]


def test_a_start_that_takes_minutes_is_no_loop_that_stands() -> None:
    telemetry = Telemetry("e")
    telemetry._turned -= 2 * STALLED_S
    healthy = [telemetry.alive]
    telemetry.describe_model(INFO, CONFIG)
    healthy.append(telemetry.alive)
    telemetry._turned -= 2 * STALLED_S
    telemetry.started({}, takeover=False, memory={})
    assert [*healthy, telemetry.alive] == [False, True, True]
