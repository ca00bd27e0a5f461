"""A busy engine checks its block accounting now and then, and finds a planted error within a minute."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from quire.engine.commands import LocalBox
from quire.engine.config import EngineConfig
from quire.engine.core.accounting import PART_BLOCKS
from quire.engine.core.blocks import AccountingError
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.loop import Engine
from quire.engine.observers.accounting_checks import BUSY_EVERY_S, MAX_SHARE, AccountingChecks
from quire.engine.wire.messages import Generate, Sampling

INFO = ModelInfo("tiny", "f" * 32, 100, 4096, [0], 0)
CONFIG = EngineConfig(kv_blocks=400, max_seqs=4, max_model_len=4096, check_accounting=False)
FOREVER_MS = 1 << 53


class Busy:
    """An engine in the middle of a long answer.  Each turn takes a second of its clock, a check `check_s`."""

    def __init__(self, check_s: float = 0.0, *, blocks: int = 400) -> None:
        self.now, self.turns = 100.0, 0
        self.box = box = LocalBox(lambda delta: None)
        self.engine = Engine(CONFIG, ScriptedExecutor(INFO, blocks), box, box)
        core = self.engine.core
        self.engine.checks = AccountingChecks(core, CONFIG, lambda: self.now)
        self.part = core.auditor.part
        self.checks_at: list[float] = []  # times of the first parts
        self.parts_at: list[float] = []

        def part() -> bool:
            if core.auditor._next == 0:
                self.checks_at.append(self.now)
            self.parts_at.append(self.now)
            self.now += check_s
            return self.part()

        core.auditor.part = part  # type: ignore[method-assign]
        box.commands.append(Generate("r", "g", [5, 6, 7], 4000, Sampling(ignore_eos=True), FOREVER_MS))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.engine.turn()
            assert not self.engine.core.idle
            self.now += 1.0


def test_a_busy_engine_checks_every_ten_seconds() -> None:
    busy = Busy()
    busy.run(60)
    assert len(busy.checks_at) == 60 / BUSY_EVERY_S - 1  # the last second is not over
    assert busy.engine.core.report.totals.audits == len(busy.checks_at)


def test_slow_checks_are_further_apart() -> None:
    busy = Busy(check_s=0.2)
    busy.run(400)
    assert 0.2 * len(busy.checks_at) <= 400 * MAX_SHARE


def test_a_planted_error_is_found_within_a_minute() -> None:
    busy = Busy()
    busy.run(35)
    pool = busy.engine.core.pool
    pool._free.pop()  # a leak: the block is neither free, cached nor held
    with pytest.raises(AccountingError):
        busy.run(60)
    assert busy.now < 100 + 35 + 2 * BUSY_EVERY_S
    assert busy.engine.core.report.totals.leaks == 1


def test_a_turn_checks_a_part_of_a_large_cache_and_all_turns_together_every_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """100,000 blocks held all streams up for 0.1 s."""
    total = 5 * PART_BLOCKS + 7
    busy = Busy(blocks=total)
    pool = busy.engine.core.pool
    seen: Counter[int] = Counter()
    monkeypatch.setattr(pool, "_check_block", lambda block, named: seen.update([block]))
    counts = []
    for _ in range(40):
        busy.engine.turn()
        counts.append(seen.total())
        busy.now += 1.0
    assert max(later - before for before, later in itertools.pairwise(counts)) <= PART_BLOCKS
    assert seen.keys() == set(range(total))
    assert busy.engine.core.report.totals.audits == len(busy.checks_at) - (busy.engine.core.auditor._next > 0)


def test_checks_in_parts_keep_to_their_share_of_the_time() -> None:
    busy = Busy(check_s=0.1, blocks=5 * PART_BLOCKS)
    busy.run(1000)
    assert len(busy.checks_at) > 3
    assert 0.1 * len(busy.parts_at) <= 1000 * MAX_SHARE


@pytest.mark.parametrize("block", [0, 3 * PART_BLOCKS, 5 * PART_BLOCKS - 1])
def test_an_error_in_any_part_is_found(block: int) -> None:
    busy = Busy(blocks=5 * PART_BLOCKS)
    busy.run(2)
    busy.engine.core.pool._refs[block] += 1
    with pytest.raises(AccountingError, match=f"block {block} has a reference count"):
        busy.run(60)


def test_a_requested_check_begins_anew_and_runs_at_once_in_an_idle_engine() -> None:
    """An error in a part that the check under way has passed is in the answer."""
    config = msgspec.structs.replace(CONFIG, on_accounting_error="report")
    box = LocalBox(lambda delta: None)
    engine = Engine(config, ScriptedExecutor(INFO, 5 * PART_BLOCKS), box, box)
    for _ in range(3):
        engine.turn()
    assert engine.core.auditor._next == 2 * PART_BLOCKS
    engine.core.pool._refs[0] += 1
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(engine.checks.request_check)
        while not answer.done():
            engine.turn()
        assert "block 0 has a reference count of 1" in answer.result()
