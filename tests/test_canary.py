"""The canary over a real tiny model on a CPU: it notices what goes wrong, and costs nothing that others need."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire.engine.commands import Command, LocalBox
from quire.engine.config import EngineConfig
from quire.engine.core.plan import StepPlan, StepResult
from quire.engine.executor.base import Executor, ModelInfo, ScriptedExecutor, StepError
from quire.engine.executor.loading import load
from quire.engine.executor.local import LocalExecutor
from quire.engine.loop import Engine
from quire.engine.observers.canary import MAX_SHARE, NAME, QUIET_S, TAIL, TOLERANCE, Canary, difference
from quire.engine.observers.metrics import Telemetry
from quire.engine.wire.messages import FOREVER_MS, Delta, Generate, Sampling

CONFIG = EngineConfig(
    kv_blocks=12, max_seqs=4, step_tokens=64, max_model_len=128, threads=1, check_accounting=True, canary_every_s=45.0
)


@pytest.fixture(scope="module")
def shared(checkpoint: Callable[[str], Path]) -> Iterator[LocalExecutor]:
    made = load(msgspec.structs.replace(CONFIG, model=str(checkpoint("llama"))))
    assert isinstance(made, LocalExecutor)
    yield made
    made.close()


@pytest.fixture
def loaded(shared: LocalExecutor) -> LocalExecutor:
    """Without the slots of an earlier engine, which would continue decoding in blocks of the next one."""
    assert shared._worker is not None
    shared._worker.reset()
    return shared


class Clock:
    """Seconds that a test sets; a millisecond passes between two readings."""

    now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Idle:
    """An engine whose canary runs when a test says so, and what its clients got."""

    def __init__(self, executor: Executor, **options: Any) -> None:
        self.clock = Clock()
        self.tokens: list[int] = []
        self.box = LocalBox(lambda delta: self.tokens.extend(delta.token_ids))
        config = msgspec.structs.replace(CONFIG, **options)
        self.telemetry = Telemetry("e0")
        self.telemetry.describe_model(executor.info, config)
        self.engine = Engine(config, executor, self.box, self.box, observers=[self.telemetry])
        self.engine.canary = self.canary = Canary(config, self.engine.core, executor, self.clock)
        self.names = map(str, itertools.count())

    @property
    def pool(self) -> Any:
        return self.engine.core.pool

    def ask(self, tokens: list[int], count: int = 6) -> list[int]:
        self.tokens = []
        self.box.commands.append(Generate(next(self.names), "g", tokens, count, GREEDY, FOREVER_MS))
        while self.box.commands or not self.engine.core.idle:
            self.engine.turn()
        return self.tokens

    def outcomes(self) -> tuple[int, int, int]:
        counts = self.canary.counts
        return counts.equal, counts.different, counts.failed

    def metric(self, name: str, **labels: str) -> float:
        self.engine.turn()
        value = self.telemetry.registry.get_sample_value(
            name, {"engine": "e0", "model_name": self.telemetry.model} | labels
        )
        assert value is not None
        return value


GREEDY = Sampling(temperature=0.0, ignore_eos=True)
TEXT = list(range(5, 45))


@pytest.fixture
def idle(loaded: LocalExecutor) -> Iterator[Idle]:
    made = Idle(loaded)
    yield made
    made.engine.core.auditor.whole()
    assert made.pool.available == made.pool.total


def test_a_sound_engine_repeats_itself_bit_for_bit(idle: Idle) -> None:
    """Whatever ran in between, in whatever blocks: on a CPU the difference is 0, and no state of the engine changes."""
    idle.canary.run()
    before = idle.ask(TEXT)
    for _ in range(3):
        idle.ask([9, 8, 7], 3)  # other blocks are on top of the free ones now
        free, cached = idle.pool.available, idle.pool.idle
        idle.canary.run()
        assert (idle.pool.available, idle.pool.idle) == (free, cached)
        assert idle.canary.counts.difference == 0.0
    assert idle.outcomes() == (4, 0, 0)
    assert idle.metric("quire_canary_runs_total", outcome="equal") == 4
    assert idle.metric("quire_canary_seconds_total") == idle.canary.counts.seconds > 0
    assert idle.ask(TEXT) == before


def test_the_counts_of_clients_do_not_show_it(idle: Idle) -> None:
    idle.ask(TEXT)
    totals = msgspec.structs.asdict(idle.engine.core.report.totals)
    step, learned = idle.engine.core.step, idle.engine.core.admission.forecast.calibration.table()
    idle.canary.run()
    assert msgspec.structs.asdict(idle.engine.core.report.totals) == totals
    assert idle.engine.core.step == step
    assert idle.engine.core.admission.forecast.calibration.table() == learned
    assert idle.engine.core.idle


def weights(executor: LocalExecutor) -> list[torch.Tensor]:
    """The weights of all linear layers, flat, in the layout in which the model reads them; the LM head is the last."""
    worker = executor._worker
    assert worker is not None
    packed = [each.packed for each in worker._loaded.module.modules() if getattr(each, "packed", None) is not None]
    assert len(packed) == 9  # four of each layer and the head
    return [each.values.view(-1) for each in packed]


@pytest.mark.parametrize("value", [float("nan"), 3e4])
@pytest.mark.parametrize("layer", [0, 4, -1])
def test_a_corrupted_weight_is_noticed(
    idle: Idle, loaded: LocalExecutor, layer: int, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    """One number, as a bit that flipped in its exponent: in the first layer, in the second, in the head."""
    idle.canary.run()
    weight = weights(loaded)[layer]
    sound = weight[99].clone()
    with torch.inference_mode():
        weight[99] = value
        idle.canary.run()
        weight[99] = sound
    assert idle.outcomes() == (1, 1, 0)
    assert idle.canary.counts.difference > TOLERANCE
    assert idle.metric("quire_canary_runs_total", outcome="different") == 1
    (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "nats from the first run's; answers may be wrong: drain this engine" in said.getMessage()
    idle.canary.run()
    assert idle.outcomes() == (2, 1, 0)  # it compares with the first run, not with the last


@pytest.mark.parametrize("value", [float("nan"), -8.0])
@pytest.mark.parametrize("place", [0, 1])
def test_corrupted_keys_and_values_are_noticed(
    idle: Idle, loaded: LocalExecutor, value: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of either block goes wrong after the first step has written it."""
    idle.canary.run()
    worker = loaded._worker
    assert worker is not None
    submit = LocalExecutor.submit
    tables: list[list[int]] = []

    def corrupting(self: LocalExecutor, plan: StepPlan) -> None:
        tables.extend(start.table for start in plan.starts)
        if not plan.starts:
            for tensor in worker.kv.shapes[0][0]:
                tensor[tables[0][place]].fill_(value)
        submit(self, plan)

    with monkeypatch.context() as patched:
        patched.setattr(LocalExecutor, "submit", corrupting)
        idle.canary.run()
    assert len(tables) == 1
    assert len(tables[0]) == 2
    assert idle.outcomes() == (1, 1, 0)
    idle.canary.run()
    assert idle.outcomes() == (2, 1, 0)  # the next run writes its blocks anew


