"""Requests whose grammar is still compiled wait outside the scheduler, and nothing else waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.commands import Command, Refused, Report, Resume, request_of
from quire.engine.config import EngineConfig
from quire.engine.core.limits import Outputs
from quire.engine.executor.base import ScriptedExecutor
from quire.engine.executor.grammar_store import PER_BYTE, GrammarError, GrammarStore
from quire.engine.executor.grammars import FAULTY, Grammars
from quire.engine.gate import POLL_S
from quire.engine.grammar_gate import GrammarGate
from quire.engine.llm import LLM
from quire.engine.loop import Engine
from quire.engine.wire.messages import CONSTRAINT, FOREVER_MS, Abort, Delta, Finish, Generate, Sampling
from tests.executor.test_grammar_store import Compiler, Matcher, store_of, work
from tests.matrix import examples
from tests.pace import patience


class Box:
    relieved, queued = False, 3

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.waits: list[float] = []

    def drain(self, wait_s: float) -> list[Command]:
        self.waits.append(wait_s)
        commands, self.commands = self.commands, []
        return commands


class Gate:
    """A gate over a box, whose grammars are compiled when `work` says so."""

    def __init__(self, max_held_mib: int = 1024) -> None:
        self.box, self.compiler, self.now_ms = Box(), Compiler(), 0
        self.store = store_of(self.compiler)
        self.gate = GrammarGate(self.box, self.store, lambda: self.now_ms, max_held_mib=max_held_mib)

    def take(self, *commands: Command) -> list[Command]:
        self.box.commands += commands
        return self.gate.drain(0.5)

    def work(self) -> list[Command]:
        work(self.store)
        return self.gate.drain(0.0)


def request(name: str, grammar: str = "", *, deadline_ms: int = FOREVER_MS, n: int = 1, tenant: str = "") -> Generate:
    return Generate(name, "g", [5], 4, Sampling(grammar=grammar), deadline_ms, n=n, tenant=tenant)


def test_a_request_waits_and_others_pass() -> None:
    gate = Gate()
    slow, plain, again = request("slow", "a"), request("plain"), Resume(request("again", "b"), [[7]])
    assert gate.take(slow, plain, again) == [plain]
    assert (gate.gate.waiting, gate.gate.waiting_sequences, gate.gate.waiting_tokens) == (2, 2, 2)
    assert gate.take() == []
    assert gate.box.waits == [0.5, POLL_S]  # an idle engine asks again soon
    gate.store.work()
    assert gate.take() == [slow]
    assert gate.work() == [again]
    gate.take()
    assert gate.box.waits[-1] == 0.5
    assert gate.gate.queued == 3
    assert not gate.gate.relieved
    assert gate.gate.waiting == gate.gate.waiting_tokens == 0


def large(name: str) -> str:
    """A grammar that counts as 4 MiB or more."""
    return name + "x" * ((4 << 20) // PER_BYTE)


def test_the_bytes_of_held_grammars_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Beyond the bound requests wait without a grammar, tenants in turns; those whose grammar is held, or that have
    none, pass.  As requests end, each one gets its turn."""
    gate, started, peak = Gate(max_held_mib=12), list[str](), 0
    commands = [request(f"loud{at}", large(f"{at}"), tenant="loud") for at in range(20)]
    quiet, shared = request("quiet", large("q"), tenant="quiet"), request("shared", large("0"), tenant="other")
    passed = gate.take(*commands, quiet, shared, request("plain"))
    assert [one.id for one in passed if isinstance(one, Generate)] == ["plain"]
    assert (gate.gate.waiting, gate.store.counts.held) == (22, 3)
    assert gate.gate.waiting_sequences == 22
    while gate.gate.waiting:
        running = [one.id for one in (*gate.take(), *gate.work()) if isinstance(one, Generate)]
        assert running, "no request got its turn"
        peak = max(peak, gate.store.counts.held_bytes)
        started += running
        gate.gate.ended(running)
    assert sorted(started) == sorted(one.id for one in (*commands, quiet, shared))
    assert started.index("quiet") <= 5  # among 22
    assert peak < 13 << 20  # the last one may exceed the bound, by 4 MiB less what was left
    assert gate.store.counts.held_bytes == 0
    assert len([one for one in caplog.records if "requests with other grammars wait" in one.message]) == 1


