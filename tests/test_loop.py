"""The step loop and offline mode over the scripted executor: no model, no Redis."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import msgspec
import pytest

from quire.engine.bus_thread import BusThread
from quire.engine.commands import LocalBox, Report, ResetPrefixCache, Resume, merged
from quire.engine.config import EngineConfig
from quire.engine.core.blocks import DoubleFree
from quire.engine.core.limits import Outputs
from quire.engine.core.plan import StepResult
from quire.engine.executor.base import ModelInfo, ScriptedExecutor, StepError, scripted_token
from quire.engine.llm import LLM
from quire.engine.loop import ConfigError, Engine, build_scheduler
from quire.engine.observers.load_report import Rate
from quire.engine.observers.turn_record import TurnRecord
from quire.engine.wire.clock import RedisClock
from quire.engine.wire.messages import Abort, Delta, EngineLoad, Finish, Generate, Sampling, TokenLogprob
from quire.engine.wire.records import SyncReply
from tests.core.drafters import AllDrafts, GuessingDrafter

INFO = ModelInfo("scripted", "f00d", 100, 256, [0], 64)
CONFIG = EngineConfig(max_seqs=8, step_tokens=64, check_accounting=True)


def test_offline_says_the_script_for_more_prompts_than_seats() -> None:
    llm = LLM.over(CONFIG, ScriptedExecutor(INFO, 64))
    prompts = [[5] * (1 + i % 7) for i in range(30)]
    samplings = [Sampling(seed=i) for i in range(30)]
    answers = llm.generate(prompts, samplings, max_new_tokens=list(range(1, 31)), n=2)
    for i, answer in enumerate(answers):
        for sibling, output in enumerate(answer.outputs):
            assert output.token_ids == [scripted_token(i, sibling, at, 100) for at in range(i + 1)]
            assert output.finish_reason == "length"
    assert llm.engine.core.idle
    assert llm.engine.core.pool.available == 64


class Breaks(ScriptedExecutor):
    """Loses one step, as a device out of memory would."""

    def collect(self) -> StepResult:
        if self._plans[0].step == 4:
            self._plans.clear()
            self._decoding.clear()
            raise StepError("out of memory in step 4")
        return super().collect()


def test_a_failed_step_costs_no_request_a_token() -> None:
    llm = LLM.over(CONFIG, Breaks(INFO, 64))
    answers = llm.generate([[1]] * 12, [Sampling(seed=i) for i in range(12)], max_new_tokens=10)
    for i, answer in enumerate(answers):
        assert answer.outputs[0].token_ids == [scripted_token(i, 0, at, 100) for at in range(10)]
        assert answer.outputs[0].finish_reason == "length"
    assert llm.engine.core.pool.available == 64


class Chokes(ScriptedExecutor):
    """Fails each step that computes a sequence whose sampling seed is `bad`, from its third token on."""

    bad = 99
    failures = 0

    def collect(self) -> StepResult:
        result = super().collect()
        if any(sampler.sampling.seed == self.bad and at > 2 for sampler, at in self._decoding.values()):
            self._plans.clear()
            self._decoding.clear()
            self.failures += 1
            raise StepError("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.31 GiB")
        return result


def test_a_request_that_fails_its_steps_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its mates say every token; its client gets a fixed sentence, the log the cause."""
    executor = Chokes(INFO, 64)
    llm = LLM.over(CONFIG, executor)
    seeds = [0, 1, 2, Chokes.bad, 4, 5, 6, 7, 8]
    answers = llm.generate([[1]] * 9, [Sampling(seed=seed) for seed in seeds], max_new_tokens=20)
    for seed, answer in zip(seeds, answers, strict=True):
        said = answer.outputs[0]
        if seed == Chokes.bad:
            assert said.finish_reason == "error"
            assert said.message == "the engine failed on this request twice at the same position"
            assert said.token_ids == [scripted_token(seed, 0, at, 100) for at in range(2)]
        else:
            assert (said.finish_reason, said.token_ids) == (
                "length",
                [scripted_token(seed, 0, at, 100) for at in range(20)],
            )
    assert executor.failures <= 6
    assert llm.engine.core.pool.available == 64
    assert "CUDA out of memory" in caplog.text


