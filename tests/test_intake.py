"""A burst of commands, or a reset of a large prefix cache, is taken in parts: no turn of the step loop is long."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import pytest

from quire.engine.commands import Command, LocalBox, ResetPrefixCache, Resume, request_of
from quire.engine.config import EngineConfig
from quire.engine.core.plan_builder import MAX_SEARCHED
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.intake import COMMAND_TOKENS, RESET_BLOCKS, TURN_TOKENS, Intake
from quire.engine.loop import Engine
from quire.engine.observers.turn_record import TurnRecord
from quire.engine.wire.messages import FOREVER_MS, Abort, Delta, Generate, Sampling

BLOCK: Literal[16] = 16
INFO = ModelInfo("tiny", "f" * 32, 32_000, 262_144, [0], 0)


class Watched:
    """An engine whose turns are kept."""

    def __init__(self, *, blocks: int = 40_000, max_seqs: int = 1024) -> None:
        config = EngineConfig(
            kv_blocks=blocks, block_size=BLOCK, max_seqs=max_seqs, step_tokens=8192, max_model_len=262_144
        )
        self.deltas: list[Delta] = []
        self.box = LocalBox(self.deltas.append)
        self.records: list[TurnRecord] = []
        self.engine = Engine(config, ScriptedExecutor(INFO, blocks), self.box, self.box, observers=[self])
        self.core = self.engine.core

    def observe(self, record: TurnRecord) -> None:
        self.records.append(record)

    def run(self, commands: list[Command]) -> None:
        """Take the commands, and turn until the engine is idle."""
        self.box.commands += commands
        self.engine.turn()
        while not self.records[-1].idle:
            self.engine.turn()

    @property
    def ended(self) -> dict[str, str]:
        """Reason of the end by request."""
        return {one.id: one.finish.reason for one in self.deltas if one.finish is not None}


def ask(name: str, prompt: list[int], tokens: int = 2) -> Generate:
    return Generate(name, "g", prompt, tokens, Sampling(ignore_eos=True), FOREVER_MS)


def words(number: int, count: int) -> list[int]:
    return [5 + (number * 7_919 + at) % 31_000 for at in range(count)]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: [ask(f"r{at}", words(at, 131_000)) for at in range(6)], id="long prompts"),
        pytest.param(lambda: [ask(f"r{at}", words(0, 4_000)) for at in range(200)], id="one prompt"),
        pytest.param(
            lambda: [Resume(ask(f"r{at}", words(at, 100), 60), [[7] * 50]) for at in range(1024)], id="resumed"
        ),
    ],
)
def test_a_burst_is_accepted_in_parts_and_answered(make: Callable[[], list[Command]]) -> None:
    """In one turn ten prompts of 131,000 tokens took 66 ms, and 1,024 resumed requests 93 ms."""
    commands = make()
    engine = Watched(blocks=60_000)
    engine.run(commands)
    parts = [record.commands for record in engine.records if record.commands]
    assert [command for part in parts for command in part] == commands
    assert len(parts) > 1
    for part in parts:
        requests = [request for command in part if (request := request_of(command)) is not None]
        work = [COMMAND_TOKENS + len(request.token_ids) for request in requests]
        assert sum(work[:-1]) < TURN_TOKENS
    assert set(engine.ended.values()) == {"length"}
    assert len(engine.ended) == len(commands)


def test_a_plan_looks_up_a_bounded_number_of_cached_blocks() -> None:
    """A cached prefix takes no tokens of the step: 1,024 requests that shared 4,000 tokens took 414 ms in one plan."""
    engine = Watched()
    prompt = words(0, 4_000)
    engine.run([ask("first", prompt)])
    lookup, looked_up = engine.core.pool.lookup, [0]

    def counted(digests: object) -> list[int]:
        found = lookup(digests)  # type: ignore[arg-type]
        looked_up[0] += len(found)
        return found

    engine.core.pool.lookup = counted  # type: ignore[method-assign]
    most, turns = 0, 0
    engine.box.commands += [ask(f"r{at}", prompt) for at in range(200)]
    while turns == 0 or not engine.records[-1].idle:
        looked_up[0] = 0
        engine.engine.turn()
        most, turns = max(most, looked_up[0]), turns + 1
    assert len(engine.ended) == 201
    lookups_per_start = 4  # admission looks a prompt up, and so does the start
    assert 0 < most <= lookups_per_start * MAX_SEARCHED
    assert turns >= 200 * (4_000 // BLOCK) // MAX_SEARCHED


def test_a_prompt_that_is_longer_than_the_bound_of_a_plan_starts() -> None:
    engine = Watched()
    engine.run([ask(f"r{at}", words(0, (MAX_SEARCHED + 1) * BLOCK)) for at in range(2)])
    assert engine.ended == {"r0": "length", "r1": "length"}


def test_a_large_cache_is_emptied_in_parts_before_what_follows() -> None:
    """A reset of 100,000 cached blocks took 70 ms."""
    engine = Watched(blocks=30_000)
    prompts = [words(at, 131_000) for at in range(3)]
    engine.run([ask(f"r{at}", prompt) for at, prompt in enumerate(prompts)])
    pool = engine.core.pool
    cached = [pool.idle]
    assert cached[0] > 2 * RESET_BLOCKS
    engine.box.commands += [ResetPrefixCache(), ask("after", prompts[0])]
    while "after" not in engine.core.requests:
        engine.engine.turn()
        cached.append(pool.idle)
    assert max(before - after for before, after in itertools.pairwise(cached)) <= RESET_BLOCKS
    assert len(pool._index) <= engine.core.limits.step_tokens // BLOCK  # those of its own first chunk
    engine.core.auditor.whole()


def test_a_reset_ends_though_running_answers_fill_blocks() -> None:
    engine = Watched(blocks=30_000)
    engine.run([ask("r", words(1, 131_000)), ask("s", words(2, 131_000))])
    engine.box.commands += [ask("long", words(3, 20), 4_000), ResetPrefixCache()]
    engine.engine.turn()
    turns = 0
    while not any(isinstance(command, ResetPrefixCache) for command in engine.records[-1].commands):
        engine.engine.turn()
        turns += 1
    assert 1 <= turns <= 4
    assert "long" in engine.core.requests


def test_an_abort_waits_behind_its_request() -> None:
    engine = Watched()
    long = [ask(f"r{at}", words(at, 131_000)) for at in range(4)]
    engine.run([*long, ask("last", [7, 8, 9], 4_000), Abort("last")])
    assert engine.ended == {**{f"r{at}": "length" for at in range(4)}, "last": "cancelled"}


def test_a_draining_engine_answers_what_waits_in_its_intake() -> None:
    engine = Watched()
    engine.box.commands += [ask(f"r{at}", words(at, 131_000)) for at in range(4)]
    engine.engine.draining = True
    engine.engine.run()
    assert len(engine.ended) == 4
    assert not engine.engine._intake


def test_every_order_costs_some_of_a_turn() -> None:
    """Aborts of unknown requests are also bounded."""
    engine = Watched()
    intake = Intake(engine.core)
    first = intake.apply([Abort(f"r{at}") for at in range(2 * TURN_TOKENS // COMMAND_TOKENS)])
    assert len(first) == len(intake) == TURN_TOKENS // COMMAND_TOKENS
    assert len(intake.apply([])) == len(first)
    assert not intake