def test_a_request_that_waits_for_others_to_end_can_be_aborted_and_expires() -> None:
    gate = Gate(max_held_mib=4)
    gate.take(request("first", large("a")))
    late = request("late", large("b"), deadline_ms=1000)
    left = request("left", large("c"))
    assert gate.take(late, left) == []
    assert gate.take(Abort("left")) == [left, Abort("left")]
    gate.now_ms = 1000
    assert gate.take() == [late]  # the scheduler ends it
    assert gate.gate.waiting == 1
    gate.gate.ended(["late", "left", "first"])
    assert gate.store.counts.held == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.sampled_from(["new", "end", "abort", "work"]))))
@settings(max_examples=examples(40), deadline=None)
def test_held_bytes_are_the_sum_of_held_grammars(steps: list[tuple[str, int, str]]) -> None:
    """And every request that was not aborted starts once, when all that run end."""
    gate, running, open_ids, started = Gate(max_held_mib=8), list[str](), set[str](), list[str]()

    def note(commands: list[Command]) -> None:
        for one in commands:
            if isinstance(one, Generate):
                running.append(one.id)
                started.append(one.id)

    for number, (tenant, at, what) in enumerate(steps):
        if what == "new":
            open_ids.add(f"r{number}")
            note(gate.take(request(f"r{number}", large(f"{at}"), tenant=tenant)))
        elif what == "work":
            note(gate.work())
        elif what == "end" and running:
            gate.gate.ended([running.pop(0)])
        elif what == "abort" and open_ids:
            gone = sorted(open_ids)[at % len(open_ids)]
            open_ids.discard(gone)
            note(gate.take(Abort(gone)))
            gate.gate.ended([gone])
            running = [one for one in running if one != gone]
        grammars = gate.store._grammars.values()
        assert gate.store._held_bytes == sum(one.bytes() for one in grammars if one.tenants)
    for _ in range(2 * len(steps) + 1):
        note(gate.work())
        gate.gate.ended(running)
        running = []
    assert gate.gate.waiting == 0
    assert len(started) == len(set(started))
    assert open_ids <= set(started)
    assert gate.store._held_bytes == 0


def test_an_abort_releases_what_it_aborts() -> None:
    gate = Gate()
    one, two, three = request("one", "a"), request("two", "a"), request("three", "b")
    assert gate.take(one, two) == []
    assert gate.take(Abort("one")) == [one, Abort("one")]
    assert gate.take(three, Abort("three", reassigned=True)) == [three, Abort("three", reassigned=True)]
    assert gate.work() == [two]
    assert gate.compiler.texts == ["a"]


def test_a_request_that_comes_back_with_its_abort_waits_again() -> None:
    """An engine lost it and claims it again: it must not pass before its grammar is compiled."""
    gate = Gate()
    lost, again = Abort("r", reassigned=True), Resume(request("r", "a"), [[7]])
    assert gate.take(request("r", "a"), lost, again) == [request("r", "a"), lost]
    assert gate.gate.waiting == 1
    assert gate.work() == [again]


def test_the_abort_of_one_choice_leaves_the_others_waiting() -> None:
    gate = Gate()
    three, abort = request("r", "a", n=3), Abort("r", index=1)
    assert gate.take(three) == []
    assert gate.take(abort) == []
    assert gate.gate.waiting_sequences == 3
    assert gate.work() == [three, abort]


def test_a_deadline_ends_what_waits() -> None:
    gate = Gate()
    soon, later = request("soon", "a", deadline_ms=10), request("later", "b", deadline_ms=20)
    gate.take(later, soon)
    gate.now_ms = 9
    assert gate.take() == []
    gate.now_ms = 10
    assert gate.take() == [soon]
    assert gate.work() == [later]
    assert gate.compiler.texts == ["b"]


def test_a_grammar_at_fault_ends_its_request_alone() -> None:
    gate = Gate()
    bad, begun, good = request("bad", "bad"), Resume(request("begun", "bad"), [[7], None]), request("good", "g")
    gate.take(bad, begun, good)
    why = "bad is at fault"
    assert gate.work() == [Refused(bad, None, why), Refused(begun.request, begun.outputs, why), good]
    assert gate.take(request("again", "bad")) == [Refused(request("again", "bad"), None, why)]
    assert gate.store.counts.held == 1
    gate.gate.ended(["good", "unknown"])
    assert gate.store.counts.held == 0


def test_a_request_that_runs_keeps_its_grammar() -> None:
    gate = Gate()
    gate.take(request("r", "a"))
    gate.work()
    assert gate.store.counts.held == 1
    gate.take(Abort("r", reassigned=True))  # another engine has it, so no end is reported
    assert gate.store.counts.held == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "take", "abort", "lose", "late", "compile", "drain", "end"]), st.integers(0, 9)),
    max_size=60,
)