def test_a_step_budget_that_leaves_no_room_for_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="step_tokens is 8; it must exceed max_seqs, 8"):
        build_scheduler(EngineConfig(max_seqs=8, step_tokens=8), ScriptedExecutor(INFO, 64))


def test_a_rate_is_right_from_the_first_interval_on_and_leaves_out_time_without_a_queue() -> None:
    rate = Rate(seconds=1.0)
    for tick in range(100):
        assert rate.update(tick, float(tick), queued=False) == 0.0
    rate.update(100, 100.0, queued=True)
    for tick in range(1, 20):
        assert rate.update(100 + 5 * tick, 100 + 0.1 * tick, queued=True) == pytest.approx(50.0)
    rate.update(200, 102.0, queued=False)
    assert rate.update(201, 200.0, queued=True) == pytest.approx(50.0, rel=0.05)
    for tick in range(1, 60):
        rate.update(201 + tick, 200 + 0.1 * tick, queued=True)
    assert rate.value == pytest.approx(10.0, rel=0.2)  # the old pace is forgotten


class Reports(LocalBox):
    """Keeps what the engine says of itself."""

    def __init__(self) -> None:
        super().__init__(lambda delta: None)
        self.said: list[Report] = []

    def put(self, outputs: Outputs, report: Report) -> None:
        self.said.append(report)


def test_the_time_of_a_step_is_known_at_once_after_idleness() -> None:
    """Output tokens per second are an average that idleness drags down: from them the first steps would look slow."""
    box = Reports()
    engine = Engine(CONFIG, ScriptedExecutor(INFO, 64, step_seconds=0.02), box, box)
    for _ in range(2):  # the second time from idleness
        box.commands.append(Generate("r", "g", [5], 8, Sampling(ignore_eos=True), 2**60))
        turns: list[float] = []
        while not engine.core.idle or box.commands:
            began = time.monotonic()
            engine.turn()
            turns.append(time.monotonic() - began)
        load = box.said[-1].load
        assert 0.02 <= load.step_s <= 2 * max(turns)  # a step begins in one turn and ends in the next
        time.sleep(0.2)
        engine.turn()
    assert box.said[-1].load.step_s == load.step_s


def test_the_pace_is_what_the_engine_does_while_requests_wait() -> None:
    """A single request does not show how many requests per second an engine can serve."""
    box = Reports()
    engine = Engine(CONFIG, ScriptedExecutor(INFO, 64, step_seconds=0.005), box, box)
    rates = []
    for queued in (False, True, False):
        box.queued = queued
        box.commands += [
            Generate(f"{seed}", "g", [5], 8, Sampling(seed=seed, ignore_eos=True), 2**60) for seed in (1, 2)
        ]
        while not engine.core.idle or box.commands:
            engine.turn()
        load = box.said[-1].load
        rates.append((load.tokens_per_s, load.blocks_per_s))
    assert rates[0] == (0.0, 0.0)
    assert rates[1][0] == pytest.approx(8 * rates[1][1], rel=0.2) != 0.0  # a block for 8 output tokens
    assert rates[2] == rates[1]


def test_a_full_engine_says_how_much_it_would_claim_for_tenants_below_their_share() -> None:
    """It has no free token then, so this bound cannot follow from the free ones."""
    box = Reports()
    engine = Engine(CONFIG, ScriptedExecutor(INFO, 64), box, box)
    box.commands += [
        Generate(f"{i}", "g", [5], 200, Sampling(seed=i, ignore_eos=True), 2**60, tenant="loud") for i in range(20)
    ]
    while not box.said or box.said[-1].free_tokens:
        engine.turn()
    report = box.said[-1]
    assert report.load.preemptible_tokens > 0
    assert report.claim_tokens == 0
    assert report.preempt_claim_tokens > 0