def test_a_table_that_leads_elsewhere_is_noticed(
    idle: Idle, loaded: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step reads through the table: swapped blocks are other keys at every position."""
    idle.canary.run()
    worker = loaded._worker
    assert worker is not None
    submit = LocalExecutor.submit

    def swapping(self: LocalExecutor, plan: StepPlan) -> None:
        if not plan.starts:
            worker._batch.tables[0, :2] = worker._batch.tables[0, :2].flip(0)
        submit(self, plan)

    monkeypatch.setattr(LocalExecutor, "submit", swapping)
    idle.canary.run()
    assert idle.outcomes() == (1, 1, 0)


def test_a_failed_step_is_counted_and_the_engine_serves_on(
    idle: Idle, loaded: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = idle.ask(TEXT)
    idle.canary.run()

    def fails(self: LocalExecutor) -> StepResult:
        self._in_flight.clear()
        self._begun.clear()
        raise StepError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(LocalExecutor, "collect", fails)
        idle.canary.run()
    assert idle.outcomes() == (1, 0, 1)
    assert idle.ask(TEXT) == before
    assert idle.metric("quire_canary_runs_total", outcome="failed") == 1


def test_a_full_cache_lends_two_blocks_once(loaded: LocalExecutor) -> None:
    """A cached prefix is evicted for the canary; its blocks are free afterwards, so the next run evicts nothing."""
    idle = Idle(loaded)
    for first in range(4):
        idle.ask([first + 20] * 47, 2)  # three full blocks each
    assert idle.pool.idle == idle.pool.total == 12
    assert not idle.canary.due(idle=True)
    idle.clock.now += QUIET_S
    assert idle.canary.due(idle=True)
    idle.canary.run()
    idle.canary.run()
    assert (idle.pool.idle, idle.pool.available) == (10, 12)
    idle.engine.core.auditor.whole()


def test_it_waits_for_a_quiet_moment_and_for_its_period(idle: Idle) -> None:
    canary, clock = idle.canary, idle.clock
    assert not canary.due(idle=False)
    assert not canary.due(idle=True)
    clock.now += QUIET_S / 2
    assert not canary.due(idle=True)
    assert not canary.due(idle=False)  # a request: the second begins again
    clock.now += QUIET_S / 2
    assert not canary.due(idle=True)
    clock.now += QUIET_S
    assert canary.due(idle=True)
    canary.run()
    clock.now += 44.9
    assert not canary.due(idle=True)
    clock.now += 0.2
    assert canary.due(idle=True)


def test_a_slow_model_runs_it_seldom(loaded: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most MAX_SHARE of the time, whatever the option says."""
    idle = Idle(loaded, canary_every_s=1.0)
    collect = LocalExecutor.collect

    def slow(self: LocalExecutor) -> StepResult:
        idle.clock.now += 2.0
        return collect(self)

    monkeypatch.setattr(LocalExecutor, "collect", slow)
    began, runs = idle.clock.now, 0
    while idle.clock.now < began + 10_000:
        if idle.canary.due(idle=True):
            idle.canary.run()
            runs += 1
        idle.clock.now += 0.5
    assert runs == pytest.approx(10_000 * MAX_SHARE / 4.0, abs=2)
    assert idle.canary.counts.seconds <= MAX_SHARE * (idle.clock.now - began) + 4.0


class Orders(LocalBox):
    """An inbox that gives requests for some turns, then none, then drains the engine."""

    def __init__(self, busy: int, turns: int, clock: Clock) -> None:
        super().__init__(lambda delta: None)
        self.busy, self.left, self.clock = busy, turns, clock
        self.engine: Engine

    def drain(self, wait_s: float) -> list[Command]:
        self.clock.now += 1.0
        self.left -= 1
        if self.left <= 0:
            self.engine.draining = True
        elif self.busy:
            self.busy -= 1
            return [Generate(f"r{self.busy}", "g", TEXT, 2, GREEDY, FOREVER_MS)]
        return []


@pytest.mark.parametrize(("busy", "runs"), [(200, 4), (0, 5), (140, 4)])
def test_idle_or_busy_it_runs_in_its_period(loaded: LocalExecutor, busy: int, runs: int) -> None:
    """A second a turn, 200 turns, 45 s between runs; a busy engine has a request in each turn."""
    clock = Clock()
    box = Orders(busy, 200, clock)
    box.engine = Engine(CONFIG, loaded, box, box)
    box.engine.canary = Canary(CONFIG, box.engine.core, loaded, clock)
    box.engine.run()
    counts = box.engine.canary.counts
    assert (counts.equal, counts.different, counts.failed) == (runs, 0, 0)
    assert counts.difference < 1e-5
    assert box.engine.core.pool.available == CONFIG.kv_blocks


TURN_S = 0.5


class Crowd(LocalBox):
    """An inbox that keeps more requests open than the engine has slots; each turn takes half a second."""

    def __init__(self, executor: LocalExecutor, turns: int) -> None:
        super().__init__(self.count)
        self.executor, self.turns, self.tenants = executor, turns, 2
        self.at: dict[int, Callable[[], None]] = {}  # what happens at a turn
        self.restart()

    def restart(self) -> None:
        self.open, self.turn, self.seen, self.ids = 0, 0, [0, 0], set[str]()
        self.clock = Clock()
        self.engine = Engine(CONFIG, self.executor, self, self)
        self.engine.canary = Canary(CONFIG, self.engine.core, self.executor, self.clock)

    def count(self, delta: Delta) -> None:
        self.ids.add(delta.id)
        self.seen[0] += len(delta.token_ids)
        if delta.finish is not None:
            self.seen[1] += 1
            self.open -= 1

    def drain(self, wait_s: float) -> list[Command]:
        self.clock.now += TURN_S
        self.turn += 1
        self.at.get(self.turn, lambda: None)()
        if self.turn >= self.turns:
            self.engine.draining = True
            return []
        fresh = range(self.open, 2 * CONFIG.max_seqs)
        self.open += len(fresh)
        return [
            Generate(f"c{self.turn}.{at}", "g", TEXT[:9], 12, GREEDY, FOREVER_MS, tenant=f"t{at % self.tenants}")
            for at in fresh
        ]


@pytest.fixture
def crowd(loaded: LocalExecutor) -> Crowd:
    """An engine whose slots are all in use, and whose pool fits just the sequences of its slots and the canary."""
    return Crowd(loaded, 340)


def test_under_load_a_planted_fault_is_found_within_a_minute(crowd: Crowd, loaded: LocalExecutor) -> None:
    """170 s of virtual time without an idle moment; the fault comes right after a run, when the next is furthest."""
    counts, weight, found = crowd.engine.canary.counts, weights(loaded)[0], list[int]()
    sound = weight[99].clone()

    def corrupt() -> None:
        with torch.inference_mode():
            weight[99] = 3e4
        planted.append((crowd.turn, counts.equal))

    def watch() -> None:
        if counts.equal and not planted:
            corrupt()
        if counts.different and not found:
            found.append(crowd.turn)
            with torch.inference_mode():
                weight[99] = sound

    planted = list[tuple[int, int]]()
    crowd.at = dict.fromkeys(range(340), watch)
    try:
        crowd.engine.run()
    finally:
        with torch.inference_mode():
            weight[99] = sound
    ((turn, equal),) = planted
    assert equal == 1
    assert found
    assert TURN_S * (found[0] - turn) <= 60.0
    assert counts.equal >= 2  # sound again


def test_under_load_clients_see_nothing_of_it(crowd: Crowd) -> None:
    """All answers are complete and none is the canary's; no sequence is preempted; its time is counted."""
    crowd.tenants = 1  # two tenants preempt each other for fairness
    crowd.engine.run()
    counts, totals = crowd.engine.canary.counts, crowd.engine.core.report.totals
    assert (counts.equal, counts.different, counts.failed) == (3, 0, 0)
    assert not any(NAME in each for each in crowd.ids)
    tokens, ended = crowd.seen
    assert tokens == 12 * ended
    assert crowd.open == 0
    assert totals.preemptions == 0
    assert totals.generated_tokens == tokens + 2 * counts.equal
    assert totals.leaks == totals.double_frees == totals.other_alarms == 0
    assert 0 < counts.seconds <= MAX_SHARE * 170.0


def test_a_mixture_whose_experts_change_at_near_ties_runs_it_idle_only(loaded: LocalExecutor) -> None:
    idle = Idle(loaded)
    assert idle.canary.loaded is not None
    loaded_info = loaded.info
    loaded.info = msgspec.structs.replace(loaded_info, near_ties=True)
    try:
        busy = Idle(loaded)
        busy.clock.now += 1000.0
        busy.canary.join()
        assert busy.engine.core.idle
    finally:
        loaded.info = loaded_info


def test_by_default_it_runs_every_45_seconds(loaded: LocalExecutor) -> None:
    config = msgspec.structs.replace(CONFIG, canary_every_s=EngineConfig().canary_every_s)
    box = LocalBox(lambda delta: None)
    assert Canary(config, Engine(config, loaded, box, box).core, loaded, Clock()).every_s == 45


def test_it_is_off_where_it_cannot_run_and_where_the_option_is_0(loaded: LocalExecutor) -> None:
    info = ModelInfo("scripted", "f00d", 100, 256, [0], 64)
    short = msgspec.structs.replace(CONFIG, step_tokens=16 + TAIL)
    for executor, config in (
        (loaded, msgspec.structs.replace(CONFIG, canary_every_s=0.0)),
        (loaded, short),
        (ScriptedExecutor(info, 12), CONFIG),
        (ScriptedExecutor(msgspec.structs.replace(info, beams=True, max_model_len=16), 12), CONFIG),
        (ScriptedExecutor(msgspec.structs.replace(info, beams=True), 1), CONFIG),
    ):
        clock, box = Clock(), LocalBox(lambda delta: None)
        canary = Canary(config, Engine(config, executor, box, box).core, executor, clock)
        canary.due(idle=True)
        clock.now += 1000
        assert not canary.due(idle=True)


def test_a_missing_token_counts_as_the_least_likely_one_that_is_named() -> None:
    one, other = {1: -1.0, 2: -2.0}, {1: -1.1, 3: -2.5}
    assert difference([one], [other]) == pytest.approx(0.5)
    assert difference([one], [one]) == 0.0
    assert difference([one, one], [one, {}]) == math.inf