@given(STEPS)
def test_every_order_passes_once(steps: list[tuple[str, int]]) -> None:
    """Whatever is compiled when, each request passes exactly once, with its grammar compiled or about to end."""
    gate, passed, sent = Gate(), list[Command](), 0
    done: dict[str, bool] = {}

    def take(commands: list[Command]) -> None:
        ends = {command.id for command in commands if isinstance(command, Abort)}
        for command in commands:
            one = request_of(command)
            if one is not None and one.sampling.grammar and not isinstance(command, Refused):
                late = one.deadline_ms <= gate.now_ms
                assert one.id in ends or late or gate.store.done(one.sampling.grammar)
        passed.extend(commands)

    for what, which in steps:
        if what == "take":
            deadline_ms = which if which % 2 else FOREVER_MS
            grammar = ["", "a", "b", "bad"][which % 4]
            gate.box.commands.append(request(f"r{sent}", grammar, deadline_ms=deadline_ms, tenant=f"t{which % 3}"))
            sent += 1
        elif what in ("abort", "lose"):
            gate.box.commands.append(Abort(f"r{which}", reassigned=what == "lose"))
        elif what == "late":
            gate.now_ms = max(gate.now_ms, which)
        elif what == "compile":
            gate.store.work()
        elif what == "end":
            gate.gate.ended([f"r{which}"]) if done.get(f"r{which}") else None
        else:
            take(gate.gate.drain(0.0))
    take(gate.gate.drain(0.0))
    take(gate.work())
    ids = [one.id for command in passed if (one := request_of(command)) is not None]
    assert sorted(ids) == sorted(f"r{at}" for at in range(sent))
    assert gate.gate.waiting == gate.gate.waiting_tokens == 0
    for at, command in enumerate(passed):
        if isinstance(command, Abort) and command.id in ids:
            earlier = [request_of(before) for before in passed[:at]]
            count = sum(one is not None for one in earlier)
            assert command.id in ids[:count] or ids.index(command.id) >= count
    gate.gate.ended(ids)
    assert gate.store.counts.held == 0


# ----------------------------------------------------------------------------------------------------- with an engine


def scripted(directory: Path, **options: Any) -> LLM:
    config = EngineConfig(model=str(directory), executor="scripted", **({"kv_blocks": 64} | options))
    return LLM.over(config, ScriptedExecutor.load(config))


def grammars_of(llm: LLM) -> Grammars:
    assert isinstance(llm.executor, ScriptedExecutor)
    assert llm.executor._constraints is not None
    found = llm.executor._constraints.grammars
    assert found is not None
    return found


def finish(llm: LLM) -> None:
    until = time.monotonic() + patience(60)
    while llm.unfinished:
        assert time.monotonic() < until
        llm.step()


