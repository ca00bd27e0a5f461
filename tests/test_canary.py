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

from quire.engine.config import EngineConfig
from quire.engine.core.plan import StepPlan, StepResult
from quire.engine.executor.base import Executor, ModelInfo, ScriptedExecutor, StepError
from quire.engine.executor.loading import load
from quire.engine.executor.local import LocalExecutor
from quire.engine.loop import Engine
from quire.engine.observers.canary import MOST_SHARE, QUIET_S, TAIL, TOLERANCE, Canary, difference
from quire.engine.observers.metrics import Telemetry
from quire.engine.orders import LocalBox, Order
from quire.engine.wire.messages import FOREVER_MS, Generate, Sampling

CONFIG = EngineConfig(
    kv_blocks=12, max_seqs=4, step_tokens=64, max_model_len=128, threads=1, check_books=True, canary_every_s=60.0
)


@pytest.fixture(scope="module")
def shared(checkpoint: Callable[[str], Path]) -> Iterator[LocalExecutor]:
    made = load(msgspec.structs.replace(CONFIG, model=str(checkpoint("llama"))))
    assert isinstance(made, LocalExecutor)
    yield made
    made.close()


@pytest.fixture
def loaded(shared: LocalExecutor) -> LocalExecutor:
    """Without the slots of an earlier engine, which would go on decoding in blocks of the next one."""
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
        self.box.orders.append(Generate(next(self.names), "g", tokens, count, GREEDY, FOREVER_MS))
        while self.box.orders or not self.engine.core.idle:
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
    """The weights of all products, flat, in the layout in which the model reads them; the head is the last."""
    worker = executor._worker
    assert worker is not None
    packed = [each.packed for each in worker._model.modules() if getattr(each, "packed", None) is not None]
    assert len(packed) == 9  # four of each layer and the head
    return [each.numbers.view(-1) for each in packed]


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
    """A cached prefix makes room for the canary; its blocks are free afterwards, so the next run evicts nothing."""
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
    clock.now += 59.9
    assert not canary.due(idle=True)
    clock.now += 0.2
    assert canary.due(idle=True)


def test_a_slow_model_runs_it_seldom(loaded: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most MOST_SHARE of the time, whatever the option says."""
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
    assert runs == pytest.approx(10_000 * MOST_SHARE / 4.0, abs=2)
    assert idle.canary.counts.seconds <= MOST_SHARE * (idle.clock.now - began) + 4.0


class Orders(LocalBox):
    """An inbox that gives requests for some turns, then none, then drains the engine."""

    def __init__(self, busy: int, turns: int, clock: Clock) -> None:
        super().__init__(lambda delta: None)
        self.busy, self.left, self.clock = busy, turns, clock
        self.engine: Engine

    def drain(self, wait_s: float) -> list[Order]:
        self.clock.now += 1.0
        self.left -= 1
        if self.left <= 0:
            self.engine.draining = True
        elif self.busy:
            self.busy -= 1
            return [Generate(f"r{self.busy}", "g", TEXT, 2, GREEDY, FOREVER_MS)]
        return []


@pytest.mark.parametrize(("busy", "runs"), [(200, 0), (0, 4), (140, 1)])
def test_an_idle_engine_runs_it_and_a_busy_one_does_not(loaded: LocalExecutor, busy: int, runs: int) -> None:
    """A second a turn, 200 turns, a minute between runs; a busy engine has a request in each turn."""
    clock = Clock()
    box = Orders(busy, 200, clock)
    box.engine = Engine(CONFIG, loaded, box, box)
    box.engine.canary = Canary(CONFIG, box.engine.core, loaded, clock)
    box.engine.run()
    assert box.engine.canary.counts.equal == runs
    assert box.engine.core.pool.available == CONFIG.kv_blocks


def test_by_default_it_runs_once_a_minute(loaded: LocalExecutor) -> None:
    config = msgspec.structs.replace(CONFIG, canary_every_s=EngineConfig().canary_every_s)
    box = LocalBox(lambda delta: None)
    assert Canary(config, Engine(config, loaded, box, box).core, loaded, Clock()).every_s == 60


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