class Shut(Reports):
    """Redis is away: what the engine says stays here, as far as it fits."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.deltas = most, 0
        self.away = True

    @property
    def full(self) -> bool:  # type: ignore[override]
        return self.away and self.deltas >= self.most

    def put(self, outputs: Outputs, report: Report) -> None:
        super().put(outputs, report)
        self.deltas += sum(map(len, outputs.deltas.values()))


def test_generation_goes_on_without_redis_up_to_a_bound() -> None:
    box = Shut(most=100)
    engine = Engine(CONFIG, ScriptedExecutor(INFO, 64), box, box)
    box.commands += [Generate(f"r{i}", "g", [5], 50, Sampling(ignore_eos=True), 2**60) for i in range(8)]
    for _ in range(60):
        engine.turn()
    assert 100 <= box.deltas < 100 + 8 * (1 + ScriptedExecutor.depth)
    box.away = False
    while not engine.core.idle:
        engine.turn()
    assert box.deltas == 8 * 50


def test_a_draining_engine_leaves_when_another_can_go_on_or_its_grace_is_over() -> None:
    for relieved, grace_s in ((True, 1000.0), (False, 0.0)):
        box = Reports()
        engine = Engine(
            msgspec.structs.replace(CONFIG, grace_s=grace_s), ScriptedExecutor(INFO, 64, step_seconds=0.01), box, box
        )
        box.commands.append(Generate("r", "g", [5], 200, Sampling(ignore_eos=True), 2**60))
        while engine.core.report.totals.generated_tokens < 3:
            engine.turn()
        box.relieved, engine.draining = relieved, True
        engine.run()
        assert not engine.core.idle
    box.commands.append(Generate("q", "g", [5], 3, Sampling(ignore_eos=True), 2**60))
    engine._leave_at = math.inf
    engine.config = msgspec.structs.replace(CONFIG, grace_s=1000.0)
    engine.run()
    assert engine.core.idle  # alone it finishes what it has


def test_a_request_begun_elsewhere_goes_on() -> None:
    said: list[Delta] = []
    box = LocalBox(said.append)
    engine = Engine(CONFIG, ScriptedExecutor(INFO, 64), box, box)
    request = Generate("r", "g", [5], 6, Sampling(ignore_eos=True, seed=3), 2**60, n=3)
    outputs = [[scripted_token(3, 0, at, 100) for at in range(4)], None, [scripted_token(3, 2, 0, 100)]]
    box.commands.append(Resume(request, outputs))
    while box.commands or not engine.core.idle:
        engine.turn()
    assert [delta.first for delta in said if delta.index == 0] == [4, 5]
    assert [delta.first for delta in said if delta.index == 2] == [1, 2, 3, 4, 5]
    assert all(delta.token_ids == [scripted_token(3, delta.index, delta.first, 100)] for delta in said)


@pytest.mark.parametrize("again", [False, True])
async def test_what_was_said_of_a_lost_request_is_not_sent_after_the_news_of_its_loss(again: bool) -> None:
    """The loop hears of a loss later than the bus does, which has its lease back and could send again."""
    thread, sent = BusThread(CONFIG), []

    class Side:
        queue_share, watched = 0.5, False
        clock = RedisClock()

        async def sync(self, batches: Any, finished: Any, *_: Any, **__: Any) -> SyncReply:
            sent.append(([delta.id for _, batch in batches for delta in batch.deltas], finished))
            first = len(sent) == 1
            return SyncReply([Generate("a", "g", [5], 6, Sampling(), 0)] if first and again else [], [], ["a"] * first)

    def say(*names: str, dropped: int, finished: tuple[str, ...] = ()) -> Report:
        report = Report(EngineLoad("e", "m", "f", 1, 1, 1, 1, 1, 1, 1, 1, 1, 1), 0, 0, 0, dropped)
        thread.put(Outputs({"g": [Delta(name, 0, [1]) for name in names]}, list(finished)), report)
        return report

    side: Any = Side()
    await thread._sync(side, say("a", "b", dropped=0))
    say("a", "b", dropped=0, finished=("a",))
    await thread._sync(side, say("a", "b", dropped=1))
    assert sent == [(["a", "b"], []), (["b", "a"], [])]
    assert thread.queued
    commands = thread.drain(0)
    assert commands[0] == Abort("a", reassigned=True)
    assert [type(command) for command in commands[1:]] == [Generate] * again
    await thread._sync(side, say("a", dropped=1, finished=("a",)))
    assert sent[2] == (["a"], ["a"])  # whatever comes after the loop's own drop is of the request's next life
    thread._loop.close()


async def test_a_reset_of_the_prefix_cache_precedes_the_claims_of_its_exchange() -> None:
    thread = BusThread(CONFIG)

    class Side:
        queue_share, watched = 0.5, False
        clock = RedisClock()

        async def sync(self, *_: Any, **__: Any) -> SyncReply:
            return SyncReply([Generate("a", "g", [5], 6, Sampling(), 0)], [], reset_prefix_cache=True)

    side: Any = Side()
    report = Report(EngineLoad("e", "m", "f", 1, 1, 1, 1, 1, 1, 1, 1, 1, 1), 0, 0, 0)
    await thread._sync(side, report)
    assert [type(command) for command in thread.drain(0)] == [ResetPrefixCache, Generate]
    thread._loop.close()


def test_an_engine_resets_its_prefix_cache_between_two_steps() -> None:
    box = LocalBox(lambda delta: None)
    engine = Engine(CONFIG, ScriptedExecutor(INFO, 64), box, box)

    def run(*commands: Any) -> int:
        box.commands += commands
        while box.commands or not engine.core.idle:
            engine.turn()
        return engine.core.report.totals.cached_prompt_tokens

    def ask(name: str) -> Generate:
        return Generate(name, "g", [5] * 40, 3, Sampling(ignore_eos=True), 2**60)

    assert run(ask("a")) == 0
    assert (hits := run(ask("b"))) > 0
    assert run(ResetPrefixCache(), ask("c")) == hits
    assert engine._accepted == 3  # a reset is no request
    assert run(ask("d")) == 2 * hits


def test_deltas_that_go_out_together_are_merged() -> None:
    probs = [TokenLogprob(-1.0)]
    deltas = [
        Delta("a", 0, [1], None, 0, probs, 16),
        Delta("b", 7, [2]),
        Delta("a", 1, [3], None, 0, probs),
        Delta("b", 8, [4], Finish("length")),
        Delta("a", 0, [5], None, 1),
        Delta("a", 2, [], Finish("cancelled")),
    ]
    assert merged(deltas) == [
        Delta("a", 0, [1, 3], Finish("cancelled"), 0, probs * 2, 16),
        Delta("b", 7, [2, 4], Finish("length")),
        Delta("a", 0, [5], None, 1),
    ]
    assert deltas[0].token_ids == [1]


def broken(**changes: Any) -> tuple[Engine, Reports]:
    """An engine in the middle of its work, one of whose held blocks was freed."""
    box = Reports()
    config = msgspec.structs.replace(CONFIG, **{"check_accounting": False} | changes)
    engine = Engine(config, ScriptedExecutor(INFO, 64), box, box)
    box.commands.append(Generate("r", "g", [5] * 40, 500, Sampling(ignore_eos=True), 2**60))
    while engine.core.report.totals.generated_tokens < 3:
        engine.turn()
    [seq] = engine.core.live()
    engine.core.pool._free.insert(0, seq.table[0])  # the last to be handed out again
    return engine, box


def test_an_engine_whose_books_are_wrong_says_so_and_stops() -> None:
    engine, box = broken()
    with pytest.raises(DoubleFree, match=r"blocks free|in the free list"):
        engine.run()
    assert box.said[-1].load.alarms == 1
    assert engine.core.report.totals.double_frees == 1


def test_the_last_record_of_such_an_engine_stays_as_observers_saw_it() -> None:
    """Observers may read it later, on another thread."""

    class Keeps:
        def __init__(self) -> None:
            self.seen: list[tuple[TurnRecord, Outputs]] = []

        def observe(self, record: TurnRecord) -> None:
            self.seen.append((record, record.outputs))

    engine, _ = broken()
    engine.observers.append(keeps := Keeps())
    with pytest.raises(DoubleFree):
        engine.run()
    assert all(record.outputs is outputs for record, outputs in keeps.seen)


def test_or_counts_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    engine, box = broken(on_accounting_error="log", check_accounting=True)
    while engine.core.report.totals.double_frees < 2:
        engine.turn()
    assert len([record for record in caplog.records if "balance" in record.message]) == 1
    assert box.said[-1].load.audits > box.said[-1].load.alarms > 0


def test_a_check_that_another_thread_requests_is_answered_by_the_loop() -> None:
    engine, _ = broken(on_accounting_error="log")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.checks.request_check)
        while not answer.done():
            engine.turn()
    assert "in the free list" in answer.result()


def test_a_live_engine_checks_once_it_is_idle_and_not_while_tokens_flow() -> None:
    box = Reports()
    config = msgspec.structs.replace(CONFIG, check_accounting=False)
    engine = Engine(config, ScriptedExecutor(INFO, 64), box, box)
    before = engine.core.report.totals.audits
    for checks in (1, 2):
        box.commands.append(Generate(f"r{checks}", "g", [5], 50, Sampling(ignore_eos=True), 2**60))
        while box.commands or not engine.core.idle:
            engine.turn()
        assert engine.core.report.totals.audits == before + checks - 1
        for _ in range(5):
            engine.turn()
        assert engine.core.report.totals.audits == before + checks


class PutOff(ScriptedExecutor):
    """Has put off three pieces of work."""

    def catch_up(self) -> bool:
        assert self.engine.core.idle
        self.left -= self.left > 0
        return self.left > 0

    left = 3
    engine: Engine


def test_work_that_the_start_put_off_is_done_while_no_request_is_here() -> None:
    executor = PutOff(INFO, 64)
    box = Reports()
    engine = executor.engine = Engine(CONFIG, executor, box, box)
    box.commands.append(Generate("r", "g", [5, 6], 5, Sampling(seed=1), 1 << 60))
    left: list[int] = []

    def turn(wait_s: float = 0.0) -> None:
        left.append(executor.left)
        Engine.turn(engine, wait_s)
        engine.draining = len(left) > 15

    engine.turn = turn  # type: ignore[method-assign]
    engine.run()
    assert left[0] == 3
    assert left[-1] == 0


def test_a_turn_reports_that_the_engine_drains_whenever_the_signal_arrives() -> None:
    """Also between a turn's report and the look at the flag: hot prefixes would not be written, nor gateways know."""

    class Signal:
        reported = False

        def observe(self, record: TurnRecord) -> None:
            self.reported |= record.draining
            engine.draining = True

    box, signal = Reports(), Signal()
    engine = Engine(CONFIG, ScriptedExecutor(INFO, 64), box, box, observers=[signal])
    engine.run()
    assert signal.reported
    assert box.said[-1].load.draining


def test_a_device_that_waits_gets_the_next_step_before_outputs_are_published() -> None:
    """Two steps in flight, one of them with drafts: the turn that takes its result also submits the next step."""
    said = [scripted_token(3, 0, at, 100) for at in range(40)]
    drafter = GuessingDrafter(lambda _, known: said[len(known) - 2 :][:3])
    records: list[TurnRecord] = []
    llm = LLM.over(CONFIG, ScriptedExecutor(INFO, 64))
    engine, core = llm.engine, llm.engine.core
    assert engine.executor.depth == 2
    core.drafts.drafter, core.drafts.policy, core.drafts.run_ahead = drafter, AllDrafts(), True
    with mock.patch.object(engine, "_observe", records.append):
        answer = llm.generate([[5, 6]], [Sampling(seed=3)], max_new_tokens=40)
    assert answer[0].outputs[0].token_ids == said
    drafting = [at for at, record in enumerate(records) if record.plan and any(s.drafts for s in record.plan.slices)]
    assert len(drafting) >= 8
    for at in drafting[2:-1]:
        assert records[at].result is not None, "the device waited while outputs were published"