def test_a_step_does_not_wait_for_a_grammar(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request's grammar is compiled, another one runs to its end."""
    may_compile, compile_now = threading.Event(), Grammars._compile

    def slowly(grammars: Grammars, grammar: str) -> object:
        may_compile.wait(patience(60))
        return compile_now(grammars, grammar)

    monkeypatch.setattr(Grammars, "_compile", slowly)
    llm = scripted(checkpoint("llama"))
    held = llm.submit([5, 6], Sampling(grammar='start: "x"'))
    plain = llm.submit([5, 6], Sampling(), max_new_tokens=8)
    while plain.outputs[0].finish_reason != "length":
        llm.step()
    assert not held.outputs[0].token_ids
    may_compile.set()
    finish(llm)
    assert held.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("count", [257, 400, 1024])
@pytest.mark.parametrize("memory_mib", [0, 256])
def test_any_number_of_different_grammars_is_answered(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, count: int, memory_mib: int
) -> None:
    """All at once, each compiled once, whatever is kept."""
    compiled, compile_now = list[str](), Grammars._compile

    def counting(grammars: Grammars, grammar: str) -> object:
        compiled.append(grammar)
        assert len(compiled) <= count
        return compile_now(grammars, grammar)

    monkeypatch.setattr(Grammars, "_compile", counting)
    llm = scripted(checkpoint("llama"), max_seqs=1024, step_tokens=2048, kv_blocks=8192, grammar_memory_mib=memory_mib)
    asked = [Sampling(seed=at, grammar=f'start: "w{at}x" | "v{at}"') for at in range(count)]
    for found in llm.generate([[5, 6]] * count, asked, max_new_tokens=12):
        assert found.outputs[0].finish_reason in ("stop", "length")
        assert found.outputs[0].token_ids
    assert sorted(compiled) == sorted(one.grammar for one in asked)
    counts = llm.engine._inbox.counts()
    assert counts.held == counts.waiting == 0
    assert bool(counts.kept) == bool(memory_mib)


def test_a_preempted_sequence_finds_its_grammar_again(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept, and other grammars come and go: held ones stay."""
    compiled, compile_now = list[str](), Grammars._compile

    def counting(grammars: Grammars, grammar: str) -> object:
        compiled.append(grammar)
        return compile_now(grammars, grammar)

    monkeypatch.setattr(Grammars, "_compile", counting)
    monkeypatch.setattr(Grammars, "_matcher", fail_unless_held := HeldOnly(Grammars._matcher))
    config = EngineConfig(
        model=str(checkpoint("llama")),
        executor="scripted",
        kv_blocks=12,
        admission="threshold",
        admit_threshold=1.0,
        grammar_memory_mib=0,
    )
    llm = LLM.over(config, ScriptedExecutor.load(config))
    asked = [Sampling(seed=at, grammar=f"start: /[a-z{at} ]{{200,400}}/") for at in range(8)]
    found = llm.generate([[5, 6]] * 8, asked, max_new_tokens=60)
    assert llm.engine.core.report.totals.preemptions
    assert {one.outputs[0].finish_reason for one in found} == {"length"}
    assert sorted(compiled) == sorted(one.grammar for one in asked)
    assert fail_unless_held.calls > len(asked)  # those that were preempted began again


class HeldOnly:
    """Counts how often a matcher was taken from the store."""

    def __init__(self, take: Callable[[Grammars, str], object]) -> None:
        self.take, self.calls = take, 0

    def __get__(self, grammars: Grammars, _: type) -> Callable[[str], object]:
        def matcher(grammar: str) -> object:
            self.calls += 1
            return self.take(grammars, grammar)

        return matcher


def test_a_grammar_at_fault_is_the_request_s(checkpoint: Callable[[str], Path]) -> None:
    """Its end says so, for each choice, and no step of another request is lost."""
    config = EngineConfig(model=str(checkpoint("llama")), executor="scripted", kv_blocks=64)
    box, executor = Box(), ScriptedExecutor.load(config)
    deltas: list[Delta] = []

    class Out:
        full = returns = False

        def put(self, outputs: Outputs, report: Report) -> None:
            deltas.extend(delta for some in outputs.deltas.values() for delta in some)

    engine = Engine(config, executor, box, Out())
    box.commands += [request("bad", "start: nowhere", n=2), request("mate"), request("good", 'start: "x"')]
    while len({delta.id for delta in deltas if delta.finish}) < 3:
        engine.turn()
    ends = [(delta.index, delta.finish) for delta in deltas if delta.id == "bad"]
    reason = ends[0][1].message if ends[0][1] else ""
    assert ends == [(at, Finish("error", message=reason, code=CONSTRAINT)) for at in range(2)]
    assert reason.startswith(f"{FAULTY}: ")
    assert {delta.finish.reason for delta in deltas if delta.finish and delta.id != "bad"} <= {"stop", "length"}
    assert engine.core.report.totals.preemptions == 0


def test_no_more_is_claimed_than_slots_wait_for_grammars(checkpoint: Callable[[str], Path]) -> None:
    config = EngineConfig(model=str(checkpoint("llama")), executor="scripted", kv_blocks=640, max_seqs=32)
    box, executor = Box(), ScriptedExecutor.load(config)
    reports: list[Report] = []

    class Out:
        full = returns = False

        def put(self, outputs: Outputs, report: Report) -> None:
            reports.append(report)

    def never(text: str) -> Matcher:
        raise GrammarError(text)

    engine = Engine(config, executor, box, Out())
    engine._inbox = GrammarGate(box, GrammarStore(never, max_bytes=0, threads=0))
    box.commands += [request(f"r{at}", f"g{at}") for at in range(30)]
    engine.turn()
    assert reports[-1].free_requests == 2
    assert reports[-1].load.waiting == reports[-1].load.waiting_tokens == 30
    assert not engine._may_leave()
    box.commands += [Abort(f"r{at}") for at in range(30)]
    engine.turn()
    engine.turn()
    assert reports[-1].free_requests == 32
    assert engine._may_leave()
