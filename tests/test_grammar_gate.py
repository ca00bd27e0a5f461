"""Requests wait for their grammar, and nothing else waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.executor.base import ScriptedExecutor
from engine.executor.grammars import Grammars
from engine.grammar_gate import POLL_S, GrammarGate
from engine.llm import LLM
from engine.orders import Order, Resume
from engine.wire.messages import FOREVER_MS, Abort, Generate, Sampling
from tests.pace import patience


class Box:
    relieved, queued = False, 3

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.waits: list[float] = []

    def drain(self, wait_s: float) -> list[Order]:
        self.waits.append(wait_s)
        orders, self.orders = self.orders, []
        return orders


def request(name: str, grammar: str = "") -> Generate:
    return Generate(name, "g", [5], 4, Sampling(grammar=grammar), FOREVER_MS)


def test_a_request_waits_and_others_pass() -> None:
    box, compiled = Box(), set[str]()
    gate = GrammarGate(box, compiled.__contains__)
    slow, plain, again = request("slow", "a"), request("plain"), Resume(request("again", "b"), [[7]])
    box.orders = [slow, plain, again]
    assert gate.drain(0.5) == [plain]
    assert gate.drain(0.5) == []
    assert box.waits == [0.5, POLL_S]  # an idle engine asks again soon
    compiled.add("b")
    assert gate.drain(0.0) == [again]
    compiled.add("a")
    assert gate.drain(0.0) == [slow]
    gate.drain(0.5)
    assert box.waits[-1] == 0.5
    assert gate.queued == 3
    assert not gate.relieved


def test_an_abort_releases_what_it_aborts() -> None:
    box = Box()
    gate = GrammarGate(box, lambda _: False)
    one, two = request("one", "a"), request("two", "a")
    box.orders = [one, two]
    assert gate.drain(0.0) == []
    box.orders = [Abort("one")]
    assert gate.drain(0.0) == [one, Abort("one")]
    three = request("three", "a")
    box.orders = [three, Abort("three", reassigned=True)]
    assert gate.drain(0.0) == [three, Abort("three", reassigned=True)]


@given(st.lists(st.tuples(st.sampled_from(["take", "abort", "compile", "drain"]), st.integers(0, 5)), max_size=40))
def test_every_order_passes_once(steps: list[tuple[str, int]]) -> None:
    """Whatever is compiled when, each request passes exactly once, and never after its abort."""
    box, compiled, passed, sent = Box(), set[str](), list[Order](), 0
    gate = GrammarGate(box, compiled.__contains__)
    for what, which in steps:
        if what == "take":
            box.orders.append(request(f"r{sent}", ["", "a", "b"][which % 3]))
            sent += 1
        elif what == "abort":
            box.orders.append(Abort(f"r{which}"))
        elif what == "compile":
            compiled.add("ab"[which % 2])
        else:
            passed += gate.drain(0.0)
    compiled |= {"a", "b"}
    passed += gate.drain(0.0)
    ids = [order.id for order in passed if isinstance(order, Generate)]
    assert sorted(ids) == sorted(f"r{at}" for at in range(sent))
    for at, order in enumerate(passed):
        if isinstance(order, Abort) and order.id in ids and int(order.id[1:]) < sent:
            taken_before = [one.id for one in passed[:at] if isinstance(one, Generate)]
            assert order.id in taken_before or ids.index(order.id) >= len(taken_before)


def test_a_step_does_not_wait_for_a_grammar(checkpoint: Callable[[str], Path]) -> None:
    """While one request's grammar is compiled, another one runs to its end."""
    config = EngineConfig(model=str(checkpoint("llama")), executor="scripted", kv_blocks=64)
    executor = ScriptedExecutor.load(config)
    assert executor._constraints is not None
    grammars, may_compile = executor._constraints.grammars, threading.Event()
    assert isinstance(grammars, Grammars)
    compile_now = grammars._compile

    def slowly(grammar: str) -> object:
        may_compile.wait(patience(60))
        return compile_now(grammar)

    grammars._compile = slowly  # type: ignore[assignment, method-assign]
    llm = LLM.over(config, executor)
    held = llm.submit([5, 6], Sampling(grammar='start: "x"'))
    plain = llm.submit([5, 6], Sampling(), max_new_tokens=8)
    while plain.outputs[0].finish_reason != "length":
        llm.step()
    assert not held.outputs[0].token_ids
    may_compile.set()
    deadline = time.monotonic() + patience(60)
    while llm.unfinished and time.monotonic() < deadline:
        llm.step()
    assert held.outputs[0].finish_reason == "stop"
