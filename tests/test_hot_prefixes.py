"""Hot prefixes over the real loop and scripted executors: what is noted, what is chosen, what is computed ahead."""

from __future__ import annotations

import itertools
import logging
import math
import struct
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import recorder
from engine.config import EngineConfig
from engine.core.blocks import chain_digest, root_digest
from engine.core.limits import Event, Outputs
from engine.core.plan import StepPlan, StepResult
from engine.executor.base import ModelInfo, ScriptedExecutor, StepError
from engine.hot_prefixes import NOTED, NOTED_TOKENS, REPORT_S, PrefixUses, choose, readable, warm
from engine.loop import Engine
from engine.metrics import Page, Telemetry
from engine.orders import LocalBox, Report, Resume
from engine.tools import replay
from engine.wire.bus import BusDown
from engine.wire.hot_prefix_store import LONGEST, Reuse
from engine.wire.messages import Generate, HotPrefix, Sampling
from tests.system.stack import free_port

INFO = ModelInfo("scripted", "f00d", 1000, 512, [0], 64)
SIZE = 16
CONFIG = EngineConfig(max_seqs=8, step_tokens=64, check_books=True, block_size=SIZE, admission="none")


def packed(token_ids: Sequence[int], salt: str = "") -> bytes:
    return msgspec.msgpack.encode(HotPrefix(struct.pack(f"<{len(token_ids)}I", *token_ids), salt))


