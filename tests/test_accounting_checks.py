"""A busy engine checks its block accounting now and then, and finds a planted error within a minute."""

from __future__ import annotations

import pytest

from quire.engine.config import EngineConfig
from quire.engine.core.blocks import AccountingError
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.loop import Engine
from quire.engine.observers.accounting_checks import BUSY_EVERY_S, MOST_SHARE, AccountingChecks
from quire.engine.orders import LocalBox
from quire.engine.wire.messages import Generate, Sampling

INFO = ModelInfo("tiny", "f" * 32, 100, 4096, [0], 0)
CONFIG = EngineConfig(kv_blocks=400, max_seqs=4, max_model_len=4096, check_books=False)
FOREVER_MS = 1 << 53


class Busy:
    """An engine in the middle of a long answer.  Each turn takes a second of its clock, a check `check_s`."""

    def __init__(self, check_s: float = 0.0) -> None:
        self.now, self.turns = 100.0, 0
        box = LocalBox(lambda delta: None)
        self.engine = Engine(CONFIG, ScriptedExecutor(INFO, 400), box, box)
        core = self.engine.core
        self.engine.checks = AccountingChecks(core, CONFIG, lambda: self.now)
        self.whole = core.auditor.whole
        self.checks_at: list[float] = []

        def whole() -> None:
            self.checks_at.append(self.now)
            self.now += check_s
            self.whole()

        core.auditor.whole = whole  # type: ignore[method-assign]
        box.orders.append(Generate("r", "g", [5, 6, 7], 4000, Sampling(ignore_eos=True), FOREVER_MS))

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
    assert 0.2 * len(busy.checks_at) <= 400 * MOST_SHARE


def test_a_planted_error_is_found_within_a_minute() -> None:
    busy = Busy()
    busy.run(35)
    pool = busy.engine.core.pool
    pool._free.pop()  # a leak: the block is neither free, cached nor held
    with pytest.raises(AccountingError):
        busy.run(60)
    assert busy.now < 100 + 35 + 2 * BUSY_EVERY_S
    assert busy.engine.core.report.totals.leaks == 1