def chain(token_ids: Sequence[int], salt: str = "", fingerprint: str = "f") -> list[bytes]:
    """Digests of its whole blocks."""
    found = [root_digest(fingerprint, salt)]
    for start in range(0, len(token_ids) // SIZE * SIZE, SIZE):
        found.append(chain_digest(found[-1], token_ids[start : start + SIZE]))
    return found[1:]


def text(seed: int, blocks: int) -> list[int]:
    return [2 + (seed * 131 + i) % 997 for i in range(blocks * SIZE)]


class Stub:
    """A manifest, and a fleet that may want the engine after some questions."""

    def __init__(self, *entries: tuple[float, bytes], wanted_at: int = 2**60, down: bool = False) -> None:
        self.entries, self.wanted_at, self.down = list(entries), wanted_at, down
        self.asked = 0
        self.read: list[str] = []
        self.survived = 0

    def wanted(self) -> bool:
        self.asked += 1
        return self.asked > self.wanted_at

    def hottest(self, fingerprint: str) -> list[tuple[float, bytes]]:
        if self.down:
            raise BusDown("Redis is away")
        self.read.append(fingerprint)
        return self.entries

    def warmed(self) -> None:
        self.survived += 1


class Reports(LocalBox):
    """Keeps what the engine says of itself, and how each request ended."""

    def __init__(self) -> None:
        self.ends: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        super().__init__(self.take)
        self.said: list[Report] = []

    def take(self, delta: object) -> None:
        raise AssertionError("put() is ours")

    def put(self, outputs: Outputs, report: Report) -> None:
        self.said.append(report)
        for delta in itertools.chain.from_iterable(outputs.deltas.values()):
            if delta.first == 0:
                self.cached[delta.id] = delta.cached_tokens
            if delta.finish:
                self.ends[delta.id] = delta.finish.reason


class Counted(ScriptedExecutor):
    """Remembers what it computed, and loses the steps it is told to."""

    def __init__(self, blocks: int = 64, lost: frozenset[int] = frozenset()) -> None:
        super().__init__(INFO, blocks)
        self.lost = lost
        self.tokens: list[int] = []  # of prompts, step by step

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
    """An engine and whoever asks it."""

    def __init__(self, executor: ScriptedExecutor | None = None, config: EngineConfig = CONFIG) -> None:
        self.box = Reports()
        self.executor = executor or Counted()
        self.engine = Engine(config, self.executor, self.box, self.box)
        self.names = itertools.count()

    def ask(self, token_ids: list[int], *, salt: str = "", n: int = 1, tokens: int = 2) -> str:
        """Have one request answered; its id."""
        name = f"r{next(self.names)}"
        sampling = Sampling(ignore_eos=True, seed=1)
        self.box.orders.append(Generate(name, "g", token_ids, tokens, sampling, 2**60, salt, n=n))
        self.rest()
        return name

    def rest(self) -> None:
        while self.box.orders or not self.engine.core.idle:
            self.engine.turn()

    def reused(self) -> list[Reuse]:
        """All that was reported, and what would be next."""
        self.engine.draining = True
        self.engine.turn()
        return [reuse for report in self.box.said for reuse in report.reused]


# ------------------------------------------------------------------------------------------------------------- noting


def test_only_what_a_request_found_at_its_start_is_noted() -> None:
    bench = Bench()
    system, document = text(1, 3), text(1, 3) + text(2, 4)
    bench.ask(document + [7] * 5, n=3)  # computed: siblings share its prefill, which is no reuse
    for i in range(4):
        bench.ask([*system, 8, i])
    bench.ask([*document, 9], salt="another tenant")
    bench.ask([*document, 10], n=2)
    bench.box.orders.append(Resume(Generate("r", "g", [*document, 11], 5, Sampling(), 2**60), [[3, 4]]))
    bench.rest()
    reuses = bench.reused()
    hits: Counter[int] = Counter()
    for reuse in reuses:
        hits[reuse.length] += reuse.hits
    assert hits == {len(system): 4, len(document): 1}
    for reuse in reuses:
        tokens = list(reuse.token_ids[: reuse.length])
        assert tokens in (system, document)
        assert reuse.digest == chain(tokens, fingerprint=INFO.fingerprint)[-1]
        assert reuse.cache_salt == ""


def test_prompts_are_not_kept_where_nobody_wants_them() -> None:
    bench = Bench(config=msgspec.structs.replace(CONFIG, warm_seconds=0))
    for i in range(3):
        bench.ask([*text(1, 3), i])
    assert bench.reused() == []
    source = Stub((1.0, packed(text(1, 3))))
    bench.engine.draining = False
    warm(bench.engine, source)
    assert not source.read


def started(digests: list[bytes], tokens: int) -> Event:
    request = Generate("r", "g", [5] * tokens, 1, Sampling(), 2**60)
    return Event("started", request, 0, tokens, digests=digests)


def test_reports_come_every_few_seconds_and_are_bounded() -> None:
    noted = PrefixUses(SIZE)
    assert noted.take(100.0) == ()
    noted.note(started([], 0))
    assert noted.take(100.0) == ()
    noted.note(started([b"a"], SIZE))
    [first] = noted.take(100.0)
    assert (first.digest, first.hits, first.length) == (b"a", 1, SIZE)
    for i in range(NOTED + 500):
        noted.note(started([b"x", i.to_bytes(4)], 2 * SIZE))
        noted.note(started([b"a"], SIZE))
    assert noted.take(100.0 + REPORT_S / 2) == ()
    found = noted.take(100.0 + REPORT_S)
    assert len(found) == NOTED
    assert max(reuse.hits for reuse in found) == NOTED + 500
    noted.note(started([b"a"], SIZE))
    assert len(noted.take(100.0 + REPORT_S, at_once=True)) == 1


def test_not_many_long_requests_are_kept() -> None:
    noted = PrefixUses(SIZE)
    for i in range(NOTED):
        noted.note(started([i.to_bytes(4)], NOTED_TOKENS // 8))
    assert len(noted.take(100.0)) == 8
    noted.note(started([b"a"], SIZE))
    assert len(noted.take(200.0)) == 1


def test_of_a_prefix_that_is_too_long_the_beginning_is_noted() -> None:
    noted, blocks = PrefixUses(SIZE), LONGEST // SIZE + 9
    noted.note(started([i.to_bytes(4) for i in range(blocks)], blocks * SIZE))
    [reuse] = noted.take(100.0)
    assert reuse.length == LONGEST
    assert reuse.digest == (LONGEST // SIZE - 1).to_bytes(4)


def test_noting_costs_a_few_microseconds_a_request() -> None:
    """On this thread's own clock, so that a busy machine does not matter: each finds another prefix, of 512 tokens."""
    noted = PrefixUses(SIZE)
    digests = [i.to_bytes(32) for i in range(512 // SIZE - 1)]
    events = [started([*digests, i.to_bytes(32)], 512) for i in range(1000)]
    best = float("inf")
    for round_ in range(5):
        began = time.thread_time()
        for event in events:
            noted.note(event)
        assert len(noted.take((1 + round_) * REPORT_S)) == len(events)
        best = min(best, (time.thread_time() - began) / len(events))
    print(f"noting a request, its part of the report included: {best * 1e6:.2f} us")
    assert best < 50e-6


# ----------------------------------------------------------------------------------------------------------- choosing


def entries_of(*found: tuple[float, list[int], str]) -> list[tuple[float, HotPrefix]]:
    return readable([(heat, packed(tokens, salt)) for heat, tokens, salt in found], 1000)


def chosen(entries: list[tuple[float, HotPrefix]], blocks: int, longest: int = 512) -> list[tuple[str, list[int]]]:
    prefixes = choose(entries, blocks=blocks, longest=longest, block_size=SIZE, fingerprint="f")
    for prefix in prefixes:
        assert prefix.digests == chain(prefix.token_ids, prefix.cache_salt)
    return [(prefix.cache_salt, prefix.token_ids) for prefix in prefixes]


def test_what_is_shared_most_comes_first_and_counts_once() -> None:
    system, one, other, alone = text(1, 3), text(1, 3) + text(2, 2), text(1, 3) + text(3, 2), text(4, 4)
    entries = entries_of((0.0, one, ""), (0.0, other, ""), (-1.0, system, ""), (1.0, alone, ""), (0.5, system, "t"))
    # By hits: 2 end in `alone`, 0.5 + 1 + 1 go through `system`, 1 in each behind it; 1.4 in the tenant's own.
    everything = [("", system), ("", alone), ("t", system), ("", one), ("", other)]
    assert chosen(entries, 100) == everything
    assert chosen(entries, 3 + 4 + 3 + 2 + 2) == everything
    assert chosen(entries, 3 + 4 + 3 + 2 + 1) == [*everything[:4], ("", other[: 4 * SIZE])]
    assert chosen(entries, 2) == [("", system[: 2 * SIZE])]
    assert chosen(entries, 0) == []


def test_it_stays_within_what_the_model_can_hold() -> None:
    entries = entries_of((0.0, text(1, 9)[:-3], ""), (0.0, text(2, 1)[:-1], ""), (0.0, [], ""))
    assert chosen(entries, 100) == [("", text(1, 8))]
    assert chosen(entries, 100, longest=5 * SIZE - 1) == [("", text(1, 4))]


def test_what_makes_no_sense_is_left_out() -> None:
    good = packed(text(1, 2))
    bad = [b"", b"\xc1", b"rubbish", good[:-1], packed([1000] * 32), msgspec.msgpack.encode({"tokens": 5})]
    bad += [msgspec.msgpack.encode([b"12345", ""]), msgspec.msgpack.encode(["text", ""])]
    assert [prefix for _, prefix in readable([(1.0, one) for one in [*bad, good]], 1000)] == [
        msgspec.msgpack.decode(good, type=HotPrefix)
    ]


@given(
    tree=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.floats(-20, 20), st.sampled_from(["", "s"])),
        max_size=20,
    ),
    blocks=st.integers(0, 40),
)
def test_the_hottest_of_any_tree_that_fit(tree: list[tuple[list[int], float, str]], blocks: int) -> None:
    """Paths of blocks of three kinds, so that they share beginnings."""
    paths = [(tuple(kinds), salt) for kinds, _, salt in tree]
    entries = entries_of(
        *((heat, [7 + kind for kind in kinds for _ in range(SIZE)], salt) for kinds, heat, salt in tree)
    )
    found = [
        (tuple(token_ids[i] - 7 for i in range(0, len(token_ids), SIZE)), salt)
        for salt, token_ids in chosen(entries, blocks)
    ]
    taken = {(path[: i + 1], salt) for path, salt in found for i in range(len(path))}
    everything = {(path[: i + 1], salt) for path, salt in paths for i in range(len(path))}
    assert len(taken) == min(blocks, len(everything))  # the share is used, and never passed
    assert taken <= everything

    def worth(path: tuple[int, ...], salt: str) -> float:
        return sum(2.0**heat for kinds, heat, other in tree if other == salt and tuple(kinds[: len(path)]) == path)

    order = [worth(path, salt) for path, salt in found[:-1]]  # the last may be cut
    assert all(one >= other * (1 - 1e-9) for one, other in itertools.pairwise(order))
    left = [worth(path, salt) for path, salt in paths if (path, salt) not in taken]
    assert max(left, default=0.0) <= min(order, default=float("inf")) * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------------------ warming


def test_what_was_hot_is_found_again_after_a_restart() -> None:
    """A workload of shared prefixes, before and after: the new engine's hit rate is that of the old one, and nothing
    that was done for it shows in its figures."""

    def workload(bench: Bench, round_: int) -> tuple[int, int]:
        before = msgspec.structs.replace(bench.engine.core.totals)
        for i in range(40):
            document = text(1, 3) + text(10 + i % 4, 4)
            bench.ask([*document, 900, round_, i], salt=["", "acme"][i % 2])
        totals = bench.engine.core.totals
        return (
            totals.cached_prompt_tokens - before.cached_prompt_tokens,
            totals.prompt_tokens - before.prompt_tokens,
        )

    old = Bench()
    workload(old, 0)
    hits, prompt = workload(old, 1)
    source = Stub(*((math.log2(reuse.hits), msgspec.msgpack.encode(reuse.prefix())) for reuse in old.reused()))
    assert hits > 0.8 * prompt
    new = Bench()
    warm(new.engine, source)
    assert source.read == ["f00d"]
    assert source.survived == 1
    core = new.engine.core
    assert core.totals.prompt_tokens == core.totals.generated_tokens == new.engine._accepted == 0
    assert new.box.said == []
    assert core.pool.available == core.pool.total
    page = new.engine.telemetry
    assert page._warmed[1] == core.pool.idle * SIZE > 0
    assert not page._clocks
    assert workload(new, 2) == (hits, prompt)
    assert new.box.ends.keys() == new.box.cached.keys() == {f"r{i}" for i in range(40)}
    core.pool.check([])


def test_the_share_of_the_pool_is_not_passed_and_the_hottest_are_evicted_last() -> None:
    bench = Bench(Counted(64), msgspec.structs.replace(CONFIG, warm_share=0.5))
    warm(bench.engine, Stub(*((-float(i), packed(text(i, 5))) for i in range(20))))
    pool = bench.engine.core.pool
    assert pool.idle == 32
    assert pool.available == 64
    taken = pool.allocate(32 + 7)
    assert [len(pool.lookup(chain(text(i, 5), fingerprint="f00d"))) for i in range(8)] == [5, 5, 5, 5, 5, 0, 0, 0]
    pool.release(taken)


def test_nothing_hot_costs_no_step() -> None:
    executor = Counted()
    bench = Bench(executor)
    warm(bench.engine, Stub())
    assert executor.tokens == []
    assert bench.engine.core.step == 0


def test_time_is_bounded() -> None:
    """By a clock that only moves when it is looked at."""
    executor, ticks = Counted(), itertools.count()
    bench = Bench(executor, msgspec.structs.replace(CONFIG, warm_seconds=6.0))
    warm(bench.engine, Stub(*((0.0, packed(text(i, 4))) for i in range(8))), lambda: float(next(ticks)))
    assert bench.engine.core.idle
    assert 0 < sum(executor.tokens) < 8 * 4 * SIZE
    assert 0 < bench.engine.core.pool.idle < 32
    bench.engine.core.pool.check([])


@pytest.mark.parametrize("at", [0, 1, 3])
def test_who_waits_is_not_kept_waiting(at: int, caplog: pytest.LogCaptureFixture) -> None:
    """As after a crash: what the dead engine had is in the queue when the next one starts, or comes a little later."""
    caplog.set_level(logging.INFO, "quire.warming")
    executor = Counted()
    bench = Bench(executor)
    source = Stub(*((0.0, packed(text(i, 4))) for i in range(8)), wanted_at=at)
    warm(bench.engine, source)
    # A step is in flight when the question is asked; none begins after the answer.
    assert len(executor.tokens) <= at
    assert sum(executor.tokens) < 8 * 4 * SIZE
    assert source.read == ["f00d"] * (at > 0)
    assert source.survived == (at > 0)
    assert "requests wait" in caplog.text
    assert bench.engine.core.idle
    bench.ask([5] * 40)
    assert bench.box.ends == {"r0": "length"}


def test_an_engine_that_shall_stop_does_not_warm() -> None:
    executor = Counted()
    bench = Bench(executor)
    bench.engine.draining = True
    warm(bench.engine, Stub((0.0, packed(text(1, 4)))))
    bench.engine.run()
    assert executor.tokens == []


@pytest.mark.parametrize("source", [Stub((0.0, packed(text(1, 4))), (0.0, packed(text(2, 4)))), Stub(down=True)])
def test_a_failure_is_logged_and_the_engine_serves(source: Stub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.warming")
    bench = Bench(Counted(lost=frozenset() if source.down else frozenset({2})))
    warm(bench.engine, source)
    assert ("Redis is away" if source.down else "out of memory") in caplog.text
    bench.ask([5] * 40)
    assert bench.box.ends == {"r0": "length"}
    assert bench.engine.core.pool.available == 64


def test_garbage_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    warm(bench.engine, Stub((3.0, b"rubbish"), (2.0, packed([10_000] * 64)), (1.0, packed(text(1, 4)))))
    assert "2 of 3 hot prefixes in Redis make no sense" in caplog.text
    name = bench.ask([*text(1, 4), 5])
    assert bench.box.cached[name] == 4 * SIZE


def test_another_salt_finds_nothing() -> None:
    bench = Bench()
    warm(bench.engine, Stub((1.0, packed(text(1, 4), "acme"))))
    asked = [bench.ask([*text(1, 4), 5], salt=salt) for salt in ("", "other", "acme")]
    assert [bench.box.cached[name] for name in asked] == [0, 0, 4 * SIZE]


def test_a_flight_that_began_warm_is_replayed_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    config = msgspec.structs.replace(CONFIG, kv_blocks=64)
    executor, box = Counted(), Reports()
    flight = recorder.Recorder(path, recorder.header(config, executor), 1 << 20)
    engine = Engine(config, executor, box, box, flight=flight)
    warm(engine, Stub(*((float(i), packed(text(i, 4))) for i in range(6))))
    box.orders += [Generate(f"r{i}", "g", [*text(i % 8, 4), i], 9, Sampling(seed=i), 2**60) for i in range(20)]
    while box.orders or not engine.core.idle:
        engine.turn()
    flight.close()
    assert sum(box.cached.values()) > 0
    log = recorder.read(path)
    assert log.whole
    same, difference = replay.again(log)
    assert difference is None
    assert same > 40


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

    class Looks(Stub):
        def wanted(self) -> bool:
            seen.append(health())
            return super().wanted()

    seen: list[tuple[int, bytes]] = []
    try:
        box = Reports()
        engine = Engine(CONFIG, Counted(), box, box, telemetry)
        warm(engine, Looks((1.0, packed(text(1, 8)))))
        assert seen[0][0] == 200
        assert seen[1:] == [(503, b'{"status":"warming"}')] * len(seen[1:])
        assert len(seen) > 2
        engine.turn()
        assert health() == (200, b'{"status":"ok"}')
        assert b'quire_warmed_tokens{engine="e",model_name="scripted"} 128.0' in telemetry.expose()
    finally:
        page.close()
